"""The items and events of OpenAI's responses: each item is added, filled by deltas, and done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megloom.compute.gateway.dialects import sse
from megloom.compute.gateway.dialects.dialect import Head
from megloom.compute.gateway.dialects.errors import CallError, openai_error
from megloom.compute.gateway.protocol import Delta, Reply, ToolCall


class ResponseStream:
    """Events of one response. Text and reasoning are items that stay open while their deltas come."""

    def __init__(self, head: Head, echo: Mapping[str, Any]) -> None:
        self._head, self._echo = head, echo
        self._sequence = 0
        self._output: list[dict[str, Any]] = []
        self._open: str | None = None  # the kind of the open item: text or reasoning
        self._text: list[str] = []

    def open(self) -> bytes:
        """See `EventStream.open`."""
        body = response_body(self._head, self._echo, output=[], reply=None)
        return self._event("response.created", response=body) + self._event(
            "response.in_progress", response=body
        )

    def add(self, choice: int, delta: Delta) -> bytes:
        """See `EventStream.add`."""
        events = b""
        if delta.reasoning:
            events += self._grow("reasoning", delta.reasoning)
        if delta.text:
            events += self._grow("text", delta.text)
        if delta.tool_call is not None:
            events += self._shut() + self._add_call(delta.tool_call)
        return events

    def end(self, choice: int, reply: Reply) -> bytes:
        """Closes the item that is open; an answer without any gets an empty message."""
        if self._output or self._open:
            return self._shut()
        return self._begin("text") + self._shut()

    def close(self, replies: Sequence[Reply]) -> bytes:
        """See `EventStream.close`."""
        (reply,) = replies
        body = response_body(self._head, self._echo, output=self._output, reply=reply)
        return self._event(f"response.{body['status']}", response=body)

    def fail(self, error: CallError) -> bytes:
        """The documented event, with the error also where the official client looks for one to raise."""
        told = openai_error(error)["error"]
        return self._event(
            "error", code=told["code"], message=told["message"], param=told["param"], error=told
        )

    def _event(self, name: str, /, **values: Any) -> bytes:
        number, self._sequence = self._sequence, self._sequence + 1
        return sse.event(name, {"type": name, "sequence_number": number, **values})

    def _place(self) -> dict[str, Any]:
        """Where the open item stands."""
        at = len(self._output)
        kind = "rs" if self._open == "reasoning" else "msg"
        return {"item_id": _item_id(kind, self._head, at), "output_index": at, "content_index": 0}

    def _grow(self, kind: str, text: str) -> bytes:
        events = b"" if self._open == kind else self._shut() + self._begin(kind)
        self._text.append(text)
        if kind == "text":
            return events + self._event(
                "response.output_text.delta", **self._place(), delta=text, logprobs=[]
            )
        return events + self._event("response.reasoning_text.delta", **self._place(), delta=text)

    def _begin(self, kind: str) -> bytes:
        self._open, at = kind, len(self._output)
        if kind == "text":
            item = {**message_item(self._head, at, "", status="in_progress"), "content": []}
            part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": []}
        else:
            item = {**reasoning_item(self._head, at, "", status="in_progress"), "content": []}
            part = {"type": "reasoning_text", "text": ""}
        return self._event("response.output_item.added", output_index=at, item=item) + self._event(
            "response.content_part.added", **self._place(), part=part
        )

    def _shut(self) -> bytes:
        if self._open is None:
            return b""
        text, at, place = "".join(self._text), len(self._output), self._place()
        if self._open == "text":
            item = message_item(self._head, at, text)
            done = self._event("response.output_text.done", **place, text=text, logprobs=[])
        else:
            item = reasoning_item(self._head, at, text)
            done = self._event("response.reasoning_text.done", **place, text=text)
        self._output.append(item)
        self._open = None
        self._text.clear()
        return (
            done
            + self._event("response.content_part.done", **place, part=item["content"][0])
            + self._event("response.output_item.done", output_index=at, item=item)
        )

    def _add_call(self, call: ToolCall) -> bytes:
        item, at = call_item(call), len(self._output)
        self._output.append(item)
        place = {"item_id": item["id"], "output_index": at}
        begun = {**item, "arguments": "", "status": "in_progress"}
        return b"".join(
            (
                self._event("response.output_item.added", output_index=at, item=begun),
                self._event("response.function_call_arguments.delta", **place, delta=call.arguments),
                self._event(
                    "response.function_call_arguments.done", **place, arguments=call.arguments, name=call.name
                ),
                self._event("response.output_item.done", output_index=at, item=item),
            )
        )


def _item_id(kind: str, head: Head, at: int) -> str:
    return f"{kind}_{head.answer_id}-{at}"


def message_item(head: Head, at: int, text: str, *, status: str = "completed") -> dict[str, Any]:
    """An output item with the answer's text."""
    return {
        "id": _item_id("msg", head, at),
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}],
    }


def reasoning_item(head: Head, at: int, text: str, *, status: str = "completed") -> dict[str, Any]:
    """An output item with the answer's reasoning."""
    return {
        "id": _item_id("rs", head, at),
        "type": "reasoning",
        "status": status,
        "summary": [],
        "content": [{"type": "reasoning_text", "text": text}],
    }


def call_item(call: ToolCall) -> dict[str, Any]:
    """An output item with a function call."""
    return {
        "id": f"fc_{call.call_id}",
        "type": "function_call",
        "status": "completed",
        "call_id": call.call_id,
        "name": call.name,
        "arguments": call.arguments,
    }


def response_body(
    head: Head, echo: Mapping[str, Any], *, output: Sequence[dict[str, Any]], reply: Reply | None
) -> dict[str, Any]:
    """A response object; without a reply it is in progress."""
    cut = reply is not None and reply.finish_reason == "length"
    return {
        "id": f"resp_{head.answer_id}",
        "object": "response",
        "created_at": head.created_s,
        "status": "in_progress" if reply is None else "incomplete" if cut else "completed",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": list(output),
        "parallel_tool_calls": True,
        "previous_response_id": None,
        **echo,
        "usage": None if reply is None else _usage(reply),
    }


def _usage(reply: Reply) -> dict[str, Any]:
    num_prompt, num_output = len(reply.prompt_ids), len(reply.token_ids)
    return {
        "input_tokens": num_prompt,
        # The official client's types want numbers here, also where the engine has told none.
        "input_tokens_details": {"cached_tokens": reply.num_cached_tokens or 0, "cache_write_tokens": 0},
        "output_tokens": num_output,
        "output_tokens_details": {"reasoning_tokens": 0},  # texts are split, tokens are not counted apart
        "total_tokens": num_prompt + num_output,
    }
