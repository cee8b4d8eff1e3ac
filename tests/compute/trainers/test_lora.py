"""Adapters: only they are trained, versions hold merged weights, and peft loads what lies beside them."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megloom.compute.state.exporting import export_version
from megloom.compute.state.staging import full_folder
from megloom.compute.state.weights import MODEL_FILE, read_manifest
from megloom.compute.trainers.lora import ADAPTER_DIR, ADAPTER_FILE, add_lora
from megloom.compute.trainers.model import load_model, write_model
from megloom.compute.trainers.protocol import TrainerError
from megloom.compute.trainers.replica import Replica
from megloom.compute.trainers.snapshot import read_state
from megloom.compute.workload import Lora, Optimizer, Publishing
from tests.compute.state.weight_versions import spoil

from .builders import CONFIG, batch, model, plan, ragged_rows

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


def adapted_logits(base: Any, version: Path) -> torch.Tensor:
    """What peft makes of the base and the version's adapter."""
    from peft import PeftModel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft's own, of names that transformers is about to drop
        adapted = PeftModel.from_pretrained(base, version / ADAPTER_DIR).eval()
    with torch.no_grad():
        made: torch.Tensor = adapted(input_ids=PROMPT).logits
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
    trainer = loaded(tmp_path / "w", **knobs)
    train(trainer)
    folder = Path(trainer.publish(weights_dir=str(tmp_path / "w"), version=1).uri)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "w" / "v000000")
    base_logits = base(input_ids=PROMPT).logits.detach()
    ours, theirs = logits(folder), adapted_logits(base, folder)
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


def test_a_target_whose_update_no_version_could_hold_is_refused(tmp_path: Path) -> None:
    write_model(model(), tmp_path, seed=1, cache_dir=None)
    network = load_model(tmp_path, torch.device("cpu"))
    shared = r"lora target lm_head shares its weight with model\.embed_tokens\.weight"
    with pytest.raises(ValueError, match=shared):
        add_lora(network, Lora(rank=2, alpha=1.0, targets=("q_proj", "lm_head")))
    for target, kind in (("embed_tokens", "Embedding"), ("self_attn", "Qwen3Attention")):
        with pytest.raises(ValueError, match=f"lora target model.*{target} is a {kind}, expected a linear"):
            add_lora(network, Lora(rank=2, alpha=1.0, targets=(target,)))
    assert all(parameter.requires_grad for parameter in network.parameters()), "refused before any change"


def test_an_output_layer_of_its_own_may_have_an_adapter(tmp_path: Path) -> None:
    source = model(config={**CONFIG, "tie_word_embeddings": False}).model_dump()
    knobs = {"lora": {"rank": 2, "alpha": 4.0, "targets": ["lm_head"]}}
    trainer = Replica(plan(model=source, trainer=knobs, optimizer=OPTIMIZER))
    trainer.load(weights_uri=trainer.create(str(tmp_path)).uri, state_path=None)
    train(trainer)
    folder = Path(trainer.publish(weights_dir=str(tmp_path), version=1).uri)
    before, after = (load_file(path / MODEL_FILE) for path in (tmp_path / "v000000", folder))
    assert {name for name in before if not torch.equal(before[name], after[name])} == {"lm_head.weight"}


def base_of(uri: str) -> str:
    config = json.loads((Path(uri) / ADAPTER_DIR / "adapter_config.json").read_text())
    return str(config["base_model_name_or_path"])


def test_an_adapter_names_the_version_that_it_lies_on(tmp_path: Path) -> None:
    """Version 0; after a load without a state the merged weights of that version, with a fresh adapter."""
    home, state = str(tmp_path / "w"), str(tmp_path / "state")
    first = loaded(tmp_path / "w")
    train(first)
    one = first.publish(weights_dir=home, version=1).uri
    first.save(state_path=state)
    train(first, 1, first=3)
    two = first.publish(weights_dir=home, version=2).uri
    assert base_of(one) == base_of(two) == f"{home}/v000000"

    restored, fresh = trainer_of(), trainer_of()
    restored.load(weights_uri=one, state_path=state)
    train(restored, 1)
    three = restored.publish(weights_dir=home, version=3).uri
    assert base_of(three) == f"{home}/v000000"
    fresh.load(weights_uri=one, state_path=None)
    train(fresh)
    four = fresh.publish(weights_dir=home, version=4).uri
    assert base_of(four) == one
    base = AutoModelForCausalLM.from_pretrained(base_of(four))
    assert torch.allclose(logits(Path(four)), adapted_logits(base, Path(four)), atol=1e-5, rtol=0)


def test_a_damaged_version_is_mended_with_its_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGLOOM_SCRATCH", str(tmp_path / "scratch"))
    trainer = loaded(tmp_path / "w")
    train(trainer)
    uri = trainer.publish(weights_dir=str(tmp_path / "w"), version=1).uri
    trainer.save(state_path=str(tmp_path / "state"))
    spoil(Path(uri) / MODEL_FILE)
    shutil.rmtree(Path(uri) / ADAPTER_DIR)
    trainer_of().load(weights_uri=uri, state_path=str(tmp_path / "state"))
    assert read_manifest(Path(uri)).version == 1 and base_of(uri) == str(tmp_path / "w" / "v000000")


def test_versions_between_anchors_keep_their_adapters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGLOOM_SCRATCH", str(tmp_path / "scratch"))
    knobs = Publishing(anchor_every=3, dtype="bfloat16").model_dump()
    trainer = Replica(plan(trainer={"lora": LORA}, publishing=knobs))
    trainer.load(weights_uri=trainer.create(str(tmp_path / "w")).uri, state_path=None)
    for number in (1, 2, 3):
        train(trainer, 1, first=number)
        trainer.publish(weights_dir=str(tmp_path / "w"), version=number)
    whole = [read_manifest(tmp_path / "w" / f"v00000{n}").is_whole for n in range(4)]
    assert whole == [True, False, False, True]
    shutil.rmtree(tmp_path / "scratch")  # another node: nothing was left there by the writer
    for number in (1, 2, 3):
        version = tmp_path / "w" / f"v00000{number}"
        export_version(version, out := tmp_path / f"out{number}")
        for folder in (version, full_folder(version), out):
            tensors = load_file(folder / ADAPTER_DIR / ADAPTER_FILE)
            assert len(tensors) == 2 * 2 * 3
        AutoModelForCausalLM.from_pretrained(out)


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
