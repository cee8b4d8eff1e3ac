"""Fixtures that the state store shares with the MEG store's tests."""

from __future__ import annotations

from tests.compute.store.conftest import small_disk

__all__ = ["small_disk"]
