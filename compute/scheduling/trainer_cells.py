"""Which training group gets which trainer cell, and who leaves one: facts and `now` in, choices out.

Cells go out in the order of asking, so nobody is passed over; a choice among free cells prefers the one that
the policy had last, then another on the same node, where its state lies. Who waits for a cell takes it from,
in this order: a satellite that rests, another satellite, the core that is idle for longest, the core that is
over its turn. A turn pays back its switch. So the n-th in line waits for at most n turns, however much work
the others have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerCell:
    """A place for one replica."""

    name: str
    node: str = "local"


@dataclass(frozen=True, kw_only=True, slots=True)
class Holding:
    """A replica on a cell. `idle_since_s` is None while it has work; an idle satellite rests.

    `can_leave` is False while its state cannot be written (ZeRO 2 and 3 in mid-batch); `is_leaving`: it was
    asked to. `switch_s` is what the last write and load of its state took.
    """

    cell: str
    policy: str
    is_core: bool
    since_s: float
    idle_since_s: float | None
    can_leave: bool = True
    is_leaving: bool = False
    switch_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Waiting:
    """A core without a cell that has work. `last_cell` and `last_node` are where it was."""

    policy: str
    since_s: float
    last_cell: str | None = None
    last_node: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """Seconds. An idle core keeps its cell for `settle_s`: the next verb of a lane follows within that.

    A busy core keeps it for `turn_s`, and for `payback` times its switch. `idle_s`: a replica idle for that
    long leaves even if nobody waits (None: it stays).
    """

    settle_s: float = 0.02
    turn_s: float = 10.0
    payback: float = 4.0
    idle_s: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """`binds` are (policy, cell), `leaves` cells to be left; `ask_again_s`: when time alone changes that."""

    binds: tuple[tuple[str, str], ...]
    leaves: tuple[str, ...]
    ask_again_s: float | None


def choose(
    cells: Sequence[TrainerCell],
    holdings: Sequence[Holding],
    waiting: Sequence[Waiting],
    *,
    now: float,
    rules: Rules,
) -> Choice:
    """What to do now. `waiting` is in the order of asking; no policy is in it twice."""
    node_of = {cell.name: cell.node for cell in cells}
    held = {holding.cell for holding in holdings}
    free = [cell.name for cell in cells if cell.name not in held]
    binds = tuple(
        (waiter.policy, _take(free, node_of, waiter, line=waiting[position + 1 :]))
        for position, waiter in enumerate(waiting)
        if free
    )
    unmet = waiting[len(binds) :]
    wanted = len(unmet) - sum(holding.is_leaving for holding in holdings)
    times = {
        holding.cell: _leaves_at(holding, is_wanted=wanted > 0, rules=rules)
        for holding in holdings
        if not holding.is_leaving
    }
    due = [holding for holding in holdings if (at := times.get(holding.cell)) is not None and at <= now]
    if wanted > 0:
        due.sort(key=lambda holding: _cost(holding, node_of, unmet[0]))
        due = due[:wanted] + [holding for holding in due[wanted:] if _is_idle_too_long(holding, now, rules)]
    later = [at for at in times.values() if at is not None and at > now]
    return Choice(
        binds=binds,
        leaves=tuple(holding.cell for holding in due),
        ask_again_s=min(later, default=None),
    )


def spare(
    cells: Sequence[TrainerCell], holdings: Sequence[Holding], waiting: Sequence[Waiting], *, node: str | None
) -> str | None:
    """A free cell that nobody waits for, for a satellite, if there is one; on `node` if possible."""
    held = {holding.cell for holding in holdings}
    free = [cell for cell in cells if cell.name not in held]
    if waiting or not free:
        return None
    return min(free, key=lambda cell: cell.node != node).name


def _take(free: list[str], node_of: dict[str, str], waiter: Waiting, *, line: Sequence[Waiting]) -> str:
    """Removes the best free cell for the first in line; one that was another's goes last."""
    others = {other.last_cell for other in line}
    best = min(
        free,
        key=lambda cell: (cell != waiter.last_cell, node_of[cell] != waiter.last_node, cell in others),
    )
    free.remove(best)
    return best


def _leaves_at(holding: Holding, *, is_wanted: bool, rules: Rules) -> float | None:
    """From when on the replica may be asked to leave; None: not by time alone."""
    if not holding.can_leave:
        return None
    idle_s = holding.idle_since_s
    times = []
    if idle_s is not None and rules.idle_s is not None:
        times.append(idle_s + rules.idle_s)
    if is_wanted:
        turn_s = max(rules.turn_s, rules.payback * holding.switch_s)
        times.append(holding.since_s + turn_s if holding.is_core else holding.since_s)
        if idle_s is not None:
            times.append(idle_s + rules.settle_s)
    return min(times, default=None)


def _is_idle_too_long(holding: Holding, now: float, rules: Rules) -> bool:
    since_s = holding.idle_since_s
    return rules.idle_s is not None and since_s is not None and since_s + rules.idle_s <= now


def _cost(holding: Holding, node_of: dict[str, str], waiter: Waiting) -> tuple[int, bool, float]:
    kind = 2 * holding.is_core + (holding.idle_since_s is None)
    elsewhere = node_of[holding.cell] != waiter.last_node
    return kind, elsewhere, holding.since_s if holding.idle_since_s is None else holding.idle_since_s
