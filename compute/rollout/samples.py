"""Training paths from the token tree of one episode and one policy: bounded in number, each token once.

A path runs from the tree's root to a leaf: a call whose answer no other call continues. All that the policy
did not sample is masked, and what an earlier path has trained is masked in later ones, so that every sampled
token has exactly one owner. Pure: a seed decides the draw. Called where a complete group becomes samples.
Source: QwenGyre, bounded and de-duplicated sampling; deviation: tokens of another agent, temperature or
reward than the leaf's are context on its path, and get a path of their own.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megloom.compute.graph.meg import Vertex
from megloom.compute.graph.states import InvocationState
from megloom.compute.graph.token_tree import TokenTree
from megloom.compute.graph.training_view import Candidate

LEAF_CLASSES = ("main", "main-summary", "sub-agent", "sub-agent-summary")  # the best first
MAX_PATHS = 5  # trains like all paths, for three quarters of the work


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawnPath:
    """One training path; arrays have shape [T] (T tokens from the root to the end of `leaf_invocation`).

    `loss_mask` is 1 on the `num_trainable` tokens that this path owns; `logprobs` holds their behaviour
    logprobs and 0 elsewhere; the versions are theirs. `owned` are the calls that these tokens came from, in
    the order of the path, and `owned_tokens` how many of them each gave.
    """

    leaf_invocation: str
    leaf_class: str
    agent: str
    token_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.uint8]
    logprobs: npt.NDArray[np.float32]
    temperature: float
    reward: float
    version_min: int
    version_max: int
    owned: tuple[str, ...]
    owned_tokens: tuple[int, ...]
    num_trainable: int


def draw_paths(
    calls: Sequence[Candidate],
    *,
    seed: int,
    max_paths: int | None = MAX_PATHS,
    class_order: Sequence[str] = LEAF_CLASSES,
) -> list[DrawnPath]:
    """At most `max_paths` paths of one episode's calls of one policy; None keeps every trainable token.

    Repeats: the best class of `class_order` that has an unmasked token; one of its leaves, with probability
    in proportion to its unmasked tokens; its path, which is then masked. `calls` come in the order of their
    registration; one that is unusable or has no reward is context. Frozen policies are the caller's to leave
    out.
    Raises: ValueError naming a call whose logprobs or versions do not fit its tokens, or of an unknown class.
    """
    tree = _Tree(class_order)
    for call in calls:
        tree.add(call)
    dice = random.Random(seed)
    leaves = tree.leaves()
    drawn: list[DrawnPath] = []
    while max_paths is None or len(drawn) < max_paths:
        counts = [(leaf, tree.num_unmasked(leaf)) for leaf in leaves]
        counts = [(leaf, count) for leaf, count in counts if count]
        if not counts:
            break
        best = min(leaf.rank for leaf, _ in counts)
        drawn.append(tree.emit(_draw([entry for entry in counts if entry[0].rank == best], dice)))
    return drawn


@dataclass(frozen=True, kw_only=True, slots=True)
class _Answer:
    """A trainable answer in the tree: `start` is where it begins on its path, `rank` that of its class."""

    call: Candidate
    segment: str
    start: int
    rank: int

    @property
    def vertex(self) -> Vertex:
        return self.call.vertex

    def trains_with(self, other: _Answer) -> bool:
        """Tokens of one path share an advantage and a convention of logprobs."""
        own, its = self.vertex, other.vertex
        return (own.agent, own.temperature, self.call.reward) == (
            its.agent,
            its.temperature,
            other.call.reward,
        )


class _Tree:
    """The token tree, and how much of each answer was emitted: always its first tokens."""

    def __init__(self, class_order: Sequence[str]) -> None:
        self._ranks = {name: rank for rank, name in enumerate(class_order)}
        self._tokens = TokenTree()
        self._places: dict[str, tuple[str | None, int, int]] = {}  # segment → parent, start, end
        self._answers: dict[str, _Answer] = {}  # by segment
        self._emitted: dict[str, int] = {}  # tokens of the answer that a path owns, by segment

    def add(self, call: Candidate) -> None:
        """Keeps the prompt and answer of a trainable call; other calls are context in later prompts."""
        vertex = call.vertex
        if vertex.unusable is not None or call.reward is None or vertex.state is not InvocationState.DONE:
            return
        rank = self._checked_rank(vertex)
        if not vertex.token_ids or vertex.prompt_ids is None:
            return
        found = self._tokens.attach(vertex.prompt_ids, {_answer(parent) for parent, _ in vertex.parents})
        leaf = found.parent
        if leaf is None or not found.is_known:
            leaf = f"{vertex.invocation_id}-p"
            self._tokens.add(leaf, found)
            self._places[leaf] = (found.parent, found.start, len(vertex.prompt_ids))
        segment = _answer(vertex.invocation_id)
        start = self._tokens.extend(segment, leaf, vertex.token_ids)
        self._places[segment] = (leaf, start, start + len(vertex.token_ids))
        self._answers[segment] = _Answer(call=call, segment=segment, start=start, rank=rank)
        self._emitted[segment] = 0

    def leaves(self) -> list[_Answer]:
        """The answers that no path through another answer contains whole."""
        continued = {
            answer.segment
            for leaf in self._answers.values()
            for answer, covered in self._on_path(leaf)
            if answer is not leaf and covered == len(answer.vertex.token_ids)
        }
        return [answer for answer in self._answers.values() if answer.segment not in continued]

    def num_unmasked(self, leaf: _Answer) -> int:
        return sum(max(0, covered - self._emitted[a.segment]) for a, covered in self._on_path(leaf))

    def emit(self, leaf: _Answer) -> DrawnPath:
        """The leaf's path with what no earlier path owns; it is then owned by this one."""
        vertex = leaf.vertex
        assert vertex.prompt_ids is not None and leaf.call.reward is not None
        token_ids = np.array(vertex.prompt_ids + vertex.token_ids, dtype=np.int32)
        mask = np.zeros(len(token_ids), dtype=np.uint8)
        logprobs = np.zeros(len(token_ids), dtype=np.float32)
        owned: list[str] = []
        owned_tokens: list[int] = []
        versions: list[int] = []
        for answer, covered in reversed(list(self._on_path(leaf))):
            first = self._emitted[answer.segment]
            if covered <= first:
                continue
            place = slice(answer.start + first, answer.start + covered)
            mask[place] = 1
            logprobs[place] = answer.vertex.logprobs[first:covered]
            versions += [
                version
                for version, start, end in answer.vertex.version_spans
                if start < covered and end > first
            ]
            owned.append(answer.vertex.invocation_id)
            owned_tokens.append(covered - first)
            self._emitted[answer.segment] = covered
        return DrawnPath(
            leaf_invocation=vertex.invocation_id,
            leaf_class=vertex.leaf_class,
            agent=vertex.agent,
            token_ids=token_ids,
            loss_mask=mask,
            logprobs=logprobs,
            temperature=vertex.temperature,
            reward=leaf.call.reward,
            version_min=min(versions),
            version_max=max(versions),
            owned=tuple(owned),
            owned_tokens=tuple(owned_tokens),
            num_trainable=int(mask.sum()),
        )

    def _on_path(self, leaf: _Answer) -> Iterator[tuple[_Answer, int]]:
        """The answers that train with the leaf on its path, the leaf first, and how many of their tokens."""
        segment, limit = leaf.segment, leaf.start + len(leaf.vertex.token_ids)
        while True:
            parent, start, end = self._places[segment]
            answer = self._answers.get(segment)
            if answer is not None and limit > start and answer.trains_with(leaf):
                yield answer, min(limit, end) - start
            if parent is None:
                return
            segment, limit = parent, min(limit, start)

    def _checked_rank(self, vertex: Vertex) -> int:
        num_spanned = sum(end - start for _, start, end in vertex.version_spans)
        if not len(vertex.token_ids) == len(vertex.logprobs) == num_spanned:
            raise ValueError(
                f"call {vertex.invocation_id}: {len(vertex.token_ids)} tokens with {len(vertex.logprobs)} "
                f"logprobs and versions for {num_spanned}, expected one of each for every token"
            )
        if vertex.leaf_class not in self._ranks:
            known = ", ".join(self._ranks)
            raise ValueError(
                f"call {vertex.invocation_id}: leaf class {vertex.leaf_class!r}, expected one of {known}"
            )
        return self._ranks[vertex.leaf_class]


def _answer(invocation_id: str) -> str:
    return f"{invocation_id}-c"


def _draw(counts: Sequence[tuple[_Answer, int]], dice: random.Random) -> _Answer:
    """A leaf, with probability in proportion to its count."""
    place = dice.randrange(sum(count for _, count in counts))
    for leaf, count in counts:
        if place < count:
            return leaf
        place -= count
    raise AssertionError("unreachable: place is below the sum of the counts")
