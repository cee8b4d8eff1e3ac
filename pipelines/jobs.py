"""`training_session_job`: one run that follows one training session through all of its steps.

One op drives the whole session, since sampling and gradients overlap inside a step; the assets are its
events. The config is typed for the Launchpad and parsed once, into the service's `SessionConfig`.

No postponed annotations here: Dagster reads the signatures, and does not resolve text.
"""

from typing import Any, Literal

import dagster as dg
from pydantic import Field

from megloom.assets.session import follow_session
from megloom.assets.system import load_system
from megloom.compute.conductor.client import ServiceDown
from megloom.compute.conductor.config import SessionConfig
from megloom.resources.compute_service import ComputeService

DEFAULT_WORKLOAD = "megloom.pipelines.systems.arithmetic_team:workload"
RETRY_AFTER_S = 2.0  # a service that was killed needs a moment to be gone
_KEEP = "Empty keeps the workload's own."


class CellsConfig(dg.Config):
    """Processes and threads on the service's machine."""

    engines_per_policy: int = Field(default=1, description="Inference engines of each policy.")
    engine_slots: int = Field(default=256, description="Concurrent sequences of one engine.")
    workload_workers: int = Field(default=1, description="Processes that run workflows and rewards.")
    trainers: int | None = Field(
        default=None, description="Places that trainers share. Empty: one for each replica of each policy."
    )
    trainer_idle_s: float | None = Field(
        default=None, description="Idle seconds after which a trainer leaves. Empty: when a place is wanted."
    )
    gateways: int = Field(default=1, description="Gateway processes, where programs call agents over HTTP.")
    engine_folders: list[str] = Field(
        default=[], description="Folders that engines load new versions from, in turn. Empty: the store."
    )
    threads: int = Field(default=1, description="Torch threads of each engine and trainer.")
    device: str = Field(default="cpu", description="Device of engines and trainers.")
    engine: Literal["local", "sglang"] = Field(
        default="local", description="Who samples: Megloom's own engine, or real SGLang."
    )
    engine_python: str | None = Field(
        default=None, description="Interpreter that has SGLang. Empty: the service's own."
    )


class TrainingOverridesConfig(dg.Config):
    """Values that replace the workload's own."""

    tasks_per_step: int | None = Field(default=None, description=f"Tasks drawn in a step. {_KEEP}")
    group_size: int | None = Field(default=None, description=f"Episodes of one task, at least 2. {_KEEP}")
    micro_batch_groups: int | None = Field(default=None, description=f"Groups in a micro-batch. {_KEEP}")
    paths_per_episode: str | None = Field(
        default=None, description=f"Training paths of an episode, a number or all. {_KEEP}"
    )
    warm_examples: int | None = Field(
        default=None, description=f"Demonstrations per policy at the start. {_KEEP}"
    )
    warm_batch: int | None = Field(default=None, description=f"Demonstrations per optimizer step. {_KEEP}")
    eval_every: int | None = Field(
        default=None, description=f"Steps between evaluations, 0 for none. {_KEEP}"
    )
    eval_small: int | None = Field(default=None, description=f"Tasks of a small evaluation. {_KEEP}")
    eval_tasks: int | None = Field(
        default=None, description="Tasks of a full evaluation. Empty takes them all."
    )
    eval_draws: int | None = Field(default=None, description=f"Draws per task in a full evaluation. {_KEEP}")
    episode_timeout_s: float | None = Field(default=None, description=f"Seconds for an episode. {_KEEP}")
    call_timeout_s: float | None = Field(default=None, description=f"Seconds for an agent call. {_KEEP}")
    field_timeout_s: float | None = Field(default=None, description=f"Seconds for late fields. {_KEEP}")
    reward_retries: int | None = Field(
        default=None, description=f"More tries of a reward function that raises. {_KEEP}"
    )


class StorageConfig(dg.Config):
    """Where sealed steps go, and how long their tokens stay."""

    root: str | None = Field(
        default=None, description="Folder or fsspec URL such as s3://bucket/runs. Empty: the home's store."
    )
    keep_tokens_of_versions: int | None = Field(
        default=None, description="Drops token segments older than so many versions. Empty keeps all."
    )
    keep_states: int = Field(default=1, description="Trainer states kept of each policy.")


class TrainingSessionConfig(dg.Config):
    """What to train, for how long, and on how much. A test holds it equal to `SessionConfig`."""

    workload: str = Field(default=DEFAULT_WORKLOAD, description="package.module:attribute of the Workload.")
    run: str = Field(default="", description="Name of the run. Empty: made from the id of this Dagster run.")
    steps: int = Field(default=10, description="Training steps in total; a run that has fewer is continued.")
    seed: int = Field(default=0, description="Seed of tasks, sampling and initial weights.")
    mode: Literal["frozen", "sync"] = Field(
        default="frozen", description="frozen: gradients while other episodes run. sync: when all have ended."
    )
    imitation_only: bool = Field(default=False, description="Every step repeats the demonstration step.")
    duration_s: float | None = Field(
        default=None, description="Ends the run with the first step that finishes after so many seconds."
    )
    lease_s: float = Field(
        default=600.0, description="The session pauses if no client asks for so many seconds."
    )
    import_paths: list[str] = Field(default=[], description="Folders to import the workload from.")
    training: TrainingOverridesConfig = Field(
        default_factory=TrainingOverridesConfig, description="Values that replace the workload's own."
    )
    cells: CellsConfig = Field(default_factory=CellsConfig, description="Processes on the service's machine.")
    storage: StorageConfig = Field(default_factory=StorageConfig, description="Where sealed steps go.")

    def session(self, dagster_run: dg.DagsterRun) -> SessionConfig:
        """The session to start. A re-executed Dagster run gets the name, and so the session, of the first.

        Raises: ValueError that names each wrong value.
        """
        values: dict[str, Any] = self.model_dump()
        run = self.run or f"run-{(dagster_run.root_run_id or dagster_run.run_id)[:8]}"
        return SessionConfig.parse({**values, "run": run})


@dg.op(
    description="Trains a multi-agent system in the compute service and reports every step's assets.",
)
def training_session(
    context: dg.OpExecutionContext, config: TrainingSessionConfig, service: ComputeService
) -> None:
    """Tried again if the service was lost: the next attempt starts it anew and continues the session.

    A retry policy would not do: Dagster applies it to interrupts too, and a cancelled run would start again.
    """
    try:
        session = config.session(context.dagster_run)
        system = load_system(session.workload, import_paths=session.import_paths)
    except ValueError as error:
        raise dg.Failure(str(error), allow_retries=False) from error
    context.instance.add_run_tags(
        context.run_id,
        {
            "megloom/run": session.run,
            "megloom/system": system.name,
            "megloom/mode": session.mode,
            "megloom/config_hash": session.config_hash(),
        },
    )
    try:
        status = follow_session(context, service.connect(), system, session)
    except ServiceDown as error:
        raise dg.RetryRequested(max_retries=2, seconds_to_wait=RETRY_AFTER_S) from error
    context.log.info(f"session run={status.run} {status.state} at step={status.step}")


@dg.job(
    description="Trains a system for a number of steps in one run. Continues the session that it finds.",
    executor_def=dg.in_process_executor,
)
def training_session_job() -> None:
    training_session()
