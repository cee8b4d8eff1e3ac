from __future__ import annotations

import errno
import io
from typing import Any

import pytest

from megloom.compute.store.draft import Draft
from megloom.compute.store.errors import StoreError
from megloom.compute.store.files import file_digest


class AlmostFullDisk(io.BytesIO):
    """Takes at most three bytes at a time and `space` in all, as a disk that is nearly full may."""

    def __init__(self, space: int) -> None:
        super().__init__()
        self.space = space

    def write(self, data: Any) -> int:
        if not self.space:
            raise OSError(errno.ENOSPC, "No space left on device")
        part = memoryview(data)[: min(3, self.space)]
        self.space -= len(part)
        return super().write(part)


def test_what_a_disk_takes_in_parts_is_written_whole() -> None:
    draft = Draft("store/meg/r/step=000001", AlmostFullDisk(space=8), None)
    assert draft.write(b"12345678") == 8
    assert draft.content() == b"12345678"
    assert (draft.size_bytes, draft.digest()) == (8, file_digest(b"12345678"))


def test_a_disk_that_takes_a_part_and_no_more_is_named_with_the_step() -> None:
    draft = Draft("store/meg/r/step=000001", AlmostFullDisk(space=7), None)
    with pytest.raises(StoreError, match=r"a file of store/meg/r/step=000001: .*No space left on device"):
        draft.write(b"12345678")


def test_a_discarded_draft_takes_bytes_and_keeps_none() -> None:
    draft = Draft("store", io.BytesIO(), None)
    draft.write(b"1")
    draft.discard()
    assert draft.write(b"footer") == 6
    assert (draft.content(), draft.size_bytes) == (b"1", 1)
