"""The cells of a step as coloured bars, small enough to lie inline in an event.

The report's timeline draws every interval and has no bound. Here time is cut into slots, each shown as the
activity that filled most of it, and into fewer slots until the picture fits.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from megloom.assets.metadata import MAX_SVG_BYTES
from megloom.compute.report.drawing import cut, element, text

_COLOURS = {"roll": "#3b82f6", "gradient": "#d97706", "update": "#a855f7", "publish": "#059669"}
_OTHER = "#8b93a1"
_SLOTS = (64, 32, 16)  # the last always fits: 8 cells of 16 stretches are 1.2 kB
_MAX_CELLS, _MAX_ACTIVITIES = 8, 4
_LEFT, _WIDTH, _ROW = 110, 320, 16  # pixels


def timeline(intervals: Sequence[Mapping[str, Any]]) -> str | None:
    """One bar per cell, of at most `MAX_SVG_BYTES`; None without intervals.

    An interval is a `CellIntervalRecord` as a dict. Cells past the eighth are counted, not drawn.
    """
    if not intervals:
        return None
    for num_slots in _SLOTS:
        drawn = _draw(intervals, num_slots)
        if len(drawn) <= MAX_SVG_BYTES:
            break
    return drawn


def _draw(intervals: Sequence[Mapping[str, Any]], num_slots: int) -> str:
    start_s = min(interval["start_s"] for interval in intervals)
    span_s = max(max(interval["end_s"] for interval in intervals) - start_s, 1e-9)
    slots = _fill_slots(intervals, num_slots, start_s, span_s)
    cells = sorted(slots)[:_MAX_CELLS]
    paths: defaultdict[str, list[str]] = defaultdict(list)
    for row, cell in enumerate(cells):
        for activity, first, length in _stretches(slots[cell]):
            paths[activity].append(f"M{first} {row}h{length}")
    height = len(cells) * _ROW
    names = [text(0, row * _ROW + 12, cut(cell, 17)) for row, cell in enumerate(cells)]
    more = f", +{len(slots) - len(cells)} cells" if len(slots) > len(cells) else ""
    return element(
        "svg",
        element("g", *names, text(0, height + 15, f"{span_s:.3g} s{more}"), fill="#8b93a1"),
        _bars(paths, num_slots, len(cells)),
        *_legend(sorted(paths), height + 15),
        xmlns="http://www.w3.org/2000/svg",
        width=_LEFT + _WIDTH,
        height=height + 20,
        font_family="sans-serif",
    )


def _bars(paths: Mapping[str, Sequence[str]], num_slots: int, num_cells: int) -> str:
    """One path per activity, in units of a slot and a row."""
    strokes = [
        element("path", stroke=_COLOURS.get(activity, _OTHER), stroke_width=".75", d="".join(moves))
        for activity, moves in paths.items()
    ]
    return element(
        "svg",
        *strokes,
        x=_LEFT,
        width=_WIDTH,
        height=num_cells * _ROW,
        viewBox=f"0 -.5 {num_slots} {num_cells}",
        preserveAspectRatio="none",
    )


def _legend(activities: Sequence[str], y: int) -> list[str]:
    return [
        text(_LEFT + 75 * i, y, cut(name, 12), fill=_COLOURS.get(name, _OTHER))
        for i, name in enumerate(activities[:_MAX_ACTIVITIES])
    ]


def _fill_slots(
    intervals: Sequence[Mapping[str, Any]], num_slots: int, start_s: float, span_s: float
) -> dict[str, dict[int, Counter[str]]]:
    """How much of each slot each activity filled, by cell."""
    slots: defaultdict[str, defaultdict[int, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
    for interval in intervals:
        first = (interval["start_s"] - start_s) / span_s * num_slots
        last = (interval["end_s"] - start_s) / span_s * num_slots
        for slot in range(int(first), min(int(last), num_slots - 1) + 1):
            share = min(last, slot + 1) - max(first, slot)
            if share > 0:
                slots[interval["cell"]][slot][interval["activity"]] += share  # type: ignore[assignment]  # a Counter of floats
    return {cell: dict(by_slot) for cell, by_slot in slots.items()}


def _stretches(by_slot: Mapping[int, Counter[str]]) -> list[tuple[str, int, int]]:
    """(activity, first slot, number of slots) of each stretch of one activity; empty slots make gaps."""
    main = [(slot, shares.most_common(1)[0][0]) for slot, shares in sorted(by_slot.items())]
    groups = [
        list(g) for _, g in groupby(enumerate(main), lambda entry: (entry[1][0] - entry[0], entry[1][1]))
    ]
    return [(group[0][1][1], group[0][1][0], len(group)) for group in groups]
