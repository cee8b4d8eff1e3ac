"""What an id tells of itself: the step that its record is sealed in. Pure.

Groups are `g000012-0003`, or `e000012-<task>` in an evaluation; episodes, calls, segments and samples begin
with their group's id. Demonstrations are `<agent>-d000000-000012`, micro-batches `<policy>-s000012-b0003`.
"""

from __future__ import annotations

import re

_LEADING = re.compile(r"[ge](\d{6,})-")
_NAMED = re.compile(r".+-(?:d(\d{6,})-\d+|s(\d{6,})-b\d+)")


def step_of_id(record_id: str) -> int | None:
    """The step that the id names, None for an id of another form (users and tests may make their own)."""
    if match := _LEADING.match(record_id):
        return int(match[1])
    if match := _NAMED.fullmatch(record_id):
        return int(match[1] or match[2])
    return None


def is_gateway_call(invocation_id: str) -> bool:
    """Whether the call came through the gateway (`…-a0-g003`), not from the workflow (`…-a0-i003`)."""
    return re.search(r"-a\d+-g\d+$", invocation_id) is not None


def episode_of_id(record_id: str) -> str | None:
    """The episode of a call's or sample's id `<group>-m001-a0-i003[-s]`; None for an id of another form."""
    match = re.match(r"([ge]\d{6,}-.+?-m\d{3,})(?:-a\d+(?:-.*)?)?$", record_id)
    return match[1] if match else None
