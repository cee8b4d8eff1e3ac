import json
import math
from typing import Any

import dagster as dg
import pytest

from megloom.assets import checks
from megloom.assets.commit import Event, step_events
from megloom.assets.curves import Curves
from megloom.assets.step import CommittedStep
from megloom.assets.system import System, load_system
from megloom.compute.conductor.reports import CheckReport, SessionStatus, StepReport
from tests.fake_service import WORKLOAD, FakeService, policy_report, step_report

THREE_POLICIES = load_system(WORKLOAD)


def committed(report: StepReport, system: System = THREE_POLICIES) -> CommittedStep:
    curves = Curves()
    for _ in range(3):
        curves.add(report)
    status = SessionStatus(**FakeService().status())
    return CommittedStep(system=system, status=status, report=report, curves=curves)


def events_of(step: int, **overrides: Any) -> list[Event]:
    return list(step_events(committed(step_report(step, **overrides))))


def materializations(events: list[Event]) -> dict[str, dg.AssetMaterialization]:
    """By key below the system's name."""
    return {
        "/".join(event.asset_key.path[1:]): event
        for event in events
        if isinstance(event, dg.AssetMaterialization)
    }


def names(events: list[Event]) -> list[str]:
    return [
        event.check_name if isinstance(event, dg.AssetCheckEvaluation) else "/".join(event.asset_key.path[1:])
        for event in events
    ]


def test_a_step_is_reported_in_the_order_in_which_it_became_true():
    assert names(events_of(2)) == [
        "rollout_batch",
        "meg_partition",
        "micro_batch_gradients/planner",
        "micro_batch_gradients/solver",
        "micro_batch_gradients/verifier",
        "policy_version/planner",
        "policy_version/solver",
        "policy_version/verifier",
        "evaluation",
        "cluster_report",
        "step_is_consistent",
        "step_is_healthy",
        "behavior_policy",
    ]


def test_the_first_step_reports_the_tasks_and_no_rollout():
    assert names(events_of(0))[:2] == ["tasks", "meg_partition"]
    assert "rollout_batch" not in names(events_of(0))


@pytest.mark.parametrize("step", [0, 1, 2])
def test_a_step_of_three_policies_has_at_most_fourteen_events(step: int):
    assert len(events_of(step, evaluation=step_report(0).evaluation)) <= 14


def test_a_further_policy_adds_two_events():
    more = ("a", "b", "c", "d", "e")
    report = step_report(2, policies={name: policy_report(2, name) for name in more})
    system = System(name="five", policies=dict.fromkeys(more, True), agents={name: name for name in more})
    assert len(list(step_events(committed(report, system)))) == len(events_of(2)) + 2 * 2


def test_an_untrained_policy_has_a_version_but_no_gradient():
    kept = policy_report(
        2, "solver", trained=False, num_micro_batches=0, version=1, parent_version=0, digest="same"
    )
    events = events_of(2, policies={**step_report(2).policies, "solver": kept})
    assert "micro_batch_gradients/solver" not in names(events)
    version = materializations(events)["policy_version/solver"]
    assert version.tags is not None and version.tags["dagster/data_version"] == "same"
    assert version.metadata["trained"] == dg.MetadataValue.bool(False)


def test_every_event_of_a_step_is_in_its_partition_and_the_behavior_policy_in_the_next():
    partitions = {
        name: event.partition for name, event in zip(names(events_of(2)), events_of(2), strict=True)
    }
    assert partitions.pop("behavior_policy") == "demo:000003"
    assert set(partitions.values()) == {"demo:000002"}


def test_events_carry_the_tags_that_lineage_is_joined_by():
    tags = materializations(events_of(2))["policy_version/solver"].tags
    assert tags is not None
    assert tags["megloom/run"] == "demo"
    assert tags["megloom/step"] == "2"
    assert tags["megloom/version"] == "2"
    assert tags["megloom/config_hash"] == "c0ffee0123456789"
    assert tags["dagster/data_version"] == "digest-solver-2"


def test_a_step_was_made_from_the_behavior_policy_that_the_step_before_committed():
    committed_before = materializations(events_of(1))["behavior_policy"].tags
    made_from = materializations(events_of(2))["rollout_batch"].tags
    assert committed_before is not None and made_from is not None
    data_version = committed_before["dagster/data_version"]
    assert made_from["dagster/input_data_version/standin_team/behavior_policy"] == data_version


@pytest.mark.parametrize(
    ("asset", "upstream"),
    [
        ("rollout_batch", "tasks"),
        ("meg_partition", "rollout_batch"),
        ("micro_batch_gradients/solver", "meg_partition"),
        ("policy_version/solver", "micro_batch_gradients/solver"),
        ("evaluation", "policy_version/verifier"),
        ("cluster_report", "meg_partition"),
    ],
)
def test_inputs_carry_the_data_version_of_the_event_that_made_them(asset: str, upstream: str):
    made = {**materializations(events_of(0)), **materializations(events_of(2))}
    tags, upstream_tags = made[asset].tags, made[upstream].tags
    assert tags is not None and upstream_tags is not None
    assert (
        tags[f"dagster/input_data_version/standin_team/{upstream}"] == upstream_tags["dagster/data_version"]
    )


def test_other_weights_are_another_data_version_of_their_gradient():
    other = {**step_report(2).policies, "solver": policy_report(2, "solver", digest="other")}
    tags = [
        materializations(events)["micro_batch_gradients/solver"].tags or {}
        for events in (events_of(2), events_of(2, policies=other))
    ]
    assert tags[0]["dagster/data_version"] != tags[1]["dagster/data_version"]


def test_metadata_has_the_numbers_of_the_report():
    made = materializations(events_of(2))
    assert made["rollout_batch"].metadata["dagster/row_count"] == dg.MetadataValue.int(32)
    assert made["rollout_batch"].metadata["duration_s"] == dg.MetadataValue.float(3.5)
    assert made["policy_version/solver"].metadata["policy_version"] == dg.MetadataValue.int(2)
    assert made["evaluation"].metadata["dagster/row_count"] == dg.MetadataValue.int(100)
    micro_batches = made["micro_batch_gradients/solver"].metadata["micro_batches"]
    assert isinstance(micro_batches, dg.TableMetadataValue)
    assert [record.data["position"] for record in micro_batches.records] == [0, 1]


def test_numbers_that_are_not_finite_reach_dagster_as_text():
    broken = policy_report(2, "solver", loss=math.nan, grad_norm=math.inf, max_logprob_gap=math.nan)
    made = materializations(events_of(2, policies={**step_report(2).policies, "solver": broken}))
    metadata = made["micro_batch_gradients/solver"].metadata
    assert metadata["loss"].value == "nan" and metadata["grad_norm"].value == "inf"
    for event in made.values():
        json.loads(dg.serialize_value(event), parse_constant=lambda name: pytest.fail(name))


def test_pictures_are_inline_and_small():
    made = materializations(events_of(2))
    for asset, entry in (("cluster_report", "timeline"), ("rollout_batch", "reward_so_far")):
        picture = made[asset].metadata[entry]
        assert isinstance(picture, dg.MarkdownMetadataValue) and picture.md_str is not None
        assert "data:image/svg+xml," in picture.md_str and len(picture.md_str) < 1000


def test_checks_of_a_kind_are_one_event_with_a_row_each():
    consistent, healthy = (event for event in events_of(3) if isinstance(event, dg.AssetCheckEvaluation))
    assert consistent.passed and consistent.blocking
    assert consistent.severity == dg.AssetCheckSeverity.ERROR
    assert not healthy.passed and not healthy.blocking
    assert healthy.severity == dg.AssetCheckSeverity.WARN
    assert healthy.description == "failed: truncation"
    verdicts = consistent.metadata["verdicts"]
    assert isinstance(verdicts, dg.TableMetadataValue)
    assert [record.data["check"] for record in verdicts.records] == [
        "graph_acyclic",
        "finite_gradient",
        "all_committed",
    ]


def test_a_failed_blocking_check_holds_the_next_behavior_policy_back():
    failed = CheckReport(name="finite_gradient", passed=False, blocking=True, detail="solver: nan")
    report = step_report(2, checks=[failed])
    assert names(list(step_events(committed(report))))[-1] == "step_is_healthy"
    assert checks.failed_blocking(report) == [failed]


def test_a_failed_warning_does_not():
    assert names(events_of(3))[-1] == "behavior_policy"


def test_a_long_run_name_is_cut_to_a_legal_tag():
    events = list(step_events(committed(step_report(2, run="r" * 64))))
    tags = materializations(events)["meg_partition"].tags
    assert tags is not None and tags["megloom/run"] == "r" * 63
