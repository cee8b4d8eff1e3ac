"""Files that are written tensor by tensor are safetensors files, and their digest is the file's."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from megloom.compute.state.digests import file_digest
from megloom.compute.state.tensor_file import TensorSpec, file_size, write_tensor_file


def test_any_reader_opens_the_file_and_its_digest_is_right(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = {
        "a": rng.normal(size=(3, 5)).astype(np.float32),
        "large": rng.integers(0, 255, size=(8 << 20) + 77, dtype=np.uint8),
        "empty": np.zeros((0, 4), dtype=np.int64),
        "scalar": np.array(2.5, dtype=np.float64),
    }
    names = {"float32": "F32", "uint8": "U8", "int64": "I64", "float64": "F64"}
    specs = [TensorSpec(name=name, dtype=names[str(a.dtype)], shape=a.shape) for name, a in arrays.items()]
    path = tmp_path / "state"
    written = write_tensor_file(
        path, specs, lambda spec: memoryview(arrays[spec.name].tobytes()), {"step": "3"}
    )
    assert written.digest == file_digest(path)
    assert written.size_bytes == path.stat().st_size == file_size(specs, {"step": "3"})
    read = load_file(path)
    assert set(read) == set(arrays)
    assert all(np.array_equal(read[name], array) for name, array in arrays.items())
    with safe_open(path, framework="np") as file:
        assert file.metadata() == {"step": "3"}
    header_end = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    assert header_end % 8 == 0 and json.loads(path.read_bytes()[8:header_end])


def test_tensors_are_asked_for_one_after_the_other_in_order(tmp_path: Path) -> None:
    asked: list[str] = []

    def bytes_of(spec: TensorSpec) -> memoryview:
        asked.append(spec.name)
        return memoryview(bytes(8))

    specs = [TensorSpec(name=name, dtype="F32", shape=(2,)) for name in "cab"]
    write_tensor_file(tmp_path / "state", specs, bytes_of, {})
    assert asked == ["c", "a", "b"]


def test_what_does_not_fit_its_description_is_refused_by_name(tmp_path: Path) -> None:
    spec = TensorSpec(name="w", dtype="F32", shape=(2,))
    with pytest.raises(ValueError, match="'w': 7 bytes, expected 8"):
        write_tensor_file(tmp_path / "x", [spec], lambda _: memoryview(bytes(7)), {})
    with pytest.raises(ValueError, match="'w' is taken"):
        write_tensor_file(tmp_path / "x", [spec, spec], lambda _: memoryview(bytes(8)), {})
    with pytest.raises(ValueError, match="dtype 'F8'"):
        write_tensor_file(
            tmp_path / "x", [TensorSpec(name="w", dtype="F8", shape=())], lambda _: memoryview(b""), {}
        )
