"""Small SVG pictures that fit inline into an event: a series as a line, the cells of a step as coloured bars.

Their size is bounded by construction, not by the data: a series is cut by its caller, a timeline is drawn on
a fixed number of slots. Colours are readable on a light and a dark page; text is grey for the same reason.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

_COLOURS = {"roll": "#4c8dd6", "gradient": "#e08a3c", "update": "#b85cc4", "publish": "#4caf6e"}
_OTHER = "#9a9a9a"
_FONT = 'font-family="sans-serif" font-size="11" fill="#888"'
_SLOTS = 64  # slots of a timeline, 5 pixels each
_MAX_CELLS = 8
_ROW = 16


def sparkline(values: Sequence[float]) -> str | None:
    """The series as a line, its least, greatest and last value written beside it; None below two points."""
    finite = [value for value in values if abs(value) < float("inf")]
    if len(finite) < 2:
        return None
    width, height, low, high = 300, 48, min(finite), max(finite)
    span = (high - low) or 1.0
    points = [
        (round(4 + width * i / (len(finite) - 1), 1), round(4 + height * (high - value) / span, 1))
        for i, value in enumerate(finite)
    ]
    line = " ".join(f"{x:g},{y:g}" for x, y in points)
    x, y = points[-1]
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" width="400" height="56">'
        f'<polyline points="{line}" fill="none" stroke="#4c8dd6" stroke-width="1.5"/>'
        f'<circle cx="{x:g}" cy="{y:g}" r="3" fill="#4c8dd6"/>'
        f'<g {_FONT}><text x="312" y="13">max {high:.4g}</text>'
        f'<text x="312" y="32">now {finite[-1]:.4g}</text><text x="312" y="51">min {low:.4g}</text></g></svg>'
    )


def timeline(intervals: Sequence[Mapping[str, Any]]) -> str | None:
    """One bar per cell: in each slot of time the activity that filled most of it; None without intervals.

    An interval is a `CellIntervalRecord` as a dict: cell, activity, start_s, end_s. Cells past the eighth are
    counted, not drawn.
    """
    if not intervals:
        return None
    start_s = min(interval["start_s"] for interval in intervals)
    seconds = max(max(interval["end_s"] for interval in intervals) - start_s, 1e-9)
    slots = _fill_slots(intervals, start_s, seconds)
    cells = sorted(slots)[:_MAX_CELLS]
    paths: defaultdict[str, list[str]] = defaultdict(list)
    for row, cell in enumerate(cells):
        for activity, x, length in _runs(slots[cell]):
            paths[activity].append(f"M{100 + 5 * x} {row * _ROW + 2}h{5 * length}v12h-{5 * length}")
    bars = "".join(
        f'<path fill="{_COLOURS.get(name, _OTHER)}" d="{"".join(d)}"/>' for name, d in paths.items()
    )
    names = "".join(f'<text y="{row * _ROW + 12}">{_escape(cell)}</text>' for row, cell in enumerate(cells))
    base = len(cells) * _ROW + 14
    legend = "".join(
        f'<text x="{100 + 70 * i}" y="{base}" fill="{_COLOURS.get(name, _OTHER)}">{_escape(name)}</text>'
        for i, name in enumerate(sorted(paths)[:4])
    )
    more = f" +{len(slots) - len(cells)} cells" if len(slots) > len(cells) else ""
    total = f'<text y="{base}">{seconds:.3g} s{more}</text>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="430" height="{base + 6}">'
        f"{bars}<g {_FONT}>{names}{total}{legend}</g></svg>"
    )


def _fill_slots(
    intervals: Sequence[Mapping[str, Any]], start_s: float, seconds: float
) -> dict[str, dict[int, Counter[str]]]:
    """Seconds of each activity by cell and slot."""
    slots: defaultdict[str, defaultdict[int, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
    for interval in intervals:
        first = (interval["start_s"] - start_s) / seconds * _SLOTS
        last = (interval["end_s"] - start_s) / seconds * _SLOTS
        for slot in range(int(first), min(int(last), _SLOTS - 1) + 1):
            share = min(last, slot + 1) - max(first, slot)
            if share > 0:
                slots[interval["cell"]][slot][interval["activity"]] += share
    return {cell: dict(by_slot) for cell, by_slot in slots.items()}


def _runs(by_slot: Mapping[int, Counter[str]]) -> list[tuple[str, int, int]]:
    """(activity, first slot, number of slots) of each stretch of equal slots; empty slots make gaps."""
    main = {slot: counts.most_common(1)[0][0] for slot, counts in sorted(by_slot.items())}
    stretches = [
        list(group)
        for _, group in groupby(enumerate(main.items()), lambda entry: (entry[1][0] - entry[0], entry[1][1]))
    ]
    return [(group[0][1][1], group[0][1][0], len(group)) for group in stretches]


def _escape(text: str) -> str:
    return text[:16].replace("&", "&amp;").replace("<", "&lt;")
