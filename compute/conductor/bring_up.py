"""Brings a session up: workers, trainers, the ledger of the newest snapshot, engines; ends with a `Run`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from megloom.compute.algorithms.table import policy_algorithm
from megloom.compute.conductor.backend import Backend
from megloom.compute.conductor.commit import initial_versions
from megloom.compute.conductor.config import SessionConfig
from megloom.compute.conductor.dispatch import Dispatcher
from megloom.compute.conductor.episodes import EpisodeDesk
from megloom.compute.conductor.events import Clock, EventLog
from megloom.compute.conductor.fields import FieldDesk
from megloom.compute.conductor.gateway_desk import GatewayDesk
from megloom.compute.conductor.gateways import Gateways
from megloom.compute.conductor.gradients import GradientLane
from megloom.compute.conductor.groups import make_groups
from megloom.compute.conductor.keeping import VersionKeeper
from megloom.compute.conductor.ledger import Committed, Ledger
from megloom.compute.conductor.loading import load_committed
from megloom.compute.conductor.provenance import provenance
from megloom.compute.conductor.publisher import Publisher, Serving
from megloom.compute.conductor.relay import AnnouncementRelay
from megloom.compute.conductor.reports import StepReport
from megloom.compute.conductor.restoring import ended_episodes, mend_versions
from megloom.compute.conductor.run import Run, RunPaths
from megloom.compute.conductor.samples import Aggregation
from megloom.compute.conductor.snapshot import Snapshot, tasks_hash
from megloom.compute.conductor.supervision import GATEWAY_PREFIX, Supervisor
from megloom.compute.gateway.leaf_classes import CLASSIFIERS
from megloom.compute.graph.meg import ExecutionGraph
from megloom.compute.graph.records import TaskRecord
from megloom.compute.graph.seeds import content_hash
from megloom.compute.graph.training_view import TrainingView
from megloom.compute.rollout.protocol import Worker, WorkloadPlan
from megloom.compute.scheduling.cursor import Cursor
from megloom.compute.store.step_store import StepStore
from megloom.compute.trainers.group import TrainingGroup
from megloom.compute.trainers.protocol import Trainer
from megloom.compute.workload import Training

MAX_EPISODES = 512  # in flight at once; more only lengthens the engines' queues


class SessionError(Exception):
    """The session cannot start: the stored run and the request do not fit together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Surroundings:
    """What a session is given: everything that touches the world, so that simulation can give other things.

    `discard_uncommitted(policy, version, states)` removes weight versions above the highest committed one and
    trainer states other than those, `discard_state` a trainer state that no ledger names any more. `keeper`
    knows the version folders, None where there are none.
    """

    config: SessionConfig
    backend: Backend
    store: StepStore
    paths: RunPaths
    clock: Clock
    wall_time: Callable[[], str]
    events: EventLog
    epoch: int
    discard_uncommitted: Callable[[str, int, Sequence[str]], None]
    discard_state: Callable[[str], None]
    keeper: VersionKeeper | None = None


class BringUp:
    """One use: `start` builds the run; `phase` says what it waits for meanwhile."""

    def __init__(self, around: Surroundings, tasks: asyncio.TaskGroup) -> None:
        self._around, self._tasks = around, tasks
        self._relay = AnnouncementRelay()
        self.phase = "the workload worker to start"
        self.run: Run | None = None

    async def start(self) -> tuple[Run, Supervisor]:
        """Returns the run, ready for its next step, and the supervisor of its cells.

        Raises: SessionError; UnknownVersion for a committed version that is damaged for good; what workers,
        trainers and engines raise at their start.
        """
        around = self._around
        manifest = await around.store.recover(around.config.run)
        snapshot = Snapshot.from_json(manifest.snapshot) if manifest else None
        workers = await self._start_workers()
        first = next(iter(workers.values()))
        plan = await first.describe()
        code_hash = content_hash(
            asdict(plan)
        )  # code, models, agents and step sizes as the worker loaded them
        if snapshot:
            _refuse_another(around.config, code_hash, snapshot.report)
        self.phase = "the dataset to load"
        for worker in workers.values():
            train, held_out = await worker.tasks("train"), await worker.tasks("eval")
        if snapshot:
            _refuse_other_tasks(around.config.run, [task.task_id for task in train], snapshot)
        self.phase = "the policies' weights"
        trainers = make_groups(
            plan,
            config=around.config,
            backend=around.backend,
            tasks=self._tasks,
            clock=around.clock,
            events=around.events,
        )
        ledger = await self._ledger(trainers, snapshot)
        stop_ids: dict[str, list[int]] = {}
        for worker in workers.values():
            stop_ids = await worker.load_tokenizers(tokenizer_dirs(ledger))
        run = self._assemble(plan, trainers, ledger, stop_ids, train, held_out, code_hash)
        supervisor = Supervisor(
            run=run,
            backend=around.backend,
            worker_events=self._relay,
            tokenizers=lambda: tokenizer_dirs(run.ledger),
        )
        run.publisher = Publisher(
            dispatcher=run.dispatcher,
            serving={
                policy: Serving(version=entry.version, uri=entry.uri)
                for policy, entry in ledger.policies.items()
            },
            fence=supervisor.restart_engine,
            events=around.events,
        )
        self._relay.target, self._relay.fields = run.desk, run.fields
        await self._restore(run)
        if run.gateways is not None:
            self.phase = "the gateways to start"
            await supervisor.start_gateways(run.gateways.names)
        self.phase = "the engines to start"
        await supervisor.start_engines(around.config.cells)
        for name, worker in workers.items():
            run.desk.worker_up(name, worker)
        if not snapshot:
            for record in [*train, *held_out, *initial_versions(run)]:
                run.store.record(record, step=0)
        if ledger.next_step <= around.config.steps:  # else the run is done, and this start makes nothing
            around.store.record(
                provenance(
                    config=around.config,
                    plan=plan,
                    code_hash=code_hash,
                    epoch=around.epoch,
                    step=ledger.next_step,
                    started_at=around.wall_time(),
                )
            )
        self.run = run
        return run, supervisor

    async def _restore(self, run: Run) -> None:
        """Gives the desk what the open step had ended when the last session was killed; drops the rest."""
        restored = ended_episodes(
            await run.store.unsealed(),
            step=run.ledger.next_step,
            versions=run.ledger.versions(),
            needs={policy: algorithm.needs for policy, algorithm in run.algorithms.items()},
        )
        kept = [record for episode in restored.values() for record in episode.records]
        num_dropped = await run.store.keep_unsealed(kept)
        run.desk.restore(restored)
        if restored or num_dropped:
            run.events.add("restored", episodes=len(restored), dropped_records=num_dropped)

    async def _start_workers(self) -> dict[str, Worker]:
        names = [f"worker/{number}" for number in range(self._around.config.cells.workload_workers)]
        return {name: await self._around.backend.start_worker(name, self._relay) for name in names}

    async def _ledger(self, trainers: Mapping[str, TrainingGroup], snapshot: Snapshot | None) -> Ledger:
        """The ledger of the newest snapshot with every trainer on it, or version 0 of every policy."""
        if snapshot:
            ledger = snapshot.ledger
            async with asyncio.TaskGroup() as tasks:
                for policy, entry in ledger.policies.items():
                    self._around.discard_uncommitted(policy, entry.highest, [*entry.states().values()])
                    load = load_committed(trainers[policy], ledger, policy)
                    tasks.create_task(load, name=f"load:{policy}")
            if self._around.keeper is not None:
                await mend_versions(ledger, trainers, keeper=self._around.keeper, events=self._around.events)
            return ledger
        for policy in trainers:  # what a start that never sealed step 0 left behind
            self._around.discard_uncommitted(policy, -1, ())
        async with asyncio.TaskGroup() as tasks:
            created = {
                policy: tasks.create_task(
                    trainer.create(self._around.paths.weights(policy)), name=f"create:{policy}"
                )
                for policy, trainer in trainers.items()
            }
        policies = {}
        for policy, task in created.items():
            initial = task.result()
            await trainers[policy].load(weights_uri=initial.uri, state_path=None)
            policies[policy] = Committed(
                version=0, parent_version=None, uri=initial.uri, digest=initial.digest, state_path=None
            )
        return Ledger(next_step=0, cursor=Cursor(), policies=policies)

    def _assemble(
        self,
        plan: WorkloadPlan,
        trainers: dict[str, TrainingGroup],
        ledger: Ledger,
        stop_ids: dict[str, list[int]],
        train: list[TaskRecord],
        held_out: list[TaskRecord],
        code_hash: str,
    ) -> Run:
        around = self._around
        config, clock, events, record = around.config, around.clock, around.events, around.store.record
        training = _with_overrides(plan, config)
        ends = {policy: tuple(ids) for policy, ids in stop_ids.items()}
        dispatcher = Dispatcher(
            run=config.run,
            graph=(graph := ExecutionGraph()),
            stop_ids=ends,
            call_timeout_s=training.call_timeout_s,
            tasks=self._tasks,
            clock=clock,
            events=events,
        )
        suspects: asyncio.Queue[str] = asyncio.Queue()  # bounded by the episodes in flight
        gateways = self._gateways(plan, training, graph, dispatcher, ends, suspects)
        desk = EpisodeDesk(
            run=config.run,
            seed=config.seed,
            plan=plan,
            graph=graph,
            dispatcher=dispatcher,
            record=record,
            max_episodes=MAX_EPISODES,
            timeout_s=training.episode_timeout_s,
            reward_retries=training.reward_retries,
            gateways=gateways,
            suspects=suspects,
            clock=clock,
            events=events,
        )
        trained = {name: spec for name, spec in plan.policies.items() if spec["trained"]}
        algorithms = {name: policy_algorithm(name, spec) for name, spec in trained.items()}
        lanes = {
            policy: GradientLane(
                run=config.run,
                policy=policy,
                algorithm=algorithms[policy],
                trainer=trainers[policy],
                restart=self._restart_trainer,
                groups_per_batch=training.micro_batch_groups,
                num_at_once=trainers[policy].num_replicas,
                hold=config.mode == "sync",
                record=record,
                clock=clock,
                events=events,
            )
            for policy in trained
        }
        for policy, lane in lanes.items():
            trainers[policy].show_to(lane.interval)
        view = TrainingView({name: algorithm.needs for name, algorithm in algorithms.items()})
        run = Run(
            config=config,
            paths=around.paths,
            plan=plan,
            training=training,
            train_ids=[task.task_id for task in train],
            eval_ids=[task.task_id for task in held_out],
            algorithms=algorithms,
            aggregations={name: Aggregation.of(algorithm) for name, algorithm in algorithms.items()},
            groups=trainers,
            lanes=lanes,
            view=view,
            desk=desk,
            dispatcher=dispatcher,
            gateways=gateways,
            store=around.store,
            ledger=ledger,
            clock=clock,
            wall_time=around.wall_time,
            events=events,
            code_hash=code_hash,
            epoch=around.epoch,
            discard_state=around.discard_state,
        )
        run.fields = FieldDesk(
            run=config.run,
            graph=graph,
            view=view,
            open_step=lambda: run.ledger.next_step,
            record=record,
            timeout_s=training.field_timeout_s,
            clock=clock,
            events=events,
        )
        return run

    def _gateways(
        self,
        plan: WorkloadPlan,
        training: Training,
        graph: ExecutionGraph,
        dispatcher: Dispatcher,
        stop_ids: Mapping[str, tuple[int, ...]],
        suspects: asyncio.Queue[str],
    ) -> Gateways | None:
        """The gateways' table, if the workload's episodes run programs that call through one."""
        around = self._around
        if not plan.uses_gateway:
            return None
        if plan.leaf_classes not in CLASSIFIERS:
            known = ", ".join(sorted(CLASSIFIERS))
            raise SessionError(f"workload {plan.name}: leaf_classes {plan.leaf_classes!r}, known: {known}")
        desk = GatewayDesk(
            agents=plan.agents,
            graph=graph,
            dispatcher=dispatcher,
            stop_ids=stop_ids,
            call_timeout_s=training.call_timeout_s,
            clock=around.clock,
            events=around.events,
        )
        return Gateways(
            run=around.config.run,
            names=[f"{GATEWAY_PREFIX}{number}" for number in range(around.config.cells.gateways)],
            agents=plan.agents,
            leaf_classes=plan.leaf_classes,
            desk=desk,
            new_token=around.backend.new_token,
            suspects=suspects,
            clock=around.clock,
            events=around.events,
        )

    async def _restart_trainer(self, policy: str) -> Trainer:
        """The policy's group, back on the last committed state.

        A version that the lost trainer had finished goes: the replay makes it again, and where satellites
        helped its bits are others.
        """
        assert self.run is not None
        group, entry = self.run.groups[policy], self.run.ledger.policies[policy]
        self._around.discard_uncommitted(policy, entry.highest, [*entry.states().values()])
        await load_committed(group, self.run.ledger, policy)
        return group


def tokenizer_dirs(ledger: Ledger) -> dict[str, str]:
    """Where each policy's tokenizer lies: beside its committed weights."""
    return {policy: committed.uri for policy, committed in ledger.policies.items()}


def _with_overrides(plan: WorkloadPlan, config: SessionConfig) -> Training:
    return Training.parse({**plan.training, **config.training.replacing()})


def _refuse_another(config: SessionConfig, code_hash: str, report: StepReport) -> None:
    for name, mine, stored in (
        ("config", config.config_hash(), report.config_hash),
        ("code", code_hash, report.code_hash),
    ):
        if stored != mine:
            raise SessionError(
                f"run {config.run} was made with {name} {stored}, this request has {mine}: "
                f"use another run name, or the same {name}"
            )


def _refuse_other_tasks(run: str, task_ids: list[str], snapshot: Snapshot) -> None:
    """The cursor counts in the tasks' order: over other tasks it would skip some and repeat others."""
    mine = tasks_hash(task_ids)
    if snapshot.tasks_hash not in (None, mine):
        raise SessionError(
            f"run {run} was made on tasks {snapshot.tasks_hash}, this dataset's {len(task_ids)} are {mine}: "
            "use another run name, or the same dataset"
        )
