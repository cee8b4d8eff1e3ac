"""Builds the command line that starts real SGLang (0.5.23) as one of our engines, and becomes it.

One function for GPU production and for the CPU test tier (docs/sglang.md); the CPU form is what
`make test-sglang` runs. The command line holds the API key, so it must not be logged.
"""

from __future__ import annotations

import json
import os
import socket
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NoReturn

from megloom.compute.state.staging import full_folder
from megloom.compute.state.weights import is_complete


@dataclass(frozen=True, kw_only=True, slots=True)
class SglangArgs:
    """How to start SGLang. `max_total_tokens` is the size of the key-value pool, a must on a CPU.

    `decode_log_interval` is the number of decode steps between two writings of the gauges in `/metrics`;
    None leaves SGLang's 40.
    """

    model_dir: str
    policy: str
    version: int
    api_key: str = field(repr=False)
    port: int
    device: Literal["cuda", "cpu"]
    context_length: int | None = None
    host: str = "127.0.0.1"
    tensor_parallel: int = 1
    mem_fraction_static: float = 0.8
    max_running_requests: int = 64
    max_total_tokens: int = 65536
    decode_log_interval: int | None = None


def sglang_command(args: SglangArgs, *, python: str) -> list[str]:
    """Returns the argument vector that starts the server with the interpreter `python`.

    On a GPU sampling is deterministic, since only then SGLang honours per-request seeds. On a CPU attention
    is plain torch in float32, which refuses the deterministic mode.
    """
    command = [python, "-m", "sglang.launch_server"]
    options: dict[str, str | int | float] = {
        "model-path": args.model_dir,
        "served-model-name": args.policy,
        "weight-version": args.version,
        "api-key": args.api_key,
        "host": args.host,
        "port": args.port,
        "device": args.device,
        "max-running-requests": args.max_running_requests,
    }
    # ids in, ids out: no tokenizer; max-queued-requests stays unset, since it fails retracted requests
    switches = ["skip-tokenizer-init", "enable-metrics"]
    if args.context_length is not None:
        options["context-length"] = args.context_length
    if args.decode_log_interval is not None:
        options["decode-log-interval"] = args.decode_log_interval
    if args.device == "cuda":
        options |= {
            "dtype": "bfloat16",
            "tp-size": args.tensor_parallel,
            "mem-fraction-static": args.mem_fraction_static,
        }
        switches.append("enable-deterministic-inference")
    else:
        options |= {
            "dtype": "float32",
            "attention-backend": "torch_native",
            "cuda-graph-backend-decode": "disabled",
            "cuda-graph-backend-prefill": "disabled",
            "max-total-tokens": args.max_total_tokens,
            "mem-fraction-static": 0.3,
        }
        switches.append("sleep-on-idle")  # otherwise the idle scheduler burns a core
    for name, value in options.items():
        command += [f"--{name}", str(value)]
    return command + [f"--{name}" for name in switches]


def free_port() -> int:
    """A port of loopback that nobody has now: SGLang cannot be asked to tell which one the kernel chose."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def read_limits(model_dir: str) -> tuple[int, int]:
    """Vocabulary size and context length of a model's folder: SGLang reports neither.

    Raises: ValueError naming the file, FileNotFoundError.
    """
    path = Path(model_dir) / "config.json"
    try:
        config = json.loads(path.read_text())
        return int(config["vocab_size"]), int(config["max_position_embeddings"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: no vocabulary size and context length ({error!r})") from None


def become_sglang(values: dict[str, Any]) -> NoReturn:
    """Entry of a forked process: goes on as SGLang, with the same pid, process group and log.

    `values` are the fields of `SglangArgs` as `args`, the interpreter as `python`, and `threads`.
    Raises: WeightsError if a version that is kept as a delta cannot be rebuilt; OSError without interpreter.
    """
    args, python = SglangArgs(**values["args"]), values["python"]
    if is_complete(folder := Path(args.model_dir)):
        args = replace(args, model_dir=str(full_folder(folder, verified=False)))
    environment = {**os.environ, "OMP_NUM_THREADS": str(values["threads"])}
    environment.pop("TORCHDYNAMO_DISABLE", None)  # the fork server's own setting
    os.execvpe(python, sglang_command(args, python=python), environment)
