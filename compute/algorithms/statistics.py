"""Means and deviations that every algorithm shares.

Two passes in float64 with exact sums (fsum), so that the order of members cannot matter to the last bit.
Values that agree to float32 precision are equal: their differences are exactly 0, and no noise is a signal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

EPSILON = 1e-6  # added to a standard deviation, in reward units; the value that all peers use
WHITEN_EPSILON = 1e-8  # added to a variance; the value that all peers use
_SAME = 2.0**-21  # relative to the largest value: 4 float32 ulps, so float noise is not a signal

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


def require_finite(values: Sequence[float], what: str) -> None:
    """Raises: ValueError naming the position of the first value that is not finite."""
    for position, value in enumerate(values):
        if not math.isfinite(value):
            raise ValueError(f"reward {position} of the {what} is {value}, expected a finite number")


def exact_mean(values: Sequence[float]) -> float:
    """The mean of at least one value."""
    return math.fsum(values) / len(values)


def are_equal(values: Sequence[float]) -> bool:
    """True if the values agree to float32 precision; an empty sequence does."""
    return not any(centred(values))


def centred(values: Sequence[float]) -> list[float]:
    """The values less their mean, exactly 0 if they are equal."""
    if not values:
        return []
    mean = exact_mean(values)
    return _zero_if_noise([value - mean for value in values], values)


def standardised(values: Sequence[float]) -> list[float]:
    """Centred values over their deviation (Bessel's correction) plus EPSILON; 0 if they are equal."""
    differences = centred(values)
    if not any(differences):
        return differences
    deviation = math.sqrt(math.fsum(d * d for d in differences) / (len(values) - 1))
    return [d / (deviation + EPSILON) for d in differences]


def left_out(values: Sequence[float]) -> list[float]:
    """Each value less the mean of the others; 0 if they are equal, or if there is only one."""
    num = len(values)
    return [d * num / (num - 1) if num > 1 else 0.0 for d in centred(values)]


def whitened(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """(value − mean) / sqrt(variance + WHITEN_EPSILON), with each value counted `weight` times.

    Bessel's correction on the sum of weights. Exact zeros if the values that weigh are equal, or weigh ≤ 1.
    """
    total = math.fsum(weights)
    counted = [value for value, weight in zip(values, weights, strict=True) if weight > 0]
    if total <= 1 or are_equal(counted):
        return [0.0] * len(values)
    mean = math.fsum(v * w for v, w in zip(values, weights, strict=True)) / total
    differences = [value - mean for value in values]
    square = math.fsum(d * d * w for d, w in zip(differences, weights, strict=True)) / (total - 1)
    return [d / math.sqrt(square + WHITEN_EPSILON) for d in differences]


def positions_by(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[int]]:
    """The positions of the items with the same key, in order; groups may have any size."""
    groups: dict[K, list[int]] = {}
    for position, item in enumerate(items):
        groups.setdefault(key(item), []).append(position)
    return groups


def _zero_if_noise(differences: list[float], values: Sequence[float]) -> list[float]:
    if max(map(abs, differences)) <= _SAME * max(map(abs, values)):
        return [0.0] * len(differences)
    return differences
