"""Builders of small weight versions in real safetensors files."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from megloom.compute.state.staging import stage_whole
from megloom.compute.state.weights import MODEL_FILE, WeightManifest, put_version
from megloom.compute.workload import Publishing

Arrays = Mapping[str, npt.NDArray[np.float32]]


def arrays(seed: int = 0, *, size: int = 3000) -> dict[str, npt.NDArray[np.float32]]:
    dice = np.random.default_rng(seed)
    return {
        "a": dice.normal(size=(size // 10, 10)).astype(np.float32),
        "b": dice.normal(size=size).astype(np.float32),
    }


def moved(tensors: Arrays, seed: int, *, share: float = 0.01) -> dict[str, npt.NDArray[np.float32]]:
    """The tensors after a step that changed a share of their values a little."""
    dice = np.random.default_rng(seed)
    return {
        name: np.where(dice.random(value.shape) < share, value * np.float32(1.01), value).astype(np.float32)
        for name, value in tensors.items()
    }


def line(
    num_versions: int, *, share: float = 0.01, size: int = 3000
) -> list[dict[str, npt.NDArray[np.float32]]]:
    """The weights of versions 0, 1, … that were trained one from the other."""
    tensors = [arrays(size=size)]
    for version in range(1, num_versions):
        tensors.append(moved(tensors[-1], version, share=share))
    return tensors


def writing(tensors: Arrays) -> Callable[[Path], None]:
    def write(directory: Path) -> None:
        save_file(dict(tensors), directory / MODEL_FILE, metadata={"format": "pt"})
        (directory / "config.json").write_text(json.dumps({"dtype": "float32", "vocab_size": 7}))
        (directory / "tokenizer.json").write_text("{}")

    return write


def put(
    folder: Path,
    version: int,
    tensors: Arrays,
    *,
    parent: int | None = None,
    anchor_every: int = 4,
    dtype: str = "float32",
    staged: Path | None = None,
) -> WeightManifest:
    """Puts a version; its parent is the one before it unless named."""
    return put_version(
        folder,
        version,
        policy="solver",
        parent_version=(version - 1 if version else None) if parent is None else parent,
        write=writing(tensors),
        publishing=Publishing(anchor_every=anchor_every, dtype=dtype),  # type: ignore[arg-type]
        stage=staged and (lambda target, manifest, source: stage_whole(target, manifest, source, staged)),
    )


def put_line(folder: Path, num_versions: int, *, anchor_every: int = 4) -> list[WeightManifest]:
    return [
        put(folder, version, tensors, anchor_every=anchor_every)
        for version, tensors in enumerate(line(num_versions))
    ]


def spoil(path: Path, at: int = -40) -> None:
    """Flips a byte of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(bytes(data))
