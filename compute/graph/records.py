"""The records of the execution graph: plain rows, each with an idempotent key.

A record is written once, when its object reaches a final state; the graph in memory holds the moving parts.
Times are seconds on the session's clock (0 at its start). `None` means "not measured", never zero.
`schemas.py` derives each record's Arrow schema from its fields, in their order.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Any


class EdgeKind(StrEnum):
    DATA = "data"
    EXTENDS = "extends"
    ORDER = "order"


class RewardStatus(StrEnum):
    SCORED = "scored"
    INHERITED = "inherited"  # a call with the reward of its agent or team: one outcome with its siblings
    UNSCORABLE = "unscorable"
    INFRASTRUCTURE = "infrastructure"


class SampleKind(StrEnum):
    ROLLOUT = "rollout"
    DEMONSTRATION = "demonstration"


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskRecord:
    """A dataset row. `task_id` is the hash of its content; `row` is the whole row as canonical JSON."""

    task_id: str
    split: str
    position: int
    prompt: str
    ground_truth: str
    data_source: str
    row: str


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupRecord:
    """The episodes of one task in one step that share a baseline."""

    group_id: str
    run: str
    step: int
    task_id: str
    epoch: int
    num_members: int
    num_scored: int
    state: str


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeRecord:
    """One run of the agent graph. `purpose` is "train" or "eval"; `metrics` is JSON {name: [sum, count]}."""

    episode_id: str
    group_id: str
    run: str
    step: int
    task_id: str
    purpose: str
    member: int
    attempt: int
    state: str
    reward: float | None
    reward_status: str
    reward_hash: str
    metrics: str
    failure: str | None
    failure_boundary: str | None
    started_s: float
    finished_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class InvocationRecord:
    """One agent call, a vertex of the graph. `version_min..max` are the policy versions that sampled it.

    `attempt` is its episode's; `num_reentries` counts how often the call itself went back to ready. `engine`
    names the process that answered: its cell and which start of it. `prompt_segment` and
    `completion_segment` are leaves of token paths, `message` is the last message of the prompt.
    """

    invocation_id: str
    episode_id: str
    run: str
    step: int
    task_id: str | None
    group_id: str
    member: int
    attempt: int
    agent: str
    policy: str
    index: int
    num_reentries: int
    state: str
    version_min: int | None
    version_max: int | None
    cell: str | None
    engine: str | None
    registered_s: float
    ready_s: float | None
    started_s: float | None
    finished_s: float | None
    prompt_segment: str | None
    completion_segment: str | None
    message: str | None
    num_prompt_tokens: int
    num_completion_tokens: int
    finish_reason: str | None
    seed: int
    temperature: float
    max_tokens: int
    text: str
    reward: float | None
    reward_status: str
    failure: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class EdgeRecord:
    """`child` follows `parent` (both invocation ids of one episode).

    "data": its prompt holds the parent's answer; "order": it only waited; "extends": its prompt continues the
    parent's tokens.
    """

    episode_id: str
    run: str
    step: int
    parent: str
    child: str
    kind: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentRecord:
    """The tokens that one call added to its episode's token tree (one tree per policy).

    The path of a segment is the first `start` tokens of its parent's path, then its own tokens; without a
    parent `start` is 0. Sampled segments carry one behaviour logprob per token (temperature applied, full
    support) and the policy versions as spans `[version, start, end)` over their own tokens.
    """

    segment_id: str
    episode_id: str
    run: str
    step: int
    policy: str
    parent: str | None
    start: int
    sampled: bool
    token_ids: list[int]
    logprobs: list[float] | None
    version_spans: list[list[int]] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class MessageRecord:
    """A chat message of a prompt, stored once per episode: `content` is the whole message as canonical JSON.

    `parent` is the message before it; the first has none.
    """

    message_id: str
    episode_id: str
    run: str
    step: int
    parent: str | None
    role: str
    content: str


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldRecord:
    """A user-defined field of a call: a critic's values, a late judge's score.

    A scalar is kept by value (`value`, JSON); an array with one number per token in `values`, by reference to
    the tokens of `segment`. Both are None while `is_ready` is false; `source` says who gave it, or why nobody
    did.
    """

    invocation_id: str
    run: str
    step: int
    agent: str
    name: str
    is_ready: bool
    value: str | None
    segment: str | None
    values: list[float] | None
    source: str
    ready_s: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleRecord:
    """A training row: the path of `leaf_segment`, of which `num_trainable` tokens carry loss.

    `invocation_id` is the call at the leaf, `invocation_ids` are all calls whose answers it trains.
    Demonstrations have no invocation and no task; their advantage is 1 and `version_min` is None.
    """

    sample_id: str
    run: str
    step: int
    kind: str
    policy: str
    agent: str
    group_id: str
    episode_id: str
    invocation_id: str | None
    invocation_ids: list[str]
    task_id: str | None
    leaf_segment: str
    num_tokens: int
    num_trainable: int
    reward: float | None
    advantage: float
    version_min: int | None
    version_max: int | None
    micro_batch_id: str | None
    state: str


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatchRecord:
    """One gradient computation. `position` orders the micro-batches of a policy in a step: replay uses it."""

    micro_batch_id: str
    run: str
    step: int
    policy: str
    position: int
    cell: str
    base_version: int
    sample_ids: list[str]
    num_tokens: int
    num_trainable: int
    loss_sum: float
    started_s: float
    finished_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyVersionRecord:
    """A committed set of weights, written `run/policy@version`."""

    run: str
    policy: str
    version: int
    parent_version: int | None
    step: int
    kind: str
    uri: str
    digest: str
    num_samples: int
    num_trainable: int
    num_optimizer_steps: int
    loss: float | None
    grad_norm: float | None
    config_hash: str
    code_hash: str
    reward_hash: str
    created_at: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ProvenanceRecord:
    """What a start of the session ran: the full config and the hashes of the code that its workers loaded.

    `epoch` numbers the starts of the service. `config`, `code_hashes` and `packages` are JSON objects.
    """

    run: str
    epoch: int
    step: int
    workload: str
    config_hash: str
    config: str
    code_hash: str
    code_hashes: str
    reward_hash: str
    packages: str
    started_at: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CellIntervalRecord:
    """What a cell did from `start_s` to `end_s`; `activity` is roll, gradient, update or publish."""

    run: str
    step: int
    cell: str
    role: str
    policy: str
    activity: str
    start_s: float
    end_s: float


RECORDS: dict[str, type] = {
    "tasks": TaskRecord,
    "groups": GroupRecord,
    "episodes": EpisodeRecord,
    "invocations": InvocationRecord,
    "edges": EdgeRecord,
    "segments": SegmentRecord,
    "messages": MessageRecord,
    "fields": FieldRecord,
    "samples": SampleRecord,
    "micro_batches": MicroBatchRecord,
    "policy_versions": PolicyVersionRecord,
    "provenance": ProvenanceRecord,
    "cell_intervals": CellIntervalRecord,
}
KEYS: dict[str, tuple[str, ...]] = {
    "tasks": ("split", "task_id"),
    "groups": ("group_id",),
    "episodes": ("episode_id", "attempt"),
    "invocations": ("invocation_id",),  # an invocation id names its attempt
    "edges": ("parent", "child", "kind"),
    "segments": ("segment_id",),
    "messages": ("episode_id", "message_id"),
    "fields": ("invocation_id", "name"),
    "samples": ("sample_id",),
    "micro_batches": ("micro_batch_id",),
    "policy_versions": ("run", "policy", "version"),
    "provenance": ("run", "epoch"),
    "cell_intervals": ("step", "cell", "start_s", "activity"),
}
TABLE_OF: dict[type, str] = {record: table for table, record in RECORDS.items()}


def record_key(record: Any) -> str:
    """The idempotent key of a record inside its table: writing it twice stores it once."""
    return "|".join(str(getattr(record, name)) for name in KEYS[TABLE_OF[type(record)]])


def clean_text(text: str) -> str:
    """`text` as valid Unicode: a split surrogate pair is joined, a lone surrogate becomes U+FFFD.

    Models and JSON escapes produce lone surrogates; UTF-8, Arrow and SQLite refuse them. Ids stay the truth.
    """
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def clean_record(record: Any) -> Any:
    """`record` with every text field passed through `clean_text`. The store's journal is the one caller."""
    texts = {f.name: getattr(record, f.name) for f in fields(record)}
    return replace(
        record, **{name: clean_text(text) for name, text in texts.items() if isinstance(text, str)}
    )
