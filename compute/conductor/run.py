"""What a step of a session works with: the run's fixed parts, and the few that move."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megloom.compute.algorithms.base import PolicyGradient
from megloom.compute.conductor.config import SessionConfig
from megloom.compute.conductor.dispatch import Dispatcher
from megloom.compute.conductor.episodes import EpisodeDesk
from megloom.compute.conductor.events import Clock, EventLog
from megloom.compute.conductor.fields import FieldDesk
from megloom.compute.conductor.gateways import Gateways
from megloom.compute.conductor.gradients import GradientLane
from megloom.compute.conductor.keeping import VersionKeeper
from megloom.compute.conductor.ledger import Ledger
from megloom.compute.conductor.publisher import Publisher
from megloom.compute.conductor.reports import StepReport
from megloom.compute.conductor.samples import Aggregation
from megloom.compute.graph.training_view import TrainingView
from megloom.compute.rollout.protocol import WorkloadPlan
from megloom.compute.store.step_store import StepStore
from megloom.compute.trainers.group import TrainingGroup
from megloom.compute.workload import Training


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPaths:
    """Where a run's files lie: under the service's home, sealed steps elsewhere if `store` names a place."""

    home: Path
    run: str
    store: str | None = None

    @property
    def store_root(self) -> str:
        return self.store or str(self.home / "store")

    @property
    def journal(self) -> Path:
        return self.home / "runs" / self.run / "journal.sqlite"

    @property
    def events(self) -> Path:
        return self.home / "runs" / self.run / "events.jsonl"

    @property
    def config(self) -> Path:
        return self.home / "runs" / self.run / "config.json"

    def weights(self, policy: str) -> str:
        return str(self.home / "store" / "weights" / self.run / policy)

    def states(self, policy: str) -> str:
        return str(self.home / "runs" / self.run / "state" / policy)

    def state(self, policy: str, step: int) -> str:
        return f"{self.states(policy)}/s{step:06d}"


@dataclass(kw_only=True, slots=True)
class Run:
    """A session's parts. Only the step loop writes `ledger` and `is_ending`; the rest is fixed."""

    config: SessionConfig
    paths: RunPaths
    plan: WorkloadPlan
    training: Training
    train_ids: Sequence[str]
    eval_ids: Sequence[str]
    algorithms: Mapping[str, PolicyGradient]
    aggregations: Mapping[str, Aggregation]
    groups: Mapping[str, TrainingGroup]
    lanes: Mapping[str, GradientLane]
    view: TrainingView
    desk: EpisodeDesk
    dispatcher: Dispatcher
    gateways: Gateways | None
    store: StepStore
    ledger: Ledger
    clock: Clock
    wall_time: Callable[[], str]
    events: EventLog
    code_hash: str
    epoch: int
    discard_state: Callable[[str], None]
    fields: FieldDesk = field(init=False)  # asks the run for its open step
    is_ending: bool = False  # the step in work is the last one
    keeper: VersionKeeper | None = None  # of version folders; None where there are none, as in simulation
    publisher: Publisher = field(init=False)  # needs the supervisor, which needs the run
    on_commit: Callable[[StepReport], None] = field(default=lambda report: None)

    @property
    def name(self) -> str:
        return self.config.run
