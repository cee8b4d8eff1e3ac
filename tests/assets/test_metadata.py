import json
import math
from urllib.parse import unquote

from megloom.assets.curves import WINDOW
from megloom.assets.metadata import MAX_ROWS, entries, picture, plot, rate_rows, table


def test_numbers_that_json_does_not_have_become_text():
    shown = entries({"loss": math.nan, "norm": math.inf, "gap": -math.inf, "fine": 0.25})
    assert shown == {"loss": "nan", "norm": "inf", "gap": "-inf", "fine": 0.25}
    json.dumps(shown, allow_nan=False)


def test_what_was_not_measured_is_left_out_and_zero_is_kept():
    assert entries({"loss": None, "num_failed": 0}) == {"num_failed": 0}


def test_floats_are_cut_to_six_digits():
    assert entries({"loss": 1 / 3}) == {"loss": 0.333333}


def test_a_table_has_one_typed_column_per_name_and_marks_missing_cells():
    shown = table(
        [{"policy": "a", "samples": 3, "loss": 0.5}, {"policy": "b", "samples": 4, "note": math.nan}]
    )
    assert shown is not None
    assert [(column.name, column.type) for column in shown.schema.columns] == [
        ("policy", "string"),
        ("samples", "int"),
        ("loss", "string"),
        ("note", "string"),
    ]
    assert shown.records[1].data == {"policy": "b", "samples": 4, "loss": "–", "note": "nan"}


def test_a_table_is_cut_to_its_bound():
    shown = table([{"position": i} for i in range(MAX_ROWS + 5)])
    assert shown is not None and len(shown.records) == MAX_ROWS


def test_a_table_without_rows_is_no_table():
    assert table([]) is None


def test_a_rate_is_divided_where_it_is_shown_and_keeps_its_count():
    assert rate_rows({"b": (3.0, 4), "a": (0.0, 0)}) == [
        {"rate": "a", "mean": None, "count": 0},
        {"rate": "b", "mean": 0.75, "count": 4},
    ]


def test_a_picture_that_dagster_would_fold_away_is_left_out():
    assert picture("<svg>" + "x" * 900 + "</svg>", title="bars") is not None
    assert picture("<svg>" + "x" * 1000 + "</svg>", title="bars") is None


def test_a_picture_survives_its_encoding():
    svg = '<svg fill="#fff"><text>100% &amp; (more)</text></svg>'
    shown = picture(svg, title="bars")
    assert shown is not None and shown.md_str is not None
    code = shown.md_str.removeprefix("![bars](data:image/svg+xml,").removesuffix(")")
    assert unquote(code) == svg.replace('"', "'")
    assert not set(code) & set(' ()<>"#')


def test_the_plot_of_a_full_window_is_shown_at_once():
    shown = plot([(-1) ** i * 123.456 for i in range(WINDOW)], title="loss of planner per step, full window")
    assert shown is not None


def test_a_single_point_is_not_plotted():
    assert plot([1.0], title="reward") is None
