"""A replaced file is the old one or the new one, never a mix."""

from __future__ import annotations

from pathlib import Path

import pytest

from megloom.compute.state.durable import replace_file


def test_a_file_is_replaced_and_its_folder_made(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "state"
    for text in ("one", "two"):
        replace_file(path, lambda temporary, text=text: temporary.write_text(text))  # type: ignore[misc]
    assert path.read_text() == "two"
    assert list(path.parent.iterdir()) == [path]


def test_a_writer_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    def fail(temporary: Path) -> None:
        temporary.write_text("half")
        raise ValueError("disk full")

    path = tmp_path / "state"
    path.write_text("old")
    with pytest.raises(ValueError, match="disk full"):
        replace_file(path, fail)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
