"""What an episode attempt has asked one policy so far, and which ids a new request continues. Pure.

A request is text; the model must see the ids that it sampled. So a request's messages are matched against the
known turns, the recorded ids of the deepest one are taken as they are, and only what follows it is encoded:

    request    m0 m1 | its answer | m3 m4            known turn: m0 m1 → answer
    rendered   …before… SENTINEL …after…             the answer replaced by a text that occurs nowhere else
    prompt     recorded prompt + sampled ids + encode(…after…)

Nothing sampled is decoded and encoded again, and the template's own separators are never lost. A template
that rewrites the past (it drops old thinking, the tools have changed) cannot be continued: such a request is
a branch, its whole prompt encoded anew.

Cost: linear in the request. Kept: hashes of messages and ids that no earlier turn has.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

from megloom.compute.gateway.messages import call_ids, message_key, plain_messages
from megloom.compute.gateway.template import ChatTemplate, ends_in_reasoning
from megloom.compute.gateway.tool_calls import THINK_CLOSE, THINK_OPEN
from megloom.compute.graph.seeds import canonical_json
from megloom.compute.rollout.chat import ChatError

Kind = Literal["extends", "new", "branch"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Matched:
    """The prompt of a request. `reason` says why it does not extend; empty for a conversation's beginning.

    `parent_invocation` is the turn that the request goes on from, also where its ids cannot be continued.
    """

    prompt_ids: tuple[int, ...]
    parent_invocation: str | None
    kind: Kind
    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Asked:
    """A request read once: `hashes[i]` stands for its first `i + 1` messages."""

    messages: list[dict[str, Any]]
    tools: Sequence[Mapping[str, Any]]
    hashes: list[bytes]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Turn:
    """A finished call. Its prompt is the first `start` ids of the path of `base` and then `new_ids`.

    `parent` is the turn whose answer its messages go on from. Its answer stands at messages
    `[num_messages, num_after)`, and `raw` is what the model wrote there, as a template is given it.
    """

    invocation_id: str
    parent: _Turn | None
    base: _Turn | None
    start: int
    new_ids: array[int]
    sampled_ids: array[int]
    num_messages: int
    num_after: int
    raw: str
    reply_key: str
    prompt_size: int  # in characters of the rendered text
    prompt_digest: bytes
    tools_digest: bytes

    @property
    def has_thinking(self) -> bool:
        return THINK_CLOSE in self.raw


class History:
    """Turns of one (episode attempt, policy). `match` only looks; `add` keeps a finished turn."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._turns: dict[str, _Turn] = {}
        self._answered: dict[bytes, _Turn] = {}  # messages and answer → the latest turn with both
        self._asked: dict[bytes, _Turn] = {}  # messages → a turn whose prompt begins with them
        self._calls: dict[str, _Turn] = {}  # tool call → the turn that made it

    def __len__(self) -> int:
        return len(self._turns)

    @property
    def num_tokens(self) -> int:
        """Ids kept, over all turns."""
        return sum(len(turn.new_ids) + len(turn.sampled_ids) for turn in self._turns.values())

    def match(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> Matched:
        """The prompt ids of a request, and the turn that it continues.

        Raises: MessageError for messages that are no text; ChatError if the template refuses them.
        """
        asked = self._read(messages, tools)
        turn = self._deepest(asked)
        if turn is None:
            known = any(message["role"] == "assistant" for message in asked.messages)
            reason = "its answers are none of the known ones" if known else ""
            return Matched(
                prompt_ids=self._encoded(asked, None), parent_invocation=None, kind="new", reason=reason
            )
        suffix, reason = self._suffix(asked, turn)
        if suffix is None:
            return Matched(
                prompt_ids=self._encoded(asked, turn),
                parent_invocation=turn.invocation_id,
                kind="branch",
                reason=reason,
            )
        return Matched(
            prompt_ids=(*_path(turn), *suffix), parent_invocation=turn.invocation_id, kind="extends"
        )

    def add(
        self,
        *,
        invocation_id: str,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        prompt_ids: Sequence[int],
        sampled_ids: Sequence[int],
        reply: Sequence[Mapping[str, Any]],
    ) -> None:
        """Keeps a finished turn: what was asked, the ids, and the reply as the client got it.

        How it finished shows in `sampled_ids`: the stop token that ended an answer is its last id.

        Raises: ValueError for an invocation that is known, or without messages or reply.
        """
        if invocation_id in self._turns:
            raise ValueError(f"turn {invocation_id} is in the history already")
        if not messages or not reply:
            raise ValueError(f"turn {invocation_id}: expected messages and a reply, one is empty")
        answer = plain_messages(reply)
        asked = self._read(messages, tools)
        parent = self._deepest(asked)
        prompt = self._template.render(self._restored(asked, parent), tools)
        start, base = 0, None
        for turn in (parent, self._sharing(asked)):
            if turn is not None and (shared := _common(_path(turn), prompt_ids)) > start:
                start, base = shared, turn
        known = [name for message in answer for name in call_ids(message)]
        keys = [message_key(message, known) for message in answer]
        added = _Turn(
            invocation_id=invocation_id,
            parent=parent,
            base=base,
            start=start,
            new_ids=array("i", prompt_ids[start:]),
            sampled_ids=array("i", sampled_ids),
            num_messages=len(messages),
            num_after=len(messages) + len(answer),
            raw=self._raw(prompt, sampled_ids),
            reply_key=keys[0] if len(keys) == 1 else "",
            prompt_size=len(prompt),
            prompt_digest=_digest(prompt),
            tools_digest=_digest(canonical_json(list(tools))),
        )
        self._turns[invocation_id] = added
        self._calls.update(dict.fromkeys(known, added))
        for running in asked.hashes:
            self._asked.setdefault(running, added)
        running = asked.hashes[-1]
        for key in keys:
            running = _running(running, key)
        self._answered[running] = added

    def _read(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> _Asked:
        plain = plain_messages(messages)
        hashes, running = [], b""
        for message in plain:
            running = _running(running, message_key(message, self._calls))
            hashes.append(running)
        return _Asked(messages=plain, tools=tools, hashes=hashes)

    def _deepest(self, asked: _Asked) -> _Turn | None:
        """The turn with the longest history that the request holds, its answer included."""
        return next((self._answered[h] for h in reversed(asked.hashes) if h in self._answered), None)

    def _sharing(self, asked: _Asked) -> _Turn | None:
        """The turn whose ids the prompt most likely begins with: only for storage, ids are compared."""
        return next((self._asked[h] for h in reversed(asked.hashes) if h in self._asked), None)

    def _raw(self, prompt: str, sampled_ids: Sequence[int]) -> str:
        """What the model wrote, as content: with the thinking's opening where the prompt had written it."""
        text = self._template.decode(self._template.without_stop(sampled_ids))
        return f"{THINK_OPEN}\n{text}" if ends_in_reasoning(prompt) and THINK_CLOSE in text else text

    def _restored(self, asked: _Asked, turn: _Turn | None, answer: str | None = None) -> list[dict[str, Any]]:
        """The request with the model's own text for each known answer, `answer` for that of `turn` if given.

        Answers on the path of `turn` are known by place, others by the ids of their tool calls.
        """
        messages = list(asked.messages)
        for position, message in enumerate(messages):
            caller = self._calls.get(next(iter(call_ids(message)), ""))
            if caller is not None and message_key(message, self._calls) == caller.reply_key:
                messages[position] = _assistant(caller.raw)
        at = turn
        while at is not None:  # from the last to the first, so that places stay right
            text = answer if at is turn and answer is not None else at.raw
            messages[at.num_messages : at.num_after] = [_assistant(text)]
            at = at.parent
        return messages

    def _encoded(self, asked: _Asked, turn: _Turn | None) -> tuple[int, ...]:
        return self._template.encode(self._template.render(self._restored(asked, turn), asked.tools))

    def _suffix(self, asked: _Asked, turn: _Turn) -> tuple[tuple[int, ...] | None, str]:
        """The ids after the answer of `turn`; or None and why the template does not just go on from it."""
        # Its own hash cannot stand in a request.
        text, thinking = f"{asked.hashes[-1].hex()}-answer", f"{asked.hashes[-1].hex()}-thinking"
        given = f"{THINK_OPEN}\n{thinking}\n{THINK_CLOSE}\n\n{text}" if turn.has_thinking else text
        try:
            rendered = self._template.render(self._restored(asked, turn, given), asked.tools)
        except ChatError as error:
            return None, f"the template refuses what follows {turn.invocation_id}: {error}"
        problem = _rewriting(turn, rendered, text, thinking, asked)
        if problem:
            return None, f"{problem} {turn.invocation_id}"
        after = rendered.partition(text)[2]
        ending = self._template.without_stop(turn.sampled_ids)
        if len(ending) < len(turn.sampled_ids):
            # Space that a template puts before its end of turn is not what the model wrote before it.
            stop = self._template.stop_text(turn.sampled_ids[-1])
            if after.lstrip().startswith(stop):
                after = after.lstrip()[len(stop) :]
        return self._template.encode_after_answer(after), ""


def _rewriting(turn: _Turn, rendered: str, text: str, thinking: str, asked: _Asked) -> str:
    """What a template does to the past of `turn`'s answer; empty if the rendering only goes on from it."""
    if rendered.count(text) != 1:
        return "the template does not show once and whole the answer of"
    before = rendered.partition(text)[0]
    if turn.has_thinking and thinking not in before:
        return "the template drops the thinking of"
    if _digest(before[: turn.prompt_size]) != turn.prompt_digest:
        if turn.tools_digest != _digest(canonical_json(list(asked.tools))):
            return "the tools have changed since"
        return "the template changes what stands before the answer of"
    between = before[turn.prompt_size :]
    if turn.has_thinking:
        between = between.replace(thinking, "").replace(THINK_OPEN, "", 1).replace(THINK_CLOSE, "", 1)
    return "the template adds text before the answer of" if between.strip() else ""


def _assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def _running(before: bytes, key: str) -> bytes:
    return hashlib.blake2b(before + key.encode(), digest_size=16).digest()


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _path(turn: _Turn) -> tuple[int, ...]:
    """The prompt and sampled ids of a turn, put together from those that it shares."""
    pieces: list[Sequence[int]] = []
    at: _Turn | None = turn
    end = None  # how much of the path of `at` is asked for
    while at is not None:
        own = at.new_ids + at.sampled_ids
        pieces.append(own if end is None else own[: max(end - at.start, 0)])
        end = at.start if end is None else min(end, at.start)
        at = at.base
    return tuple(chain.from_iterable(reversed(pieces)))


def _common(known: Sequence[int], ids: Sequence[int]) -> int:
    """How many leading ids are equal."""
    if tuple(ids[: len(known)]) == tuple(known):
        return len(known)
    pairs = enumerate(zip(known, ids, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(known), len(ids)))
