"""One episode as a picture: agents are lanes, calls are boxes in order of their depth, edges are arrows.

The task stands left, the result right; the call whose text became the result is outlined.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megloom.compute.graph.records import EdgeKind, EdgeRecord, EpisodeRecord, InvocationRecord
from megloom.compute.report.drawing import colour, cut, element, number, svg, text, tooltip, wrap

_BOX_W, _BOX_H, _GAP_X, _GAP_Y = 206.0, 104.0, 62.0, 16.0
_LANE_PAD, _LANE_HEAD, _LANE_GAP, _SIDE_W = 10.0, 20.0, 10.0, 178.0
_MONO_COLUMNS, _TEXT_LINES = 30, 3  # what fits into a box at size 10.5
_GOOD, _BAD, _NEUTRAL = "#059669", "#ef4444", "#8b93a1"


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeStory:
    """What the picture shows. `chosen` is the id of the call whose text became `result`, if one did."""

    episode: EpisodeRecord
    calls: Sequence[InvocationRecord]
    edges: Sequence[EdgeRecord]
    prompt: str
    expected: str
    result: str | None = None
    chosen: str | None = None


@dataclass(frozen=True, slots=True)
class _Box:
    x: float
    y: float
    width: float = _BOX_W
    height: float = _BOX_H

    @property
    def middle(self) -> float:
        return self.y + self.height / 2


def episode_graph(story: EpisodeStory) -> str:
    """One SVG. Full texts are in the tooltips."""
    agents = list(dict.fromkeys(c.agent for c in sorted(story.calls, key=lambda c: c.index)))
    colours = {agent: colour(index) for index, agent in enumerate(agents)}
    depths = _depths(story.calls, story.edges)
    boxes, lanes = _layout(story.calls, agents, depths)
    num_columns = max(depths.values(), default=0) + 1
    inner = num_columns * _BOX_W + (num_columns - 1) * _GAP_X + 2 * _LANE_PAD
    left = _SIDE_W + _GAP_X - _LANE_PAD
    height = max([lane.y + lane.height for lane in lanes.values()], default=_BOX_H) + 4
    task = _Box(1, height / 2 - 64, _SIDE_W, 128)
    result = _Box(left + inner + _GAP_X - _LANE_PAD, height / 2 - 64, _SIDE_W, 128)
    parts = [_MARKERS]
    for agent, lane in lanes.items():
        parts.append(element("rect", x=left, y=lane.y, width=inner, height=lane.height, rx=8, class_="track"))
        parts.append(
            text(left + _LANE_PAD, lane.y + 15, agent, 11.5, class_="bold", style=f"fill:{colours[agent]}")
        )
    parts += _arrows(story, boxes, task, result)
    parts += [
        _call(c, boxes[c.invocation_id], colours[c.agent], c.invocation_id == story.chosen)
        for c in story.calls
    ]
    parts += [_task(story, task), _result(story, result)]
    label = f"episode {story.episode.episode_id}: {len(story.calls)} calls of {len(agents)} agents"
    return svg(result.x + result.width + 2, height, *parts, label=label)


def _depths(calls: Sequence[InvocationRecord], edges: Sequence[EdgeRecord]) -> dict[str, int]:
    """Columns: 0 for a call without parents, else one more than its deepest parent.

    A call's parents are registered before it, so that registration order is a topological one.
    """
    parents: dict[str, list[str]] = {c.invocation_id: [] for c in calls}
    for edge in edges:
        parents.setdefault(edge.child, []).append(edge.parent)
    depths: dict[str, int] = {}
    for call in sorted(calls, key=lambda c: c.index):
        known = [depths[p] for p in parents[call.invocation_id] if p in depths]
        depths[call.invocation_id] = 1 + max(known, default=-1)
    return depths


def _layout(
    calls: Sequence[InvocationRecord], agents: Sequence[str], depths: Mapping[str, int]
) -> tuple[dict[str, _Box], dict[str, _Box]]:
    """Where each call's box and each agent's lane lies. Calls that share lane and column are stacked."""
    boxes, lanes, y = {}, {}, 2.0
    left = _SIDE_W + _GAP_X
    for agent in agents:
        stacked: Counter[int] = Counter()
        for call in sorted((c for c in calls if c.agent == agent), key=lambda c: c.index):
            column = depths[call.invocation_id]
            top = y + _LANE_HEAD + 4 + stacked[column] * (_BOX_H + _GAP_Y)
            boxes[call.invocation_id] = _Box(left + column * (_BOX_W + _GAP_X), top)
            stacked[column] += 1
        height = _LANE_HEAD + 4 + max(stacked.values()) * (_BOX_H + _GAP_Y) - _GAP_Y + _LANE_PAD
        lanes[agent] = _Box(left - _LANE_PAD, y, 0, height)
        y += height + _LANE_GAP
    return boxes, lanes


_MARKERS = element(
    "defs",
    *(
        element(
            "marker",
            element("path", d="M0,0 L8,4 L0,8 z", fill=fill),
            id=name,
            markerWidth=8,
            markerHeight=8,
            refX=7,
            refY=4,
            orient="auto",
            markerUnits="userSpaceOnUse",
        )
        for name, fill in (("meg-arrow", _NEUTRAL), ("meg-chosen", _GOOD))
    ),
)


def _arrows(story: EpisodeStory, boxes: Mapping[str, _Box], task: _Box, result: _Box) -> list[str]:
    children = {edge.child for edge in story.edges}
    shown = [e for e in story.edges if e.parent in boxes and e.child in boxes]
    parts = [
        _arrow(task, boxes[c.invocation_id], "the task")
        for c in story.calls
        if c.invocation_id not in children
    ]
    parts += [_arrow(boxes[e.parent], boxes[e.child], e.kind, dashed=e.kind == EdgeKind.ORDER) for e in shown]
    parents = {edge.parent for edge in story.edges}
    parts += [
        _arrow(boxes[c.invocation_id], result, "last call")
        for c in story.calls
        if c.invocation_id not in parents and c.invocation_id != story.chosen
    ]
    if story.chosen is not None and story.chosen in boxes:
        parts.append(_arrow(boxes[story.chosen], result, "chosen as the result", chosen=True))
    return parts


def _arrow(source: _Box, target: _Box, about: str, *, dashed: bool = False, chosen: bool = False) -> str:
    x1, y1, x2, y2 = source.x + source.width, source.middle, target.x, target.middle
    bend = min(max((x2 - x1) / 2, 24.0), 60.0)
    return element(
        "path",
        tooltip(about),
        d=f"M{x1:.0f},{y1:.0f} C{x1 + bend:.0f},{y1:.0f} {x2 - bend:.0f},{y2:.0f} {x2:.0f},{y2:.0f}",
        fill="none",
        stroke=_GOOD if chosen else _NEUTRAL,
        stroke_width=2.2 if chosen else 1.3,
        stroke_dasharray="5 4" if dashed else None,
        marker_end=f"url(#{'meg-chosen' if chosen else 'meg-arrow'})",
    )


def _call(call: InvocationRecord, box: _Box, stroke: str, is_chosen: bool) -> str:
    failed = call.failure is not None
    content = call.failure if call.failure is not None else call.text
    edge = _BAD if failed else _GOOD if is_chosen else stroke
    name = f"{call.agent} #{call.index}"
    lines = wrap(content, _MONO_COLUMNS, _TEXT_LINES)
    return element(
        "g",
        tooltip(f"{name} ({call.invocation_id})\n{content}"),
        _card(box, edge, 2.4 if is_chosen or failed else 1.1),
        text(box.x + 10, box.y + 18, cut(name, 18), 11.5, class_="bold"),
        text(box.x + box.width - 10, box.y + 18, _version(call), 10.5, class_="faint", text_anchor="end"),
        *(text(box.x + 10, box.y + 36 + 13 * n, line, 10.5, class_="mono") for n, line in enumerate(lines)),
        text(
            box.x + 10,
            box.y + box.height - 10,
            f"{call.num_prompt_tokens} → {call.num_completion_tokens} tokens",
            10.5,
            class_="faint",
        ),
        _reward(box, call.reward),
        _chip(box, box.y - 13, "chosen", _GOOD) if is_chosen else "",
        _chip(box, box.y - 13, call.state, _BAD) if failed else "",
    )


def _task(story: EpisodeStory, box: _Box) -> str:
    lines = wrap(story.prompt, 24, 5)
    return element(
        "g",
        tooltip(f"task {story.episode.task_id}\n{story.prompt}\nexpected: {story.expected}"),
        _card(box, _NEUTRAL, 1.1),
        text(box.x + 10, box.y + 18, "task", 11.5, class_="bold"),
        *(text(box.x + 10, box.y + 36 + 13 * n, line, 10.5, class_="mono") for n, line in enumerate(lines)),
        text(
            box.x + 10, box.y + box.height - 10, f"expected: {cut(story.expected, 17)}", 10.5, class_="faint"
        ),
    )


def _result(story: EpisodeStory, box: _Box) -> str:
    episode = story.episode
    outcome = story.result if story.result is not None else (episode.failure or episode.state)
    lines = wrap(outcome, 24, 5)
    edge = _BAD if episode.failure is not None else _tone(episode.reward)
    return element(
        "g",
        tooltip(f"episode {episode.episode_id}: {episode.state}\n{outcome}"),
        _card(box, edge, 2.4),
        text(box.x + 10, box.y + 18, "result", 11.5, class_="bold"),
        *(text(box.x + 10, box.y + 36 + 13 * n, line, 10.5, class_="mono") for n, line in enumerate(lines)),
        text(
            box.x + 10,
            box.y + box.height - 10,
            f"{episode.finished_s - episode.started_s:.2f} s",
            10.5,
            class_="faint",
        ),
        _reward(box, episode.reward),
    )


def _card(box: _Box, stroke: str, stroke_width: float) -> str:
    place = {"x": box.x, "y": box.y, "width": box.width, "height": box.height, "rx": 6}
    # Two layers: the page's own colour hides the arrows behind the box, also where it is transparent.
    return element("rect", **place, style="fill:var(--page,#8b93a122)") + element(
        "rect", **place, class_="card", stroke=stroke, stroke_width=stroke_width
    )


def _reward(box: _Box, reward: float | None) -> str:
    """The reward in the lower right corner of a box; nothing where there is none."""
    if reward is None:
        return ""
    return _chip(box, box.y + box.height - 25, f"reward {number(reward)}", _tone(reward))


def _chip(box: _Box, y: float, label: str, fill: str) -> str:
    """A pill at the right of a box."""
    width = 14 + 5.7 * len(label)
    x = box.x + box.width - width - 8
    return element("rect", x=x, y=y, width=width, height=17, rx=8.5, fill=fill) + text(
        x + width / 2, y + 12.5, label, 10, class_="on", text_anchor="middle"
    )


def _tone(reward: float | None) -> str:
    if reward is None or reward == 0:
        return _NEUTRAL
    return _GOOD if reward > 0 else _BAD


def _version(call: InvocationRecord) -> str:
    if call.version_min is None:
        return call.policy
    span = (
        f"{call.version_min}"
        if call.version_max in (None, call.version_min)
        else f"{call.version_min}–{call.version_max}"
    )
    return f"{cut(call.policy, 12)}@{span}"
