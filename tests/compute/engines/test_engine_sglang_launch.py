"""The SGLang command line has what RL needs on each device."""

from __future__ import annotations

from megloom.compute.engines.sglang_launch import SglangArgs, sglang_command


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
