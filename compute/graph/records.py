"""The records of the execution graph, each with the Arrow schema that it is stored in.

A record is written once, when its object reaches a final state; the graph in memory holds the moving parts.
Times are seconds on the session's clock (0 at its start). `None` means "not measured", never zero.
Field order of a dataclass equals that of its schema; `tests/compute/graph/test_records.py` round-trips each.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from enum import StrEnum
from operator import attrgetter
from typing import Any

import pyarrow as pa

SCHEMA_VERSION = 1


class EdgeKind(StrEnum):
    DATA = "data"
    EXTENDS = "extends"
    ORDER = "order"


class RewardStatus(StrEnum):
    SCORED = "scored"
    UNSCORABLE = "unscorable"
    INFRASTRUCTURE = "infrastructure"


class SampleKind(StrEnum):
    ROLLOUT = "rollout"
    DEMONSTRATION = "demonstration"


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskRecord:
    """A dataset row. `task_id` is the hash of its canonical content; `row` is the whole row as JSON text."""

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
    """One agent call, a vertex of the graph. `version_min..max` are the policy versions that sampled it."""

    invocation_id: str
    episode_id: str
    run: str
    step: int
    agent: str
    policy: str
    index: int
    attempt: int
    state: str
    version_min: int | None
    version_max: int | None
    cell: str | None
    registered_s: float
    ready_s: float | None
    started_s: float | None
    finished_s: float | None
    prompt_segment: str | None
    completion_segment: str | None
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
    """`child` waited for `parent` (both invocation ids of one episode)."""

    episode_id: str
    run: str
    step: int
    parent: str
    child: str
    kind: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentRecord:
    """New tokens of one token-tree node; `parent` is the node that they extend.

    Sampled segments carry one behaviour logprob per token (temperature applied, full support) and the
    policy versions as spans `[version, start, end)` over their own tokens.
    """

    segment_id: str
    run: str
    step: int
    policy: str
    parent: str | None
    sampled: bool
    token_ids: list[int]
    logprobs: list[float] | None
    version_spans: list[list[int]] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleRecord:
    """A training row: the token path `segments`, of which `num_trainable` tokens carry loss.

    Demonstrations have no invocation; their advantage is 1 and `version_min` is None.
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
    segments: list[str]
    num_tokens: int
    num_trainable: int
    advantage: float
    version_min: int | None
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
    created_at: str


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


_STR, _INT, _REAL = pa.string(), pa.int64(), pa.float64()
_COLUMNS: dict[str, pa.DataType] = {
    # Columns that are not plain text, integer or float64; every other type is derived from the annotation.
    "token_ids": pa.list_(pa.int32()),
    "logprobs": pa.list_(pa.float32()),
    "version_spans": pa.list_(pa.list_(_INT)),
    "segments": pa.list_(_STR),
    "sample_ids": pa.list_(_STR),
}
_SCALARS: dict[str, pa.DataType] = {"str": _STR, "int": _INT, "float": _REAL, "bool": pa.bool_()}


def _schema(record: type) -> pa.Schema:
    columns = []
    for field in fields(record):
        annotation = str(field.type)
        scalar = annotation.removesuffix(" | None")
        kind = _COLUMNS.get(field.name) or _SCALARS[scalar]
        columns.append(pa.field(field.name, kind, nullable=annotation.endswith("| None")))
    return pa.schema(columns, metadata={"schema_version": str(SCHEMA_VERSION), "record": record.__name__})


RECORDS: dict[str, type] = {
    "tasks": TaskRecord,
    "groups": GroupRecord,
    "episodes": EpisodeRecord,
    "invocations": InvocationRecord,
    "edges": EdgeRecord,
    "segments": SegmentRecord,
    "samples": SampleRecord,
    "micro_batches": MicroBatchRecord,
    "policy_versions": PolicyVersionRecord,
    "cell_intervals": CellIntervalRecord,
}
SCHEMAS: dict[str, pa.Schema] = {table: _schema(record) for table, record in RECORDS.items()}
KEYS: dict[str, tuple[str, ...]] = {
    "tasks": ("split", "task_id"),
    "groups": ("group_id",),
    "episodes": ("episode_id", "attempt"),
    "invocations": ("invocation_id",),
    "edges": ("parent", "child"),
    "segments": ("segment_id",),
    "samples": ("sample_id",),
    "micro_batches": ("micro_batch_id",),
    "policy_versions": ("run", "policy", "version"),
    "cell_intervals": ("cell", "start_s", "activity"),
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


def to_table(table: str, records: list[Any]) -> pa.Table:
    """The records of one table as Arrow."""
    schema = SCHEMAS[table]
    rows = map(attrgetter(*schema.names), records)  # one C call per record: sealing runs at every step
    values = list(zip(*rows, strict=True)) or [()] * len(schema)
    columns = [pa.array(column, type=f.type) for column, f in zip(values, schema, strict=True)]
    return pa.Table.from_arrays(columns, schema=schema)


def from_table(table: str, arrow: pa.Table) -> list[Any]:
    """The inverse of `to_table`.

    Raises: ValueError if the stored schema version is newer than this reader.
    """
    version = int((arrow.schema.metadata or {}).get(b"schema_version", b"1"))
    if version > SCHEMA_VERSION:
        raise ValueError(
            f"table {table}: schema_version {version} is newer than this reader ({SCHEMA_VERSION})"
        )
    record = RECORDS[table]
    return [record(**row) for row in arrow.select(SCHEMAS[table].names).to_pylist()]
