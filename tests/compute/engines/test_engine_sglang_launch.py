"""The SGLang command line has what RL needs on each device."""

from __future__ import annotations

import dataclasses
import json
import os

import pytest

from megloom.compute.engines import sglang_launch
from megloom.compute.engines.sglang_launch import SglangArgs, become_sglang, read_limits, sglang_command
from megloom.compute.state.weights import DONE_FILE


def command(device, **overrides):
    knobs = {"model_dir": "/m", "policy": "solver", "version": 7, "api_key": "secret", "port": 30000}
    return sglang_command(SglangArgs(device=device, **knobs | overrides), python="python")


def value_of(arguments, name):
    return arguments[arguments.index(name) + 1]


def test_both_forms_name_the_version_and_stay_on_loopback():
    for device in ("cuda", "cpu"):
        arguments = command(device)
        assert arguments[:3] == ["python", "-m", "sglang.launch_server"]
        assert value_of(arguments, "--weight-version") == "7"
        assert value_of(arguments, "--served-model-name") == "solver"
        assert value_of(arguments, "--host") == "127.0.0.1"
        assert value_of(arguments, "--device") == device
        assert "--skip-tokenizer-init" in arguments
        assert "--max-queued-requests" not in arguments
        assert all(isinstance(argument, str) for argument in arguments)


def test_gpu_form_honours_seeds_and_spreads_over_devices():
    arguments = command("cuda", tensor_parallel=4, context_length=8192)
    assert "--enable-deterministic-inference" in arguments
    assert value_of(arguments, "--tp-size") == "4"
    assert value_of(arguments, "--context-length") == "8192"
    assert value_of(arguments, "--dtype") == "bfloat16"


def test_cpu_form_is_plain_float32_with_a_bounded_pool_and_sleeps_when_idle():
    arguments = command("cpu", max_total_tokens=4096)
    assert value_of(arguments, "--dtype") == "float32"
    assert value_of(arguments, "--attention-backend") == "torch_native"
    assert value_of(arguments, "--max-total-tokens") == "4096"
    assert "--sleep-on-idle" in arguments
    assert "--enable-deterministic-inference" not in arguments


def test_gauges_are_written_as_often_as_asked_on_either_device():
    for device in ("cuda", "cpu"):
        assert value_of(command(device, decode_log_interval=1), "--decode-log-interval") == "1"
        assert "--decode-log-interval" not in command(device)


def test_key_is_not_part_of_the_printed_arguments():
    args = SglangArgs(model_dir="/m", policy="p", version=0, api_key="secret", port=1, device="cpu")
    assert "secret" not in repr(args)


@pytest.mark.parametrize("is_version", [False, True])
def test_a_process_becomes_sglang_on_the_whole_weights_of_a_version(is_version, tmp_path, monkeypatch):
    """The rebuilding itself is `full_folder`'s; a folder that is no version is taken as it is."""
    executed = []
    monkeypatch.setattr(os, "execvpe", lambda *given: executed.append(given))
    monkeypatch.setattr(sglang_launch, "full_folder", lambda folder, *, verified: folder / "whole")
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    if is_version:
        (tmp_path / DONE_FILE).touch()
    args = SglangArgs(model_dir=str(tmp_path), policy="p", version=0, api_key="k", port=1, device="cpu")
    become_sglang({"args": dataclasses.asdict(args), "python": "/p/python", "threads": 3})
    ((file, arguments, environment),) = executed
    assert file == arguments[0] == "/p/python"
    assert value_of(arguments, "--model-path") == str(tmp_path / "whole" if is_version else tmp_path)
    assert environment["OMP_NUM_THREADS"] == "3"
    assert "TORCHDYNAMO_DISABLE" not in environment


@pytest.mark.parametrize("config", ["{}", "[]", "not json", '{"vocab_size": null}'])
def test_limits_are_those_of_the_models_config_or_its_path_is_told(config, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"vocab_size": 61, "max_position_embeddings": 100}))
    assert read_limits(str(tmp_path)) == (61, 100)
    path.write_text(config)
    with pytest.raises(ValueError, match=f"{path}: no vocabulary size and context length"):
        read_limits(str(tmp_path))
