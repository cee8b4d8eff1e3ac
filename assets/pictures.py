"""The cells of a step as coloured bars, small enough that Dagster shows them at once.

The report's timeline draws every interval and has no bound. Here time is cut into slots, each shown as the
activity that filled most of it, and into fewer slots until the picture fits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import dagster as dg

from megloom.assets.metadata import picture
from megloom.compute.report.drawing import cut, element

COLOURS = {"roll": "#3b82f6", "gradient": "#d97706", "update": "#a855f7", "publish": "#059669"}
COLOUR_NAMES = {"roll": "blue", "gradient": "orange", "update": "purple", "publish": "green"}
OTHER_COLOUR, OTHER_NAME = "#8b93a1", "grey"
_SLOTS = (64, 48, 32, 24, 16, 12, 8, 4)
_MAX_CELLS = 8
_LEFT, _WIDTH, _ROW = 110, 320, 16  # pixels

Shares = dict[int, dict[str, float]]


def timeline(intervals: Sequence[Mapping[str, Any]], *, title: str) -> dg.MarkdownMetadataValue | None:
    """One bar per cell, in as many slots of time as fit inline; None without intervals.

    An interval is a `CellIntervalRecord` as a dict. Cells past the eighth are not drawn. The legend is the
    table of activities beside it, with `COLOUR_NAMES`.
    """
    if not intervals:
        return None
    drawn = (picture(_draw(intervals, num_slots), title=title) for num_slots in _SLOTS)
    return next((shown for shown in drawn if shown is not None), None)


def _draw(intervals: Sequence[Mapping[str, Any]], num_slots: int) -> str:
    slots = _fill_slots(intervals, num_slots)
    cells = sorted(slots)[:_MAX_CELLS]
    paths: defaultdict[str, list[str]] = defaultdict(list)
    for row, cell in enumerate(cells):
        for activity, first, length in _stretches(slots[cell]):
            paths[COLOURS.get(activity, OTHER_COLOUR)].append(f"M{first},{row}h{length}")
    height = len(cells) * _ROW
    names = [element("text", _escaped(cell), y=row * _ROW + 12) for row, cell in enumerate(cells)]
    strokes = [element("path", stroke=colour, d="".join(moves)) for colour, moves in paths.items()]
    bars = element(
        "svg",
        element("g", *strokes, stroke_width=".8"),
        x=_LEFT,
        width=_WIDTH,
        height=height,
        viewBox=f"0,-.5,{num_slots},{len(cells)}",
        preserveAspectRatio="none",
    )
    size = {"width": _LEFT + _WIDTH, "height": height}
    style = {"font_size": 11, "font_family": "sans-serif", "fill": OTHER_COLOUR}
    return element("svg", *names, bars, xmlns="http://www.w3.org/2000/svg", **size, **style)


def _fill_slots(intervals: Sequence[Mapping[str, Any]], num_slots: int) -> dict[str, Shares]:
    """How much of each slot each activity filled, by cell."""
    start_s = min(interval["start_s"] for interval in intervals)
    slot_s = max(max(interval["end_s"] for interval in intervals) - start_s, 1e-9) / num_slots
    filled: dict[str, Shares] = {}
    for interval in intervals:
        first, last = (interval["start_s"] - start_s) / slot_s, (interval["end_s"] - start_s) / slot_s
        shares_of = filled.setdefault(interval["cell"], {})
        for slot in range(int(first), min(int(last), num_slots - 1) + 1):
            share = min(last, slot + 1) - max(first, slot)
            if share > 0:
                shares = shares_of.setdefault(slot, {})
                shares[interval["activity"]] = shares.get(interval["activity"], 0.0) + share
    return filled


def _stretches(by_slot: Shares) -> list[tuple[str, int, int]]:
    """(activity, first slot, number of slots) of each stretch of one activity; empty slots make gaps."""
    main = [(slot, max(shares, key=shares.__getitem__)) for slot, shares in sorted(by_slot.items())]
    stretches = []
    for (_, activity), group in groupby(enumerate(main), lambda entry: (entry[1][0] - entry[0], entry[1][1])):
        slots = [slot for _, (slot, _) in group]
        stretches.append((activity, slots[0], len(slots)))
    return stretches


def _escaped(cell: str) -> str:
    return cut(cell, 16).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
