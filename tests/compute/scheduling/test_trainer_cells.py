"""Trainer cells go out in order, are taken from whoever minds least, and nobody waits for ever."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from megloom.compute.scheduling.trainer_cells import Holding, Rules, TrainerCell, Waiting, choose, spare

RULES = Rules(settle_s=0.1, turn_s=10.0, payback=4.0)
CELLS = [
    TrainerCell(name="c0", node="n0"),
    TrainerCell(name="c1", node="n0"),
    TrainerCell(name="c2", node="n1"),
]


def holding(cell: str, policy: str = "a", **overrides: Any) -> Holding:
    values = {"is_core": True, "since_s": 0.0, "idle_since_s": None, **overrides}
    return Holding(cell=cell, policy=policy, **values)


def waiting(policy: str, **overrides: Any) -> Waiting:
    return Waiting(policy=policy, since_s=0.0, **overrides)


def decide(
    holdings: Sequence[Holding], waiters: Sequence[Waiting], now: float = 5.0, rules: Rules = RULES
) -> Any:
    return choose(CELLS, holdings, waiters, now=now, rules=rules)


def test_a_free_cell_goes_to_the_first_in_line_where_it_was_before() -> None:
    chosen = decide([], [waiting("a", last_cell="c1", last_node="n0"), waiting("b")])
    assert chosen.binds == (("a", "c1"), ("b", "c0")) and chosen.leaves == ()


def test_without_its_old_cell_a_policy_stays_on_its_node() -> None:
    chosen = decide([holding("c2")], [waiting("b", last_cell="c2", last_node="n1"), waiting("c")])
    assert chosen.binds == (("b", "c0"), ("c", "c1"))
    cells = [TrainerCell(name="x", node="n0"), TrainerCell(name="y", node="n1")]
    chosen = choose(cells, [], [waiting("b", last_cell="gone", last_node="n1")], now=0.0, rules=RULES)
    assert chosen.binds == (("b", "y"),)


def test_a_cell_that_the_next_in_line_had_is_left_for_it_if_another_is_free() -> None:
    chosen = decide([holding("c2")], [waiting("b"), waiting("c", last_cell="c0", last_node="n0")])
    assert chosen.binds == (("b", "c1"), ("c", "c0"))


def test_who_waits_takes_a_satellites_cell_first_then_the_longest_idle_ones_then_one_over_its_turn() -> None:
    holdings = [
        holding("c0", "busy", since_s=-20.0),
        holding("c1", "idle", idle_since_s=1.0),
        holding("c2", "busy", is_core=False),
    ]
    assert decide(holdings, [waiting("x")]).leaves == ("c2",)
    assert decide(holdings, [waiting("x"), waiting("y")]).leaves == ("c2", "c1")
    assert decide(holdings, [waiting("x"), waiting("y"), waiting("z")]).leaves == ("c2", "c1", "c0")


def test_nobody_is_asked_while_enough_are_leaving_already() -> None:
    holdings = [holding("c0", is_leaving=True), holding("c1", idle_since_s=0.0), holding("c2", since_s=4.0)]
    assert decide(holdings, [waiting("x")]).leaves == ()


def test_an_idle_core_keeps_its_cell_for_a_moment_and_a_busy_one_for_its_turn() -> None:
    just_idle = [holding("c0", idle_since_s=4.95), holding("c1", since_s=4.0), holding("c2", since_s=4.0)]
    chosen = decide(just_idle, [waiting("x")])
    assert chosen.leaves == () and round(chosen.ask_again_s, 6) == 5.05
    slow = [holding(cell, since_s=-20.0, switch_s=10.0) for cell in ("c0", "c1", "c2")]
    chosen = decide(slow, [waiting("x")])
    assert chosen.leaves == () and chosen.ask_again_s == 20.0  # a turn of four switches


def test_a_core_whose_state_cannot_be_written_is_not_asked() -> None:
    holdings = [
        holding(cell, since_s=-99.0, idle_since_s=0.0, can_leave=False) for cell in ("c0", "c1", "c2")
    ]
    chosen = decide(holdings, [waiting("x")])
    assert (chosen.leaves, chosen.ask_again_s) == ((), None)


def test_idle_cores_leave_unasked_after_idle_s() -> None:
    rules = Rules(idle_s=3.0)
    holdings = [holding("c0", idle_since_s=1.0), holding("c1", idle_since_s=4.0), holding("c2")]
    chosen = decide(holdings, [], rules=rules)
    assert chosen.leaves == ("c0",) and chosen.ask_again_s == 7.0


def test_a_satellite_gets_a_cell_that_nobody_waits_for_on_its_cores_node() -> None:
    assert spare(CELLS, [holding("c0")], [], node="n1") == "c2"
    assert spare(CELLS, [holding("c0"), holding("c2")], [], node="n1") == "c1"
    assert spare(CELLS, [holding("c0")], [waiting("b")], node="n0") is None
    assert spare(CELLS, [holding(cell) for cell in ("c0", "c1", "c2")], [], node="n0") is None


@given(
    num_cells=st.integers(1, 3),
    num_policies=st.integers(2, 7),
    verbs=st.lists(st.tuples(st.integers(0, 6), st.floats(0.05, 3.0)), min_size=5, max_size=60),
)
def test_nobody_starves_beside_policies_whose_work_never_ends(
    num_cells: int, num_policies: int, verbs: list[tuple[int, float]]
) -> None:
    """Every policy always has work; holders are asked between verbs of the given lengths."""
    cells = [TrainerCell(name=f"c{number}") for number in range(num_cells)]
    line = [f"p{number}" for number in range(num_policies)]
    asked_s = dict.fromkeys(line, 0.0)
    held: dict[str, Holding] = {}
    last: dict[str, str] = {}
    now, longest_verb_s = 0.0, max(seconds for _, seconds in verbs)
    for position in range(400):
        chosen = choose(
            cells,
            list(held.values()),
            [Waiting(policy=p, since_s=asked_s[p], last_cell=last.get(p)) for p in line],
            now=now,
            rules=RULES,
        )
        assert [policy for policy, _ in chosen.binds] == line[: len(chosen.binds)]  # nobody is passed over
        for policy, cell in chosen.binds:
            assert cell not in held
            line.remove(policy)
            bound = (num_policies / num_cells + 1) * (RULES.turn_s + 2 * longest_verb_s)
            assert now - asked_s[policy] <= bound, f"{policy} waited {now - asked_s[policy]} s of {bound} s"
            held[cell], last[policy] = holding(cell, policy, since_s=now), cell
        for cell in chosen.leaves:  # between verbs: at the end of the one in work
            policy = held.pop(cell).policy
            line.append(policy)
            asked_s[policy] = now
        now += verbs[position % len(verbs)][1]
