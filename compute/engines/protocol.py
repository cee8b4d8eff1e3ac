"""What a caller asks of an inference engine and what it gets back, whoever serves it.

Owns the request and completion records, the `Engine` protocol and the error tree of the engine boundary.
No torch and no HTTP here: the conductor, the HTTP client and the simulated engines all import this module.
Log-probability convention: `log_softmax(logits / temperature)` of the sampled id over the full vocabulary;
at temperature 0 (greedy) the logits are taken at temperature 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol


class FinishReason(StrEnum):
    """Why a completion ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class PauseMode(StrEnum):
    """What a pause does to running requests.

    ABORT ends them with their partial output. RETRACT queues them again: their cache is dropped and computed
    anew after the pause, their sampled tokens stay. IN_PLACE keeps them and their cache as they are.
    """

    ABORT = "abort"
    RETRACT = "retract"
    IN_PLACE = "in_place"


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateRequest:
    """One completion to sample.

    `rid` is hex of one fixed length for all requests: SGLang aborts by prefix. `temperature` 0 is greedy.
    `training` marks tokens that may enter a loss; truncated sampling (`top_p`, `top_k`) is refused for them.
    """

    rid: str
    token_ids: tuple[int, ...]
    max_tokens: int
    temperature: float
    seed: int
    stop_token_ids: tuple[int, ...]
    training: bool
    top_p: float = 1.0
    top_k: int = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class VersionSpan:
    """Output tokens `[start, end)` were sampled by policy version `version`."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """The sampled tokens of one request; a sampled stop token is included, with its logprob.

    `token_ids` and `logprobs` have one length, which the version spans cover in order without gaps.
    `cached_tokens` counts prompt tokens that were served from a prefix cache; None where that is not told.
    """

    rid: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    version_spans: tuple[VersionSpan, ...]
    cached_tokens: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineInfo:
    """What an engine serves now. `incarnation` differs between two lives of one address."""

    policy: str
    version: int
    vocab_size: int
    context_length: int
    incarnation: str
    paused: bool


class EngineError(Exception):
    """Base of all failures at the engine boundary."""


class EngineUnavailable(EngineError):
    """The engine is dead or going away: connection refused or reset, or a 5xx answer."""


class EngineRefused(EngineError):
    """The engine (or the client on its behalf) refused the request: it would be refused again."""


class EngineProtocolError(EngineError):
    """The engine's answer breaks its contract, e.g. ids and logprobs differ in length."""


class Engine(Protocol):
    """One engine that serves one policy.

    Every method raises `EngineUnavailable` when the engine cannot be reached, except `ready`. `url` and
    `token` are for who asks the engine without this object: the gateway. `context_length` is what `info` last
    told, None before.
    """

    @property
    def url(self) -> str: ...
    @property
    def token(self) -> str: ...
    @property
    def context_length(self) -> int | None: ...

    async def generate(self, request: GenerateRequest) -> Completion:
        """Returns the completion, also an aborted one with its partial output; never retries.

        Waits without bound while the engine is paused; cancelling the call aborts the request.

        Raises: EngineRefused, EngineProtocolError, EngineUnavailable.
        """
        ...

    async def abort(self, rid: str) -> None:
        """Ends a live request, whose `generate` then returns its partial output; unknown rids are ignored."""
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Stops sampling; `ready` turns False and new requests wait until `resume`."""
        ...

    async def resume(self) -> None:
        """Continues after a pause; harmless when not paused."""
        ...

    async def load_version(self, model_path: str, version: int, digest: str | None) -> None:
        """Replaces the weights by those in the folder and labels tokens sampled from now on with `version`.

        Without a pause it first waits for the live requests; requests that come meanwhile wait behind it.
        `digest` is that of `model.safetensors`: BLAKE3, 64 hex digits. After a refusal
        the old weights still serve.

        Raises: EngineRefused, EngineUnavailable.
        """
        ...

    async def info(self) -> EngineInfo:
        """Returns what the engine serves now."""
        ...

    async def ready(self) -> bool:
        """Returns whether a request sent now would be sampled at once; False also if the engine is dead."""
        ...

    async def close(self) -> None:
        """Releases the caller's side; the engine itself goes on."""
        ...
