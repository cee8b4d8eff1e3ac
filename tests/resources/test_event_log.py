from pathlib import Path

import dagster as dg
import pytest

from megloom.resources.event_log import kept_engines


@dg.op
def write_events(context: dg.OpExecutionContext) -> None:
    with kept_engines(context.instance):
        for i in range(3):
            context.log_event(
                dg.AssetMaterialization("thing", partition=str(i), tags={"dagster/data_version": "v"})
            )
            context.log_event(
                dg.AssetCheckEvaluation(
                    dg.AssetKey("thing"), check_name="fine", passed=i < 2, partition=str(i)
                )
            )
    context.log_event(dg.AssetMaterialization("thing", partition="after"))


@dg.job(executor_def=dg.in_process_executor)
def writing_job() -> None:
    write_events()


@pytest.fixture
def instance(tmp_path: Path) -> dg.DagsterInstance:
    return dg.DagsterInstance.local_temp(str(tmp_path))


def test_events_that_were_written_on_kept_engines_are_read_back_by_another_instance(
    instance: dg.DagsterInstance, tmp_path: Path
):
    run_id = writing_job.execute_in_process(instance=instance).run_id
    other = dg.DagsterInstance.local_temp(str(tmp_path))
    key = dg.AssetKey("thing")
    assert other.get_materialized_partitions(key) == {"0", "1", "2", "after"}
    assert sum(1 for entry in other.all_logs(run_id) if entry.asset_materialization) == 4
    latest = other.get_latest_asset_check_evaluation_record(dg.AssetCheckKey(key, "fine"))
    assert latest is not None and latest.event is not None
    assert latest.event.asset_check_evaluation is not None
    assert latest.event.asset_check_evaluation.partition == "2"


def test_the_storage_is_as_it_was_when_the_block_ends(instance: dg.DagsterInstance):
    before = dict(vars(instance.event_log_storage))
    with pytest.raises(KeyError), kept_engines(instance):
        assert set(vars(instance.event_log_storage)) - set(before) == {"_connect", "has_table"}
        raise KeyError
    assert vars(instance.event_log_storage).keys() == before.keys()


def test_an_inner_block_leaves_the_engines_to_the_outer_one(instance: dg.DagsterInstance):
    with kept_engines(instance):
        with kept_engines(instance):
            pass
        assert "_connect" in vars(instance.event_log_storage)


def test_a_storage_of_another_kind_is_left_alone():
    with dg.DagsterInstance.ephemeral() as instance:
        before = dict(vars(instance.event_log_storage))
        with kept_engines(instance):
            assert vars(instance.event_log_storage).keys() == before.keys()
