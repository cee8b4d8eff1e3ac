from __future__ import annotations

import base64
import math
import re
from typing import Any
from xml.etree import ElementTree

import pytest

from megloom.compute.report.curves import Panel, curves, sparkline, sparkline_markdown


def panel(**overrides: Any) -> Panel:
    values: dict[str, Any] = {"title": "reward", "x_label": "step", "y_label": "mean", "series": {}}
    return Panel(**(values | overrides))


def test_a_panel_shows_its_title_labels_legend_and_one_line_per_series(parsed: Any) -> None:
    picture = parsed(
        curves([panel(series={"solver": [(0, 0.1), (1, 0.4)], "planner": [(0, 0.2), (1, 0.3)]})])
    )
    assert {"reward", "step", "mean", "solver", "planner"} <= set(picture.texts)
    assert len(picture.all("polyline")) == 2


def test_a_label_has_the_same_colour_in_all_panels(parsed: Any) -> None:
    line = [(0, 0.1), (1, 0.4)]
    picture = parsed(curves([panel(series={"a": line, "b": line}), panel(series={"b": line})]))
    strokes = [(p.find("*").text, p.attrib["stroke"]) for p in picture.all("polyline")]
    assert len({stroke for label, stroke in strokes if label == "b"}) == 1
    assert len({stroke for _, stroke in strokes}) == 2


def test_a_value_that_was_not_measured_is_a_gap_and_not_a_zero(parsed: Any) -> None:
    series = [(0, 0.5), (1, 0.6), (2, None), (3, math.nan), (4, 0.7), (5, 0.8)]
    picture = parsed(curves([panel(series={"a": series})]))
    assert [len(p.attrib["points"].split()) for p in picture.all("polyline")] == [2, 2]


@pytest.mark.parametrize("series", [{}, {"a": []}, {"a": [(0, None)]}])
def test_nothing_measured_is_said(parsed: Any, series: Any) -> None:
    assert "nothing measured yet" in parsed(curves([panel(series=series)])).texts


@pytest.mark.parametrize(
    "series", [[(3, 2.0)], [(0, 0.0), (1, 0.0)], [(0, -5.0), (9, -5.0)], [(0, 1e9), (1, -1e9)]]
)
def test_every_point_lies_inside_the_picture(parsed: Any, series: Any) -> None:
    picture = parsed(curves([panel(series={"a": series})]))
    dots = [(float(c.attrib["cx"]), float(c.attrib["cy"])) for c in picture.all("circle")]
    assert len(dots) == len(series)
    assert all(0 <= x <= picture.width and 0 <= y <= picture.height for x, y in dots)


def test_a_fixed_axis_keeps_its_range(parsed: Any) -> None:
    series = {"a": [(0, 0.40), (1, 0.41)]}
    assert {"0", "1"} <= set(parsed(curves([panel(series=series, y_range=(0, 1))])).texts)


def test_names_with_markup_are_escaped(parsed: Any, evil: str) -> None:
    names: dict[str, Any] = {"title": evil, "x_label": evil, "y_label": evil}
    drawn = curves([panel(series={evil: [(0, 1.0), (1, 2.0)]}, **names)])
    assert parsed(drawn).all("script") == []


def test_no_panels_give_an_empty_picture(parsed: Any) -> None:
    assert parsed(curves([])).texts == []


@pytest.mark.parametrize("num", [1, 2, 100, 10_000])
def test_a_sparkline_stays_below_3_kb_and_ends_at_the_last_value(num: int) -> None:
    markdown = sparkline_markdown("mean reward", [math.sin(n / 7) * 1e6 for n in range(num - 1)] + [2e6])
    assert len(markdown) < 3000
    match = re.fullmatch(r"!\[mean reward\]\(data:image/svg\+xml;base64,(.+)\)", markdown)
    assert match is not None
    dot = ElementTree.fromstring(base64.b64decode(match[1]))[-1]
    assert num == 1 or float(dot.attrib["cy"]) == 4.0  # the largest value, at the top


@pytest.mark.parametrize("values", [[], [None], [math.nan, None]])
def test_a_sparkline_of_nothing_is_empty(values: Any) -> None:
    assert len(ElementTree.fromstring(sparkline(values))) == 0


def test_a_sparkline_label_cannot_break_the_markdown() -> None:
    assert sparkline_markdown("a](x) <b>\n", [1, 2]).startswith("![a  x   b  ](data:")
