"""Chat messages of an episode's prompts, each kept once: a call holds the id of its prompt's last message.

Messages form chains from the last one back to the first. A worker sends each as canonical JSON
(`rollout/team.py`), the conductor makes records of them when an episode has ended, exports read them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megloom.compute.graph.records import MessageRecord
from megloom.compute.graph.seeds import content_hash


@dataclass(frozen=True, kw_only=True, slots=True)
class Messages:
    """The records of an episode attempt, and the last message of each call that has any."""

    records: list[MessageRecord]
    last: dict[str, str]


def message_records(
    messages: Mapping[str, Sequence[str]], *, episode_id: str, run: str, step: int
) -> Messages:
    """A message's id is the hash of the id before it and of its own JSON: equal beginnings share records.

    `messages` are the prompts by invocation id, each message as canonical JSON with a role. Two attempts of
    an episode give the same records for the same messages.
    """
    records: dict[str, MessageRecord] = {}
    known: dict[tuple[str | None, str], str] = {}  # a growing prompt is hashed once, not at every turn
    last: dict[str, str] = {}
    for invocation_id, prompt in messages.items():
        parent: str | None = None
        for content in prompt:
            message_id = known.get((parent, content))
            if message_id is None:
                message_id = known[parent, content] = content_hash([parent, content])
                records[message_id] = MessageRecord(
                    message_id=message_id,
                    episode_id=episode_id,
                    run=run,
                    step=step,
                    parent=parent,
                    role=str(json.loads(content).get("role", "")),
                    content=content,
                )
            parent = message_id
        if parent is not None:
            last[invocation_id] = parent
    return Messages(records=list(records.values()), last=last)


def by_id(records: Iterable[MessageRecord]) -> dict[str, MessageRecord]:
    """An index for `read_messages`. Ids are hashes of content: two episodes with equal ones share a chain."""
    return {record.message_id: record for record in records}


def read_messages(
    records: Iterable[MessageRecord] | Mapping[str, MessageRecord], tip: str
) -> list[dict[str, Any]]:
    """The prompt that ends with message `tip`, first message first. Make the index once for many prompts.

    Raises: ValueError naming the message that is missing or that follows itself.
    """
    known = records if isinstance(records, Mapping) else by_id(records)
    messages: list[dict[str, Any]] = []
    seen: set[str] = set()
    at: str | None = tip
    while at is not None:
        if at in seen:
            raise ValueError(f"prompt {tip}: message {at} follows itself")
        record = known.get(at)
        if record is None:
            raise ValueError(f"prompt {tip}: message {at} is not among the {len(known)} messages read")
        seen.add(at)
        messages.append(json.loads(record.content))
        at = record.parent
    return messages[::-1]
