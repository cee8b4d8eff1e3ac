import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from typing import Any
from urllib.parse import unquote

from megloom.assets.metadata import MAX_PICTURE
from megloom.assets.pictures import COLOURS, timeline
from tests.fake_service import step_report


def drawn(intervals: Sequence[dict[str, Any]]) -> ElementTree.Element:
    shown = timeline(intervals, title="cells")
    assert shown is not None and shown.md_str is not None and len(shown.md_str) <= MAX_PICTURE
    return ElementTree.fromstring(unquote(shown.md_str.partition("svg+xml,")[2].removesuffix(")")))


def interval(cell: str, activity: str, start_s: float, end_s: float) -> dict[str, Any]:
    return {"cell": cell, "activity": activity, "start_s": start_s, "end_s": end_s}


def texts(picture: ElementTree.Element) -> list[str | None]:
    return [element.text for element in picture.iter() if element.tag.endswith("text")]


def paths(picture: ElementTree.Element) -> dict[str, str]:
    found = [element.attrib for element in picture.iter() if element.tag.endswith("path")]
    return {path["stroke"]: path["d"] for path in found}


def test_a_bar_is_as_long_as_its_interval():
    picture = drawn([interval("a", "roll", 10.0, 11.0), interval("b", "update", 11.0, 12.0)])
    assert texts(picture) == ["a", "b"]
    assert paths(picture) == {COLOURS["roll"]: "M0,0h32", COLOURS["update"]: "M32,1h32"}


def test_a_slot_shows_the_activity_that_filled_most_of_it():
    picture = drawn([interval("a", "roll", 0.0, 63.3), interval("a", "update", 63.3, 64.0)])
    assert paths(picture) == {COLOURS["roll"]: "M0,0h63", COLOURS["update"]: "M63,0h1"}


def test_time_without_activity_is_a_gap():
    picture = drawn([interval("a", "roll", 0.0, 1.0), interval("a", "roll", 3.0, 4.0)])
    assert paths(picture) == {COLOURS["roll"]: "M0,0h16M48,0h16"}


def test_a_step_of_six_cells_is_shown_at_once():
    picture = drawn(step_report(2).timeline)
    assert texts(picture)[:2] == ["roll/planner/0", "roll/solver/0"]
    assert set(paths(picture)) == set(COLOURS.values())


def test_thousands_of_intervals_of_many_cells_are_shown_at_once():
    activities = ("roll", "gradient", "update", "else")
    picture = drawn([interval(f"cell-{i % 20:012}", activities[i % 4], i, i + 1) for i in range(5000)])
    assert len(texts(picture)) == 8


def test_an_interval_of_no_length_is_drawn_as_nothing():
    assert paths(drawn([interval("a", "roll", 1.0, 1.0)])) == {}


def test_a_cell_name_cannot_break_the_picture():
    assert texts(drawn([interval("<a&b>\"'", "roll", 0.0, 1.0)]))[0] is not None


def test_no_intervals_are_no_timeline():
    assert timeline([], title="cells") is None
