"""User-defined fields of calls: they come from workers, may be late, and a policy's loss waits for its own.

A field that arrives is recorded at once. Where one does not come in time, its call leaves the group before
any statistic, and the record says that it is not ready and why.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from megloom.compute.conductor.events import Clock, EventLog
from megloom.compute.graph.ids import step_of_id
from megloom.compute.graph.meg import ExecutionGraph
from megloom.compute.graph.records import FieldRecord
from megloom.compute.graph.token_paths import completion_segment_id
from megloom.compute.graph.training_view import Candidate, FieldValue, TrainingView
from megloom.compute.rollout.protocol import FieldReady


class FieldDesk:
    """Gives fields to calls of live episodes (the graph) and of ended ones (the training view)."""

    def __init__(
        self,
        *,
        run: str,
        graph: ExecutionGraph,
        view: TrainingView,
        open_step: Callable[[], int],
        record: Callable[[Any], None],
        timeout_s: float,
        clock: Clock,
        events: EventLog,
    ) -> None:
        self._run, self._graph, self._view, self._open_step = run, graph, view, open_step
        self._record, self._timeout_s, self._clock, self._events = record, timeout_s, clock, events
        self._came = asyncio.Event()  # replaced each time it is set
        self._failed: dict[tuple[str, str], str] = {}  # (call, field) → why it will not come
        self._seen: set[tuple[str, str]] = set()  # of the open step: the first value of a field counts
        self._seen_step = -1

    def field_ready(self, message: FieldReady) -> None:
        """A worker has a field, or says why it will never have it. Late and repeated ones change nothing."""
        step = step_of_id(message.invocation_id)
        if step is None or step != self._open_step():
            self._events.add("field_late", invocation=message.invocation_id, field=message.name)
            return
        if self._seen_step != step:
            self._seen_step, self._seen = step, set()
        key = (message.invocation_id, message.name)
        if key in self._seen:
            return
        self._seen.add(key)
        if message.failure is not None or message.value is None:
            self._failed[key] = message.failure or "no value"
        else:
            value = FieldValue(value=message.value, source=message.source, ready_s=self._clock())
            self._give(*key, value)
            self._record(self._ready_record(message, value, step))
        came, self._came = self._came, asyncio.Event()
        came.set()

    async def take(self, policy: str, group_id: str) -> list[Candidate]:
        """The policy's calls of an ended group, once all that its loss needs is there or is given up."""
        try:
            async with asyncio.timeout(self._timeout_s):
                while any(pair not in self._failed for pair in self._view.waiting(policy, group_id)):
                    await self._came.wait()
        except TimeoutError:
            pass  # the fields that are missing are named below
        missing = self._view.give_up(policy, group_id)
        calls = self._view.take(policy, group_id)
        for call, name in missing:
            key = (call.vertex.invocation_id, name)
            cause = self._failed.pop(key, f"not ready within {self._timeout_s:g} s")
            self._seen.add(key)
            self._record(self._missing_record(call, name, cause))
            self._events.add("field_missing", invocation=key[0], field=name, cause=cause[:200])
        return calls

    def _give(self, invocation_id: str, name: str, value: FieldValue) -> None:
        vertex = self._graph.get(invocation_id)
        if vertex is not None:
            vertex.fields[name] = value
        elif self._view.has_call(invocation_id):
            self._view.set_field(invocation_id, name, value)
        # Else its policy is frozen, or its group was taken: the field is recorded and read by nobody.

    def _ready_record(self, message: FieldReady, value: FieldValue, step: int) -> FieldRecord:
        is_scalar = not isinstance(value.value, list)
        return FieldRecord(
            invocation_id=message.invocation_id,
            run=self._run,
            step=step,
            agent=message.agent,
            name=message.name,
            is_ready=True,
            value=json.dumps(value.value) if is_scalar else None,
            segment=None if is_scalar else completion_segment_id(message.invocation_id),
            values=value.value if isinstance(value.value, list) else None,
            source=value.source,
            ready_s=value.ready_s,
        )

    def _missing_record(self, call: Candidate, name: str, cause: str) -> FieldRecord:
        return FieldRecord(
            invocation_id=call.vertex.invocation_id,
            run=self._run,
            step=self._open_step(),
            agent=call.vertex.agent,
            name=name,
            is_ready=False,
            value=None,
            segment=None,
            values=None,
            source=cause,
            ready_s=None,
        )
