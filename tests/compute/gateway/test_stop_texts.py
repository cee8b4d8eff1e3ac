"""A stop text ends the answer and is left out; what may begin one is held back."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from megloom.compute.gateway.stop_texts import StopTexts, beginning_at_end


def test_possible_beginnings_are_held_back_until_they_are_none() -> None:
    stops = StopTexts(["END", "\n\n"])
    assert [stops.feed(text) for text in ("a E", "N", "d\n", "b")] == ["a ", "", "ENd", "\nb"]
    assert stops.feed("cEN") == "c" and stops.finish() == "EN" and stops.found is None


def test_what_stands_before_the_stop_is_passed_on_and_nothing_after() -> None:
    stops = StopTexts(["END"])
    assert [stops.feed("aE"), stops.feed("ND b"), stops.feed("c"), stops.finish()] == ["a", "", "", ""]
    assert stops.found == "END"


def test_the_stop_that_is_complete_first_counts() -> None:
    stops = StopTexts(["bcd", "c", "abc"])
    assert (stops.feed("xabcd"), stops.found) == ("x", "abc"), "both end there, the longer is left out whole"


def test_without_stops_everything_passes() -> None:
    stops = StopTexts(["", ""])
    assert stops.feed("a") == "a" and stops.found is None


def test_the_longest_beginning_is_found_and_a_whole_marker_is_none() -> None:
    assert beginning_at_end("xaba", ["abab"]) == 3
    assert beginning_at_end("ab", ["ab"]) == 0
    assert beginning_at_end("", ["ab"]) == 0 and beginning_at_end("a", []) == 0


@settings(max_examples=300, deadline=None)
@given(
    text=st.text(alphabet="ab", max_size=12),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(1, 5), max_size=12),
)
def test_any_cut_of_a_text_stops_where_reading_by_characters_stops(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    expected = text
    for end in range(len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            expected = text[: end - max(map(len, ended))]
            break
    reader, passed = StopTexts(stops), ""
    for size in [*cuts, len(text) + 1]:
        passed += reader.feed(text[:size])
        text = text[size:]
    assert passed + reader.finish() == expected
