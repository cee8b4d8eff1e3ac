"""Adapters: only they are trained, versions hold merged weights, and peft loads what lies beside them."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megloom.compute.state.weights import MODEL_FILE
from megloom.compute.trainers.lora import ADAPTER_DIR, ADAPTER_FILE, add_lora
from megloom.compute.trainers.model import load_model, write_model
from megloom.compute.trainers.protocol import TrainerError
from megloom.compute.trainers.replica import Replica
from megloom.compute.trainers.snapshot import read_state
from megloom.compute.workload import Lora, Optimizer

from .builders import batch, model, plan, ragged_rows

ROWS = ragged_rows(9)
LORA = {"rank": 4, "alpha": 8.0, "targets": ["q_proj", "v_proj", "down_proj"]}
OPTIMIZER = Optimizer(learning_rate=1e-2).model_dump()
PROMPT = torch.tensor([[3, 1, 4, 1, 5, 9]])


def trainer_of(**knobs: Any) -> Replica:
    return Replica(plan(trainer={"lora": LORA, **knobs}, optimizer=OPTIMIZER))


def loaded(folder: Path, **knobs: Any) -> Replica:
    trainer = trainer_of(**knobs)
    trainer.load(weights_uri=trainer.create(str(folder)).uri, state_path=None)
    return trainer


def train(trainer: Replica, num_steps: int = 3, first: int = 0) -> None:
    for step in range(first, first + num_steps):
        trainer.forward_backward(batch(ROWS, name=str(step)))
        trainer.optim_step(scale=0.01)


def logits(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        made: torch.Tensor = load_model(folder, torch.device("cpu"))(input_ids=PROMPT).logits
    return made


def test_a_fresh_adapter_changes_nothing_and_only_adapters_are_trained(tmp_path: Path) -> None:
    trainer = loaded(tmp_path / "w")
    zeroth = trainer.publish(weights_dir=str(tmp_path / "w"), version=1)
    assert torch.equal(logits(Path(zeroth.uri)), logits(tmp_path / "w" / "v000000"))
    trainer.save(state_path=str(tmp_path / "before"))
    train(trainer)
    trainer.save(state_path=str(tmp_path / "after"))
    before, after = read_state(tmp_path / "before")[1], read_state(tmp_path / "after")[1]
    weights = [name for name in before if name.startswith("weights/")]
    changed = {name for name in weights if not torch.equal(before[name], after[name])}
    assert changed == {name for name in weights if ".lora_" in name} and len(changed) == 2 * 3 * 2
    moments = {name for name in after if name.startswith("optimizer/exp_avg/")}
    assert moments == {name.replace("weights/", "optimizer/exp_avg/") for name in changed}


@pytest.mark.parametrize("knobs", [{}, {"backend": "deepspeed", "zero_stage": 1}], ids=["torch", "zero-1"])
def test_peft_loads_the_saved_adapter_and_gives_the_published_logits(
    tmp_path: Path, knobs: dict[str, Any]
) -> None:
    from peft import PeftModel

    trainer = loaded(tmp_path / "w", **knobs)
    train(trainer)
    folder = Path(trainer.publish(weights_dir=str(tmp_path / "w"), version=1).uri)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "w" / "v000000")
    base_logits = base(input_ids=PROMPT).logits.detach()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft's own, about a base model without a hub name
        adapted = PeftModel.from_pretrained(base, folder / ADAPTER_DIR).eval()
    with torch.no_grad():
        theirs = adapted(input_ids=PROMPT).logits
    ours = logits(folder)
    assert torch.allclose(ours, theirs, atol=1e-5, rtol=0)
    assert (ours - base_logits).abs().max() > 1e-2  # it has learned something
    config = json.loads((folder / ADAPTER_DIR / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (4, 8.0, "LORA")
    tensors = load_file(folder / ADAPTER_DIR / ADAPTER_FILE)
    assert all(name.startswith("base_model.model.model.layers.") for name in tensors)


def test_a_version_holds_the_names_of_the_model_without_adapters(tmp_path: Path) -> None:
    trainer = loaded(tmp_path / "w")
    train(trainer, 1)
    folder = Path(trainer.publish(weights_dir=str(tmp_path / "w"), version=1).uri)
    plain, merged = (load_file(path / MODEL_FILE) for path in (tmp_path / "w" / "v000000", folder))
    assert plain.keys() == merged.keys()
    changed = {name.split(".")[-2] for name in plain if not torch.equal(plain[name], merged[name])}
    assert changed == set(LORA["targets"])  # type: ignore[call-overload]


def test_a_state_in_mid_batch_continues_to_the_bit(tmp_path: Path) -> None:
    first, second = loaded(tmp_path / "w"), trainer_of()
    train(first, 2)
    published = first.publish(weights_dir=str(tmp_path / "w"), version=1)
    first.forward_backward(batch(ROWS[:4], name="a"))
    first.save(state_path=str(tmp_path / "state"))
    second.load(weights_uri=published.uri, state_path=str(tmp_path / "state"))
    for trainer, folder in ((first, "one"), (second, "other")):
        trainer.forward_backward(batch(ROWS[4:], name="b"))
        trainer.optim_step(scale=0.01)
        trainer.publish(weights_dir=str(tmp_path / folder), version=2)
    one, other = (load_file(tmp_path / name / "v000002" / MODEL_FILE) for name in ("one", "other"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_state_without_adapters_is_refused(tmp_path: Path) -> None:
    plain = Replica(plan())
    uri = plain.create(str(tmp_path / "w")).uri
    plain.load(weights_uri=uri, state_path=None)
    plain.save(state_path=str(tmp_path / "state"))
    with pytest.raises(TrainerError, match="does not fit the model"):
        trainer_of().load(weights_uri=uri, state_path=str(tmp_path / "state"))


def test_targets_that_are_not_there_are_named(tmp_path: Path) -> None:
    write_model(model(), tmp_path, seed=1, cache_dir=None)
    network = load_model(tmp_path, torch.device("cpu"))
    with pytest.raises(ValueError, match="lora targets qproj: no such layers"):
        add_lora(network, Lora(rank=2, alpha=1.0, targets=("q_proj", "qproj")))
    with pytest.raises(ValueError, match="lora targets none"):
        add_lora(network, Lora(rank=2, alpha=1.0, targets=()))


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_every_stage_trains_the_same_adapter(tmp_path: Path, stage: int) -> None:
    folders = []
    for name, knobs in (("a", {}), ("b", {"backend": "deepspeed", "zero_stage": stage})):
        trainer = loaded(tmp_path / name, **knobs)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of stage 3's gathers
            train(trainer)
            folders.append(Path(trainer.publish(weights_dir=str(tmp_path / name), version=1).uri))
    assert torch.allclose(logits(folders[0]), logits(folders[1]), atol=1e-3, rtol=0)
