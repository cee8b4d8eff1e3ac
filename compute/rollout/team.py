"""The team handle of one episode attempt: `team.<agent>(...)` registers a call in the graph at once.

The handle only announces calls and prompts (`EpisodeEvents`) and receives answers; which call may run is the
graph's decision. Prompts are rendered here, where the user's code is.
"""

from __future__ import annotations

import asyncio
import difflib
import logging
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any

from megloom.compute.graph.records import EdgeKind
from megloom.compute.rollout.chat import Chat, chat_messages, recorded_messages
from megloom.compute.rollout.harness import Programs
from megloom.compute.rollout.protocol import CallAnswer, CallOpened, CallPrompt, EpisodeEvents
from megloom.compute.workload import Agent, CallFailed

log = logging.getLogger(__name__)
MIN_QUOTED_CHARS = 20  # shorter completions ("b", "12") occur in prompts by chance


class Call:
    """A registered call: `megloom.compute.workload.Invocation`. Only its team resolves it."""

    def __init__(self, invocation_id: str, agent: str, arguments: tuple[Any, ...]) -> None:
        self.invocation_id, self.agent = invocation_id, agent
        self.parents: dict[str, str] = {}  # invocation id → edge kind
        self.pending: set[str] = set()  # parents whose answer has not come yet
        self.arguments = arguments
        self.token_ids: tuple[int, ...] = ()
        self._text: str | None = None
        self._finish_reason = ""
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._done.add_done_callback(_retrieve)

    @property
    def is_done(self) -> bool:
        return self._done.done()

    @property
    def failed(self) -> bool:
        return self._done.done() and self._done.exception() is not None

    @property
    def text(self) -> str:
        if self._text is None:
            raise RuntimeError(f"call {self.invocation_id} ({self.agent}) is pending: await it before .text")
        return self._text

    @property
    def finish_reason(self) -> str:
        return self._finish_reason

    def __await__(self) -> Generator[Any, None, Call]:
        yield from asyncio.shield(self._done).__await__()
        return self

    def __str__(self) -> str:
        return self.text

    def resolve(self, token_ids: tuple[int, ...], text: str, finish_reason: str) -> None:
        self.token_ids, self._text, self._finish_reason = token_ids, text, finish_reason
        self._done.set_result(None)

    def fail(self, failure: str) -> None:
        self._done.set_exception(CallFailed(f"{self.agent} call {self.invocation_id}: {failure}"))


class TeamHandle:
    """`megloom.compute.workload.Team`: has the agents as attributes, and `run` and `endpoint`."""

    def __init__(self, book: CallBook, programs: Programs | None = None) -> None:
        self._book = book
        if programs is not None:
            self.run, self.endpoint = programs.run, programs.endpoint

    def __getattr__(self, agent: str) -> Callable[..., Call]:
        book = self.__dict__["_book"]
        book.check_agent(agent)

        def call(*arguments: Any, after: Sequence[Call] = ()) -> Call:
            return book.open(agent, arguments, after)

        return call


class CallBook:
    """Every call of one episode attempt, in the order of registration."""

    def __init__(
        self,
        *,
        prefix: str,
        episode_id: str,
        agents: Mapping[str, Agent],
        chats: Mapping[str, Chat],
        events: EpisodeEvents,
    ) -> None:
        self._prefix, self._episode_id = prefix, episode_id
        self._agents, self._chats, self._events = agents, chats, events
        self._calls: dict[str, Call] = {}
        self._waiting_for: dict[str, list[Call]] = {}  # parent → calls that need its answer
        self.warnings: list[str] = []

    def check_agent(self, agent: str) -> None:
        """Raises: AttributeError with the nearest name, if the team has no such agent."""
        if agent not in self._agents:
            near = difflib.get_close_matches(agent, self._agents, n=1)
            hint = f", did you mean '{near[0]}'?" if near else ""
            known = ", ".join(sorted(self._agents))
            raise AttributeError(f"the team has no agent '{agent}'{hint} (agents: {known})")

    @property
    def calls(self) -> list[Call]:
        return list(self._calls.values())

    def receive(self, answer: CallAnswer) -> None:
        """Resolves a call and renders those that waited for nothing else.

        Which calls these are is known here, not from the answer: a call may be registered while the answer
        of its parent is on its way.
        """
        call = self._calls[answer.invocation_id]
        if call.is_done:
            return
        if answer.failure is not None:
            self._fail_with_descendants(call, answer.failure)
            return
        chat = self._chats[self._agents[call.agent].policy]
        call.resolve(answer.token_ids, chat.decode(answer.token_ids), answer.finish_reason)
        for child in self._waiting_for.pop(call.invocation_id, []):
            child.pending.discard(call.invocation_id)
            if not child.pending and not child.is_done:
                self._send_prompt(child)

    def _send_prompt(self, call: Call) -> None:
        try:
            prompt_ids, messages = self._render(call)
        except Exception as error:  # the user's prompt function: whoever awaits the call gets the cause
            self._fail_with_descendants(call, f"its prompt raised {type(error).__name__}: {error}")
        else:
            self._events.call_prompt(
                CallPrompt(invocation_id=call.invocation_id, prompt_ids=prompt_ids, messages=messages)
            )

    def _fail_with_descendants(self, call: Call, failure: str) -> None:
        """Fails a call and the calls that wait for it, which can never run."""
        call.fail(failure)
        for child in self._waiting_for.pop(call.invocation_id, []):
            if not child.is_done:
                self._fail_with_descendants(child, f"its parent {call.invocation_id} failed: {failure}")

    def fail_open(self, failure: str) -> None:
        """Fails every pending call, so that whoever awaits one is woken."""
        for call in self._calls.values():
            if not call.is_done:
                call.fail(failure)

    def open(self, agent: str, arguments: tuple[Any, ...], after: Sequence[Call]) -> Call:
        index = len(self._calls)
        call = Call(f"{self._prefix}-i{index:03d}", agent, arguments)
        parents = call.parents
        for parent in _calls_in(arguments):
            parents[parent.invocation_id] = EdgeKind.DATA.value
        for parent in after:
            parents.setdefault(parent.invocation_id, EdgeKind.ORDER.value)
        call.pending = {name for name in parents if not self._calls[name].is_done}
        for name in parents:
            if self._calls[name].failed:
                self._calls[call.invocation_id] = call
                call.fail(f"parent {name} failed")
                return call
        prompt_ids, messages = (None, ()) if call.pending else self._render(call)
        for name in call.pending:
            self._waiting_for.setdefault(name, []).append(call)
        self._calls[call.invocation_id] = call
        self._events.call_opened(
            CallOpened(
                invocation_id=call.invocation_id,
                episode_id=self._episode_id,
                agent=agent,
                index=index,
                parents=tuple(parents.items()),
                prompt_ids=prompt_ids,
                messages=messages,
            )
        )
        return call

    def _render(self, call: Call) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """The ids of a call's prompt, and its messages as they are recorded."""
        agent = self._agents[call.agent]
        prompt = agent.prompt(*(_as_text(argument) for argument in call.arguments))
        messages = chat_messages(prompt)
        self._warn_of_lost_edges(call, messages)
        return self._chats[agent.policy].encode(messages), recorded_messages(messages)

    def _warn_of_lost_edges(self, call: Call, messages: Sequence[Mapping[str, Any]]) -> None:
        text = "\n".join(str(message["content"]) for message in messages)
        known = {parent.invocation_id for parent in _calls_in(call.arguments)} | {call.invocation_id}
        for other in self._calls.values():
            if other.invocation_id in known or not other.is_done or other.failed:
                continue
            if len(other.text) >= MIN_QUOTED_CHARS and other.text in text:
                self.warnings.append(
                    f"{call.invocation_id} quotes {other.invocation_id} without an edge: pass the call itself"
                )


def _calls_in(arguments: Iterable[Any]) -> Iterator[Call]:
    for argument in arguments:
        if isinstance(argument, Call):
            yield argument
        elif isinstance(argument, list | tuple):
            yield from _calls_in(argument)
        elif isinstance(argument, Mapping):
            yield from _calls_in(argument.values())


def _as_text(argument: Any) -> Any:
    if isinstance(argument, Call):
        return argument.text
    if isinstance(argument, list | tuple):
        return type(argument)(_as_text(entry) for entry in argument)
    if isinstance(argument, Mapping):
        return {key: _as_text(value) for key, value in argument.items()}
    return argument


def _retrieve(future: asyncio.Future[None]) -> None:
    """Marks a failure as seen: a call that nobody awaits is recorded by the graph, not by asyncio's log."""
    if not future.cancelled():
        future.exception()
