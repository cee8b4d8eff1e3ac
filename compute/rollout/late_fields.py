"""Computes a workload's late fields: after an episode has ended, while its worker goes on with others.

Each field is one call of the user's function for one episode. A field that raises, or gives no finite number
for a call, is told as such, so that nobody waits for it.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from megloom.compute.rollout.episode import Finished
from megloom.compute.rollout.protocol import FieldReady
from megloom.compute.rollout.team import Call
from megloom.compute.workload import LateField

log = logging.getLogger(__name__)


class LateFields:
    """The fields under way. `start` returns at once; `close` cancels what still runs."""

    def __init__(self, fields: Mapping[str, LateField], send: Callable[[FieldReady], None]) -> None:
        self._fields, self._send = fields, send
        self._running: set[asyncio.Task[None]] = set()

    def start(self, task: Any, finished: Finished) -> None:
        """Begins every declared field of an ended episode."""
        for name, field in self._fields.items():
            running = asyncio.create_task(self._compute(name, field, task, finished), name=f"field:{name}")
            self._running.add(running)
            running.add_done_callback(self._running.discard)

    def close(self) -> None:
        for running in list(self._running):
            running.cancel()

    async def _compute(self, name: str, field: LateField, task: Any, finished: Finished) -> None:
        try:
            values = await field(task, finished)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # the boundary of user code: told for every call that waits for it
            log.warning("field name=%s raised %r", name, error)
            values, failure = {}, f"{name} raised {type(error).__name__}: {error}"
        else:
            failure = f"{name} gave no finite number for this call"
        for call, value in _per_call(values, finished.calls):
            self._send(
                FieldReady(
                    invocation_id=call.invocation_id,
                    agent=call.agent,
                    name=name,
                    value=value,
                    source=f"field {name}",
                    failure=failure if value is None else None,
                )
            )


def _per_call(values: Any, calls: Sequence[Call]) -> Iterator[tuple[Call, float | list[float] | None]]:
    """Each call with its value: its own entry, else its agent's, else the number given for all."""
    for call in calls:
        value = values
        if isinstance(values, Mapping):
            value = values.get(call.invocation_id, values.get(call.agent))
        yield call, _checked(value, num_tokens=len(call.token_ids))


def _checked(value: Any, *, num_tokens: int) -> float | list[float] | None:
    if isinstance(value, int | float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Sequence) and not isinstance(value, str | bytes) and len(value) == num_tokens:
        numbers = [float(entry) for entry in value]
        return numbers if all(map(math.isfinite, numbers)) else None
    return None
