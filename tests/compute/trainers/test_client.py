"""A trainer in a process of its own does what a replica does, and its death is noticed at once."""

from __future__ import annotations

import asyncio
import multiprocessing
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import asdict, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megloom.compute.algorithms.base import Correction, Kl
from megloom.compute.algorithms.grpo import Grpo
from megloom.compute.trainers.client import TrainerClient, connect_trainer
from megloom.compute.trainers.protocol import (
    ForwardReport,
    TrainerError,
    TrainerLost,
    TrainerPlan,
    TrainingRow,
)
from megloom.compute.trainers.replica import Replica
from megloom.compute.trainers.server import serve
from megloom.compute.trainers.wire import pack_micro_batch, unpack_micro_batch

from .builders import batch, plan, ragged_rows, row

ROWS = ragged_rows(20)
KL = Grpo(kl=Kl(coefficient=0.1), correction=Correction(name="token-tis"), entropy=0.01)
PLAN = plan(algorithm=KL.model_dump())
START_TIMEOUT_S = 100.0  # the first process waits for the fork server's imports
Spawn = Callable[[TrainerPlan], tuple[Path, BaseProcess]]


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    """Starts a trainer process; returns its socket and the process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["megloom.compute.trainers.server"])
    folder = Path(tempfile.mkdtemp(prefix="megloom-"))  # socket paths are at most 107 bytes
    started: list[BaseProcess] = []

    def start(trainer_plan: TrainerPlan) -> tuple[Path, BaseProcess]:
        socket = folder / str(len(started))
        args = {"socket": str(socket), "plan": asdict(trainer_plan), "cache_dir": str(folder)}
        process = context.Process(target=serve, args=(args,), daemon=True)
        process.start()
        started.append(process)
        return socket, process

    yield start
    for process in started:
        process.kill()
        process.join()
        process.close()


def run(
    spawn: Spawn,
    work: Callable[[TrainerClient, BaseProcess], Awaitable[None]],
    trainer_plan: TrainerPlan | None = None,
) -> None:
    async def connected() -> None:
        socket, process = spawn(trainer_plan or plan())
        client = await connect_trainer("solver", socket, timeout_s=START_TIMEOUT_S)
        try:
            await work(client, process)
        finally:
            await client.close()

    asyncio.run(connected())


def same_columns(one: ForwardReport, other: ForwardReport) -> None:
    assert one.columns.keys() == other.columns.keys()
    for name, arrays in one.columns.items():
        assert [array.tobytes() for array in arrays] == [array.tobytes() for array in other.columns[name]]


def with_columns(rows: Sequence[TrainingRow], report: ForwardReport) -> tuple[TrainingRow, ...]:
    """The rows with what `forward` gave for them."""
    return tuple(
        replace(one, columns={name: arrays[number] for name, arrays in report.columns.items()})
        for number, one in enumerate(rows)
    )


def timeless(report: Any) -> Any:
    return replace(report, seconds=0.0)


def test_every_verb_answers_as_the_replica_itself_does(spawn: Spawn, tmp_path: Path) -> None:
    local = Replica(PLAN)

    async def work(client: TrainerClient, process: BaseProcess) -> None:
        created = await client.create(str(tmp_path / "a"))
        assert created == replace(local.create(str(tmp_path / "b")), uri=created.uri)
        places: dict[str, Any] = {
            "weights_uri": created.uri,
            "state_path": None,
            "reference_uri": created.uri,
        }
        local.load(**places)
        await client.load(**places)
        for part in (0, 1):
            micro_batch = batch(ROWS[part::2], name=f"part-{part}")
            columns = await client.forward(micro_batch, ["reference_logprobs", "proximal_logprobs"])
            same_columns(columns, local.forward(micro_batch, ["reference_logprobs", "proximal_logprobs"]))
            micro_batch = replace(micro_batch, rows=with_columns(micro_batch.rows, columns))
            there = await client.forward_backward(micro_batch)
            assert timeless(there) == timeless(local.forward_backward(micro_batch))
        await client.save(state_path=str(tmp_path / "a-state"))
        local.save(state_path=str(tmp_path / "b-state"))
        assert (tmp_path / "a-state").read_bytes() == (tmp_path / "b-state").read_bytes()
        sums = [str(tmp_path / "a-sums"), str(tmp_path / "b-sums")]
        exported = await client.export_gradients(path=sums[0])
        assert replace(exported, path=sums[1]) == local.export_gradients(path=sums[1])
        assert Path(sums[0]).read_bytes() == Path(sums[1]).read_bytes()
        await client.add_gradients(path=sums[1])
        local.add_gradients(path=sums[0])
        assert timeless(await client.optim_step(scale=0.01)) == timeless(local.optim_step(scale=0.01))
        published = await client.publish(weights_dir=str(tmp_path / "a"), version=1)
        assert published.digest == local.publish(weights_dir=str(tmp_path / "b"), version=1).digest
        await client.load(weights_uri=published.uri, state_path=str(tmp_path / "a-state"))
        assert (await client.optim_step(scale=0.01)).micro_batch_ids == ("part-0", "part-1")
        await client.close()
        await asyncio.to_thread(process.join, 20)
        assert process.exitcode == 0

    run(spawn, work, PLAN)


def test_a_failed_verb_is_an_error_with_the_far_tracebacks_end_and_the_trainer_lives_on(
    spawn: Spawn, tmp_path: Path
) -> None:
    async def work(client: TrainerClient, process: BaseProcess) -> None:
        await client.load(weights_uri=(await client.create(str(tmp_path))).uri, state_path=None)
        bad = row(3, logprobs=np.full(7, np.nan, np.float32))
        with pytest.raises(
            TrainerError, match="policy=solver forward_backward batch-0: sample sample-3"
        ) as info:
            await client.forward_backward(batch([bad]))
        assert not isinstance(info.value, TrainerLost)
        assert "Traceback" in str(info.value) or 'File "' in str(info.value)
        assert (await client.forward_backward(batch([row(1)]))).num_rows == 1

    run(spawn, work)


def test_a_killed_trainer_is_lost_at_once(spawn: Spawn, tmp_path: Path) -> None:
    async def work(client: TrainerClient, process: BaseProcess) -> None:
        await client.load(weights_uri=(await client.create(str(tmp_path))).uri, state_path=None)
        long = batch([row(i, num_prompt=100, num_sampled=100) for i in range(400)])
        call = asyncio.create_task(client.forward_backward(long))
        await asyncio.sleep(0.2)  # real processes, real time: let the gradient begin
        process.kill()
        killed = time.monotonic()
        with pytest.raises(TrainerLost, match="policy=solver forward_backward"):
            await call
        assert time.monotonic() - killed < 5.0
        with pytest.raises(TrainerLost, match="policy=solver optim_step"):
            await client.optim_step(scale=1.0)

    run(spawn, work)


def plain_fields(one: TrainingRow) -> tuple[Any, ...]:
    return one.sample_id, one.advantage, one.weight, one.temperature, one.episode_id, one.version_min


def test_a_micro_batch_survives_the_wire_to_the_bit() -> None:
    columns = {"values": np.array([1, np.nan, -0.0, 4, 5, 6, 7], np.float32)}
    first = row(1, advantage=0.1 + 0.2, episode_id="run/0/é", version_min=2**40, columns=columns)
    sent = batch([first, row(2, num_sampled=9)])
    received = unpack_micro_batch(pack_micro_batch(sent))
    assert (received.micro_batch_id, received.loss) == (sent.micro_batch_id, sent.loss)
    for one, other in zip(sent.rows, received.rows, strict=True):
        for name in ("token_ids", "loss_mask", "logprobs"):
            assert getattr(one, name).tobytes() == getattr(other, name).tobytes()
            assert getattr(one, name).dtype == getattr(other, name).dtype
        assert one.columns.keys() == other.columns.keys()
        for name, values in one.columns.items():
            assert values.tobytes() == other.columns[name].tobytes()
            assert values.dtype == other.columns[name].dtype
        assert plain_fields(one) == plain_fields(other)


def test_an_array_of_another_type_is_refused_before_it_is_sent() -> None:
    with pytest.raises(ValueError, match="sample sample-1: token_ids is int64"):
        pack_micro_batch(batch([row(1, token_ids=np.zeros(7, np.int64))]))
    with pytest.raises(ValueError, match="sample sample-1: values is float64"):
        pack_micro_batch(batch([row(1, columns={"values": np.zeros(7)})]))
    with pytest.raises(ValueError, match=r"sample sample-1: columns \['vales'\], expected some of"):
        pack_micro_batch(batch([row(1, columns={"vales": np.zeros(7, np.float32)})]))


def test_nobody_listening_is_a_timeout_that_names_the_socket(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match="nothing listens on"):
        asyncio.run(connect_trainer("solver", tmp_path / "none", timeout_s=0.05))
