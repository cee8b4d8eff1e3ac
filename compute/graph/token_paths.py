"""The segments of one episode attempt: where each call's prompt and answer lie in its policy's token tree."""

from __future__ import annotations

from megloom.compute.graph.meg import Vertex
from megloom.compute.graph.records import SegmentRecord
from megloom.compute.graph.states import InvocationState
from megloom.compute.graph.token_tree import TokenTree


def completion_segment_id(invocation_id: str) -> str:
    return f"{invocation_id}-c"


class TokenPaths:
    """Calls are added in the order of their registration, so that what a prompt continues is there before it.

    `extends` are (parent, child) invocation ids: the child continues the prompt and answer of the parent.
    """

    def __init__(self, *, run: str, step: int) -> None:
        self._run, self._step = run, step
        self._trees: dict[str, TokenTree] = {}
        self._sampled: dict[str, str] = {}  # completion segment → its invocation
        self._prompts: dict[str, str] = {}
        self.segments: list[SegmentRecord] = []
        self.extends: list[tuple[str, str]] = []

    def prompt_segment(self, invocation_id: str) -> str | None:
        """The leaf of the call's prompt; None for a call that never got one."""
        return self._prompts.get(invocation_id)

    def add(self, vertex: Vertex) -> None:
        """Keeps the tokens of a call that no earlier call of its policy had."""
        if vertex.prompt_ids is None:
            return
        tree = self._trees.setdefault(vertex.policy, TokenTree())
        prefer = {completion_segment_id(parent) for parent, _ in vertex.parents}
        found = tree.attach(vertex.prompt_ids, prefer)
        if found.is_known and found.parent is not None:
            leaf = found.parent
        else:
            leaf = f"{vertex.invocation_id}-p"
            tree.add(leaf, found)
            self._segment(vertex, leaf, found.parent, found.start, found.new_ids)
        self._prompts[vertex.invocation_id] = leaf
        continued = next((s for s in tree.on_path(found.parent, found.start) if s in self._sampled), None)
        if continued is not None:
            self.extends.append((self._sampled[continued], vertex.invocation_id))
        if vertex.state is InvocationState.DONE:
            answer = completion_segment_id(vertex.invocation_id)
            start = tree.extend(answer, leaf, vertex.token_ids)
            self._sampled[answer] = vertex.invocation_id
            self._segment(vertex, answer, leaf, start, vertex.token_ids, sampled=True)

    def _segment(
        self,
        vertex: Vertex,
        segment_id: str,
        parent: str | None,
        start: int,
        token_ids: tuple[int, ...],
        *,
        sampled: bool = False,
    ) -> None:
        self.segments.append(
            SegmentRecord(
                segment_id=segment_id,
                episode_id=vertex.episode_id,
                run=self._run,
                step=self._step,
                policy=vertex.policy,
                parent=parent,
                start=start,
                sampled=sampled,
                token_ids=list(token_ids),
                logprobs=list(vertex.logprobs) if sampled and vertex.logprobs else None,
                version_spans=[list(span) for span in vertex.version_spans] if sampled else None,
            )
        )
