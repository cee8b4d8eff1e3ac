import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import dagster as dg
import pytest
import yaml
from dagster._core.definitions.assets.graph.asset_graph import AssetGraph

from megloom.assets.system import System, load_system
from megloom.pipelines.definitions import WORKLOADS, definitions_of
from megloom.pipelines.jobs import TrainingSessionConfig
from tests.fake_service import WORKLOAD, FakeService, serving, step_reports

ROOT = Path(__file__).parents[2]
FIVE = System(
    name="five",
    policies={"a": True, "b": True, "c": True, "d": True, "judge": False},
    agents={"planner": "a", "solver": "b", "critic": "b", "editor": "c", "coder": "d", "judge": "judge"},
)


@pytest.fixture(scope="module")
def graph() -> AssetGraph:
    return definitions_of([load_system(WORKLOAD), FIVE]).resolve_asset_graph()


@pytest.fixture(scope="module")
def loaded() -> dict[str, list[str]]:
    """What loading the code location brings along, in a process whose import path starts with the root."""
    code = (
        "import json, sys; sys.path.insert(0, ''); import megloom.pipelines.definitions as d;"
        "print(json.dumps({'modules': list(sys.modules), 'jobs': [j.name for j in d.defs.jobs]}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    return json.loads(done.stdout)


def below(name: str, *parts: str) -> dg.AssetKey:
    return dg.AssetKey([name, *parts])


def test_the_lineage_graph_has_no_circle(graph: AssetGraph):
    parents = {key: graph.get(key).parent_keys for key in graph.get_all_asset_keys()}
    assert len(list(TopologicalSorter(parents).static_order())) == len(parents)


def test_lineage_leads_from_the_tasks_to_every_policy(graph: AssetGraph):
    chain = [
        below("five", "tasks"),
        below("five", "rollout_batch"),
        below("five", "meg_partition"),
        below("five", "micro_batch_gradients", "b"),
        below("five", "policy_version", "b"),
        below("five", "evaluation"),
    ]
    for upstream, key in itertools.pairwise(chain):
        assert upstream in graph.get(key).parent_keys
    assert graph.get(below("five", "behavior_policy")).parent_keys == set()
    assert below("five", "behavior_policy") in graph.get(below("five", "rollout_batch")).parent_keys


def test_a_frozen_policy_has_versions_and_no_gradient(graph: AssetGraph):
    assert below("five", "policy_version", "judge") in graph.get_all_asset_keys()
    assert below("five", "micro_batch_gradients", "judge") not in graph.get_all_asset_keys()


def test_systems_do_not_share_assets(graph: AssetGraph):
    for key in graph.get_all_asset_keys():
        assert all(parent.path[0] == key.path[0] for parent in graph.get(key).parent_keys)


def test_all_step_assets_share_one_partition_set(graph: AssetGraph):
    partitioned = {key for key in graph.get_all_asset_keys() if graph.get(key).partitions_def is not None}
    rest = {key.path[-1] for key in graph.get_all_asset_keys() - partitioned}
    assert rest == {"tasks", "compute_service"}
    definitions = {graph.get(key).partitions_def for key in partitioned}
    assert definitions == {dg.DynamicPartitionsDefinition(name="train_step")}


def test_every_asset_says_what_it_is_and_has_a_code_version(graph: AssetGraph):
    for key in graph.get_all_asset_keys() - {dg.AssetKey("compute_service")}:
        node = graph.get(key)
        assert node.description and node.kinds and node.code_version and node.group_name == key.path[0]


def test_every_known_workload_has_a_name_of_its_own():
    names = [load_system(workload).name for workload in WORKLOADS]
    assert len(names) == len(set(names))


def test_the_code_location_loads_nothing_heavy(loaded: dict[str, list[str]]):
    heavy = {"torch", "transformers", "pyarrow", "duckdb", "numpy", "ray", "deepspeed", "sglang"}
    assert heavy.isdisjoint(loaded["modules"])


def test_no_folder_of_ours_is_imported_by_its_bare_name(loaded: dict[str, list[str]]):
    assert {"assets", "resources", "compute", "pipelines"}.isdisjoint(loaded["modules"])


def test_dagster_accepts_the_workspace(tmp_path: Path):
    (tmp_path / "dagster.yaml").write_text((ROOT / "dagster.yaml").read_text())
    done = subprocess.run(
        [sys.executable, "-m", "dagster", "definitions", "validate", "-w", "workspace.yaml"],
        cwd=ROOT,
        env={**os.environ, "DAGSTER_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_dagster_accepts_the_instance_config(tmp_path: Path):
    (tmp_path / "dagster.yaml").write_text((ROOT / "dagster.yaml").read_text())
    with dg.DagsterInstance.from_config(str(tmp_path)) as instance:
        assert instance.run_monitoring_enabled
        assert not instance.telemetry_enabled
        assert not instance.nux_enabled


def test_the_workspace_names_the_definitions_module():
    (entry,) = yaml.safe_load((ROOT / "workspace.yaml").read_text())["load_from"]
    assert entry["python_module"]["module_name"] == "megloom.pipelines.definitions"


def test_the_job_runs_as_the_definitions_bind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, instance: dg.DagsterInstance
):
    with serving(FakeService(tmp_path, step_reports(1))) as service:
        monkeypatch.setenv("MEGLOOM_HOME", str(service.home))
        job = definitions_of([load_system(WORKLOAD)]).resolve_job_def("training_session_job")
        config = TrainingSessionConfig(workload=WORKLOAD, run="demo", steps=1)
        result = job.execute_in_process(
            run_config=dg.RunConfig(ops={"training_session": config}), instance=instance
        )
    assert result.success


def test_the_checks_of_the_latest_step_can_be_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, instance: dg.DagsterInstance
):
    definitions = definitions_of([load_system(WORKLOAD)])
    with serving(FakeService(tmp_path, step_reports(3))) as service:
        monkeypatch.setenv("MEGLOOM_HOME", str(service.home))
        config = TrainingSessionConfig(workload=WORKLOAD, run="demo", steps=3)
        job = definitions.resolve_job_def("training_session_job")
        job.execute_in_process(run_config=dg.RunConfig(ops={"training_session": config}), instance=instance)
        checks = dg.AssetSelection.checks_for_assets(below("standin_team", "meg_partition"))
        judge = dg.define_asset_job("judge", selection=checks)
        result = (
            dg.Definitions.merge(definitions, dg.Definitions(jobs=[judge]))
            .resolve_job_def("judge")
            .execute_in_process(instance=instance)
        )
    assert {e.check_name: e.passed for e in result.get_asset_check_evaluations()} == {
        "step_is_consistent": True,
        "step_is_healthy": False,
    }


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as instance:
        yield instance
