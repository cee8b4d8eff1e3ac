import xml.etree.ElementTree as ElementTree

from megloom.assets.metadata import MAX_SVG_BYTES
from megloom.assets.pictures import timeline
from tests.fake_service import step_report


def test_a_timeline_has_a_row_per_cell_and_a_colour_per_activity():
    svg = timeline(step_report(2).timeline)
    assert svg is not None and len(svg) <= MAX_SVG_BYTES
    texts = [element.text for element in ElementTree.fromstring(svg).iter() if element.text]
    assert {"train/solver", "roll/planner/0", "gradient", "publish"} <= set(texts)


def test_a_timeline_of_thousands_of_intervals_stays_inline():
    intervals = [
        {
            "cell": f"cell-{i % 20:02}",
            "activity": ("roll", "gradient", "update")[i % 3],
            "start_s": i,
            "end_s": i + 1,
        }
        for i in range(5000)
    ]
    svg = timeline(intervals)
    assert svg is not None and "+12 cells" in svg
    assert len(svg) <= MAX_SVG_BYTES


def test_a_cell_name_cannot_break_the_picture():
    svg = timeline([{"cell": "<a&b>", "activity": "roll", "start_s": 0.0, "end_s": 1.0}])
    assert svg is not None
    ElementTree.fromstring(svg)


def test_no_intervals_are_no_timeline():
    assert timeline([]) is None
