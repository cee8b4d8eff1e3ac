"""Learning curves: panels of line series on shared axes, and sparklines for a line of text.

Inputs are plain numbers. A value that was not measured (None, NaN) leaves a gap, never a zero.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megloom.compute.report.drawing import (
    colour,
    cut,
    data_uri,
    element,
    number,
    points,
    svg,
    text,
    ticks,
    tooltip,
)

Points = Sequence[tuple[float, float | None]]
WIDTH, HEIGHT = 536.0, 270.0  # pixels of one panel
_LEFT, _RIGHT, _TOP, _BOTTOM = 52.0, 14.0, 50.0, 38.0
SPARK_POINTS = 100  # keeps a sparkline's data URI below 3 kB
MAX_MARKED = 40  # series with more points are drawn without dots


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    """One plot. `series` maps a legend label to its (x, y) points; `y_range` fixes the axis, if given."""

    title: str
    x_label: str
    y_label: str
    series: Mapping[str, Points]
    y_range: tuple[float, float] | None = None


def curves(panels: Sequence[Panel], columns: int = 2) -> str:
    """One SVG with the panels in rows of `columns`; a label has the same colour in all panels."""
    labels = list(dict.fromkeys(label for panel in panels for label in panel.series))
    colours = {label: colour(index) for index, label in enumerate(labels)}
    drawn = [
        element(
            "g",
            *_panel(panel, colours),
            transform=f"translate({index % columns * WIDTH:.0f} {index // columns * HEIGHT:.0f})",
        )
        for index, panel in enumerate(panels)
    ]
    num_rows = max(1, math.ceil(len(panels) / columns))
    width = WIDTH * max(1, min(columns, len(panels)))
    return svg(width, HEIGHT * num_rows, *drawn, label="learning curves")


def _panel(panel: Panel, colours: Mapping[str, str]) -> list[str]:
    measured = [(x, y) for series in panel.series.values() for x, y in series if _is_measured(y)]
    parts = [text(_LEFT, 17, panel.title, 13, class_="bold"), *_legend(panel, colours)]
    if not measured:
        return [
            *parts,
            text(WIDTH / 2, HEIGHT / 2, "nothing measured yet", class_="faint", text_anchor="middle"),
        ]
    xs = _Scale.over([x for x, _ in measured], _LEFT, WIDTH - _RIGHT, padded=False)
    wanted = panel.y_range or tuple(y for _, y in measured if y is not None)
    ys = _Scale.over(wanted, HEIGHT - _BOTTOM, _TOP, padded=panel.y_range is None)
    parts += _axes(panel, xs, ys)
    for label, series in panel.series.items():
        parts += _series(label, series, xs, ys, colours[label])
    return parts


@dataclass(frozen=True, slots=True)
class _Scale:
    """Maps values `low..high` to pixels `start..end`."""

    low: float
    high: float
    start: float
    end: float

    @classmethod
    def over(cls, values: Sequence[float], start: float, end: float, *, padded: bool) -> _Scale:
        low, high = min(values), max(values)
        if low == high:
            low, high = low - (abs(low) or 1.0) * 0.5, high + (abs(high) or 1.0) * 0.5
        pad = (high - low) * 0.06 if padded else 0.0
        return cls(low - pad, high + pad, start, end)

    def __call__(self, value: float) -> float:
        clipped = min(max(value, self.low), self.high)
        return self.start + (clipped - self.low) / (self.high - self.low) * (self.end - self.start)


def _axes(panel: Panel, xs: _Scale, ys: _Scale) -> list[str]:
    parts = []
    for tick in ticks(ys.low, ys.high, 4):
        parts.append(element("line", x1=_LEFT, x2=WIDTH - _RIGHT, y1=ys(tick), y2=ys(tick), class_="grid"))
        parts.append(text(_LEFT - 7, ys(tick) + 4, number(tick), class_="faint", text_anchor="end"))
    for tick in ticks(xs.low, xs.high, 6):
        parts.append(
            text(xs(tick), HEIGHT - _BOTTOM + 16, number(tick), class_="faint", text_anchor="middle")
        )
    middle = (_TOP + HEIGHT - _BOTTOM) / 2
    turned = f"rotate(-90 12 {middle:.0f})"
    parts.append(text((_LEFT + WIDTH - _RIGHT) / 2, HEIGHT - 6, panel.x_label, text_anchor="middle"))
    parts.append(text(12, middle, panel.y_label, text_anchor="middle", transform=turned))
    return parts


def _legend(panel: Panel, colours: Mapping[str, str]) -> list[str]:
    parts, x = [], _LEFT
    for label in panel.series:
        shown = cut(label, 22)
        parts.append(element("rect", x=x, y=27.0, width=12, height=3, rx=1.5, fill=colours[label]))
        parts.append(text(x + 16, 32, shown, 11))
        x += 28 + 6.2 * len(shown)
    return parts


def _series(label: str, series: Points, xs: _Scale, ys: _Scale, stroke: str) -> list[str]:
    parts = []
    for run in _runs(series):
        path = [(xs(x), ys(y)) for x, y in run]
        if len(path) > 1:
            line = {"fill": "none", "stroke": stroke, "stroke_width": 2, "stroke_linejoin": "round"}
            parts.append(element("polyline", tooltip(label), points=points(path), **line))
        if len(path) == 1 or len(series) <= MAX_MARKED:
            parts += [
                element(
                    "circle",
                    tooltip(f"{label}: {number(y)} at {number(x)}"),
                    cx=px,
                    cy=py,
                    r=2.6,
                    fill=stroke,
                )
                for (x, y), (px, py) in zip(run, path, strict=True)
            ]
    return parts


def _runs(series: Points) -> list[list[tuple[float, float]]]:
    """The stretches between values that were not measured."""
    runs: list[list[tuple[float, float]]] = [[]]
    for x, y in series:
        if y is not None and math.isfinite(y):
            runs[-1].append((x, y))
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def _is_measured(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def sparkline(
    values: Sequence[float | None], width: float = 160, height: float = 28, stroke: str = "#3b82f6"
) -> str:
    """A small SVG of a series, its last value marked. Long series are thinned to `SPARK_POINTS`."""
    stride = max(1, math.ceil(len(values) / SPARK_POINTS))
    kept = list(values[::-stride])[::-1]  # counted from the end, so that the last value stays
    runs = _runs(list(enumerate(kept)))
    flat = [y for run in runs for _, y in run]
    children = []
    if flat:
        xs = _Scale.over([0.0, float(max(len(kept) - 1, 1))], 3.0, width - 4, padded=False)
        ys = _Scale.over(flat, height - 4, 4.0, padded=False)
        for run in runs:
            path = points([(xs(x), ys(y)) for x, y in run])
            children.append(element("polyline", points=path, fill="none", stroke=stroke, stroke_width=1.6))
        last_x, last_y = runs[-1][-1]
        children.append(element("circle", cx=xs(last_x), cy=ys(last_y), r=2.6, fill=stroke))
    size = {"viewBox": f"0 0 {width:.0f} {height:.0f}", "width": width, "height": height}
    return element("svg", *children, xmlns="http://www.w3.org/2000/svg", **size)


def sparkline_markdown(label: str, values: Sequence[float | None]) -> str:
    """Markdown of one image, below 3 kB, as Dagster shows it in metadata; symbols in `label` are dropped."""
    plain = "".join(c if c.isalnum() or c in " _/.-" else " " for c in label)
    return f"![{plain}]({data_uri(sparkline(values))})"
