"""Sealed calls as chat conversations: one row per finished agent call, in the form that other tools read.

A row is the messages of the call's prompt followed by its answer, with its policy version, reward and ids, as
plain JSON-like data. Steps are read one by one and episodes are turned into rows one by one, so memory
follows the largest step and the number of tasks, not the length of the run. The CLI writes rows to files
through `export_files.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import pyarrow as pa

from megloom.compute.graph.messages import by_id, read_messages
from megloom.compute.graph.paths import path_pieces
from megloom.compute.graph.records import InvocationRecord, MessageRecord, RewardStatus, SegmentRecord
from megloom.compute.graph.schemas import from_table
from megloom.compute.graph.states import InvocationState
from megloom.compute.store.errors import TokensDropped
from megloom.compute.store.reader import MegReader

Purpose = Literal["train", "eval", "all"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """Which calls of a run. Bounds of steps are included; `min_reward` leaves out calls without a reward."""

    run: str
    purpose: Purpose = "train"
    first_step: int | None = None
    last_step: int | None = None
    agent: str | None = None
    min_reward: float | None = None
    tokens: bool = False


@dataclass(kw_only=True, slots=True)
class Exported:
    """What an export met, filled while its rows are taken. Written by `export_rows` only."""

    num_rows: int = 0
    num_unanswered: int = 0  # calls without an answer, or whose text was lost with their worker
    agents: set[str] = field(default_factory=set)


def chosen_steps(reader: MegReader, selection: Selection) -> list[int]:
    """The sealed steps of the selection.

    Raises: FileNotFoundError for an unknown run; ValueError if none of its steps lies within the bounds.
    """
    sealed = reader.sealed_steps(selection.run)
    if not sealed:
        known = ", ".join(reader.runs()) or "none"
        raise FileNotFoundError(f"run {selection.run}: no sealed step (runs here: {known})")
    first = sealed[0] if selection.first_step is None else selection.first_step
    last = sealed[-1] if selection.last_step is None else selection.last_step
    steps = [step for step in sealed if first <= step <= last]
    if not steps:
        raise ValueError(
            f"run {selection.run}: no sealed step in {first}:{last} (has {sealed[0]} to {sealed[-1]})"
        )
    return steps


def export_rows(
    reader: MegReader, selection: Selection, *, exported: Exported, notice: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    """The rows of the selected calls, by step, episode, attempt and order of registration.

    `notice` is told once of steps without the messages of prompts (of schema 1), and once of steps that had
    theirs dropped: the task's prompt stands for them.
    Raises: as `chosen_steps`; TokensDropped if tokens are wanted of a step that has none any more; ValueError
    at the end if no such agent was met.
    """
    steps, once = chosen_steps(reader, selection), _Once(notice)
    tasks = _Tasks(reader, selection.run, once)
    for step in steps:
        content = _StepContent(reader, selection, step, once)
        for episode, calls in _episodes(reader, selection, step, exported):
            messages, segments = content.messages(episode.episode_id), content.segments(episode.episode_id)
            for call in calls:
                task = tasks.get(call.task_id or episode.task_id)
                row = _row(call, episode, task, tasks.prompt_of(call, messages, task))
                if selection.tokens:
                    row |= _tokens(call, segments)
                exported.num_rows += 1
                yield row
    if selection.agent is not None and selection.agent not in exported.agents:
        known = ", ".join(sorted(exported.agents)) or "none"
        where = f"run {selection.run} steps {steps[0]} to {steps[-1]}"
        raise ValueError(f"{where}: no agent {selection.agent!r} (agents: {known})")


class _Once:
    """Tells each kind of thing once."""

    def __init__(self, notice: Callable[[str], None]) -> None:
        self._notice = notice
        self._told: set[str] = set()

    def tell(self, kind: str, text: str) -> None:
        if kind not in self._told:
            self._told.add(kind)
            self._notice(text)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Episode:
    episode_id: str
    task_id: str
    purpose: str


def _episodes(
    reader: MegReader, selection: Selection, step: int, exported: Exported
) -> Iterator[tuple[_Episode, list[InvocationRecord]]]:
    """The step's episodes that have selected calls, and these."""
    columns = ["episode_id", "task_id", "purpose"]
    rows = reader.read_table(selection.run, "episodes", [step], columns).to_pylist()
    purposes = {row["episode_id"]: _Episode(**row) for row in rows}  # attempts share task and purpose
    by_episode: dict[str, list[InvocationRecord]] = {}
    for call in from_table("invocations", reader.read_table(selection.run, "invocations", [step])):
        exported.agents.add(call.agent)
        if selection.purpose not in ("all", purposes[call.episode_id].purpose):
            continue
        if selection.agent not in (None, call.agent):
            continue
        if not _has_answer(call):
            exported.num_unanswered += 1
        elif _is_good_enough(call.reward, selection.min_reward):
            by_episode.setdefault(call.episode_id, []).append(call)
    for episode_id in sorted(by_episode):
        calls = sorted(by_episode[episode_id], key=lambda call: (call.attempt, call.index))
        yield purposes[episode_id], calls


def _has_answer(call: InvocationRecord) -> bool:
    lost = call.reward_status == RewardStatus.INFRASTRUCTURE and not call.text
    return call.state == InvocationState.DONE and not lost


def _is_good_enough(reward: float | None, min_reward: float | None) -> bool:
    return min_reward is None or (reward is not None and reward >= min_reward)


class _StepContent:
    """The messages and segments of one step, given out by episode: the step stays in Arrow."""

    def __init__(self, reader: MegReader, selection: Selection, step: int, once: _Once) -> None:
        self._messages: pa.Table | None
        try:
            self._messages = reader.read_table(selection.run, "messages", [step])
        except TokensDropped as error:
            if selection.tokens:
                raise
            once.tell("dropped", f"{error}: rows of such steps begin with the task's prompt instead")
            self._messages = None
        self._segments = reader.read_table(selection.run, "segments", [step]) if selection.tokens else None
        self._message_rows, self._segment_rows = map(_rows_by_episode, (self._messages, self._segments))

    def messages(self, episode_id: str) -> dict[str, MessageRecord] | None:
        """The episode's messages by id; None if they were dropped."""
        if self._messages is None:
            return None
        rows = _take(self._messages, self._message_rows.get(episode_id))
        return by_id(from_table("messages", rows))

    def segments(self, episode_id: str) -> dict[str, SegmentRecord]:
        """The episode's segments by id; empty if tokens are not wanted."""
        if self._segments is None:
            return {}
        rows = _take(self._segments, self._segment_rows.get(episode_id))
        return {segment.segment_id: segment for segment in from_table("segments", rows)}


def _rows_by_episode(table: pa.Table | None) -> dict[str, list[int]]:
    rows: dict[str, list[int]] = {}
    if table is None:
        return rows
    for row, episode_id in enumerate(table.column("episode_id").to_pylist()):
        rows.setdefault(episode_id, []).append(row)
    return rows


def _take(table: pa.Table, rows: list[int] | None) -> pa.Table:
    return table.take(pa.array(rows or [], pa.int64()))


class _Tasks:
    """The tasks of the run, which the conductor records in its first step."""

    def __init__(self, reader: MegReader, run: str, once: _Once) -> None:
        self._once = once
        columns = ["task_id", "prompt", "ground_truth", "data_source"]
        table = reader.read_table(run, "tasks", None, columns)
        self._rows = {row.pop("task_id"): row for row in table.to_pylist()}

    def get(self, task_id: str) -> dict[str, Any] | None:
        """The task in the field's form; None if its row was not recorded."""
        row = self._rows.get(task_id)
        if row is None:
            return None
        return {
            "prompt": row["prompt"],
            "reward_model": {"ground_truth": row["ground_truth"]},
            "data_source": row["data_source"],
        }

    def prompt_of(
        self,
        call: InvocationRecord,
        messages: Mapping[str, MessageRecord] | None,
        task: Mapping[str, Any] | None,
    ) -> list[dict[str, Any]]:
        """The messages of the call's prompt, or the task's prompt as one user message."""
        if call.message is not None and messages is not None:
            return read_messages(messages, call.message)
        if call.message is None:
            self._once.tell(
                "unrecorded",
                f"run {call.run} step {call.step}: no messages of prompts were recorded (schema 1 has none):"
                " rows of such steps begin with the task's prompt instead",
            )
        return [] if task is None else [{"role": "user", "content": task["prompt"]}]


def _row(
    call: InvocationRecord,
    episode: _Episode,
    task: Mapping[str, Any] | None,
    prompt: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """`policy_version` is the oldest version that sampled a token of the answer."""
    return {
        "messages": [*prompt, {"role": "assistant", "content": call.text}],
        "agent": call.agent,
        "policy": call.policy,
        "policy_version": call.version_min,
        "reward": call.reward,
        "run": call.run,
        "step": call.step,
        "purpose": episode.purpose,
        "task_id": call.task_id or episode.task_id,
        "group_id": call.group_id,
        "episode_id": call.episode_id,
        "invocation_id": call.invocation_id,
        "finish_reason": call.finish_reason,
        "num_prompt_tokens": call.num_prompt_tokens,
        "num_completion_tokens": call.num_completion_tokens,
        "task": task,
    }


def _tokens(call: InvocationRecord, segments: Mapping[str, SegmentRecord]) -> dict[str, Any]:
    """The call's whole path, prompt and answer.

    `logprobs` is None where a token was not sampled; `loss_mask` is 1 for the call's own answer only, so that
    every sampled token of an episode is marked in one row.
    Raises: BrokenPath (a ValueError) if the segments do not give the path.
    """
    assert call.completion_segment is not None, call.invocation_id
    token_ids: list[int] = []
    logprobs: list[float | None] = []
    loss_mask: list[int] = []
    for piece in path_pieces(segments, call.completion_segment):
        segment, end = piece.segment, piece.num_tokens
        token_ids += segment.token_ids[:end]
        logprobs += [None] * end if segment.logprobs is None else segment.logprobs[:end]
        loss_mask += [int(segment.segment_id == call.completion_segment)] * end
    return {"token_ids": token_ids, "logprobs": logprobs, "loss_mask": loss_mask}
