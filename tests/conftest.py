"""Profiles of the property tests: `make fuzz` runs them with `--hypothesis-profile fuzz`."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("fuzz", max_examples=1_000, deadline=None, print_blob=True)
