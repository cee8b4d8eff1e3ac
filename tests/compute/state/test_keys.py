"""Keys are safe as paths and in URLs, and read back as they were written."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megloom.compute.state.keys import Key
from tests.compute.state.node_store import key


def test_a_key_is_written_as_a_path_and_read_back() -> None:
    assert str(key(12)) == "r/solver/trainer/v000012"
    assert Key.parse("r/solver/trainer/v000012") == key(12)
    assert Key.parse(str(key(12_345_678))) == key(12_345_678)


@pytest.mark.parametrize("part", ["", "..", ".hidden", "a/b", "a b", "-x", "é", "x" * 129, "a\n", "a\0"])
@pytest.mark.parametrize("field", ["run", "policy", "kind"])
def test_a_part_that_could_leave_the_folder_is_refused_by_name(field: str, part: str) -> None:
    with pytest.raises(ValueError, match=f"state key: {field}"):
        key(**{field: part})


@pytest.mark.parametrize(
    "text", ["r/p/k", "r/p/k/12", "r/p/k/v12", "../p/k/v000001", "r/p/k/v000001/x", "r/p/k/v-00001"]
)
def test_text_that_is_no_key_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="state key"):
        Key.parse(text)


@given(st.text(max_size=40))
def test_whatever_parses_is_the_same_text(text: str) -> None:
    try:
        parsed = Key.parse(text)
    except ValueError:
        return
    assert Key.parse(str(parsed)) == parsed and ".." not in str(parsed).split("/")
