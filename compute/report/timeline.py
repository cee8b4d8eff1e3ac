"""A step's timeline: one lane per cell, coloured by what the cell did, on the session's clock."""

from __future__ import annotations

from collections.abc import Sequence

from megloom.compute.graph.records import CellIntervalRecord
from megloom.compute.report.drawing import cut, element, number, svg, text, ticks, tooltip

ACTIVITY_COLOURS = {
    "roll": "#3b82f6",
    "gradient": "#d97706",
    "update": "#a855f7",
    "publish": "#059669",
    "bind": "#94a3b8",
    "load": "#0ea5e9",
    "offload": "#f472b6",
}
_OTHER = "#8b93a1"
_LANE, _GAP, _TOP, _BOTTOM, _RIGHT = 26.0, 9.0, 40.0, 40.0, 64.0
_LETTER = 6.4  # pixels of one letter at size 11


def timeline(intervals: Sequence[CellIntervalRecord], width: float = 1072, title: str = "") -> str:
    """One SVG. Time starts at the first interval; the right column says how busy each cell was.

    Labels inside the bars name the role where it fits; the tooltip always has it all.
    """
    cells = sorted({i.cell for i in intervals}, key=_natural)
    left = 20 + _LETTER * max((min(len(c), 24) for c in cells), default=8)
    height = _TOP + len(cells) * (_LANE + _GAP) + _BOTTOM
    if not intervals:
        nothing = text(
            width / 2, height / 2, "no cell activity recorded", class_="faint", text_anchor="middle"
        )
        return svg(width, height, nothing, label="step timeline")
    begin = min(i.start_s for i in intervals)
    span = max(i.end_s for i in intervals) - begin or 1.0
    inner = width - left - _RIGHT
    parts = [*_legend(intervals, title, left), *_time_axis(span, left, inner, height)]
    for lane, cell in enumerate(cells):
        own = [i for i in intervals if i.cell == cell]
        y = _TOP + lane * (_LANE + _GAP)
        parts.append(text(left - 10, y + 17, cut(cell, 24), text_anchor="end"))
        parts.append(element("rect", x=left, y=y, width=inner, height=_LANE, rx=3, class_="track"))
        parts += [_bar(i, left + (i.start_s - begin) / span * inner, y, inner / span) for i in own]
        parts.append(text(width - _RIGHT + 10, y + 17, f"{_busy_share(own, span):.0%} busy", class_="faint"))
    return svg(width, height, *parts, label=f"timeline of {len(cells)} cells over {span:.2f} s")


def _bar(interval: CellIntervalRecord, x: float, y: float, pixels_per_s: float) -> str:
    seconds = interval.end_s - interval.start_s
    width = max(seconds * pixels_per_s, 1.0)
    fill = ACTIVITY_COLOURS.get(interval.activity, _OTHER)
    about = f"{interval.cell}: {interval.activity} {interval.policy}, as {interval.role}, {number(seconds)} s"
    parts = [element("rect", x=x, y=y, width=width, height=_LANE, rx=3, fill=fill)]
    room = int((width - 8) / _LETTER)
    label = next((name for name in (interval.role, interval.policy) if name and len(name) <= room), "")
    if label:
        parts.append(text(x + 5, y + 17, label, 11, class_="on"))
    return element("g", tooltip(about), *parts)


def _legend(intervals: Sequence[CellIntervalRecord], title: str, left: float) -> list[str]:
    used = {i.activity for i in intervals}
    names = [a for a in ACTIVITY_COLOURS if a in used] + sorted(used - ACTIVITY_COLOURS.keys())
    parts, x = [text(left, 17, title, 13, class_="bold")], left + (16 + 7.4 * len(title) if title else 0)
    for name in names:
        parts.append(
            element("rect", x=x, y=8.0, width=11, height=11, rx=2, fill=ACTIVITY_COLOURS.get(name, _OTHER))
        )
        parts.append(text(x + 16, 17, name))
        x += 34 + _LETTER * len(name)
    parts.append(element("rect", x=x, y=8.0, width=11, height=11, rx=2, class_="track"))
    return [*parts, text(x + 16, 17, "idle")]


def _time_axis(span: float, left: float, inner: float, height: float) -> list[str]:
    parts = []
    for tick in ticks(0.0, span, 8):
        x = left + tick / span * inner
        parts.append(element("line", x1=x, x2=x, y1=_TOP - 6, y2=height - _BOTTOM, class_="grid"))
        parts.append(text(x, height - _BOTTOM + 14, number(tick), class_="faint", text_anchor="middle"))
    return [*parts, text(left + inner / 2, height - 6, "seconds since the step began", text_anchor="middle")]


def _busy_share(intervals: Sequence[CellIntervalRecord], span: float) -> float:
    """The share of `span` that the intervals cover, overlaps counted once."""
    busy, reached = 0.0, float("-inf")
    for interval in sorted(intervals, key=lambda i: i.start_s):
        busy += max(0.0, interval.end_s - max(interval.start_s, reached))
        reached = max(reached, interval.end_s)
    return busy / span


def _natural(name: str) -> tuple[str, int, str]:
    """Orders cell-2 before cell-10."""
    stem = name.rstrip("0123456789")
    digits = name[len(stem) :]
    return stem, int(digits) if digits else -1, name
