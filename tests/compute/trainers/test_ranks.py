"""Several ranks are one trainer: rows are split, reports merged, failures agreed on, losses noticed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from megloom.compute.state.weights import MODEL_FILE
from megloom.compute.trainers.protocol import (
    ForwardReport,
    GradientReport,
    TrainerError,
    TrainerLost,
    TrainerPlan,
)
from megloom.compute.trainers.ranks import ECHO, RankedTrainer, merge_gradient_reports, split_rows
from megloom.compute.trainers.replica import Replica
from megloom.compute.trainers.snapshot import read_state
from megloom.compute.workload import Optimizer

from .builders import batch, plan, ragged_rows, row
from .rank_processes import RankProcesses

ROWS = ragged_rows(15)
OPTIMIZER = Optimizer(learning_rate=1e-3, grad_clip=0.5).model_dump()
TOLERANCE = 1e-5  # of the norm: of the raw gradient, and of the weights


@pytest.fixture
def processes() -> Iterator[RankProcesses]:
    started = RankProcesses()
    yield started
    started.end()


def ranked_plan(stage: int, ranks: int = 2, **overrides: Any) -> TrainerPlan:
    knobs = {"backend": "deepspeed", "ranks": ranks, "zero_stage": stage, "budget_tokens": 40}
    return plan(trainer=knobs, optimizer=OPTIMIZER, **overrides)


def alone(folder: Path) -> Replica:
    """The reference: plain torch, one process."""
    trainer = Replica(plan(optimizer=OPTIMIZER))
    trainer.load(weights_uri=trainer.create(str(folder)).uri, state_path=None)
    return trainer


def relative_gap(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """‖ours − theirs‖ / ‖theirs‖ over all tensors."""
    assert ours.keys() == theirs.keys()
    difference = [torch.linalg.vector_norm(ours[name] - theirs[name]) for name in ours]
    whole = [torch.linalg.vector_norm(value) for value in theirs.values()]
    return float(torch.stack(difference).norm() / torch.stack(whole).norm())


def weight_gap(one_uri: str, other_uri: str) -> float:
    return relative_gap(*(load_file(Path(uri) / MODEL_FILE) for uri in (one_uri, other_uri)))


def saved(prefix: str, path: Path) -> dict[str, Tensor]:
    return {name: value for name, value in read_state(path)[1].items() if name.startswith(prefix)}


def saved_sums(path: Path) -> dict[str, Tensor]:
    return saved("sums/", path)


# Splitting and merging


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 4)), max_size=30), st.integers(1, 5))
def test_every_row_goes_to_one_rank_in_order_and_an_episode_stays_together(
    sizes: list[tuple[int, int]], num_ranks: int
) -> None:
    rows = [
        row(index, num_prompt=size, episode_id=f"e{episode}" if episode else "")
        for index, (size, episode) in enumerate(sizes)
    ]
    shares = split_rows(rows, num_ranks)
    assert len(shares) == num_ranks
    assert sorted(index for share in shares for index in share) == list(range(len(rows)))
    assert all(share == sorted(share) for share in shares)
    for episode in {one.episode_id for one in rows} - {""}:
        holders = {
            rank for rank, share in enumerate(shares) for index in share if rows[index].episode_id == episode
        }
        assert len(holders) == 1
    assert split_rows(rows, num_ranks) == shares


def test_ranks_get_about_equal_numbers_of_tokens() -> None:
    loads = [sum(len(ROWS[index].token_ids) for index in share) for share in split_rows(ROWS, 2)]
    assert max(loads) - min(loads) <= max(len(one.token_ids) for one in ROWS)
    assert max(loads) < 0.55 * sum(loads)


def test_fewer_rows_than_ranks_leave_some_without() -> None:
    assert split_rows([], 2) == [[], []]
    assert split_rows([row(1)], 2) == [[0], []]


def report(**overrides: Any) -> GradientReport:
    values: dict[str, Any] = {
        "micro_batch_id": "b",
        "num_rows": 1,
        "num_tokens": 7,
        "num_trainable": 3,
        "loss_sum": 0.5,
        "num_clipped": 1,
        "max_logprob_gap": 0.25,
        "seconds": 2.0,
        "sums": {"kl": (1.0, 3)},
        **overrides,
    }
    return GradientReport(**values)


def test_counts_add_and_gaps_and_seconds_are_the_largest() -> None:
    other = report(num_rows=2, max_logprob_gap=0.5, seconds=1.0, sums={"kl": (0.5, 2), "entropy": (2.0, 2)})
    assert merge_gradient_reports([report(), other]) == report(
        num_rows=3,
        num_tokens=14,
        num_trainable=6,
        loss_sum=1.0,
        num_clipped=2,
        max_logprob_gap=0.5,
        sums={"kl": (1.5, 5), "entropy": (2.0, 2)},
    )
    nothing = report(max_logprob_gap=None)
    assert merge_gradient_reports([nothing, nothing]).max_logprob_gap is None


# Failures


class FakeRank:
    """A rank whose verbs do what `answer` says."""

    def __init__(self, answer: Callable[[Any], Awaitable[Any]]) -> None:
        self._answer = answer
        self.is_closed = False

    async def forward_backward(self, batch: Any) -> Any:
        return await self._answer(batch)

    async def forward(self, batch: Any, wants: Any) -> Any:
        return await self._answer(batch)

    async def anything(self, **arguments: Any) -> Any:
        return await self._answer(arguments)

    export_gradients = add_gradients = optim_step = publish = save = anything

    async def close(self) -> None:
        self.is_closed = True


def raising(error: Exception) -> Callable[[Any], Awaitable[Any]]:
    async def answer(_: Any) -> Any:
        raise error

    return answer


async def fine(_: Any) -> GradientReport:
    return report()


async def never(_: Any) -> None:
    await asyncio.Event().wait()


def outcome(*answers: Callable[[Any], Awaitable[Any]]) -> tuple[Exception, list[bool]]:
    """The error of a micro-batch on such ranks, and which of them are closed after it."""
    ranks: list[Any] = [FakeRank(answer) for answer in answers]
    trainer = RankedTrainer("solver", ranks, failure_grace_s=0.02)
    with pytest.raises(TrainerError) as info:
        asyncio.run(trainer.forward_backward(batch(ROWS)))
    return info.value, [rank.is_closed for rank in ranks]


def test_the_error_is_that_of_the_rank_that_failed_not_of_those_that_heard_of_it() -> None:
    echo, cause = raising(TrainerError(f"x: {ECHO} 1")), raising(TrainerError("sample s-3: token loss nan"))
    error, closed = outcome(echo, cause)
    assert str(error) == "rank 1: sample s-3: token loss nan"
    assert not isinstance(error, TrainerLost) and closed == [False, False]


def test_a_lost_rank_ends_all_whatever_else_failed() -> None:
    error, closed = outcome(raising(TrainerError("Connection closed by peer")), raising(TrainerLost("gone")))
    assert isinstance(error, TrainerLost) and "policy=solver rank 1: gone" in str(error)
    assert closed == [True, True]


def test_ranks_that_wait_on_after_a_failure_are_lost_too() -> None:
    error, closed = outcome(never, raising(TrainerError("out of memory")))
    assert isinstance(error, TrainerLost) and "rank 1: out of memory; 1 ranks still waited" in str(error)
    assert closed == [True, True]


def test_a_failure_of_one_rank_alone_is_an_error_and_they_live_on() -> None:
    error, closed = outcome(raising(TrainerError("no space left")), fine)
    assert not isinstance(error, TrainerLost) and closed == [False, False]


VERBS: list[tuple[str, dict[str, Any]]] = [
    ("export_gradients", {"path": "p"}),
    ("add_gradients", {"path": "p"}),
    ("optim_step", {"scale": 1.0}),
    ("publish", {"weights_dir": "w", "version": 1}),
]


@pytest.mark.parametrize(("verb", "arguments"), VERBS, ids=[verb for verb, _ in VERBS])
@pytest.mark.parametrize("failing", [0, 1])
def test_ranks_of_which_only_some_made_a_change_are_lost(
    verb: str, arguments: dict[str, Any], failing: int
) -> None:
    answers: list[Callable[[Any], Awaitable[Any]]] = [fine, fine]
    answers[failing] = raising(TrainerError("no space left"))
    ranks: list[Any] = [FakeRank(answer) for answer in answers]
    with pytest.raises(TrainerLost, match=f"rank {failing}: no space left; 1 other ranks went on"):
        asyncio.run(getattr(RankedTrainer("solver", ranks), verb)(**arguments))
    assert all(rank.is_closed for rank in ranks)


@pytest.mark.parametrize(("verb", "arguments"), VERBS, ids=[verb for verb, _ in VERBS])
def test_a_change_that_failed_on_all_ranks_leaves_them_alike(verb: str, arguments: dict[str, Any]) -> None:
    ranks: list[Any] = [FakeRank(raising(TrainerError("gradient norm inf"))) for _ in range(2)]
    with pytest.raises(TrainerError, match="rank 0: gradient norm inf") as info:
        asyncio.run(getattr(RankedTrainer("solver", ranks), verb)(**arguments))
    assert not isinstance(info.value, TrainerLost) and not any(rank.is_closed for rank in ranks)


def test_a_state_that_cannot_be_written_leaves_the_ranks_as_they_were() -> None:
    ranks: list[Any] = [FakeRank(raising(TrainerError("no space left"))), FakeRank(fine)]
    with pytest.raises(TrainerError, match="rank 0: no space left") as info:
        asyncio.run(RankedTrainer("solver", ranks).save(state_path="s"))
    assert not isinstance(info.value, TrainerLost) and not any(rank.is_closed for rank in ranks)


def test_columns_come_back_in_the_order_of_the_rows() -> None:
    async def lengths(part: Any) -> ForwardReport:
        values = [np.full(len(one.token_ids), len(one.token_ids), np.float32) for one in part.rows]
        return ForwardReport(columns={"values": values}, seconds=1.0)

    ranks: list[Any] = [FakeRank(lengths) for _ in range(3)]
    made = asyncio.run(RankedTrainer("solver", ranks).forward(batch(ROWS), ["values"]))
    assert [int(column[0]) for column in made.columns["values"]] == [len(one.token_ids) for one in ROWS]


def test_a_replica_of_no_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match="a replica of no ranks"):
        RankedTrainer("solver", [])


# Real ranks over gloo


async def check_like_one_process(processes: RankProcesses, folder: Path, stage: int) -> None:
    """0, 1, 7 and 7 samples on two ranks, two updates; a poisoned micro-batch at stages that survive one."""
    reference = alone(folder / "alone")
    uri = str(folder / "alone" / "v000000")
    trainer, _ = await processes.start(ranked_plan(stage), 2)
    await trainer.load(weights_uri=uri, state_path=None)
    for step in range(2):
        for name, rows in (("none", []), ("one", ROWS[:1]), ("seven", ROWS[1:8]), ("rest", ROWS[8:])):
            micro_batch = batch(rows, name=f"{step}-{name}")
            expected, made = (
                reference.forward_backward(micro_batch),
                await trainer.forward_backward(micro_batch),
            )
            assert (made.num_rows, made.num_trainable) == (expected.num_rows, expected.num_trainable)
            assert made.loss_sum == pytest.approx(expected.loss_sum, rel=1e-4, abs=1e-4)
        if stage < 2:
            poison = row(
                99, num_prompt=4, num_sampled=30, logprobs=np.full(34, -100.0, np.float32), advantage=3e38
            )
            with pytest.raises(TrainerError, match=r"rank \d: .*sample sample-99: token loss"):
                await trainer.forward_backward(batch([*ROWS, poison], name="poison"))
            await trainer.save(state_path=str(folder / "ranked-state"))
            reference.save(state_path=str(folder / "alone-state"))
            sums, expected_sums = saved_sums(folder / "ranked-state"), saved_sums(folder / "alone-state")
            assert relative_gap(sums, expected_sums) < TOLERANCE
        update, expected_update = await trainer.optim_step(scale=0.01), reference.optim_step(scale=0.01)
        assert update.micro_batch_ids == expected_update.micro_batch_ids
        assert update.num_trainable == expected_update.num_trainable
        assert update.grad_norm == pytest.approx(expected_update.grad_norm, rel=1e-5)
    published = await trainer.publish(weights_dir=str(folder / "ranked"), version=1)
    expected_uri = reference.publish(weights_dir=str(folder / "alone"), version=1).uri
    assert weight_gap(published.uri, expected_uri) < TOLERANCE
    await trainer.close()


def test_two_ranks_at_stage_1_make_the_updates_of_one_process(
    processes: RankProcesses, tmp_path: Path
) -> None:
    asyncio.run(check_like_one_process(processes, tmp_path, stage=1))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_two_ranks_at_every_stage_make_the_updates_of_one_process(
    processes: RankProcesses, tmp_path: Path, stage: int
) -> None:
    asyncio.run(check_like_one_process(processes, tmp_path, stage))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_rank_killed_in_mid_backward_ends_the_others_and_a_restart_makes_the_same_update(
    processes: RankProcesses, tmp_path: Path, stage: int
) -> None:
    """From the last state: in mid-batch at stages 0 and 1, at the boundary before the batch at 2 and 3."""
    can_save_in_mid_batch = stage < 2
    long = batch([row(i, num_prompt=60, num_sampled=60) for i in range(240)], name="long")
    short, state = batch(ROWS, name="short"), str(tmp_path / "state")

    async def work() -> None:
        first, members = await processes.start(ranked_plan(stage), 2)
        uri = (await first.create(str(tmp_path / "w"))).uri
        await first.load(weights_uri=uri, state_path=None)
        if not can_save_in_mid_batch:
            await first.save(state_path=state)
        await first.forward_backward(short)
        if can_save_in_mid_batch:
            await first.save(state_path=state)
        call = asyncio.create_task(first.forward_backward(long))
        await asyncio.sleep(0.1)  # real processes, real time: let the backward begin
        assert not call.done()
        members[1].kill()
        killed = time.monotonic()
        with pytest.raises(TrainerLost, match="policy=solver rank 1"):
            await call
        await asyncio.to_thread(members[0].join, 20)
        assert members[0].exitcode is not None and time.monotonic() - killed < 20

        finished, restarted = [], await processes.start(ranked_plan(stage), 2)
        whole, _ = await processes.start(ranked_plan(stage), 2)  # nothing ever happened to this one
        for number, (trainer, path) in enumerate(((restarted[0], state), (whole, None))):
            await trainer.load(weights_uri=uri, state_path=path)
            for micro_batch in (short, long):
                if path is None or micro_batch is long or not can_save_in_mid_batch:
                    await trainer.forward_backward(micro_batch)
            assert (await trainer.optim_step(scale=1e-3)).micro_batch_ids == ("short", "long")
            made = await trainer.publish(weights_dir=str(tmp_path / f"after-{number}"), version=1)
            finished.append(made.uri)
            await trainer.close()
        assert weight_gap(*finished) < 1e-6  # at stages 0 and 1 the save has moved a sum to rank 0

    asyncio.run(work())


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_state_of_two_ranks_continues_on_one_and_back(processes: RankProcesses, tmp_path: Path) -> None:
    """In mid-batch: the sums of both ranks are in the state."""

    async def work() -> None:
        reference = alone(tmp_path / "alone")
        uri, state = str(tmp_path / "alone" / "v000000"), str(tmp_path / "state")
        parts = [batch(ROWS[part::3], name=str(part)) for part in range(3)]
        first, _ = await processes.start(ranked_plan(1), 2)
        second, _ = await processes.start(ranked_plan(1), 2)
        await first.load(weights_uri=uri, state_path=None)
        await first.forward_backward(parts[0])
        await first.save(state_path=state)
        single = Replica(plan(optimizer=OPTIMIZER))
        single.load(weights_uri=uri, state_path=state)
        single.forward_backward(parts[1])
        single.save(state_path=state)
        await second.load(weights_uri=uri, state_path=state)
        await second.forward_backward(parts[2])
        await second.optim_step(scale=0.01)
        for part in parts:
            reference.forward_backward(part)
        reference.optim_step(scale=0.01)
        made = await second.publish(weights_dir=str(tmp_path / "ranked"), version=1)
        expected = reference.publish(weights_dir=str(tmp_path / "alone"), version=1)
        assert weight_gap(made.uri, expected.uri) < TOLERANCE

    asyncio.run(work())


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("stage", [2, 3])
def test_the_gradient_of_two_ranks_is_that_of_one_where_no_sums_can_be_saved(
    processes: RankProcesses, tmp_path: Path, stage: int
) -> None:
    """After the first step the first moment is the gradient, up to a factor."""
    parts = [batch(ROWS[:1], name="one"), batch(ROWS[1:8], name="seven"), batch(ROWS[8:], name="rest")]

    async def first_moments(num_ranks: int, uri: str) -> dict[str, Tensor]:
        trainer, _ = await processes.start(ranked_plan(stage, num_ranks), num_ranks)
        await trainer.load(weights_uri=uri, state_path=None)
        for part in parts:
            await trainer.forward_backward(part)
        await trainer.optim_step(scale=0.001)
        await trainer.save(state_path=str(tmp_path / f"ranks-{num_ranks}"))
        await trainer.close()
        return saved("optimizer/exp_avg/", tmp_path / f"ranks-{num_ranks}")

    async def work() -> None:
        reference = alone(tmp_path / "alone")
        for part in parts:
            reference.forward_backward(part)
        norm = reference.optim_step(scale=0.001).grad_norm
        assert 0.1 < norm < 0.5, "not clipped, so that a wrong factor shows"
        reference.save(state_path=str(tmp_path / "state"))
        expected = saved("optimizer/exp_avg/", tmp_path / "state")
        assert all(value.any() for value in expected.values())
        one, two = [await first_moments(n, str(tmp_path / "alone" / "v000000")) for n in (1, 2)]
        assert relative_gap(two, one) < TOLERANCE
        assert relative_gap(two, expected) < TOLERANCE

    asyncio.run(work())


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("stage", [0, 1])
def test_two_ranks_go_on_from_a_state_in_mid_batch_to_the_same_bits(
    processes: RankProcesses, tmp_path: Path, stage: int
) -> None:
    """Also those that wrote it, since a save moves the sums of all ranks to rank 0, as a load does."""
    short, rest, state = batch(ROWS[:6], name="short"), batch(ROWS[6:], name="rest"), str(tmp_path / "state")

    async def digest(trainer: RankedTrainer, folder: str) -> str:
        await trainer.forward_backward(rest)
        assert (await trainer.optim_step(scale=0.01)).micro_batch_ids == ("short", "rest")
        published = await trainer.publish(weights_dir=str(tmp_path / folder), version=1)
        await trainer.close()
        return published.digest

    async def work() -> None:
        first, _ = await processes.start(ranked_plan(stage), 2)
        uri = (await first.create(str(tmp_path / "w"))).uri
        await first.load(weights_uri=uri, state_path=None)
        await first.forward_backward(short)
        await first.save(state_path=state)
        digests = [await digest(first, "first")]
        for number in range(2):
            again, _ = await processes.start(ranked_plan(stage), 2)
            await again.load(weights_uri=uri, state_path=state)
            digests.append(await digest(again, f"again-{number}"))
        assert digests[1] == digests[2]
        assert digests[0] == digests[1]

    asyncio.run(work())
