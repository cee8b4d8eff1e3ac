"""What a workload worker and the conductor say to each other. Plain data; every id names run-wide objects.

An episode attempt is one call `run_episode`; while it runs, the worker announces agent calls (`CallOpened`),
then the prompts of those that had to wait (`CallPrompt`), and the conductor sends each answer (`CallAnswer`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from megloom.compute.graph.records import TaskRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentPlan:
    policy: str
    max_tokens: int
    temperature: float


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkloadPlan:
    """A workload as plain data, as its worker loaded it. `policies` are `Policy.model_dump()`s.

    `uses_gateway` says that its episodes run programs that call agents through the gateway.
    """

    name: str
    policies: dict[str, dict[str, Any]]
    agents: dict[str, AgentPlan]
    training: dict[str, Any]
    has_demonstrations: bool
    reward_hash: str
    code_hashes: dict[str, str]
    uses_gateway: bool = False
    leaf_classes: str = "all_main"


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """Where an episode's programs call: `openai_url` ends with `/v1`, `anthropic_url` stands before it."""

    openai_url: str
    anthropic_url: str
    token: str


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeOrder:
    """`attempt` counts starts of the same episode; invocation ids contain it.

    `endpoint` is there where the workload uses the gateway. `timeout_s` is the time that the attempt has,
    None where the workload's own setting holds. A reward function that raises is asked again,
    `reward_retries` times.
    """

    episode_id: str
    task_id: str
    split: str
    attempt: int
    endpoint: Endpoint | None = None
    timeout_s: float | None = None
    reward_retries: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class CallOpened:
    """A registered call. `parents` are (invocation id, edge kind); it has prompt ids if none is pending.

    `messages` are the prompt's chat messages, each as canonical JSON; empty while there are no prompt ids.
    """

    invocation_id: str
    episode_id: str
    agent: str
    index: int
    parents: tuple[tuple[str, str], ...]
    prompt_ids: tuple[int, ...] | None
    messages: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class CallPrompt:
    """The prompt of a call that had to wait; `messages` as in `CallOpened`."""

    invocation_id: str
    prompt_ids: tuple[int, ...]
    messages: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class CallAnswer:
    """A call's end. `failure` is set instead of tokens."""

    invocation_id: str
    token_ids: tuple[int, ...]
    finish_reason: str
    failure: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldReady:
    """A user-defined field of a call, maybe after its episode has ended: a number, or one for each token.

    `value` is None and `failure` set where it will never come.
    """

    invocation_id: str
    agent: str
    name: str
    value: float | list[float] | None
    source: str
    failure: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class CallScore:
    """`reward` is None for a call that nobody could score; `is_inherited` if it is its agent's or team's."""

    invocation_id: str
    text: str
    reward: float | None
    is_inherited: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeOutcome:
    """How an attempt ended. `state` is an EpisodeState value; `boundary` names where it failed.

    `calls` are those that the workflow made itself. A call through the gateway has the reward of its agent in
    `agent_rewards`, else `reward`. A scored outcome with a failure was scored on what was kept.
    """

    episode_id: str
    state: str
    reward: float | None
    calls: tuple[CallScore, ...]
    metrics: dict[str, tuple[float, int]] = field(default_factory=dict)
    failure: str | None = None
    boundary: str | None = None
    warnings: tuple[str, ...] = ()
    agent_rewards: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class DemonstrationRow:
    """A rendered example: the answer's ids follow the prompt's."""

    agent: str
    policy: str
    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]


class WorkerLost(Exception):
    """The worker process is gone; its episodes have no outcome."""


class WorkloadError(Exception):
    """The workload itself is wrong: it cannot be loaded, its dataset is empty, a row lacks a field."""


class EpisodeEvents(Protocol):
    """Where a worker's announcements go; the conductor implements it."""

    def call_opened(self, call: CallOpened) -> None: ...
    def call_prompt(self, prompt: CallPrompt) -> None: ...
    def field_ready(self, field: FieldReady) -> None: ...


class Worker(Protocol):
    """One workload worker, a process in production and an object in simulation."""

    async def describe(self) -> WorkloadPlan: ...
    async def tasks(self, split: str) -> list[TaskRecord]: ...
    async def load_tokenizers(self, directories: dict[str, str]) -> dict[str, list[int]]:
        """Loads each policy's tokenizer; returns the token ids that end an answer, by policy."""
        ...

    async def demonstrations(self, num_per_agent: int, seed: int) -> list[DemonstrationRow]: ...
    async def run_episode(self, order: EpisodeOrder) -> EpisodeOutcome: ...
    def answer(self, answer: CallAnswer) -> None: ...
    def cancel(self, episode_id: str, attempt: int) -> None:
        """Ends an attempt; its `run_episode` then returns what could be scored of it."""
        ...

    async def close(self) -> None: ...
