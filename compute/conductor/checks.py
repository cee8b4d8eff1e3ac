"""Consistency checks of a step, over what it is about to commit. A blocking one that fails stops the run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from megloom.compute.conductor.episodes import EndedEpisode
from megloom.compute.conductor.gradients import LaneStep
from megloom.compute.conductor.reports import CheckReport, Rate, ratio
from megloom.compute.graph.meg import Vertex

MAX_ON_POLICY_GAP = 1e-2  # engine and trainer agree to 1e-4; more means another model or convention
MAX_TRUNCATED_SHARE = 0.2


def step_checks(
    *, ended: Sequence[EndedEpisode], versions: Mapping[str, int], lanes: Mapping[str, LaneStep], reward: Rate
) -> list[CheckReport]:
    """The checks of a training step; `versions` are those that the step was sampled with."""
    vertices = [vertex for member in ended for vertex in member.vertices if vertex.version_spans]
    return [
        _one_version(vertices, versions),
        _aligned(vertices),
        _edges_resolve(ended),
        _finite(lanes),
        _applied_once(lanes),
        *_warnings(vertices, lanes, reward),
    ]


def _check(name: str, problems: list[str], *, blocking: bool, good: str) -> CheckReport:
    detail = "; ".join(problems[:3]) + (f"; {len(problems) - 3} more" if len(problems) > 3 else "")
    return CheckReport(name=name, passed=not problems, blocking=blocking, detail=detail or good)


def _one_version(vertices: Sequence[Vertex], versions: Mapping[str, int]) -> CheckReport:
    problems = [
        f"{v.invocation_id}: sampled by version {span[0]}, frozen at {versions[v.policy]}"
        for v in vertices
        for span in v.version_spans
        if span[0] != versions[v.policy]
    ]
    return _check(
        "single_policy_version", problems, blocking=True, good=f"{len(vertices)} calls at one version each"
    )


def _aligned(vertices: Sequence[Vertex]) -> CheckReport:
    problems = [
        f"{v.invocation_id}: {len(v.token_ids)} tokens, {len(v.logprobs)} logprobs, spans to "
        f"{v.version_spans[-1][2]}"
        for v in vertices
        if not len(v.token_ids) == len(v.logprobs) == v.version_spans[-1][2]
    ]
    return _check("token_logprob_alignment", problems, blocking=True, good=f"{len(vertices)} calls aligned")


def _edges_resolve(ended: Sequence[EndedEpisode]) -> CheckReport:
    problems: list[str] = []
    for member in ended:
        seen: set[str] = set()
        for vertex in member.vertices:  # registration order: a parent always stands before its child
            problems += [
                f"{vertex.invocation_id}: parent {p} not before it"
                for p, _ in vertex.parents
                if p not in seen
            ]
            seen.add(vertex.invocation_id)
    return _check("meg_edges_resolve", problems, blocking=True, good="every edge points backwards")


def _finite(lanes: Mapping[str, LaneStep]) -> CheckReport:
    problems = [
        f"{policy}: gradient norm {lane.update.grad_norm}"
        for policy, lane in lanes.items()
        if lane.update is not None and not math.isfinite(lane.update.grad_norm)
    ]
    return _check("gradient_finite", problems, blocking=True, good="all gradient norms finite")


def _applied_once(lanes: Mapping[str, LaneStep]) -> CheckReport:
    """The trainer's own list of what its update took must be the micro-batches that were sent, each once.

    Their order may differ: what a satellite took is added when it hands its sums in.
    """
    problems = []
    for policy, lane in lanes.items():
        sent = [taken.batch.micro_batch_id for taken in lane.taken]
        if lane.update is not None and sorted(lane.update.micro_batch_ids) != sorted(sent):
            problems.append(f"{policy}: sent {sent}, the update took {list(lane.update.micro_batch_ids)}")
    return _check(
        "micro_batches_applied_once", problems, blocking=True, good="each update took what was sent, once"
    )


def _warnings(
    vertices: Sequence[Vertex], lanes: Mapping[str, LaneStep], reward: Rate
) -> Iterator[CheckReport]:
    mean = ratio(reward)
    flat = (
        [] if mean is not None and any(lane.taken for lane in lanes.values()) else ["no group had a signal"]
    )
    yield _check("reward_not_degenerate", flat, blocking=False, good=f"mean reward {mean}")
    truncated = sum(vertex.finish_reason == "length" for vertex in vertices)
    share = truncated / len(vertices) if vertices else 0.0
    over = [f"{truncated} of {len(vertices)} calls hit max_tokens"] if share > MAX_TRUNCATED_SHARE else []
    yield _check("truncation", over, blocking=False, good=f"{truncated} of {len(vertices)} calls truncated")
    gaps = {policy: _largest_gap(lane) for policy, lane in lanes.items()}
    wide = [f"{policy}: {gap:.2g}" for policy, gap in gaps.items() if gap > MAX_ON_POLICY_GAP]
    largest = max(gaps.values(), default=0.0)
    yield _check("train_infer_mismatch", wide, blocking=False, good=f"largest logprob gap {largest:.2g}")


def _largest_gap(lane: LaneStep) -> float:
    return max((t.report.max_logprob_gap or 0.0 for t in lane.taken if t.report), default=0.0)
