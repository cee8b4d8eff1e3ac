"""A policy's chat template as the gateway uses it: rendering, ids and text, and what follows an answer.

Over `rollout/chat.py`, which owns the tokenizer files. The history asks it to render and encode; calls ask it
to decode what was sampled. No I/O after it was made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megloom.compute.gateway.tool_calls import MARKERS, THINK_OPEN
from megloom.compute.rollout.chat import Chat, ChatError


class ChatTemplate:
    """`variables` go to every rendering, such as `enable_thinking`.

    `opens_reasoning` says that answers begin inside the thinking: the prompt itself ends with its marker.
    """

    def __init__(self, chat: Chat, variables: Mapping[str, Any] | None = None) -> None:
        self._chat, self._variables = chat, dict(variables or {})
        self.stop_ids = tuple(chat.stop_ids)
        special = chat.special_tokens()
        self._hidden = {token_id for token_id, text in special.items() if text not in MARKERS}
        self.opens_reasoning = self._opens_reasoning()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
    ) -> str:
        """The text of plain messages, by default up to where the model's answer begins. Raises: ChatError."""
        return self._chat.render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            variables=self._variables,
        )

    def encode(self, text: str) -> tuple[int, ...]:
        """The ids of a whole prompt."""
        return self._chat.encode_text(text)

    def encode_after_answer(self, text: str) -> tuple[int, ...]:
        """The ids of a text that follows a stop token.

        Encoded alone, some tokenizers would put a space before it, or keep one that the stop token swallows.
        """
        stop = self.stop_ids[0]
        ids = self._chat.encode_text(self.stop_text(stop) + text)
        return ids[1:] if ids[:1] == (stop,) else self._chat.encode_text(text)

    def stop_text(self, token_id: int) -> str:
        """The text of a stop token."""
        return self._chat.decode_all([token_id])

    def without_stop(self, token_ids: Sequence[int]) -> Sequence[int]:
        """Sampled ids without the stop token that ended them, if one did."""
        return token_ids[:-1] if len(token_ids) and token_ids[-1] in self.stop_ids else token_ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """What an answer reads like: special tokens are left out, but for the markers that we parse."""
        return self._chat.decode_all([token_id for token_id in token_ids if token_id not in self._hidden])

    def decode_all(self, token_ids: Sequence[int]) -> str:
        """The text of ids, special tokens included: a prompt's reads like its rendering."""
        return self._chat.decode_all(token_ids)

    def _opens_reasoning(self) -> bool:
        try:
            probe = self.render([{"role": "user", "content": "x"}])
        except ChatError:  # a template that wants more than one user message says so again when it is used
            return False
        return ends_in_reasoning(probe)


def ends_in_reasoning(prompt: str) -> bool:
    """Whether an answer to this prompt begins inside the thinking."""
    return prompt.rstrip().endswith(THINK_OPEN)
