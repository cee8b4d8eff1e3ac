"""`CompiledRunner`: the kernels of `kernels.py` behind the `Runner` protocol.

For models on the CPU in float32 that are so small that calling torch's operators costs more than computing
them. Kernels are compiled once per machine: the first engine of a machine compiles while the others wait,
later ones read the machine code from a folder of the user's. No other module imports numba.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numba
import numpy as np
import torch

from megloom.compute.engines import draws, kernels, layers, vectors
from megloom.compute.engines.checkpoint import ModelConfig
from megloom.compute.engines.kernels import RowColumns
from megloom.compute.engines.layers import BLOCK, CHUNK, PANEL, Cache, KernelModel, Scratch
from megloom.compute.engines.live_request import LiveRequest
from megloom.compute.engines.model import Weights
from megloom.compute.engines.rope import inverse_frequencies, rotations
from megloom.compute.engines.runner import Admission, Sampled, as_lists, copy_prefixes, request_columns
from megloom.compute.engines.sampling import SamplingColumns, sample
from megloom.compute.engines.slots import SlotCache, round_up
from megloom.compute.engines.vectors import WIDTH

log = logging.getLogger(__name__)
CPU = torch.device("cpu")
MAX_PARAMETERS = (
    20_000_000  # kernels still decode 1.5 times as fast there; above, prefill is slower than torch's
)
_MAX_STEPS = 8
_STEP_PARAMETERS = 3_000_000  # parameters times steps of a call: some 5 ms with 32 requests


def unfit_reason(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> str | None:
    """Returns why the kernels cannot or should not run a model; None if they should."""
    if device.type != "cpu" or dtype != torch.float32:
        return f"kernels are for float32 on the CPU, got {dtype} on {device}"
    sizes = (config.hidden_size, config.intermediate_size, config.head_dim)
    if any(size % multiple for size, multiple in zip(sizes, (PANEL, WIDTH, WIDTH), strict=True)):
        return f"hidden, intermediate and head sizes {sizes} are not multiples of {(PANEL, WIDTH, WIDTH)}"
    count = num_parameters(config)
    if count > MAX_PARAMETERS:
        return f"{count:,} parameters: above {MAX_PARAMETERS:,} torch's operators are as fast"
    return None


def num_parameters(config: ModelConfig) -> int:
    """Returns the number of weights that a token is multiplied with."""
    heads = (config.num_heads + config.num_kv_heads) * 2 * config.head_dim
    layer = config.hidden_size * (heads + 3 * config.intermediate_size)
    return config.num_layers * layer + config.vocab_size * config.hidden_size


def _panels(matrices: Sequence[torch.Tensor]) -> np.ndarray:
    """Returns matrices `[inputs, outputs]` in the layout of `KernelModel`."""
    stacked = torch.stack(list(matrices))
    padded = torch.nn.functional.pad(stacked, (0, -stacked.shape[2] % PANEL))
    return padded.unflatten(2, (-1, PANEL)).transpose(1, 2).contiguous().numpy()


def _kernel_model(config: ModelConfig, weights: Weights, num_positions: int) -> KernelModel:
    layers = weights.layers
    norms = [layer.head_norm for layer in layers if layer.head_norm is not None]
    turns = rotations(inverse_frequencies(config), num_positions)
    return KernelModel(
        embedding=weights.embedding.contiguous().numpy(),
        attention_norm=torch.stack([layer.attention_norm for layer in layers]).numpy(),
        qkv=_panels([layer.qkv.t() for layer in layers]),
        head_norm=torch.stack(norms).numpy() if norms else np.empty((0, 0, 0), dtype=np.float32),
        output=_panels([layer.output for layer in layers]),
        mlp_norm=torch.stack([layer.mlp_norm for layer in layers]).numpy(),
        gate_up=_panels([layer.gate_up.t() for layer in layers]),
        down=_panels([layer.down for layer in layers]),
        final_norm=weights.final_norm.reshape(1, -1).numpy(),
        head=_panels([weights.head.t()]),
        cosines=torch.stack([turns.real, turns.real], -1).flatten(1).numpy(),
        sines=torch.stack([-turns.imag, turns.imag], -1).flatten(1).numpy(),
        num_kv_heads=config.num_kv_heads,
        eps=np.float32(config.rms_norm_eps),
    )


def _scratch(config: ModelConfig, num_positions: int, num_rows: int) -> Scratch:
    def floats(columns: int, rows: int = CHUNK) -> np.ndarray:
        return torch.zeros((rows, columns)).numpy()  # torch's memory starts at a cache line

    heads = config.num_heads * config.head_dim
    vocab_size = round_up(config.vocab_size, PANEL)
    return Scratch(
        hidden=floats(config.hidden_size),
        normed=floats(config.hidden_size),
        qkv=floats(round_up(heads + 2 * config.num_kv_heads * config.head_dim, PANEL)),
        mixed=floats(heads),
        gate_up=floats(round_up(2 * config.intermediate_size, PANEL)),
        active=floats(config.intermediate_size),
        scores=floats(num_positions, 1)[0],
        ends=floats(config.hidden_size, round_up(num_rows, BLOCK)),
        logits=floats(vocab_size, round_up(num_rows, BLOCK)),
        logprobs=floats(vocab_size, 1)[0],
        probabilities=floats(vocab_size, 1)[0],
        order=np.arange(max(num_rows, CHUNK)),
        live=np.zeros((4, num_rows), dtype=np.int64),
    )


@dataclass(slots=True)
class _Lanes:
    """The rows of the next step; `tokens` and `positions` move on with each."""

    tokens: np.ndarray  # [N]
    slots: np.ndarray  # [N]
    positions: np.ndarray  # [N]
    last: np.ndarray  # [B]
    columns: RowColumns
    narrowed: SamplingColumns | None  # [B] if a row draws from its top-p or top-k only


class CompiledRunner:
    """See `Runner`. Narrowed draws (top-p, top-k) are torch's, on the kernels' logits."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.cache = SlotCache(config, device=CPU, dtype=torch.float32, keys_by_channel=True)
        self.max_steps = max(1, min(_MAX_STEPS, _STEP_PARAMETERS // num_parameters(config)))
        self._config, self._weights = config, weights
        self._shape = (0, 0)
        self._lanes: _Lanes | None = None
        with _compiling():
            self._warm_up()

    def _warm_up(self) -> None:
        """Compiles the kernels or reads their machine code."""
        request = LiveRequest(
            rid="",
            prompt_ids=[0],
            max_tokens=1,
            temperature=1.0,
            top_p=1.0,
            top_k=-1,
            seed=0,
            stop_ids=frozenset(),
        )
        self.prefill(0, [Admission(request=request, token_ids=[0], source_slot=0, num_cached=0)])

    def logits(self, num_rows: int) -> torch.Tensor:
        """Returns those of the last step `[B, V]`, valid until the next one."""
        return torch.from_numpy(self._scratch.logits)[:num_rows, : self._config.vocab_size]

    def load(self, weights: Weights) -> None:
        """See `Runner`."""
        self._weights = weights
        self._model = _kernel_model(self._config, weights, self.cache.length)

    def copy(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """See `Runner`."""
        if not set(targets).isdisjoint(sources):
            self.cache.copy(sources, targets, length)
            return
        keys, values = self._keys, self._values
        for source, target in zip(sources, targets, strict=True):  # cheaper than one call of torch
            keys[:, target, ..., :length] = keys[:, source, ..., :length]
            values[:, target, :, :length] = values[:, source, :, :length]

    def change_rows(self) -> None:
        """See `Runner`."""
        self._lanes = None

    def prefill(self, first_slot: int, admissions: Sequence[Admission]) -> Sampled:
        """See `Runner`."""
        self._lanes = None
        slots = np.arange(first_slot, first_slot + len(admissions))
        self._ensure(first_slot + len(admissions), max(len(a.token_ids) for a in admissions))
        copy_prefixes(self, admissions, first_slot)
        counts = [admission.num_new for admission in admissions]
        lanes = self._new_lanes(
            [admission.request for admission in admissions],
            tokens=np.array([token_id for a in admissions for token_id in a.token_ids[a.num_cached :]]),
            slots=np.repeat(slots, counts),
            positions=np.concatenate([np.arange(a.num_cached, len(a.token_ids)) for a in admissions]),
            last=np.cumsum(counts) - 1,
        )
        return self._generate(lanes, 1)

    def decode(self, requests: Sequence[LiveRequest], num_steps: int) -> Sampled:
        """See `Runner`."""
        rows = np.arange(len(requests))
        lanes = self._lanes or self._new_lanes(
            requests,
            tokens=np.array([request.output_ids[-1] for request in requests]),
            slots=rows,
            positions=np.array([request.num_tokens - 1 for request in requests]),
            last=rows,
        )
        self._ensure(len(requests), int(lanes.positions.max()) + num_steps)
        sampled = self._generate(lanes, num_steps)
        num_steps = len(sampled.ids[0])
        lanes.tokens = np.array([ids[-1] for ids in sampled.ids])
        lanes.positions += num_steps
        lanes.columns.left[:] -= num_steps
        self._lanes = lanes
        return sampled

    def _new_lanes(self, requests: Sequence[LiveRequest], **places: np.ndarray) -> _Lanes:
        narrowed = None
        if any(request.top_p < 1 or request.top_k > 0 for request in requests):
            narrowed = request_columns(requests, self._config.vocab_size, CPU)
        return _Lanes(columns=_row_columns(requests), narrowed=narrowed, **places)

    def _ensure(self, num_slots: int, num_positions: int) -> None:
        """Grows the cache, and what goes with its size, to hold so much."""
        self.cache.ensure(num_slots, num_positions)
        shape = (self.cache.num_slots, self.cache.length)
        if shape != self._shape:
            self._shape = shape
            self._keys, self._values = self.cache.keys.transpose(3, 4).numpy(), self.cache.values.numpy()
            self._kernel_cache = Cache(
                keys=self.cache.keys.transpose(3, 4).view(-1).numpy(),
                values=self.cache.values.view(-1).numpy(),
                num_slots=self.cache.num_slots,
                length=self.cache.length,
            )
            self._scratch = _scratch(self._config, self.cache.length, self.cache.num_slots)
            self.load(self._weights)

    def _generate(self, lanes: _Lanes, num_steps: int) -> Sampled:
        num_rows = len(lanes.last)
        if lanes.narrowed is not None:
            num_steps = 1
        ids = np.empty((num_rows, num_steps), dtype=np.int64)
        logprobs = np.empty((num_rows, num_steps), dtype=np.float32)
        counts = np.empty(num_rows, dtype=np.int64)
        kernels.generate(
            self._model,
            self._scratch,
            self._kernel_cache,
            lanes.tokens,
            lanes.slots,
            lanes.positions,
            lanes.last,
            lanes.columns,
            ids,
            logprobs,
            counts,
        )
        if lanes.narrowed is not None:
            places = (lanes.positions[lanes.last] + 1).astype(np.uint64)
            return as_lists(*sample(self.logits(num_rows), lanes.narrowed, places))
        return Sampled(
            ids=[row[:count] for row, count in zip(ids.tolist(), counts.tolist(), strict=True)],
            logprobs=[row[:count] for row, count in zip(logprobs.tolist(), counts.tolist(), strict=True)],
        )


def _row_columns(requests: Sequence[LiveRequest]) -> RowColumns:
    stop_ids = np.full((len(requests), max(len(request.stop_ids) for request in requests)), -1)
    for row, request in enumerate(requests):
        stop_ids[row, : len(request.stop_ids)] = list(request.stop_ids)
    return RowColumns(
        seeds=np.array([request.seed & (1 << 64) - 1 for request in requests], dtype=np.uint64),
        temperatures=np.array([request.temperature for request in requests], dtype=np.float32),
        stop_ids=stop_ids,
        left=np.array([request.max_tokens - len(request.output_ids) for request in requests]),
    )


def cache_folder() -> Path | None:
    """Returns the folder of this version's machine code, None if none can be written.

    It is named by the sources' digest: numba itself notices only changes of the called function's own file.
    """
    sources = [Path(module.__file__ or "").read_bytes() for module in (draws, kernels, layers, vectors)]
    digest = hashlib.sha256(b"".join(sources)).hexdigest()[:16]
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = base / "megloom" / f"kernels-{digest}"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except (OSError, RuntimeError):  # read-only, or nobody's home
        return None
    return folder if os.access(folder, os.W_OK) else None


@contextlib.contextmanager
def _compiling() -> Iterator[None]:
    """Keeps machine code for the next processes; one at a time compiles, the others wait and read."""
    folder = cache_folder()
    if folder is None:
        log.warning("no folder can keep the kernels' machine code: every engine compiles for itself")
        yield
        return
    numba.config.CACHE_DIR = str(folder)
    kernels.generate.enable_caching()
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
