"""What a user writes: a `Workload` of agents, policies, a workflow and a reward.

A system is one file under `pipelines/systems/` with a module attribute, named to the conductor as
`"package.module:attribute"`. The workflow is ordinary async Python:

    async def solve(task, team):
        plan = team.planner(task.prompt)                             # registered at once, may be pending
        tries = [team.solver(task.prompt, plan) for _ in range(3)]   # passing a call into a call is an edge
        return await team.verifier(task.prompt, *tries)

A finished program joins in with `await team.run(["program"], agent="coder")`, a client library in the
workflow with `team.endpoint("coder")`; both need `uses_gateway=True`.
User code runs in workload workers only; nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from pydantic import Field

from megloom.compute.closed import Closed
from megloom.compute.policy import Algorithm as Algorithm
from megloom.compute.policy import Lora as Lora
from megloom.compute.policy import ModelSource as ModelSource
from megloom.compute.policy import Optimizer as Optimizer
from megloom.compute.policy import PackagedGguf as PackagedGguf
from megloom.compute.policy import Policy as Policy
from megloom.compute.policy import PretrainedModel as PretrainedModel
from megloom.compute.policy import Publishing as Publishing
from megloom.compute.policy import RandomModel as RandomModel
from megloom.compute.policy import Tokenizer as Tokenizer
from megloom.compute.policy import Trainer as Trainer


class Sampling(Closed):
    """How an agent's calls are sampled. Truncated sampling (top-p, top-k) is not offered for training."""

    max_tokens: int = Field(ge=1)
    temperature: float = Field(default=1.0, ge=0.0, le=10.0)


class Training(Closed):
    """How much a step does, and how the warm start is cut; a session may override any of it."""

    tasks_per_step: int = Field(ge=1)
    group_size: int = Field(ge=2)
    micro_batch_groups: int = Field(default=4, ge=1, description="complete groups in one micro-batch")
    paths_per_episode: int | None = Field(
        default=5, ge=1, description="training paths of one episode and policy, None for all"
    )
    warm_examples: int = Field(default=0, ge=0, description="demonstrations per policy in the warm start")
    warm_batch: int = Field(default=64, ge=1, description="demonstrations per optimizer step")
    eval_every: int = Field(default=0, ge=0, description="steps between small evaluations, 0 for none")
    eval_small: int = Field(default=100, ge=1, description="held-out tasks in a small evaluation")
    eval_draws: int = Field(default=2, ge=1, description="seeded draws per task in a full evaluation")
    episode_timeout_s: float = Field(default=120.0, gt=0)
    call_timeout_s: float = Field(default=60.0, gt=0)
    field_timeout_s: float = Field(default=120.0, gt=0, description="wait of an ended group for fields")
    reward_retries: int = Field(default=2, ge=0, description="more tries of a reward function that raises")


class Task(Protocol):
    """A dataset row as the workflow sees it: `row` is the whole row, nested fields included."""

    @property
    def task_id(self) -> str: ...
    @property
    def prompt(self) -> str: ...
    @property
    def ground_truth(self) -> str: ...
    @property
    def row(self) -> Mapping[str, Any]: ...


class Invocation(Protocol):
    """A call that is registered in the graph and may still be pending. Awaiting it gives itself, finished.

    `text` is a view; the tokens are the truth. Awaiting a failed call raises `CallFailed`.
    """

    @property
    def invocation_id(self) -> str: ...
    @property
    def agent(self) -> str: ...
    @property
    def text(self) -> str: ...
    @property
    def finish_reason(self) -> str: ...
    def __await__(self) -> Generator[Any, None, Any]: ...


class CallFailed(Exception):
    """An agent call ended without an answer; the message names the call and the cause."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentEndpoint:
    """Where a client reaches an agent: `model` is its name, `token` the API key.

    `openai_url` ends with `/v1`; `anthropic_url` stands before it, as that client adds the rest.
    """

    openai_url: str
    anthropic_url: str
    token: str
    model: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramLimits:
    """What a program may use. Its directory is looked at a few times a second, its files are capped by the
    kernel; `memory_bytes` (address space) and `cpu_s` hold for each of its processes.

    `output_bytes` of what it prints are kept, and files up to `collected_bytes` in all. After `grace_s` of
    being asked to end it is killed. "closed" gives it no network at all, or does not start it;
    "closed_if_possible" starts it all the same where the kernel offers none.
    """

    disk_bytes: int = 256 << 20
    file_bytes: int = 128 << 20
    memory_bytes: int | None = None
    cpu_s: int | None = None
    output_bytes: int = 64 << 10
    collected_bytes: int = 8 << 20
    collected_files: int = 500
    grace_s: float = 2.0
    network: Literal["open", "closed", "closed_if_possible"] = "open"


@dataclass(frozen=True, kw_only=True, slots=True)
class HarnessResult:
    """How a program ended: `exit_code` as a shell gives it, 128 + signal if it was killed.

    `output` is what it printed, the middle left out if that was much. `workspace` has its files by path,
    `left_out` names those that were not copied and why. `timed_out` and `over_disk` say why it was stopped.
    """

    exit_code: int
    timed_out: bool
    over_disk: bool
    output: str
    workspace: Mapping[str, bytes]
    left_out: tuple[str, ...] = ()


class Team(Protocol):
    """The agents of one episode: `team.<agent>(*prompt_arguments, after=())` registers a call."""

    def __getattr__(self, agent: str) -> Callable[..., Invocation]: ...

    def endpoint(self, agent: str) -> AgentEndpoint:
        """Where a client library calls the agent."""
        ...

    async def run(
        self,
        program: Sequence[str],
        *,
        agent: str,
        files: Mapping[str, str | bytes] | None = None,
        env: Mapping[str, str] | None = None,
        keep: Sequence[str] = ("*",),
        timeout_s: float | None = None,
        limits: ProgramLimits | None = None,
    ) -> HarnessResult:
        """Runs a finished program that calls the agent, in a new directory with `files`."""
        ...


class FinishedEpisode(Protocol):
    """What a reward function sees: the workflow's result and every finished call, in registration order."""

    @property
    def result(self) -> Any: ...
    @property
    def calls(self) -> Sequence[Invocation]: ...
    def of(self, agent: str) -> list[Invocation]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """A reward with more detail than a number.

    `team` is the episode's reward; `agents` and `calls` (by invocation id) override it where given.
    A call mapped to None is unscorable: it leaves before any statistic. `metrics` are (sum, count) pairs.
    """

    team: float
    agents: Mapping[str, float] = field(default_factory=dict)
    calls: Mapping[str, float | None] = field(default_factory=dict)
    metrics: Mapping[str, tuple[float, int]] = field(default_factory=dict)


TEAM_METHODS = ("run", "endpoint")
Message = Mapping[str, str]
Prompt = str | Sequence[Message]
Workflow = Callable[[Any, Any], Awaitable[Any]]
Reward = Callable[[Any, Any], "float | Mapping[str, float] | Score"]
Rows = Callable[[], Iterable[Mapping[str, Any]]]
LateField = Callable[[Any, Any], Awaitable["float | Mapping[str, float | Sequence[float]]"]]


class Agent(Closed):
    """A role in the graph. `prompt` turns a call's arguments into a text or chat messages.

    Pending calls among the arguments reach `prompt` as their text.
    """

    policy: str
    prompt: Callable[..., Any]
    sampling: Sampling


@dataclass(frozen=True, kw_only=True, slots=True)
class Demonstration:
    """One recorded example for an agent: the arguments of its prompt and the answer to imitate."""

    agent: str
    arguments: tuple[str, ...]
    answer: str


Demonstrate = Callable[[int, int], Iterable[Demonstration]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """A trained multi-agent system.

    `tasks` and `eval_tasks` are a parquet or jsonl path, or a function that returns rows (called once, the
    rows are then kept as parquet). `demonstrate(num_per_agent, seed)` makes the warm start's examples.
    `fields` are values of calls that may come later than the episode ends, such as a slow judge's score:
    `await field(task, episode)` gives a number for every call, or a mapping of agents or invocation ids to
    numbers (or lists with a number for each sampled token). A policy whose loss needs a field waits for it.
    `uses_gateway` opens an endpoint for each episode, for programs and client libraries that call agents;
    `leaf_classes` names how its calls are told apart (`megloom.compute.gateway.leaf_classes`): "all_main", or
    "coding_harness" for programs with sub-agents and summaries.

    Raises: ValueError if an agent names an unknown policy, or a name is not a Python identifier or taken.
    """

    name: str
    policies: Mapping[str, Policy]
    agents: Mapping[str, Agent]
    workflow: Workflow
    reward: Reward
    tasks: str | Rows
    eval_tasks: str | Rows
    training: Training
    demonstrate: Demonstrate | None = None
    fields: Mapping[str, LateField] = field(default_factory=dict)
    uses_gateway: bool = False
    leaf_classes: str = "all_main"

    def __post_init__(self) -> None:
        for name in (self.name, *self.policies, *self.agents, *self.fields):
            if not name.isidentifier():
                raise ValueError(f"workload {self.name}: {name!r} must be a Python identifier")
        for name, agent in self.agents.items():
            if name in TEAM_METHODS:
                raise ValueError(f"workload {self.name}: agent {name!r} would hide team.{name}(): rename it")
            if agent.policy not in self.policies:
                known = ", ".join(sorted(self.policies))
                raise ValueError(f"agent {name}: unknown policy {agent.policy!r} (known: {known})")
        for name, policy in self.policies.items():
            for needed in getattr(policy.algorithm, "needs", ()):
                if needed not in self.fields:
                    known = ", ".join(sorted(self.fields)) or "none"
                    raise ValueError(f"policy {name}: its loss needs field {needed!r} (declared: {known})")
