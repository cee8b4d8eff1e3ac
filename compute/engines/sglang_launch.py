"""Builds the command line that starts real SGLang (0.5.23) as one of our engines.

One function for GPU production and for the CPU test tier (docs/sglang.md); the CPU form is what
`make test-sglang` runs. Pure: the caller starts the process. The result holds the API key, so it must not
be logged.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


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
