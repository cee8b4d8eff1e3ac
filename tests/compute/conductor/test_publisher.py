"""A version comes to all engines or to none, traffic never meets a mix, and who fails is fenced and told."""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megloom.compute.conductor import publisher
from megloom.compute.conductor.canary import Answer, Canary, trainer_logprobs
from megloom.compute.conductor.dispatch import Dispatcher
from megloom.compute.conductor.events import EventLog
from megloom.compute.conductor.publisher import PublishAborted, Publisher, Serving
from megloom.compute.conductor.stager import ChunkStager, FolderNode, LocalStager, Stager, StagingError
from megloom.compute.conductor.supervision import Supervisor
from megloom.compute.conductor.version_services import local_services
from megloom.compute.engines.protocol import (
    Completion,
    EngineError,
    EngineInfo,
    EngineUnavailable,
    FinishReason,
    GenerateRequest,
    PauseMode,
    VersionSpan,
)
from megloom.compute.graph.meg import ExecutionGraph
from megloom.compute.simulation.clock import run_virtual
from megloom.compute.state.digests import file_digest
from megloom.compute.state.weights import MODEL_FILE, version_dir
from megloom.compute.store.offload import InlineOffload
from megloom.compute.trainers.protocol import ForwardReport, MicroBatch, Published, TrainerError
from tests.compute.state.weight_versions import put_line, spoil

CELLS = ("engine/p/0", "engine/p/1", "engine/p/2")
Fault = Callable[[str], Any]  # from a verb to what it does instead: an exception to raise, or "hang"


@dataclass(kw_only=True)
class FakeEngine:
    """An engine that notes what it was told. `wrong_by` shifts its logprobs once it has loaded a version."""

    cell: str
    version: int = 0
    faults: Mapping[str, Any] = field(default_factory=dict)
    wrong_by: float = 0.0
    told: list[str] = field(default_factory=list)
    paused: bool = False
    url: str = "fake://"
    token: str = ""
    context_length: int | None = 64

    async def _verb(self, name: str) -> None:
        self.told.append(name)
        await asyncio.sleep(0.01)
        fault = self.faults.get(name)
        if fault == "hang":
            await asyncio.Event().wait()
        if isinstance(fault, Exception):
            raise fault

    async def generate(self, request: GenerateRequest) -> Completion:
        await self._verb("generate")
        ids = tuple(7 + n for n in range(request.max_tokens))
        return Completion(
            rid=request.rid,
            token_ids=ids,
            logprobs=tuple(-1.0 - 0.1 * n + self.wrong_by for n in range(len(ids))),
            finish_reason=FinishReason.LENGTH,
            version_spans=(VersionSpan(version=self.version, start=0, end=len(ids)),),
            cached_tokens=0,
        )

    async def abort(self, rid: str) -> None: ...

    async def pause(self, mode: PauseMode) -> None:
        await self._verb("pause")
        self.paused = True

    async def resume(self) -> None:
        await self._verb("resume")
        self.paused = False

    async def load_version(self, model_path: str, version: int, digest: str | None) -> None:
        await self._verb("load")
        self.told[-1] = f"load {Path(model_path).name}"
        if self.faults.get("version") != "stuck":
            self.version = version

    async def info(self) -> EngineInfo:
        await self._verb("info")
        return EngineInfo(
            policy="p",
            version=self.version,
            vocab_size=40,
            context_length=64,
            incarnation=self.cell,
            paused=self.paused,
        )

    async def ready(self) -> bool:
        return not self.paused

    async def close(self) -> None: ...


class FakeStager:
    """`failures` of each cell come before it succeeds."""

    def __init__(self, failures: Mapping[str, int] | None = None) -> None:
        self._failures = dict(failures or {})
        self.staged: list[str] = []

    async def stage(self, cell: str, published: Published) -> str:
        await asyncio.sleep(0.01)
        if self._failures.get(cell, 0) > 0:
            self._failures[cell] -= 1
            raise StagingError(f"{cell}: disk full")
        self.staged.append(cell)
        return f"/node/{cell.rpartition('/')[2]}"


def published(version: int = 1, uri: str = "w/v000001", digest: str = "d") -> Published:
    return Published(uri=uri, version=version, digest=digest, size_bytes=1)


@dataclass
class Scene:
    """A publisher over a real dispatcher, and engines whose restart is noted and heals them."""

    engines: dict[str, FakeEngine]
    stager: Stager | None = None
    canary: Canary | None = None
    restarted: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        clock = asyncio.get_running_loop().time
        self.events = EventLog(clock)
        self.dispatcher = Dispatcher(
            run="r",
            graph=ExecutionGraph(),
            stop_ids={"p": (0,)},
            call_timeout_s=5,
            tasks=asyncio.TaskGroup(),
            clock=clock,
            events=self.events,
        )
        for cell, engine in self.engines.items():
            self.dispatcher.add_engine(cell, policy="p", capacity=4)
            self.dispatcher.engine_up(cell, engine)
        self.publisher = Publisher(
            dispatcher=self.dispatcher,
            serving={"p": Serving(version=0, uri="w/v000000")},
            fence=self.restart,
            events=self.events,
            stager=self.stager,
            canary=self.canary,
        )

    async def restart(self, cell: str, cause: str) -> None:
        assert cell not in self.dispatcher.engines_of("p"), "fenced before it is restarted"
        self.restarted[cell] = cause
        self.engines[cell] = FakeEngine(cell=cell, version=self.publisher.serving["p"].version)
        self.dispatcher.engine_up(cell, self.engines[cell])

    def versions(self) -> list[int]:
        return [engine.version for engine in self.engines.values()]


def engines(**faults: Mapping[str, Any]) -> dict[str, FakeEngine]:
    """Three engines; `faults` by e0, e1, e2."""
    return {cell: FakeEngine(cell=cell, faults=faults.get(f"e{n}", {})) for n, cell in enumerate(CELLS)}


def scene(
    body: Callable[[Scene], Any],
    fakes: dict[str, FakeEngine] | None = None,
    *,
    stager: Stager | None = None,
    canary: Canary | None = None,
) -> Scene:
    async def main() -> Scene:
        made = Scene(fakes or engines(), stager, canary)
        await body(made)
        return made

    return run_virtual(main())


async def publish_one(at: Scene) -> None:
    await at.publisher.publish("p", published())


def test_all_engines_load_what_was_staged_on_their_node() -> None:
    stager = FakeStager()
    at = scene(publish_one, stager=stager)
    assert at.versions() == [1, 1, 1] and sorted(stager.staged) == sorted(CELLS) and not at.restarted
    assert [e.told for e in at.engines.values()] == [
        ["pause", f"load {n}", "resume", "info"] for n in range(3)
    ]
    assert at.publisher.serving["p"] == Serving(version=1, uri="w/v000001")


def test_a_node_that_cannot_stage_for_a_while_is_tried_again() -> None:
    at = scene(publish_one, stager=FakeStager({CELLS[1]: 2}))
    assert at.versions() == [1, 1, 1] and not at.restarted


def test_a_node_that_cannot_stage_aborts_the_publish_and_nothing_has_changed() -> None:
    """The old version serves everywhere, no engine was even paused, and the next try may use the number."""

    async def body(at: Scene) -> None:
        with pytest.raises(
            PublishAborted, match=r"p@1 aborted, .*engine/p/1: disk full \(3 tries\)"
        ) as caught:
            await at.publisher.publish("p", published())
        assert (caught.value.policy, caught.value.version) == ("p", 1)
        assert at.versions() == [0, 0, 0] and [e.told for e in at.engines.values()] == [[], [], []]
        assert at.publisher.serving["p"].version == 0 and not at.restarted
        assert len(at.dispatcher.engines_of("p")) == 3
        assert any("publish_aborted" in line for line in at.events.take())
        await at.publisher.publish("p", published())

    assert scene(body, stager=FakeStager({CELLS[1]: 3})).versions() == [1, 1, 1]


@pytest.mark.parametrize(
    ("faults", "cause"),
    [
        ({"pause": EngineUnavailable("gone")}, "gone"),
        ({"pause": "hang"}, "did not pause within"),
        ({"load": EngineUnavailable("no memory")}, "no memory"),
        ({"load": "hang"}, "not loaded within"),
        ({"resume": EngineError("odd")}, "odd"),
        ({"info": "hang"}, "not loaded within"),
        ({"version": "stuck"}, "says version 0"),
    ],
)
def test_an_engine_that_fails_in_phase_two_is_fenced_and_started_on_the_new_version(
    faults: Mapping[str, Any], cause: str
) -> None:
    at = scene(publish_one, engines(e1=faults), stager=FakeStager())
    assert at.versions() == [1, 1, 1] and list(at.restarted) == [CELLS[1]]
    assert cause in at.restarted[CELLS[1]] and "publish of version 1 failed" in at.restarted[CELLS[1]]
    assert at.publisher.serving["p"].version == 1 and len(at.dispatcher.engines_of("p")) == 3


def canary(
    expected: Sequence[float] | None = None, *, error: Exception | None = None, dtype: str = "float32"
) -> Canary:
    async def reference(policy: str, answer: Answer) -> Sequence[float]:
        if error is not None:
            raise error
        assert expected is not None and policy == "p"
        return expected

    asks = expected is not None or error is not None
    return Canary(run="r", dtypes={"p": dtype}, reference=reference if asks else None)


def test_an_engine_whose_canary_differs_from_the_first_one_is_fenced() -> None:
    fakes = engines()
    fakes[CELLS[2]].wrong_by = 0.5
    at = scene(publish_one, fakes, canary=canary())
    assert list(at.restarted) == [CELLS[2]] and "0.5 from the first engine's" in at.restarted[CELLS[2]]
    assert fakes[CELLS[0]].told == ["pause", "load v000001", "resume", "info", "generate"]


@pytest.mark.parametrize(("dtype", "is_fenced"), [("float32", True), ("bfloat16", False)])
def test_the_trainer_is_the_better_reference(dtype: str, is_fenced: bool) -> None:
    """With one engine there is no other to ask; the tolerance is the published dtype's."""
    fakes = {CELLS[0]: FakeEngine(cell=CELLS[0], wrong_by=0.1)}
    at = scene(publish_one, fakes, canary=canary([-1.0, -1.1, -1.2, -1.3], dtype=dtype))
    assert (CELLS[0] in at.restarted) is is_fenced


@pytest.mark.parametrize("expected", [[-1.0, -1.1], [-1.0, -1.1, float("nan"), -1.3], []])
def test_an_answer_that_cannot_be_compared_is_wrong(expected: list[float]) -> None:
    assert len(scene(publish_one, canary=canary(expected)).restarted) == 3


def test_without_the_trainer_the_first_engine_is_the_measure() -> None:
    assert not scene(publish_one, canary=canary(error=TrainerError("busy"))).restarted


def test_the_trainers_canary_is_a_row_of_the_answers_tokens() -> None:
    class Fake:
        async def forward(self, batch: MicroBatch, wants: Sequence[str]) -> ForwardReport:
            (row,) = batch.rows
            assert list(wants) == ["proximal_logprobs"] and row.temperature == 1.0
            assert row.token_ids.tolist() == [5, 6, 8, 9] and row.loss_mask.tolist() == [0, 0, 1, 1]
            columns = {"proximal_logprobs": [np.array([0, 0, -2, -3], dtype=np.float32)]}
            return ForwardReport(columns=columns, seconds=0.0)

    answer = Answer(prompt_ids=(5, 6), token_ids=(8, 9), logprobs=(-2.0, -3.0))
    assert asyncio.run(trainer_logprobs(Fake(), answer)) == [-2.0, -3.0]  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(12))
def test_traffic_never_meets_a_mix(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under random faults: whenever a call may start, all engines in service are on one version."""
    monkeypatch.setattr(publisher, "LOAD_TIMEOUT_S", 0.3)
    monkeypatch.setattr(publisher, "PAUSE_TIMEOUT_S", 0.2)
    dice = random.Random(seed)
    verbs = ("pause", "load", "resume", "info")
    choices = [EngineUnavailable("gone"), "hang"]
    faults = {f"e{n}": {dice.choice(verbs): dice.choice(choices)} for n in range(3) if dice.random() < 0.5}
    seen: set[tuple[int, ...]] = set()

    async def body(at: Scene) -> None:
        async def watch() -> None:
            while True:
                if "p" not in at.dispatcher._held:
                    up = at.dispatcher.engines_of("p")
                    seen.add(tuple(sorted({at.engines[cell].version for cell in up})))
                await asyncio.sleep(0.003)

        watching = asyncio.create_task(watch())
        for version in (1, 2):
            await at.publisher.publish("p", published(version))
            assert at.versions() == [version] * 3
        watching.cancel()

    scene(body, engines(**faults), stager=FakeStager({CELLS[0]: 1}))
    assert all(len(versions) <= 1 for versions in seen), seen


# --- staging real files


class FlakyNode(FolderNode):
    """A node whose disk fails at a chunk of the weights, so many times."""

    def __init__(self, root: Path, *, at_chunk: int = -1, times: int = 0) -> None:
        super().__init__(root, InlineOffload())
        self.at_chunk, self.times, self.chunks = at_chunk, times, list[int]()

    async def append(self, name: str, file: str, offset: int, data: bytes) -> None:
        if file == MODEL_FILE:
            self.chunks.append(offset)
            if len(self.chunks) == self.at_chunk and self.times:
                self.times -= 1
                self.chunks.pop()
                raise OSError(28, "No space left on device")
        await super().append(name, file, offset, data)


def weights(folder: Path, version: int) -> Published:
    manifest = put_line(folder, version + 1)[version]
    return published(version, uri=str(version_dir(folder, version)), digest=manifest.digest)


def chunked(tmp_path: Path, new: Published, **flaky: int) -> tuple[ChunkStager, dict[str, FlakyNode]]:
    """Three nodes, and three chunks for the weights; the second node is flaky."""
    nodes = {
        cell: FlakyNode(tmp_path / f"node{n}", **(flaky if n == 1 else {})) for n, cell in enumerate(CELLS)
    }
    return ChunkStager(node_of=nodes.__getitem__, offload=InlineOffload(), chunk_bytes=10_000), nodes


@pytest.fixture(autouse=True)
def scratch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MEGLOOM_SCRATCH", str(tmp_path / "scratch"))


@pytest.mark.parametrize("version", [0, 1])
def test_a_version_reaches_every_node_whole(tmp_path: Path, version: int) -> None:
    """Also one that is kept as a delta; the engines load it from their own node."""
    new = weights(tmp_path / "w", version)
    stager, nodes = chunked(tmp_path, new)

    async def body(at: Scene) -> None:
        await at.publisher.publish("p", new)

    at = scene(body, stager=stager)
    assert at.versions() == [version] * 3
    for number, node in enumerate(nodes.values()):
        (folder,) = (tmp_path / f"node{number}").iterdir()
        assert file_digest(folder / MODEL_FILE) == new.digest and node.chunks == [0, 10_000, 20_000]
        assert (folder / "tokenizer.json").is_file()


def test_one_node_that_fails_at_chunk_2_of_3_for_good_aborts_the_publish(tmp_path: Path) -> None:
    new = weights(tmp_path / "w", 1)
    stager, _ = chunked(tmp_path, new, at_chunk=2, times=3)

    async def body(at: Scene) -> None:
        with pytest.raises(PublishAborted, match="engine/p/1: .*No space left"):
            await at.publisher.publish("p", new)

    at = scene(body, stager=stager)
    assert at.versions() == [0, 0, 0] and all(engine.told == [] for engine in at.engines.values())
    assert at.publisher.serving["p"].version == 0


def test_a_try_that_failed_at_chunk_2_of_3_goes_on_there(tmp_path: Path) -> None:
    new = weights(tmp_path / "w", 1)
    stager, nodes = chunked(tmp_path, new, at_chunk=2, times=1)

    async def body(at: Scene) -> None:
        await at.publisher.publish("p", new)

    assert scene(body, stager=stager).versions() == [1, 1, 1]
    assert nodes[CELLS[1]].chunks == [0, 10_000, 20_000]


def test_engines_with_folders_of_their_own_load_from_there_and_two_versions_stay(tmp_path: Path) -> None:
    new = [weights(tmp_path / "a-policy", version) for version in (2, 1, 0)]
    other = weights(tmp_path / "a", 0)
    folders = [tmp_path / "disk0", tmp_path / "disk1"]
    services = local_services(lambda policy: "", InlineOffload(), engine_folders=folders)

    async def main() -> None:
        for number, cell in enumerate(CELLS):
            for published in (other, *new):
                folder = Path(await services.stager.stage(cell, published))
                assert folder.parent == folders[number % 2]
                assert file_digest(folder / MODEL_FILE) == published.digest

    asyncio.run(main())
    for folder in folders:
        names = sorted(path.name.rpartition("-")[0] for path in folder.iterdir())
        assert names == ["a-000000", "a-policy-000000", "a-policy-000001"]


def test_a_node_that_received_other_bytes_starts_over(tmp_path: Path) -> None:
    new = weights(tmp_path / "w", 0)
    stager, _ = chunked(tmp_path, new)

    async def main() -> None:
        folder = Path(await stager.stage(CELLS[0], new))
        spoil(folder / MODEL_FILE)
        with pytest.raises(StagingError, match="weights have digest"):
            await stager.stage(CELLS[0], new)
        assert file_digest(Path(await stager.stage(CELLS[0], new)) / MODEL_FILE) == new.digest

    asyncio.run(main())


def test_engines_on_the_trainers_machine_load_a_folder_that_was_checked(tmp_path: Path) -> None:
    new = weights(tmp_path / "w", 1)
    stager = LocalStager(InlineOffload())

    async def main() -> None:
        first, second = [await stager.stage(cell, new) for cell in CELLS[:2]]
        assert first == second and file_digest(Path(first) / MODEL_FILE) == new.digest
        base = weights(tmp_path / "w", 0)
        assert await stager.stage(CELLS[0], base) == base.uri
        spoil(Path(base.uri) / MODEL_FILE)
        with pytest.raises(StagingError, match="engine/p/0: "):
            await LocalStager(InlineOffload()).stage(CELLS[0], base)

    asyncio.run(main())


def test_a_version_with_the_weights_of_the_last_one_is_checked_in_its_own_folder(tmp_path: Path) -> None:
    """An update that moves nothing gives two versions one digest; the older folder may be pruned any time."""
    folder = tmp_path / "w"
    first = weights(folder, 0)
    shutil.copytree(first.uri, version_dir(folder, 7))
    same = published(7, uri=str(version_dir(folder, 7)), digest=first.digest)
    stager = LocalStager(InlineOffload())

    async def main() -> None:
        assert await stager.stage(CELLS[0], first) == first.uri
        shutil.rmtree(first.uri)
        assert await stager.stage(CELLS[0], same) == same.uri

    asyncio.run(main())


# --- engines that are started anew


@dataclass
class FakeBackend:
    """Starts the engines that a test has prepared, in turn."""

    lives: dict[str, list[FakeEngine]]
    started: list[str] = field(default_factory=list)

    def incarnation(self, cell: str) -> int:
        return self.started.count(cell)

    async def start_engine(self, cell: str, *, policy: str, uri: str, version: int) -> FakeEngine:
        self.started.append(cell)
        engine = self.lives[cell].pop(0)
        engine.version = version
        return engine

    async def stop(self, cell: str) -> None: ...


def restarted(lives: Sequence[FakeEngine], *, is_published: bool = True) -> tuple[Scene, FakeBackend]:
    """Two engines publish version 1; then the second is lost, and `lives` are its next ones."""

    async def body(at: Scene) -> None:
        if is_published:
            await at.publisher.publish("p", published())
        run = SimpleNamespace(dispatcher=at.dispatcher, publisher=at.publisher, events=at.events)
        supervisor = Supervisor(
            run=run,  # type: ignore[arg-type]
            backend=backend,  # type: ignore[arg-type]
            worker_events=None,  # type: ignore[arg-type]
            tokenizers=dict,
        )
        supervisor._policy_of[CELLS[1]] = "p"
        await supervisor.restart_engine(CELLS[1], "killed")

    backend = FakeBackend(lives={CELLS[1]: list(lives)})
    fakes = {cell: FakeEngine(cell=cell) for cell in CELLS[:2]}
    return scene(body, fakes, canary=canary()), backend


def test_an_engine_that_is_started_anew_answers_the_canary_before_it_has_traffic() -> None:
    wrong, right = FakeEngine(cell=CELLS[1], wrong_by=0.5), FakeEngine(cell=CELLS[1])
    at, backend = restarted([wrong, right])
    assert backend.started == [CELLS[1]] * 2 and wrong.told == right.told == ["info", "generate"]
    assert at.dispatcher.engines_of("p")[CELLS[1]] is right


@pytest.mark.parametrize("fault", ["hang", EngineUnavailable("gone")])
def test_an_engine_that_gives_no_canary_is_started_again(fault: Any) -> None:
    silent, right = FakeEngine(cell=CELLS[1], faults={"generate": fault}), FakeEngine(cell=CELLS[1])
    at, _ = restarted([silent, right])
    assert at.dispatcher.engines_of("p")[CELLS[1]] is right


def test_without_a_known_answer_of_its_version_an_engine_is_believed() -> None:
    wrong = FakeEngine(cell=CELLS[1], wrong_by=0.5)
    at, _ = restarted([wrong], is_published=False)
    assert at.dispatcher.engines_of("p")[CELLS[1]] is wrong and wrong.told == []
