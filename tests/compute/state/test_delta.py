"""Deltas are lossless, never much larger than the file, and refuse a base or content that is not theirs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from megloom.compute.state import delta as delta_module
from megloom.compute.state import weight_file
from megloom.compute.state.delta import DeltaError, apply_delta, read_facts, write_delta
from megloom.compute.state.digests import file_digest
from megloom.compute.state.weight_file import WeightFileError, cast_to_bfloat16, read_layout
from tests.compute.state.weight_versions import arrays, line, moved, spoil


def saved(path: Path, tensors: dict[str, npt.NDArray[np.generic]]) -> Path:
    save_file(tensors, path)
    return path


def through(folder: Path, base: Path, target: Path) -> float:
    """Writes and applies a delta, checks that nothing is lost; its size as a share of the target's."""
    facts = write_delta(base, target, folder / "delta", base_digest=file_digest(base))
    assert apply_delta(base, folder / "delta", folder / "result") == facts
    assert (folder / "result").read_bytes() == target.read_bytes()
    assert facts.digest == file_digest(target) and read_facts(folder / "delta") == facts
    return (folder / "delta").stat().st_size / target.stat().st_size


@pytest.mark.parametrize("is_bfloat16", [False, True])
def test_a_delta_of_a_few_changes_is_small_and_gives_the_same_file(tmp_path: Path, is_bfloat16: bool) -> None:
    paths = [saved(tmp_path / f"v{n}", dict(value)) for n, value in enumerate(line(2, size=200_000))]
    if is_bfloat16:
        for path in paths:
            cast_to_bfloat16(path, path.with_suffix(".cast"))
        paths = [path.with_suffix(".cast") for path in paths]
    assert through(tmp_path, *paths) < 0.04


def test_dense_changes_never_exceed_105_percent(tmp_path: Path) -> None:
    """[delta_worst]: other weights altogether, random bytes, and a base with nothing in common."""
    dice = np.random.default_rng(0)
    noise = [{"x": dice.integers(0, 2**32, 50_000, dtype=np.uint32).view(np.float32)} for _ in range(2)]
    cases = [
        (arrays(1, size=50_000), arrays(2, size=50_000)),
        (noise[0], noise[1]),
        ({"other": np.zeros(3, np.float32)}, noise[0]),
        (arrays(1, size=50_000), moved(arrays(1, size=50_000), 3, share=1.0)),
    ]
    for base, target in cases:
        share = through(tmp_path, saved(tmp_path / "base", base), saved(tmp_path / "target", target))  # type: ignore[arg-type]
        assert share <= 1.05


def test_tensors_that_come_go_change_shape_or_dtype_are_kept_whole(tmp_path: Path) -> None:
    base = saved(tmp_path / "a", {"x": np.ones(40, np.float32), "gone": np.ones(9, np.int64)})
    target = saved(
        tmp_path / "b",
        {
            "x": np.ones((4, 5), np.float64),
            "new": np.arange(7, dtype=np.int8),
            "none": np.zeros((0, 3), np.float32),
            "one": np.array(3, dtype=np.uint16),
        },
    )
    through(tmp_path, base, target)


@given(seed=st.integers(0, 10**6), share=st.sampled_from([0.0, 0.001, 0.2, 1.0]), size=st.integers(1, 3000))
@settings(max_examples=30, deadline=None)
def test_whatever_changed_comes_back(
    tmp_path_factory: pytest.TempPathFactory, seed: int, share: float, size: int
) -> None:
    folder = tmp_path_factory.mktemp("delta")
    dice = np.random.default_rng(seed)
    old = dice.normal(size=size).astype(np.float16)
    new = np.where(dice.random(size) < share, dice.normal(size=size), old).astype(np.float16)
    assert (
        through(folder, saved(folder / "a", {"x": old}), saved(folder / "b", {"x": new}))
        <= 1.05 + 1000 / size
    )


def test_tensors_are_worked_on_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_file, "CHUNK_BYTES", 4096)
    paths = [saved(tmp_path / f"v{n}", dict(value)) for n, value in enumerate(line(2))]
    through(tmp_path, *paths)
    frames = [len(tensor.frames) for tensor in read_facts(tmp_path / "delta").tensors]
    assert frames == [3, 3]


def test_a_delta_is_applied_to_its_own_base_only(tmp_path: Path) -> None:
    base, target, other = (
        saved(tmp_path / f"v{n}", dict(value)) for n, value in enumerate([*line(2), arrays(9)])
    )
    with pytest.raises(DeltaError, match="the delta's base has 00"):
        write_delta(base, target, tmp_path / "delta", base_digest="00")
    write_delta(base, target, tmp_path / "delta", base_digest=file_digest(base))
    with pytest.raises(DeltaError, match="digest .* the delta's base has"):
        apply_delta(other, tmp_path / "delta", tmp_path / "result")


def test_every_byte_of_a_delta_counts(tmp_path: Path) -> None:
    """A flipped byte or a cut anywhere is an error with the file's name, never other weights."""
    base, target = (saved(tmp_path / f"v{n}", dict(v)) for n, v in enumerate(line(2, size=60)))
    path = tmp_path / "delta"
    write_delta(base, target, path, base_digest=file_digest(base))
    good = path.read_bytes()
    for at in range(0, len(good), 7):
        spoil(path, at)
        with pytest.raises(DeltaError, match="delta"):
            apply_delta(base, path, tmp_path / "result")
            assert (tmp_path / "result").read_bytes() == target.read_bytes(), at  # a byte without meaning
            raise DeltaError("delta: harmless")
        path.write_bytes(good)
    for length in (0, 7, 20, len(good) // 2, len(good) - 1):
        path.write_bytes(good[:length])
        with pytest.raises(DeltaError, match="delta"):
            apply_delta(base, path, tmp_path / "result")


def test_the_cast_rounds_to_nearest_even_and_keeps_what_is_not_a_number(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file as load_torch

    dice = np.random.default_rng(0)
    values = dice.integers(0, 2**32, 20_000, dtype=np.uint32).view(np.float32)
    values[:6] = [np.inf, -np.inf, np.nan, 0.0, -0.0, np.float32(1e-45)]
    save_file({"x": values, "n": np.arange(5)}, tmp_path / "a", metadata={"format": "pt"})
    cast_to_bfloat16(tmp_path / "a", tmp_path / "b")
    got, expected = load_torch(tmp_path / "b"), torch.from_numpy(values).to(torch.bfloat16)
    assert got["x"].dtype is torch.bfloat16 and got["n"].tolist() == [0, 1, 2, 3, 4]
    assert torch.equal(got["x"].isnan(), expected.isnan())
    assert torch.equal(got["x"][~expected.isnan()], expected[~expected.isnan()])
    assert read_layout(tmp_path / "b").metadata == {"format": "pt"}


@pytest.mark.parametrize("content", [b"", b"hello", b"\xff" * 64, b"\x02\0\0\0\0\0\0\0{}x"])
def test_what_is_no_safetensors_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(WeightFileError, match="x: "):
        read_layout(tmp_path / "x")
    with pytest.raises(DeltaError, match="x: "):
        write_delta(tmp_path / "x", tmp_path / "x", tmp_path / "delta", base_digest="")


def test_results_open_with_the_usual_reader(tmp_path: Path) -> None:
    first, second = line(2)
    through(tmp_path, saved(tmp_path / "a", dict(first)), saved(tmp_path / "b", dict(second)))
    assert all(np.array_equal(load_file(tmp_path / "result")[name], second[name]) for name in second)
    assert delta_module.CODEC == "xor-planes-zstd1-blake3"
