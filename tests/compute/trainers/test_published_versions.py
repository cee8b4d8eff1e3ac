"""What a real trainer publishes: deltas that engines load, casts of the master, damage that is mended."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megloom.compute.engines.checkpoint import read_config, read_tensors, verify
from megloom.compute.engines.server import whole_folder
from megloom.compute.state import staging
from megloom.compute.state.exporting import export_version
from megloom.compute.state.staging import full_folder
from megloom.compute.state.weights import DELTA_FILE, MODEL_FILE, WeightsError, read_manifest
from megloom.compute.trainers.protocol import Published, TrainerError
from megloom.compute.trainers.replica import Replica
from megloom.compute.workload import Publishing
from tests.compute.state.weight_versions import spoil

from .builders import batch, plan, ragged_rows, replica, same_bits, state_tensors

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def scratch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("MEGLOOM_SCRATCH", str(tmp_path / "scratch"))
    return tmp_path / "scratch"


def trained(folder: Path, num_versions: int, *, dtype: str = "float32") -> tuple[Replica, list[Published]]:
    """A trainer that has published so many versions, every third whole, and its state beside the last."""
    publishing = Publishing.parse({"anchor_every": 3, "dtype": dtype}).model_dump()
    trainer, published = replica(folder, publishing=publishing), []
    for version in range(1, num_versions + 1):
        report = trainer.forward_backward(batch(ragged_rows(6), name=f"v{version}"))
        trainer.optim_step(scale=1.0 / report.num_trainable)
        published.append(trainer.publish(weights_dir=str(folder), version=version))
    trainer.save(state_path=str(folder / "state"))
    return trainer, published


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_engine_loads_a_version_that_is_kept_as_a_delta(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """The trainer left a whole copy, so nothing is rebuilt; its digest is the published one."""
    monkeypatch.setattr(staging, "apply_delta", lambda *_: pytest.fail("rebuilt"))
    trainer, published = trained(tmp_path / "w", 1, dtype=dtype)
    uri = published[0].uri
    assert read_manifest(Path(uri)).base_version == 0 and not (Path(uri) / MODEL_FILE).exists()
    folder = whole_folder(uri)
    verify(folder, published[0].digest)
    served = read_tensors(folder, read_config(folder), device=CPU, dtype=torch.float32)
    master = state_tensors(trainer, tmp_path)
    for name, tensor in served.items():
        of_name = [
            value for key, value in master.items() if key.endswith(name) and value.shape == tensor.shape
        ]
        casts = [value.to(getattr(torch, dtype)).to(torch.float32) for value in of_name]
        assert any(torch.equal(tensor, cast) for cast in casts), name


def test_a_folder_that_is_no_version_is_loaded_as_it_is(tmp_path: Path) -> None:
    assert whole_folder(str(tmp_path)) == str(tmp_path)


def test_an_engine_refuses_a_version_that_cannot_be_rebuilt(tmp_path: Path, scratch: Path) -> None:
    _, published = trained(tmp_path / "w", 1)
    spoil(Path(published[0].uri) / DELTA_FILE, 40)
    for path in scratch.glob("*/DONE"):
        path.unlink()  # the copy in memory is gone: another day, another node
    with pytest.raises(ValueError, match="v000001 cannot be rebuilt: .*newest intact anchor: version 0"):
        whole_folder(published[0].uri)


def test_a_damaged_version_is_mended_by_a_trainer_that_starts_from_its_state(
    tmp_path: Path, scratch: Path
) -> None:
    """Its state has the weights: it stands on the exact version, and everyone else can load it again."""
    first, published = trained(tmp_path / "w", 2)
    spoil(Path(published[1].uri) / DELTA_FILE, 40)
    for path in scratch.glob("*/DONE"):
        path.unlink()
    second = Replica(plan(), cache_dir=None)
    second.load(weights_uri=published[1].uri, state_path=str(tmp_path / "w" / "state"))
    assert same_bits(state_tensors(first, tmp_path), state_tensors(second, tmp_path))
    mended = read_manifest(Path(published[1].uri))
    assert mended.is_whole and mended.digest == published[1].digest


def test_without_a_state_a_damaged_version_is_an_error_that_names_the_anchor(
    tmp_path: Path, scratch: Path
) -> None:
    _, published = trained(tmp_path / "w", 2)
    spoil(Path(published[1].uri) / DELTA_FILE, 40)
    for path in scratch.glob("*/DONE"):
        path.unlink()
    with pytest.raises(TrainerError, match="v000002 cannot be rebuilt.*newest intact anchor: version 0"):
        Replica(plan(), cache_dir=None).load(weights_uri=published[1].uri, state_path=None)


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_an_exported_delta_opens_with_from_pretrained(tmp_path: Path, dtype: str | None) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    _, published = trained(tmp_path / "w", 1)
    size_bytes = export_version(Path(published[0].uri), tmp_path / "out", dtype=dtype)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.dtype is getattr(torch, dtype or "float32")
    assert AutoTokenizer.from_pretrained(tmp_path / "out").vocab_size
    kept = load_file(full_folder(Path(published[0].uri)) / MODEL_FILE)
    for name, tensor in kept.items():
        assert torch.equal(model.state_dict()[name], tensor.to(model.dtype)), name
    assert size_bytes == sum(path.stat().st_size for path in (tmp_path / "out").iterdir())
    assert not {"manifest.json", "DONE"} & {path.name for path in (tmp_path / "out").iterdir()}
    with pytest.raises(ValueError, match="exists already"):
        export_version(Path(published[0].uri), tmp_path / "out")


def test_an_export_never_invents_precision(tmp_path: Path) -> None:
    _, published = trained(tmp_path / "w", 1, dtype="bfloat16")
    with pytest.raises(ValueError, match="published as bfloat16"):
        export_version(Path(published[0].uri), tmp_path / "out", dtype="float32")
    spoil(Path(published[0].uri) / DELTA_FILE, 40)
    (next((tmp_path / "scratch").glob("*/DONE"))).unlink()
    with pytest.raises(WeightsError, match="cannot be rebuilt"):
        export_version(Path(published[0].uri), tmp_path / "other")
    assert not list(tmp_path.glob("*draft*"))
