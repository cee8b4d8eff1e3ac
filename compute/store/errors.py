"""The store's error tree. A missing object is `FileNotFoundError`, never one of these."""

from __future__ import annotations


class StoreError(Exception):
    """The store cannot keep its promise. The message names the file, the step or the record's key."""


class ConflictingRecord(StoreError):
    """Two records with different content under one key: a record is final, so one of them is a bug."""


class CorruptFile(StoreError):
    """A stored file is not what its manifest or its own digest says."""


class TokensDropped(StoreError):
    """A file is gone because the run's retention dropped it. The message names the step and the reason."""
