from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megloom.compute.report.drawing import cut, element, escape, number, svg, text, ticks, wrap


@settings(max_examples=100, deadline=None)
@given(content=st.text())
def test_any_text_gives_a_well_formed_picture(content: str) -> None:
    drawn = svg(10, 10, text(0, 0, content, fill=content), label=content)
    assert ElementTree.fromstring(drawn) is not None


def test_attributes_are_escaped_and_none_is_left_out() -> None:
    assert element("a", x=1.25, stroke_width=2.0, title='"<', fill=None) == (
        '<a x="1.2" stroke-width="2" title="&quot;&lt;"/>'
    )


def test_characters_that_xml_cannot_hold_are_replaced() -> None:
    assert escape("a\x00b\ud800c\uffff<") == "a\ufffdb\ufffdc\ufffd&lt;"


@pytest.mark.parametrize(
    ("value", "expected"),
    [(None, "–"), (float("nan"), "–"), (0, "0"), (0.123456, "0.1235"), (12345.6, "12,346"), (1e-7, "1e-07")],
)
def test_a_number_is_written_for_people(value: Any, expected: str) -> None:
    assert number(value) == expected


@settings(max_examples=100, deadline=None)
@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e9))  # spans far above the spacing of float64
def test_ticks_are_few_ascending_and_inside(low: float, span: float) -> None:
    found = ticks(low, low + span, 5)
    assert len(found) <= 12
    assert found == sorted(found)
    assert all(low - span * 1e-6 <= tick <= low + span * (1 + 1e-6) for tick in found)


def test_ticks_are_round_numbers() -> None:
    assert ticks(0.0, 1.0, 5) == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert ticks(3.0, 3.0) == [3.0]


def test_long_text_is_wrapped_at_spaces_and_cut_at_the_last_line() -> None:
    assert wrap("one two three four five", 9, 2) == ["one two", "three fo…"]
    assert wrap("abcdefghij", 4, 5) == ["abcd", "efgh", "ij"]
    assert wrap("", 4, 5) == []
    assert cut("a\n b", 5) == "a b"


@settings(max_examples=100, deadline=None)
@given(st.text(), st.integers(2, 30), st.integers(1, 5))
def test_wrapped_lines_keep_their_limits(content: str, width: int, max_lines: int) -> None:
    lines = wrap(content, width, max_lines)
    assert len(lines) <= max_lines
    assert all(0 < len(line) <= width for line in lines)
