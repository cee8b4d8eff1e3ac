"""What the gateway is asked, what it answers, and what it and the conductor say to each other. Plain data.

    client ──dialect──► ChatCall ──history──► CallRequest ──► conductor: a vertex, placed on an engine
    client ◄─dialect─── Delta, Reply ◄─────── Sampled ◄────── engine (asked by the gateway itself)

The conductor decides where and when a call runs; the gateway asks that engine, and asks again elsewhere if it
goes away. Everything between the two is one of the messages below, so a gateway may be another process.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from megloom.compute.engines.answers import Sampled as Sampled  # engines lie below; all others find it here
from megloom.compute.engines.answers import flaw as flaw
from megloom.compute.rollout.protocol import Endpoint


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentRoute:
    """How an agent, the `model` of a request, is sampled. Requests may ask for fewer tokens, not more."""

    policy: str
    max_tokens: int
    temperature: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Admission:
    """An episode attempt that may call. `token` is its secret; it ends `lifetime_s` after it arrives.

    With `ignores_truncation`, requests may name top-p, top-k or penalties, which are then not applied.
    `leaf_classes` names the classifier (`leaf_classes.py`) that tells helpers and summaries apart.
    """

    run: str
    episode_id: str
    attempt: int
    token: str
    agents: Mapping[str, AgentRoute]
    lifetime_s: float
    ignores_truncation: bool = False
    leaf_classes: str = "all_main"


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatCall:
    """One request of any dialect. `messages`, `tools` are in OpenAI's chat form; `prompt_ids` or
    `prompt_text`, a text without a template, replaces them.

    `stop` are texts that end the answer; None where the client left the choice to the route. `prompt_field`
    is the request's field that the prompt came from: an error that concerns it names it.
    """

    agent: str
    messages: Sequence[Mapping[str, Any]] = ()
    tools: Sequence[Mapping[str, Any]] = ()
    prompt_ids: tuple[int, ...] | None = None
    prompt_text: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    stop: tuple[str, ...] = ()
    n: int = 1
    stream: bool = False
    prompt_field: str = "messages"


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """A tool call as the client sees it. `arguments` is the JSON text that the model wrote."""

    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Delta:
    """What a stream adds: text, reasoning or one whole tool call, and the tokens that it came from."""

    text: str = ""
    reasoning: str = ""
    tool_call: ToolCall | None = None
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """A finished answer. `finish_reason` is stop | length | tool_calls; ids and logprobs as sampled.

    `num_cached_tokens` of the prompt came from the engine's cache; None if the engine did not say.
    `stop_text` is the text of `ChatCall.stop` that ended it; spans are `[version, start, end)`.
    """

    invocation_id: str
    text: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]
    finish_reason: str
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    num_cached_tokens: int | None = None
    stop_text: str | None = None
    version_spans: tuple[tuple[int, int, int], ...] = ()


# --- gateway → conductor


@dataclass(frozen=True, kw_only=True, slots=True)
class CallRequest:
    """A call for the graph. `parents` are (invocation id, edge kind); `messages` are canonical JSON each."""

    invocation_id: str
    episode_id: str
    attempt: int
    agent: str
    index: int
    parents: tuple[tuple[str, str], ...]
    prompt_ids: tuple[int, ...]
    messages: tuple[str, ...]
    max_tokens: int
    temperature: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Where a call runs now. `rid` is new for every place: a retry is another request.

    Prompt and answer together fit into `context_length` tokens; None where the engine's is not known.
    `vocab_size` is told of an engine that does not report its limits itself, which is real SGLang.
    """

    invocation_id: str
    rid: str
    policy: str
    url: str
    token: str
    engine: str
    seed: int
    stop_token_ids: tuple[int, ...]
    context_length: int | None = None
    vocab_size: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class CallEnd:
    """A call's end. `failure` is set instead of an answer, `unusable` beside one not to be trained on."""

    invocation_id: str
    rid: str | None
    sampled: Sampled
    finish_reason: str
    text: str
    leaf_class: str = "main"
    failure: str | None = None
    unusable: str | None = None


class NotAdmitted(Exception):
    """The episode is unknown, over, or its attempt is not the current one."""


class NoPlace(Exception):
    """No engine can take the call before its episode ends; the message names what it waited for."""


class GatewayLost(Exception):
    """The gateway process is gone, and with it the trees of its episodes."""


class CallDesk(Protocol):
    """The conductor as the gateway sees it."""

    async def place(self, call: CallRequest) -> Placement:
        """Registers the call and waits for an engine. Raises: NotAdmitted, NoPlace.

        A caller that stops waiting tells it by `end` without a rid, also if the place was just given.
        """
        ...

    async def replace(self, invocation_id: str, rid: str, cause: str) -> Placement:
        """Another place for a call whose engine went away. Raises: NotAdmitted, NoPlace."""
        ...

    async def end(self, end: CallEnd) -> None:
        """Tells a call's end, exactly once for each placed call."""
        ...


# --- conductor → gateway


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeCounts:
    """What an episode's closing leaves: calls by outcome; `late` came after it was over."""

    num_calls: int
    num_failed: int
    num_unusable: int
    num_branches: int
    late: int
    problems: tuple[str, ...] = field(default=())


class Gateway(Protocol):
    """The gateway as the conductor sees it."""

    async def load_chats(self, directories: Mapping[str, str]) -> None:
        """Loads each policy's tokenizer and chat template."""
        ...

    async def admit(self, admission: Admission) -> Endpoint:
        """Lets an episode attempt call until it is closed or its lifetime ends."""
        ...

    async def close_episode(self, episode_id: str, attempt: int) -> EpisodeCounts:
        """Ends its calls in flight, forgets its tree; later requests with its token get an error."""
        ...


# --- what an engine must offer the gateway


class StreamingEngine(Protocol):
    """One engine, asked for tokens as they come."""

    def stream(
        self,
        *,
        rid: str,
        prompt_ids: Sequence[int],
        max_tokens: int,
        temperature: float,
        seed: int,
        stop_token_ids: Sequence[int],
        incremental: bool,
    ) -> AsyncIterator[tuple[Sampled, str | None]]:
        """Pieces of the answer as they come, the last with its finish reason (stop | length | abort).

        With `incremental` false there is one piece. Spans count from the first token of this request.
        Raises: EngineError.
        """
        ...
