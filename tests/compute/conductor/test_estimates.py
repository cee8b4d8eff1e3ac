"""When advantages are final, what is held until then, and what an algorithm carries to the next step."""

from __future__ import annotations

import itertools
import json

import pytest

from megloom.compute.algorithms.base import PolicyGradient
from megloom.compute.algorithms.grpo import Grpo
from megloom.compute.algorithms.rae import Rae
from megloom.compute.algorithms.reinforce_pp import ReinforcePlusPlus
from megloom.compute.conductor.draws import DrawnGroup
from megloom.compute.conductor.estimates import StepEstimates
from megloom.compute.conductor.ledger import Committed, Ledger, Reference
from megloom.compute.conductor.samples import Aggregation, Sample
from megloom.compute.scheduling.cursor import Cursor
from megloom.compute.trainers.protocol import Published
from tests.compute.conductor.training_rows import drawn_group

GROUPS = [drawn_group(0, [1.0, 0.0]), drawn_group(1, [0.5, 0.5, 2.0]), drawn_group(2, [0.0])]


def step(
    algorithm: PolicyGradient, groups: list[DrawnGroup], state: dict[str, float] | None = None
) -> tuple[list[list[Sample]], list[list[Sample]], dict[str, float]]:
    """What was final early, what at the end, and the next state."""
    estimates = StepEstimates(algorithm, Aggregation.of(algorithm), state or {})
    early = [samples for drawn in groups for samples in estimates.add(drawn)]
    return early, estimates.close(), estimates.next_state()


def advantages(groups: list[list[Sample]]) -> dict[str, float]:
    return {s.record.sample_id: s.record.advantage for samples in groups for s in samples}


def test_a_group_is_final_at_once_for_an_algorithm_of_groups() -> None:
    early, late, state = step(Grpo(), GROUPS)
    assert ([len(samples) for samples in early], late, state) == ([2, 3, 1], [], {})


def test_no_group_is_final_before_the_last_for_an_algorithm_of_the_step() -> None:
    early, late, _ = step(ReinforcePlusPlus(), GROUPS)
    assert (early, [len(samples) for samples in late]) == ([], [2, 3, 1])


@pytest.mark.parametrize("algorithm", [Grpo(), ReinforcePlusPlus(), Rae()], ids=lambda a: a.name)
def test_the_order_in_which_groups_end_reaches_no_advantage_and_no_state(algorithm: PolicyGradient) -> None:
    found = []
    for order in itertools.permutations(GROUPS):
        early, late, state = step(algorithm, list(order), {"solver": 0.25})
        found.append((advantages([*early, *late]), state))
        in_order = [samples[0].record.group_id for samples in late]
        assert in_order == sorted(in_order)
    assert all(other == found[0] for other in found)


def test_an_algorithm_of_the_step_sees_the_outcomes_of_all_groups() -> None:
    """Tokens 3 × 1.0 and 4 × 0.0 against 5 × 1.0 alone: a mean of 8/12."""
    _, late, _ = step(
        ReinforcePlusPlus(), [drawn_group(0, [1.0, 0.0], lengths=[3, 4]), drawn_group(1, [1.0], lengths=[5])]
    )
    found = advantages(late)
    assert found["g0-m0-i0-s"] == found["g1-m0-i0-s"] > 0 > found["g0-m1-i0-s"]
    assert 8 * found["g0-m0-i0-s"] + 4 * found["g0-m1-i0-s"] == pytest.approx(0.0, abs=1e-9)


def test_the_running_baseline_goes_on_from_the_last_step() -> None:
    _, _, first = step(Rae(decay=0.5), GROUPS)
    early, _, second = step(Rae(decay=0.5), GROUPS, first)
    assert advantages(early)["g0-m0-i0-s"] == 1.0 - first["solver"]
    assert second["solver"] != first["solver"]


def test_the_state_of_an_algorithm_survives_in_the_ledger_to_the_last_bit() -> None:
    _, _, state = step(Rae(), GROUPS, {"solver": 0.1})
    ledger = Ledger(next_step=1, cursor=Cursor(), policies={}, algorithm_states={"other": {"a": 1.0}})
    after = ledger.committed(cursor=Cursor(), published={}, states={}, algorithm_states={"solver": state})
    again = Ledger.from_json(json.loads(json.dumps(after.to_json())))
    assert again.algorithm_states == {"other": {"a": 1.0}, "solver": state}


def test_a_ledger_without_states_is_one_of_algorithms_that_have_none() -> None:
    old = {"next_step": 3, "cursor": {"epoch": 0, "offset": 0}, "policies": {}}
    assert Ledger.from_json(old).algorithm_states == {}


def test_two_policies_with_unlike_algorithms_see_their_own_outcomes_only() -> None:
    groups = [drawn_group(0, [1.0, 0.0], lengths=[1, 1]), drawn_group(1, [1.0, 1.0], lengths=[1, 1])]
    early, _, _ = step(Grpo(normalise="none"), groups)
    _, late, _ = step(ReinforcePlusPlus(), groups)
    assert [*advantages(early).values()] == [0.5, -0.5, 0.0, 0.0]
    assert [*advantages(late).values()] == pytest.approx([0.5, -1.5, 0.5, 0.5])


def test_the_references_of_a_ledger_stand_while_its_versions_move() -> None:
    start = Committed(version=1, parent_version=0, uri="u1", digest="d", state_path=None)
    ledger = Ledger(next_step=0, cursor=Cursor(), policies={"a": start, "b": start}).referring(["a"])
    new = Published(uri="u2", version=2, digest="d", size_bytes=1)
    after = ledger.committed(cursor=Cursor(), published={"a": new}, states={})
    again = Ledger.from_json(json.loads(json.dumps(after.to_json())))
    assert again.references == {"a": Reference(version=1, uri="u1")} and again.versions() == {"a": 2, "b": 1}
