"""The training engine together, in real processes: algorithms, backends, adapters, deltas, a resume."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from megloom.compute.conductor.config import SessionConfig
from megloom.compute.conductor.reports import SessionStatus, StepReport, ratio
from megloom.compute.conductor.run import RunPaths
from megloom.compute.state.staging import full_folder
from megloom.compute.state.versions import list_versions
from megloom.compute.state.weights import version_dir
from megloom.compute.trainers.snapshot import read_state
from tests.service_fixture import config, follow, service


def a_session(steps: int) -> SessionConfig:
    return config("r", steps).model_copy(update={"workload": "tests.losses_system:workload"})


def check_steps(status: SessionStatus, steps: list[StepReport], *, first: int, last: int) -> None:
    assert (status.state, status.failure) == ("finished", None)
    assert all(check.passed for step in steps for check in step.checks if check.blocking)
    trained = [step for step in steps if step.kind == "train" and first <= step.step <= last]
    assert [step.step for step in trained] == list(range(first, last + 1))
    for step in trained:
        for policy in step.policies.values():
            assert policy.trained and policy.parent_version is not None
            assert policy.version > policy.parent_version
            assert policy.grad_norm is not None and math.isfinite(policy.grad_norm) and policy.grad_norm > 0
        writer, critic = step.policies["writer"], step.policies["critic"]
        assert writer.rates["kl"][1] == writer.rates["value_loss"][1] == writer.num_trainable
        assert (ratio(writer.rates["value_loss"]) or 0.0) > 0
        assert "kl" not in critic.rates
        # The engines compute with what was published: exactly, and rounded to bfloat16.
        assert writer.max_logprob_gap is not None and writer.max_logprob_gap < 1e-3
        assert critic.max_logprob_gap is not None and critic.max_logprob_gap < 5e-2
    assert (ratio(trained[-1].policies["writer"].rates["kl"]) or 0.0) > 0, "it has left its reference"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_critic_on_zero_and_adapters_with_deltas_train_side_by_side_and_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("deepspeed", reason="the writer's trainer needs the extra deepspeed")
    pytest.importorskip("peft", reason="the critic's adapters need the extra lora")
    monkeypatch.setenv("MEGLOOM_SCRATCH", str(tmp_path / "scratch"))
    home = tmp_path / "home"
    with service(home) as client:
        client.start_session(a_session(3))
        status, steps = follow(client, "r")
        check_steps(status, steps, first=1, last=3)
    before = status.versions
    with service(home) as client:  # another service, with trainers that start from their states
        client.start_session(a_session(5))
        status, steps = follow(client, "r")
        check_steps(status, steps, first=4, last=5)
    assert status.versions == {policy: version + 2 for policy, version in before.items()}
    paths = RunPaths(home=home, run="r")
    folder = Path(paths.weights("critic"))
    stored = {one.version: one.manifest for one in list_versions(folder)}
    assert not all(manifest.is_whole for manifest in stored.values() if manifest)
    for version in range(1, status.versions["critic"] + 1):
        adapter = full_folder(version_dir(folder, version), tmp_path / "rebuilt") / "adapter"
        knobs = json.loads((adapter / "adapter_config.json").read_text())
        assert knobs["base_model_name_or_path"] == str(folder / "v000000"), "also after the resume"
    (state,) = Path(paths.states("writer")).iterdir()
    assert any(name.startswith("weights/value_head.") for name in read_state(state)[1])
