"""Every loss again in plain Python, float64, token by token: slow, and without a line of the real ones.

Rows are lists of tokens; all functions take and give ragged lists [row][token].
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from megloom.compute.algorithms.base import Cispo, Clip, Correction, Gspo, Sapo

Ragged = list[list[float]]
TokenLoss = Callable[[float, float, float], float]


def mapped(function: Callable[..., float], *ragged: Ragged) -> Ragged:
    return [[function(*token) for token in zip(*row, strict=True)] for row in zip(*ragged, strict=True)]


def geometric_means(log_ratios: Ragged) -> Ragged:
    return [[math.exp(math.fsum(row) / len(row))] * len(row) for row in log_ratios]


def clipped(ratio: float, advantage: float, low: float, high: float, dual: float | None = None) -> float:
    value = min(ratio * advantage, min(max(ratio, low), high) * advantage)
    return -max(value, dual * advantage) if dual is not None and advantage < 0 else -value


def sapo(ratio: float, advantage: float, knobs: Sapo) -> float:
    tau = knobs.tau_positive if advantage > 0 else knobs.tau_negative
    return -advantage * 4.0 / tau / (1.0 + math.exp(-tau * (ratio - 1.0)))


def surrogate(knobs: Any, new: Ragged, base: Ragged, advantages: Ragged, low: float, high: float) -> Ragged:
    log_ratios = mapped(lambda n, b: n - b, new, base)
    ratios = mapped(math.exp, log_ratios)
    match knobs:
        case Clip():
            return mapped(lambda r, a: clipped(r, a, low, high, knobs.dual_clip), ratios, advantages)
        case Gspo():
            cap = math.inf if knobs.token_cap is None else math.log(knobs.token_cap)
            means = geometric_means(mapped(lambda x: min(x, cap), log_ratios))
            return mapped(lambda r, a: clipped(r, a, low, high), means, advantages)
        case Cispo():
            return mapped(lambda r, a, n: -min(max(r, low), high) * a * n, ratios, advantages, new)
        case Sapo():
            return mapped(lambda r, a: sapo(r, a, knobs), ratios, advantages)
    raise AssertionError(knobs)


def correction_weights(correction: Correction, proximal: Ragged, behaviour: Ragged) -> Ragged:
    log_ratios = mapped(lambda p, b: p - b, proximal, behaviour)
    ratios, low, high = mapped(math.exp, log_ratios), correction.low, correction.high
    match correction.name:
        case "behaviour":
            return mapped(lambda r: 1.0, ratios)
        case "token-tis":
            return mapped(lambda r: min(r, high), ratios)
        case "sequence-tis":
            return [[min(math.exp(math.fsum(row)), high)] * len(row) for row in log_ratios]
        case "icepop":
            return mapped(lambda r: r if low <= r <= high else 0.0, ratios)
        case "sequence-mask":
            means = geometric_means(log_ratios)
            return mapped(lambda r, m: r if low <= m <= high else 0.0, ratios, means)
        case "decoupled":
            return ratios


def kl(estimator: str, new: Ragged, reference: Ragged) -> Ragged:
    delta = mapped(lambda n, r: n - r, new, reference)
    formulas: dict[str, Callable[[float], float]] = {
        "k1": lambda d: d,
        "k2": lambda d: d * d / 2,
        "k3": lambda d: math.exp(-d) - 1 + d,
    }
    return mapped(formulas[estimator], delta)


def value_loss(values: Ragged, returns: Ragged, old: Ragged, clip: float | None) -> Ragged:
    def one(value: float, target: float, before: float) -> float:
        bounded = value if clip is None else min(max(value, before - clip), before + clip)
        return 0.5 * max((value - target) ** 2, (bounded - target) ** 2)

    return mapped(one, values, returns, old)
