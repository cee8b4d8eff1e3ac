"""The parts of a transformer layer as machine code: projections, norms, rotation, attention, gate.

Each follows its counterpart in `model.py`; what they read and write stands in the structures below.
Called by `kernels.py` only.
Shapes: N new tokens, B rows (requests), H query and K key-value heads, D head dim, T cached positions per
slot, E hidden size, I intermediate size, V vocabulary, P columns of V rounded up to a panel.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numba import njit

from megloom.compute.engines.vectors import (
    WIDTH,
    add,
    divide,
    exponential,
    larger,
    largest,
    load,
    multiply,
    multiply_add,
    spread,
    spread_from,
    store,
    subtract,
    swap_pairs,
    total,
)

CHUNK = 64  # tokens; a multiple of BLOCK
BLOCK = 4  # rows of a matrix product whose sums stay in registers together
PANEL = 2 * WIDTH  # columns of the same
UNLIKELY = np.float32(-1e30)  # a score whose exponential is 0 beside any other


class KernelModel(NamedTuple):
    """The weights as the kernels read them, all float32.

    A projection of n inputs and m outputs is `[..., m / PANEL, n, PANEL]`, its last panel filled with zeros.
    """

    embedding: np.ndarray  # [V, E]
    attention_norm: np.ndarray  # [layers, E]
    qkv: np.ndarray  # E → (H + 2K) · D
    head_norm: np.ndarray  # [layers, H + K, D]; no rows without head norms
    output: np.ndarray  # H · D → E
    mlp_norm: np.ndarray  # [layers, E]
    gate_up: np.ndarray  # E → 2I
    down: np.ndarray  # I → E
    final_norm: np.ndarray  # [1, E]
    head: np.ndarray  # E → V
    cosines: np.ndarray  # [positions, D], each for both channels of a pair
    sines: np.ndarray  # [positions, D], negative for the first channel of a pair
    num_kv_heads: int
    eps: np.float32


class Scratch(NamedTuple):
    """What lies between two operations; the first six are `[CHUNK, columns]`."""

    hidden: np.ndarray
    normed: np.ndarray
    qkv: np.ndarray
    mixed: np.ndarray
    gate_up: np.ndarray
    active: np.ndarray
    scores: np.ndarray  # [T]
    ends: np.ndarray  # [B or more, E]
    logits: np.ndarray  # [B or more, P]
    logprobs: np.ndarray  # [P]
    probabilities: np.ndarray  # [P]
    order: np.ndarray  # [CHUNK or B] int64: 0, 1, 2, …
    live: np.ndarray  # [4, B] int64: the rows that go on, and each one's slot, next position, last token


class Cache(NamedTuple):
    """The slot cache as flat memory: keys `[layers, slots, K, D, T]`, values `[layers, slots, K, T, D]`."""

    keys: np.ndarray
    values: np.ndarray
    num_slots: int
    length: int  # T


@njit
def project(inputs: Any, weights: Any, layer: int, outputs: Any, num_rows: int, accumulates: bool) -> None:
    """Writes or adds `inputs @ weights[layer]` for whole blocks of rows."""
    _, num_panels, depth, _ = weights.shape
    input_stride, output_stride = inputs.shape[1], outputs.shape[1]
    for panel in range(num_panels):
        base = (layer * num_panels + panel) * depth * PANEL
        for row in range(0, num_rows, BLOCK):
            x0 = row * input_stride
            x1, x2, x3 = x0 + input_stride, x0 + 2 * input_stride, x0 + 3 * input_stride
            y0 = row * output_stride + panel * PANEL
            y1, y2, y3 = y0 + output_stride, y0 + 2 * output_stride, y0 + 3 * output_stride
            a0 = a1 = b0 = b1 = c0 = c1 = d0 = d1 = spread(np.float32(0))
            if accumulates:
                a0, a1 = load(outputs, y0), load(outputs, y0 + WIDTH)
                b0, b1 = load(outputs, y1), load(outputs, y1 + WIDTH)
                c0, c1 = load(outputs, y2), load(outputs, y2 + WIDTH)
                d0, d1 = load(outputs, y3), load(outputs, y3 + WIDTH)
            for k in range(depth):
                w0, w1 = load(weights, base + k * PANEL), load(weights, base + k * PANEL + WIDTH)
                x = spread_from(inputs, x0 + k)
                a0, a1 = multiply_add(x, w0, a0), multiply_add(x, w1, a1)
                x = spread_from(inputs, x1 + k)
                b0, b1 = multiply_add(x, w0, b0), multiply_add(x, w1, b1)
                x = spread_from(inputs, x2 + k)
                c0, c1 = multiply_add(x, w0, c0), multiply_add(x, w1, c1)
                x = spread_from(inputs, x3 + k)
                d0, d1 = multiply_add(x, w0, d0), multiply_add(x, w1, d1)
            store(outputs, y0, a0)
            store(outputs, y0 + WIDTH, a1)
            store(outputs, y1, b0)
            store(outputs, y1 + WIDTH, b1)
            store(outputs, y2, c0)
            store(outputs, y2 + WIDTH, c1)
            store(outputs, y3, d0)
            store(outputs, y3 + WIDTH, d1)


@njit
def normalise(
    source: Any, at: int, weights: Any, weights_at: int, size: int, eps: Any, target: Any, to: int
) -> None:
    """Writes x / sqrt(mean(x²) + eps) · weight of `size` floats."""
    squares = spread(np.float32(0))
    for i in range(0, size, WIDTH):
        x = load(source, at + i)
        squares = multiply_add(x, x, squares)
    scale = spread(np.float32(np.float32(1) / math.sqrt(total(squares) / np.float32(size) + eps)))
    for i in range(0, size, WIDTH):
        x = multiply(load(source, at + i), scale)
        store(target, to + i, multiply(x, load(weights, weights_at + i)))


@njit
def _rotate(heads: Any, at: int, cosines: Any, sines: Any, turn_at: int, dim: int) -> None:
    """Turns the neighbouring pairs of a head's channels, as `rope.rotate`."""
    for i in range(0, dim, WIDTH):
        x = load(heads, at + i)
        turned = multiply(swap_pairs(x), load(sines, turn_at + i))
        store(heads, at + i, multiply_add(x, load(cosines, turn_at + i), turned))


@njit
def write_heads(
    model: KernelModel, scratch: Scratch, layer: int, cache: Cache, slots: Any, positions: Any
) -> None:
    """Norms and turns the tokens' queries and keys, writes their keys and values."""
    dim, num_kv, length, heads = model.cosines.shape[1], model.num_kv_heads, cache.length, scratch.qkv
    cosines, sines, head_norm, keys, values = (
        model.cosines,
        model.sines,
        model.head_norm,
        cache.keys,
        cache.values,
    )
    num_turning = scratch.mixed.shape[1] // dim + num_kv
    for row in range(len(slots)):
        position, start = positions[row], row * heads.shape[1]
        for head in range(num_turning):
            at = start + head * dim
            if head_norm.shape[0] > 0:
                weights_at = (layer * num_turning + head) * dim
                normalise(heads, at, head_norm, weights_at, dim, model.eps, heads, at)
            _rotate(heads, at, cosines, sines, position * dim, dim)
        for head in range(num_kv):
            to = ((layer * cache.num_slots + slots[row]) * num_kv + head) * length * dim
            column = (num_turning - num_kv + head) * dim
            for i in range(dim):
                keys[to + i * length + position] = heads[row, column + i]
            for i in range(0, dim, WIDTH):
                store(values, to + position * dim + i, load(heads, start + num_kv * dim + column + i))


@njit
def _score(
    queries: Any, at: int, keys: Any, keys_at: int, dim: int, stride: int, count: int, scores: Any
) -> None:
    """Writes a query's products with the first `count` keys, and some behind them."""
    for start in range(0, count, 4 * WIDTH):
        s0 = s1 = s2 = s3 = spread(np.float32(0))
        for i in range(dim):
            query = spread_from(queries, at + i)
            k = keys_at + i * stride + start
            s0 = multiply_add(query, load(keys, k), s0)
            s1 = multiply_add(query, load(keys, k + WIDTH), s1)
            s2 = multiply_add(query, load(keys, k + 2 * WIDTH), s2)
            s3 = multiply_add(query, load(keys, k + 3 * WIDTH), s3)
        store(scores, start, s0)
        store(scores, start + WIDTH, s1)
        store(scores, start + 2 * WIDTH, s2)
        store(scores, start + 3 * WIDTH, s3)


@njit
def _soften(scores: Any, count: int, scale: Any) -> Any:
    """Replaces `count` scores by e^(scale · (score - highest)), returns 1 / their sum."""
    end = (count + WIDTH - 1) // WIDTH * WIDTH
    for i in range(count, end):
        scores[i] = UNLIKELY
    highest = load(scores, 0)
    for i in range(WIDTH, end, WIDTH):
        highest = larger(highest, load(scores, i))
    peak = spread(largest(highest))
    sums = spread(np.float32(0))
    for i in range(0, end, WIDTH):
        weights = exponential(multiply(subtract(load(scores, i), peak), scale))
        store(scores, i, weights)
        sums = add(sums, weights)
    return np.float32(1) / total(sums)


@njit
def _mix(scores: Any, share: Any, count: int, values: Any, at: int, dim: int, mixed: Any, to: int) -> None:
    """Writes `share` · Σ score · value over the first `count` values."""
    for i in range(0, dim, WIDTH):
        v = at + i
        m0 = m1 = m2 = m3 = spread(np.float32(0))
        whole = count // 4 * 4
        for t in range(0, whole, 4):
            m0 = multiply_add(spread_from(scores, t), load(values, v + t * dim), m0)
            m1 = multiply_add(spread_from(scores, t + 1), load(values, v + (t + 1) * dim), m1)
            m2 = multiply_add(spread_from(scores, t + 2), load(values, v + (t + 2) * dim), m2)
            m3 = multiply_add(spread_from(scores, t + 3), load(values, v + (t + 3) * dim), m3)
        for t in range(whole, count):
            m0 = multiply_add(spread_from(scores, t), load(values, v + t * dim), m0)
        store(mixed, to + i, multiply(add(add(m0, m1), add(m2, m3)), spread(share)))


@njit
def attend(
    model: KernelModel,
    scratch: Scratch,
    layer: int,
    cache: Cache,
    slots: Any,
    positions: Any,
    sources: Any,
    start: int,
) -> None:
    """Writes, row by row, what the heads of tokens `sources - start` take from their slots."""
    dim, num_kv, columns = model.cosines.shape[1], model.num_kv_heads, scratch.mixed.shape[1]
    keys, values, queries = cache.keys, cache.values, scratch.qkv
    scores, mixed = scratch.scores, scratch.mixed
    group = columns // dim // num_kv
    scale = spread(np.float32(1 / math.sqrt(dim)))
    for row in range(len(sources)):
        source = sources[row] - start
        count = positions[source] + 1
        for head in range(num_kv * group):
            slot_at = (layer * cache.num_slots + slots[source]) * num_kv
            at = (slot_at + head // group) * cache.length * dim
            _score(
                queries, source * queries.shape[1] + head * dim, keys, at, dim, cache.length, count, scores
            )
            share = _soften(scores, count, scale)
            _mix(scores, share, count, values, at, dim, mixed, row * columns + head * dim)


@njit
def gate(gate_up: Any, active: Any, num_rows: int) -> None:
    """Writes silu(gate) · up."""
    size = active.shape[1]
    one, zero = spread(np.float32(1)), spread(np.float32(0))
    for row in range(num_rows):
        at = row * gate_up.shape[1]
        for i in range(0, size, WIDTH):
            gate = load(gate_up, at + i)
            product = multiply(gate, load(gate_up, at + size + i))
            bottom = add(one, exponential(subtract(zero, gate)))
            store(active, row * size + i, divide(product, bottom))


@njit
def normalise_rows(model: KernelModel, scratch: Scratch, weights: Any, layer: int, num_rows: int) -> None:
    size = scratch.hidden.shape[1]
    for row in range(num_rows):
        at = row * size
        normalise(scratch.hidden, at, weights, layer * size, size, model.eps, scratch.normed, at)
