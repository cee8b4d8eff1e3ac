"""The `megloom` command. Parses and checks everything before anything heavy is imported."""

from __future__ import annotations

import argparse
import datetime
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from megloom import __version__, export_command, lineage_commands, retention_command, version_commands

BAD_INPUT = 2


class _Parser(argparse.ArgumentParser):
    """One clear line for bad input instead of the usage text."""

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message} (see {self.prog} --help)", file=sys.stderr)
        raise SystemExit(BAD_INPUT)


def main(argv: list[str] | None = None) -> int:
    """Entry of the console script; returns the exit code."""
    arguments = _parser().parse_args(argv)
    try:
        command: Callable[[argparse.Namespace], int] = arguments.command
        return command(arguments)
    except ValueError as error:
        print(f"megloom: {error}", file=sys.stderr)
        return BAD_INPUT
    except FileNotFoundError as error:
        print(f"megloom: {error}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print("megloom: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="megloom",
        description="Trains multi-agent LLM systems by reinforcement learning, from Dagster or from here.",
        epilog="Start with: megloom demo",
    )
    parser.add_argument("--version", action="version", version=f"megloom {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND", parser_class=_Parser)

    demo = commands.add_parser("demo", help="train the three-agent arithmetic team and write a report")
    _add_training(demo, steps_required=False)
    demo.add_argument(
        "--model", choices=["default", "smollm2"], default="default",
        help="default: a tiny transformer from scratch; smollm2: SmolLM2-135M-Instruct, a few steps",
    )  # fmt: skip
    demo.add_argument("--run", help="name of the run (default: demo-<time>)")
    demo.add_argument("--report", default="report.html", help="where the report is written")
    demo.set_defaults(command=_demo)

    train = commands.add_parser("train", help="train a pipeline for a number of steps, or continue a run")
    train.add_argument("pipeline", metavar="PIPELINE", help="short name, or package.module:attribute")
    _add_training(train, steps_required=True)
    train.add_argument("--run", required=True, help="name of the run; an existing one is continued")
    train.add_argument("--report", help="write an HTML report to this path at the end")
    train.set_defaults(command=_train)

    lineage_commands.register(commands, _Parser)

    for name, text, command in (
        ("up", "start the compute service (training starts it by itself)", _up),
        ("down", "stop the compute service and everything that it started", _down),
        ("status", "the service and its sessions", _status),
    ):
        service = commands.add_parser(name, help=text)
        _add_home(service)
        service.set_defaults(command=command)

    ui = commands.add_parser("ui", help="Dagster's web UI on this instance, on loopback")
    ui.add_argument("--port", type=int, default=3000)
    _add_home(ui)
    ui.set_defaults(command=_ui)

    export_command.register(commands)
    retention_command.register(commands)
    version_commands.register(commands, _Parser)
    return parser


def _add_home(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--home", help="folder of the service's files (default: $MEGLOOM_HOME or .megloom)")


def _add_training(parser: argparse.ArgumentParser, *, steps_required: bool) -> None:
    parser.add_argument("--steps", type=int, required=steps_required, help="training steps in total")
    parser.add_argument("--seed", type=int, default=0, help="seed of tasks, sampling and weights")
    parser.add_argument("--duration-s", type=float, help="end with the first step that finishes after it")
    parser.add_argument(
        "--mode", choices=["frozen", "sync"], default="frozen",
        help="frozen: gradients are taken while episodes still run; sync: after all of them",
    )  # fmt: skip
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="settings",
        help="any session setting, for example training.group_size=8 or cells.engines_per_policy=2",
    )  # fmt: skip
    _add_home(parser)


def _session(arguments: argparse.Namespace, *, workload: str, run: str) -> Any:
    """The checked session config of a workload that can be imported. Raises: ValueError in one line."""
    from megloom.compute.conductor.config import SessionConfig, set_path
    from megloom.compute.importing import import_workload

    values: dict[str, Any] = {
        "workload": workload,
        "run": run,
        "steps": arguments.steps,
        "seed": arguments.seed,
        "mode": arguments.mode,
        "duration_s": arguments.duration_s,
        "import_paths": [str(Path.cwd())],
    }
    for setting in arguments.settings:
        set_path(values, setting)
    config = SessionConfig.parse(values)
    sys.path[:0] = [path for path in config.import_paths if path not in sys.path]
    import_workload(config.workload)  # what is wrong with it is said here, before anything is started
    return config


def _demo(arguments: argparse.Namespace) -> int:
    from megloom.systems import resolve_system

    smollm2 = arguments.model == "smollm2"
    if arguments.steps is None:
        arguments.steps = SMOLLM2_STEPS if smollm2 else DEMO_STEPS
    if arguments.duration_s is None and not smollm2:
        arguments.duration_s = DEMO_TRAINING_S
    if smollm2:
        arguments.settings.insert(0, f"training.eval_tasks={SMOLLM2_EVAL_TASKS}")
    run = arguments.run or f"demo-{datetime.datetime.now():%m%d-%H%M%S}"
    name = "arithmetic_smollm2" if smollm2 else "arithmetic_team"
    config = _session(arguments, workload=resolve_system(name), run=run)
    if smollm2:
        from megloom.estimate import smollm2_step_s

        print(
            f"SmolLM2-135M-Instruct: converting its weights takes about a minute, once; then a step takes"
            f" about {smollm2_step_s():.0f} s on this CPU, and {config.steps} steps run",
            flush=True,
        )
    return _train_and_report(arguments, config, demo=True)


DEMO_STEPS = 400  # more than fit into the time
DEMO_TRAINING_S = 270.0  # leaves time of the six minutes for starting, the last evaluation and the report
SMOLLM2_STEPS, SMOLLM2_EVAL_TASKS = 2, 4


def _train(arguments: argparse.Namespace) -> int:
    from megloom.systems import resolve_system

    config = _session(arguments, workload=resolve_system(arguments.pipeline), run=arguments.run)
    return _train_and_report(arguments, config, demo=False)


def _train_and_report(arguments: argparse.Namespace, config: Any, *, demo: bool) -> int:
    from megloom.home import prepare_dagster_home, service_home

    home = service_home(arguments.home)
    prepare_dagster_home()
    from megloom.training import train

    print(f"run {config.run}: {config.workload}, up to {config.steps} steps, seed {config.seed}", flush=True)
    trained = train(config, home=home)
    if trained.failure is not None:
        print(f"megloom: run {config.run} failed: {trained.failure}", file=sys.stderr)
        return 1
    table = trained.table
    pipeline = config.workload.partition(":")[0].rpartition(".")[2]
    print(
        f"{'demo' if demo else 'train'} pipeline={pipeline} steps={table.last_step}"
        f" accuracy_before={_fixed(table.accuracy_before)} accuracy_after={_fixed(table.accuracy)}"
        f" invocations={table.num_invocations} policy_versions={table.num_versions}"
        f" wall_s={trained.wall_s:.1f}"
    )
    command = _lineage_command(trained.reports, config.run, arguments.home)
    print(f"which samples made it:  {command}")
    if arguments.report:
        from megloom.report import write_report

        path = write_report(config, trained.reports, home=home, command=command, path=Path(arguments.report))
        print(f"report:  {path}")
    return 0


def _lineage_command(reports: list[Any], run: str, home: str | None) -> str:
    policies = list(reports[-1].policies) if reports else ["POLICY"]
    policy = "solver" if "solver" in policies else policies[-1]
    place = f" --home {home}" if home else ""
    return f"{_program()} lineage version {policy}@last --run {run}{place}"


def _program() -> str:
    """How the user can call this very installation from where they are."""
    here = Path(sys.executable).parent / "megloom"
    if shutil.which("megloom") == str(here):
        return "megloom"
    return str(here.relative_to(Path.cwd()) if here.is_relative_to(Path.cwd()) else here)


def _fixed(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}"


def _up(arguments: argparse.Namespace) -> int:
    from megloom.compute.conductor.client import ensure_service
    from megloom.home import service_home

    health = ensure_service(service_home(arguments.home)).health()
    print(f"service pid={health['pid']} epoch={health['epoch']} home={service_home(arguments.home)}")
    return 0


def _down(arguments: argparse.Namespace) -> int:
    from megloom.compute.conductor.client import stop_service
    from megloom.home import service_home

    was_up = stop_service(service_home(arguments.home))
    print("service stopped" if was_up else "no service was running")
    return 0


def _status(arguments: argparse.Namespace) -> int:
    from megloom.compute.conductor.client import ServiceClient, ServiceDown
    from megloom.home import service_home

    client = ServiceClient(service_home(arguments.home))
    try:
        health, sessions = client.health(), client.sessions()
    except ServiceDown as error:
        print(error)
        return 1
    print(f"service pid={health['pid']} epoch={health['epoch']} sessions={len(sessions)}")
    for session in sessions:
        versions = ",".join(f"{name}@{version}" for name, version in session.versions.items())
        line = f"{session.run}  {session.state}  step={session.step}/{session.target_steps}  {versions}"
        notes = [note for note in (session.waiting_for, session.failure) if note]
        print(line + ("  " + "; ".join(notes) if notes else ""))
    return 0


def _ui(arguments: argparse.Namespace) -> int:
    from megloom.home import prepare_dagster_home, service_home

    os.environ["MEGLOOM_HOME"] = str(service_home(arguments.home))
    home = prepare_dagster_home()
    workspace = Path("workspace.yaml")
    target = ["-w", str(workspace)] if workspace.exists() else ["-m", "megloom.pipelines.definitions"]
    print(f"Dagster on http://127.0.0.1:{arguments.port} (instance {home}); stop with Ctrl-C", flush=True)
    # A shell starts background commands with SIGINT ignored, and Dagster then ignores SIGTERM as well.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.execv(
        sys.executable,
        [sys.executable, "-m", "dagster", "dev", "-h", "127.0.0.1", "-p", str(arguments.port), *target],
    )


if __name__ == "__main__":
    sys.exit(main())
