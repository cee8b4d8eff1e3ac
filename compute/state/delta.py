"""Lossless deltas between two safetensors files: XOR against the base, byte planes, zstd, chunk by chunk.

    magic | frames, in the order of the target's tensors | JSON footer | 8 bytes its length | magic

A training step changes few bits of bfloat16 weights, so that the XOR is mostly zeros; grouping the first
bytes of all items, then the second ones, puts the zeros together. Where the base has no such tensor, or XOR
gains nothing, a chunk holds the target's own planes, or its bytes as they are: never more than the full file
and a small footer. Applying checks the base's digest before and the result's after. Numpy and zstd only.

Source: what changes, PULSE (arXiv 2602.03839); planes and XOR are common in checkpoint compression.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
from blake3 import blake3

from megloom.compute.state.digests import file_digest
from megloom.compute.state.weight_file import (
    ITEM_BYTES,
    Bytes,
    Entry,
    WeightFileError,
    chunks,
    mapped,
    parse_head,
    read_layout,
)

MAGIC = b"MEGDELTA"
CODEC = "xor-planes-zstd1-blake3"
ZSTD_LEVEL = 1  # level 3 gains nothing on XORed planes
SAME, XOR, PLANES, RAW = "same", "xor", "planes", "raw"  # what a frame holds; "same" has no bytes
DENSE = 0.6  # a XOR that leaves more than this of the bytes is compared with the target's own planes
_FOOTER_BYTES = 8 + len(MAGIC)
_MAX_FOOTER_BYTES = 1 << 28


class DeltaError(Exception):
    """A delta is corrupt, or does not belong to this base. The message names the file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorDelta:
    """One tensor of the result. `frames` are (what, bytes in the delta), one a chunk; `digest` is BLAKE3."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: str
    frames: tuple[tuple[str, int], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaFacts:
    """What a delta says of itself. `head` is the result's own header; digests are BLAKE3 of whole files."""

    base_digest: str
    digest: str
    size_bytes: int
    head: bytes
    tensors: tuple[TensorDelta, ...]


def write_delta(base: Path, target: Path, delta: Path, *, base_digest: str) -> DeltaFacts:
    """Writes what turns `base` into `target`.

    Raises: DeltaError if `base` has another digest or one of them is no safetensors file.
    """
    try:
        base_layout, layout = read_layout(base), read_layout(target)
    except WeightFileError as error:
        raise DeltaError(str(error)) from error
    _require_digest(base, base_digest)
    base_bytes, target_bytes = mapped(base), mapped(target)
    known = {entry.name: entry for entry in base_layout.entries}
    whole = blake3()
    whole.update(layout.head)
    tensors = []
    with delta.open("wb") as file:
        file.write(MAGIC)
        for entry in layout.entries:
            old = known.get(entry.name)
            is_alike = old is not None and (old.dtype, old.shape) == (entry.dtype, entry.shape)
            shift = old.start - entry.start if is_alike and old is not None else None
            digest, frames = blake3(), []
            for start, end in chunks(entry):
                new = target_bytes[start:end]
                whole.update(new.data)
                digest.update(new.data)
                before = None if shift is None else base_bytes[start + shift : end + shift]
                what, frame = _encoded(new, before, entry.item_bytes)
                file.write(frame)
                frames.append((what, len(frame)))
            tensors.append(_tensor(entry, digest.hexdigest(), frames))
        facts = DeltaFacts(
            base_digest=base_digest,
            digest=whole.hexdigest(),
            size_bytes=len(target_bytes),
            head=layout.head,
            tensors=tuple(tensors),
        )
        _write_footer(file, facts)
    return facts


def apply_delta(base: Path, delta: Path, result: Path) -> DeltaFacts:
    """Writes the delta's target to `result`, a new file; `base` stays as it is.

    Raises: DeltaError if the base is another one, if the delta is corrupt, or if the result's digest is not
    the one that it promises (what was written then is worthless).
    """
    facts = read_facts(delta)
    _require_digest(base, facts.base_digest)
    try:
        known = {entry.name: entry for entry in read_layout(base).entries}
        layout = parse_head(facts.head, str(delta))
    except WeightFileError as error:
        raise DeltaError(str(error)) from error
    base_bytes, delta_bytes = mapped(base), mapped(delta)
    whole, at = blake3(), len(MAGIC)
    whole.update(facts.head)
    with result.open("wb") as file:
        file.write(facts.head)
        for entry, tensor in zip(layout.entries, facts.tensors, strict=True):
            digest = blake3()
            for (start, end), (what, size) in zip(chunks(entry), tensor.frames, strict=True):
                old = known.get(entry.name)
                shift = 0 if old is None else old.start - entry.start
                before = base_bytes[start + shift : end + shift] if what in (SAME, XOR) else None
                new = _decoded(what, delta_bytes[at : at + size], before, end - start, entry, delta)
                at += size
                digest.update(new.data)
                whole.update(new.data)
                file.write(new.tobytes())
            if digest.hexdigest() != tensor.digest:
                raise DeltaError(f"{delta}: tensor {entry.name} has digest {digest.hexdigest()} after apply")
    if whole.hexdigest() != facts.digest:
        raise DeltaError(f"{delta}: result has digest {whole.hexdigest()}, expected {facts.digest}")
    return facts


def read_facts(delta: Path) -> DeltaFacts:
    """The footer of a delta. Raises: DeltaError if it is unreadable or does not fit the file's length."""
    try:
        data = mapped(delta)
        length = int.from_bytes(data[-_FOOTER_BYTES : -len(MAGIC)].tobytes(), "little")
        is_framed = data[: len(MAGIC)].tobytes() == MAGIC == data[-len(MAGIC) :].tobytes()
        if not is_framed or not 0 < length <= min(_MAX_FOOTER_BYTES, len(data)):
            raise DeltaError(f"{delta}: no delta, or one that was cut ({len(data)} bytes)")
        values: dict[str, Any] = json.loads(data[-_FOOTER_BYTES - length : -_FOOTER_BYTES].tobytes())
        if values.pop("codec") != CODEC:
            raise DeltaError(f"{delta}: another codec than {CODEC}")
        values["head"] = values["head"].encode("latin-1")
        values["tensors"] = tuple(
            TensorDelta(
                name=tensor["name"],
                dtype=tensor["dtype"],
                shape=tuple(tensor["shape"]),
                digest=tensor["digest"],
                frames=tuple((what, int(size)) for what, size in tensor["frames"]),
            )
            for tensor in values["tensors"]
        )
        facts = DeltaFacts(**values)
        layout = parse_head(facts.head, str(delta))
    except (ValueError, KeyError, TypeError, WeightFileError, OSError) as error:
        raise DeltaError(f"{delta}: footer unreadable: {error!r}") from error
    frames = [frame for tensor in facts.tensors for frame in tensor.frames]
    expected = len(MAGIC) + sum(size for _, size in frames) + length + _FOOTER_BYTES
    mine = [(t.name, t.dtype, t.shape, len(t.frames)) for t in facts.tensors]
    theirs = [(e.name, e.dtype, e.shape, sum(1 for _ in chunks(e))) for e in layout.entries]
    if mine != theirs or len(data) != expected or any(size < 0 for _, size in frames):
        raise DeltaError(f"{delta}: footer and content disagree ({len(data)} bytes, expected {expected})")
    return facts


def _write_footer(file: BinaryIO, facts: DeltaFacts) -> None:
    values = {"codec": CODEC, **asdict(facts), "head": facts.head.decode("latin-1")}
    text = json.dumps(values, separators=(",", ":")).encode()
    file.write(text + len(text).to_bytes(8, "little") + MAGIC)


def _tensor(entry: Entry, digest: str, frames: list[tuple[str, int]]) -> TensorDelta:
    return TensorDelta(
        name=entry.name, dtype=entry.dtype, shape=entry.shape, digest=digest, frames=tuple(frames)
    )


def _encoded(new: Bytes, before: Bytes | None, item_bytes: int) -> tuple[str, bytes]:
    """The smallest frame for a chunk, and what it is."""
    found: list[tuple[str, bytes]] = [(RAW, b"")]
    if before is not None:
        changed = np.bitwise_xor(new, before)
        if not changed.any():
            return SAME, b""
        packed = _packed(changed, item_bytes)
        if len(packed) < DENSE * len(new):
            return XOR, packed
        found.append((XOR, packed))
    found.append((PLANES, _packed(new, item_bytes)))
    what, frame = min(found[1:], key=lambda pair: len(pair[1]))
    return (what, frame) if len(frame) < len(new) else (RAW, new.tobytes())


def _decoded(what: str, frame: Bytes, before: Bytes | None, size: int, entry: Entry, delta: Path) -> Bytes:
    """The chunk's bytes; the inverse of `_encoded`."""
    if before is not None and len(before) != size:
        raise DeltaError(f"{delta}: the base has no tensor like {entry.name}")
    if what == SAME and before is not None:
        return before
    if what == RAW and len(frame) == size:
        return frame
    if what not in (XOR, PLANES):
        raise DeltaError(f"{delta}: tensor {entry.name}: a frame {what!r} of {len(frame)} bytes for {size}")
    try:
        planes = pa.decompress(frame.tobytes(), decompressed_size=size, codec="zstd", asbytes=True)
    except (pa.ArrowException, OSError) as error:
        raise DeltaError(f"{delta}: tensor {entry.name}: {error}") from error
    width = ITEM_BYTES[entry.dtype]
    items = np.ascontiguousarray(np.frombuffer(planes, np.uint8).reshape(width, -1).T).reshape(-1)
    return items if before is None else np.bitwise_xor(items, before)


def _packed(data: Bytes, item_bytes: int) -> bytes:
    planes = np.ascontiguousarray(data.reshape(-1, item_bytes).T)
    packed: bytes = pa.Codec("zstd", compression_level=ZSTD_LEVEL).compress(planes.tobytes(), asbytes=True)
    return packed


def _require_digest(base: Path, expected: str) -> None:
    if (found := file_digest(base)) != expected:
        raise DeltaError(f"{base}: digest {found}, the delta's base has {expected}")
