from __future__ import annotations

from typing import Any

import pytest

from megloom.compute.report.timeline import ACTIVITY_COLOURS, timeline


def bars(picture: Any) -> list[Any]:
    """The rectangles that stand for intervals: they are drawn beside a tooltip."""
    return [g.find("{*}rect") for g in picture.all("g")]


def test_each_cell_has_a_lane_and_each_interval_a_bar_of_its_activitys_colour(parsed: Any, make: Any) -> None:
    intervals = [make.interval("cell-0", float(n), activity=a) for n, a in enumerate(ACTIVITY_COLOURS)]
    picture = parsed(timeline([*intervals, make.interval("cell-1", 2.0)], title="Step 1"))
    assert {"cell-0", "cell-1", "Step 1", "seconds since the step began"} <= set(picture.texts)
    assert [bar.attrib["fill"] for bar in bars(picture)[: len(ACTIVITY_COLOURS)]] == list(
        ACTIVITY_COLOURS.values()
    )


def test_bars_begin_and_last_in_proportion_to_their_seconds(parsed: Any, make: Any) -> None:
    intervals = [make.interval(start_s=100.0, end_s=101.0), make.interval(start_s=103.0, end_s=105.0)]
    first, second = bars(parsed(timeline(intervals)))
    scale = float(first.attrib["width"])
    assert float(second.attrib["width"]) == pytest.approx(2 * scale, abs=0.2)
    assert float(second.attrib["x"]) - float(first.attrib["x"]) == pytest.approx(3 * scale, abs=0.3)


def test_the_busy_share_counts_overlaps_once(parsed: Any, make: Any) -> None:
    intervals = [
        make.interval("a", start_s=0.0, end_s=4.0),
        make.interval("a", start_s=1.0, end_s=2.0, activity="publish"),
        make.interval("b", start_s=8.0, end_s=10.0),
    ]
    assert [t for t in parsed(timeline(intervals)).texts if "busy" in t] == ["40% busy", "20% busy"]


def test_cells_are_ordered_by_their_numbers(parsed: Any, make: Any) -> None:
    picture = parsed(timeline([make.interval(f"cell-{n}") for n in (10, 2, 1)]))
    assert [t for t in picture.texts if t.startswith("cell-")] == ["cell-1", "cell-2", "cell-10"]


def test_an_unknown_activity_is_drawn_and_named(parsed: Any, make: Any) -> None:
    assert "migrate" in parsed(timeline([make.interval(activity="migrate")])).texts


def test_the_tooltip_has_the_role_even_where_the_label_does_not_fit(parsed: Any, make: Any) -> None:
    picture = parsed(timeline([make.interval(end_s=0.001), make.interval(start_s=50.0)]))
    assert any("as ROLL(solver)" in title for title in picture.titles)


@pytest.mark.parametrize("intervals", [0, 1])
def test_few_intervals_are_no_error(parsed: Any, make: Any, intervals: int) -> None:
    parsed(timeline([make.interval(start_s=1.0, end_s=1.0)] * intervals))


def test_names_with_markup_are_escaped(parsed: Any, make: Any, evil: str) -> None:
    drawn = timeline([make.interval(evil, role=evil, policy=evil, activity=evil)], title=evil)
    assert parsed(drawn).all("script") == []
