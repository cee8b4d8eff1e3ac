"""Any order of puts, gets, pins, leases and deletes on tiny tiers, against a plain dict.

Always: budgets hold, what is kept stays on its tier, every object has its content, and files and rows agree.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from megloom.compute.state.errors import StateError, StateFull
from megloom.compute.state.store import StateStore
from megloom.compute.state.tiers import Tier
from tests.compute.state.node_store import Clock, a_store, content, files_under, key

BUDGETS = {Tier.TMPFS: 60, Tier.DISK: 100, Tier.REMOTE: None}
versions = st.integers(0, 7)

LONG_EXAMPLES = 60 if settings.get_current_profile_name() != "fuzz" else settings().max_examples


class StoreMachine(RuleBasedStateMachine):
    """`_model` holds the content, `_pinned` and `_leased` (until when) what stays, `_places` its tiers."""

    @initialize()
    def open(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._folder = Path(tempfile.mkdtemp())
        self._clock = Clock()
        self._stack = AsyncExitStack()
        self._store: StateStore = self._run(self._opened())
        self._model: dict[int, bytes] = {}
        self._pinned: set[int] = set()
        self._leased: dict[int, float] = {}
        self._places: dict[int, set[Tier]] = {}

    async def _opened(self) -> StateStore:
        opening = a_store(self._folder, budgets=BUDGETS, clock=self._clock)
        return await self._stack.enter_async_context(opening)

    def _run(self, work: Any) -> Any:
        return self._loop.run_until_complete(work)

    @rule(version=versions, size=st.integers(0, 70), as_draft=st.booleans())
    def put(self, version: int, size: int, as_draft: bool) -> None:
        data = self._model.get(version, bytes([version]) * size)
        try:
            if as_draft:
                draft = self._run(self._store.draft(len(data) // 2))  # a writer may be wrong about the size
                draft.path.write_bytes(data)
                self._run(self._store.put(key(version), draft))
            else:
                self._run(self._store.put(key(version), data))
        except StateFull:
            is_here = self._run(self._store.local_entry(key(version))) is not None
            assert as_draft or not is_here, "what is here needs no room"
            return
        self._model[version] = data

    @rule(version=versions)
    def get(self, version: int) -> None:
        if version in self._model:
            try:
                assert self._run(content(self._store, key(version))) == self._model[version]
            except StateFull:  # it is at the URL, and what is kept leaves no room for it here
                assert self._tiers(version) == {Tier.REMOTE}
        else:
            try:
                self._run(self._store.get(key(version)))
            except FileNotFoundError:
                return
            raise AssertionError("it was never put, or deleted")

    @rule(version=versions, seconds=st.integers(1, 50), pin=st.booleans())
    def keep(self, version: int, seconds: int, pin: bool) -> None:
        if version not in self._model:
            return
        if pin:
            self._run(self._store.pin(key(version)))
            self._pinned.add(version)
        else:
            self._leased[version] = self._run(self._store.lease(key(version), "holder", seconds))

    @rule(version=versions)
    def unpin(self, version: int) -> None:
        self._run(self._store.unpin(key(version)))
        self._pinned.discard(version)

    @rule(seconds=st.integers(1, 40))
    def wait(self, seconds: int) -> None:
        self._clock.now_s += seconds

    @rule(version=versions)
    def secure(self, version: int) -> None:
        try:
            self._run(self._store.secure(key(version)))
        except (FileNotFoundError, StateFull):
            return

    @rule(version=versions)
    def delete(self, version: int) -> None:
        try:
            was_there = self._run(self._store.delete(key(version)))
        except StateError:
            assert version in self._kept()
            return
        assert was_there == (version in self._model) and version not in self._kept()
        self._model.pop(version, None)

    @precondition(lambda self: bool(self._model))
    @rule()
    def reopen(self) -> None:
        self._run(self._stack.aclose())
        self._store = self._run(self._opened())

    @invariant()
    def all_is_well(self) -> None:
        assert [found.version for found in self._run(self._store.keys())] == sorted(self._model)
        held = self._run(self._store.held_bytes())
        places = {version: self._tiers(version) for version in self._model}
        for tier in (Tier.TMPFS, Tier.DISK):
            assert held[tier] <= (BUDGETS[tier] or 0)
            here = [version for version in self._model if tier in places[version]]
            assert held[tier] == sum(len(self._model[version]) for version in here), "a draft leaks room"
            assert len(files_under(self._folder / tier)) == len(here), "a file without a row"
        for version, tiers in places.items():
            assert tiers, "an object without a copy"
            if version in self._kept():
                assert self._places.get(version, set()) <= tiers, "a kept copy went away"
        self._places = places

    def _kept(self) -> set[int]:
        leased = {version for version, until in self._leased.items() if until > self._clock.now_s}
        return (self._pinned | leased) & set(self._model)

    def _tiers(self, version: int) -> set[Tier]:
        return {copy.tier for copy in self._store._files.index.copies(key(version))}

    def teardown(self) -> None:
        self._run(self._stack.aclose())
        self._loop.close()
        shutil.rmtree(self._folder)


def test_a_store_is_a_dict_whose_values_move() -> None:
    run_state_machine_as_test(
        StoreMachine, settings=settings(max_examples=10, stateful_step_count=25, deadline=None)
    )


@pytest.mark.slow
def test_a_store_is_a_dict_whose_values_move_at_length() -> None:
    run_state_machine_as_test(
        StoreMachine, settings=settings(max_examples=LONG_EXAMPLES, stateful_step_count=40, deadline=None)
    )
