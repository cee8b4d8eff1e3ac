"""A replica of several ranks, as the conductor holds it: one `protocol.Trainer` over one client per rank.

Rows are split over the ranks, every other verb goes to all of them, reports are merged. The ranks agree
among themselves whether a micro-batch counts (`process_group.Ranks`); a rank that is gone, or that leaves the
others waiting after a failure, ends all of them: they share one optimizer step. No torch here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from megloom.compute.trainers.protocol import (
    ForwardReport,
    GradientReport,
    GradientSums,
    MicroBatch,
    Published,
    Trainer,
    TrainerError,
    TrainerLost,
    TrainingRow,
    UpdateReport,
)

ECHO = "failed on rank"  # how the other ranks' errors begin: the error of that rank is the one to report
FAILURE_GRACE_S = 30.0  # from one rank's failure to the others' answers: they are at most a pass behind
Report = TypeVar("Report")


class RankedTrainer:
    """The verbs over all ranks; `ranks[0]` is the one that writes files.

    A call fails with TrainerLost, and every connection is closed, once a rank is gone, or once only some of
    them succeeded in a verb that changes them: they no longer hold the same. Else it fails with TrainerError
    and the ranks live on: a save that fails leaves them as they were, a micro-batch fails on all of them.
    """

    def __init__(
        self, policy: str, ranks: Sequence[Trainer], *, failure_grace_s: float = FAILURE_GRACE_S
    ) -> None:
        if not ranks:
            raise ValueError(f"policy={policy}: a replica of no ranks")
        self._policy, self._ranks, self._grace_s = policy, tuple(ranks), failure_grace_s

    async def create(self, weights_dir: str) -> Published:
        return await self._ranks[0].create(weights_dir)

    async def load(
        self, *, weights_uri: str, state_path: str | None, reference_uri: str | None = None
    ) -> None:
        await self._all(
            lambda rank: rank.load(
                weights_uri=weights_uri, state_path=state_path, reference_uri=reference_uri
            )
        )

    async def forward(self, batch: MicroBatch, wants: Sequence[str]) -> ForwardReport:
        shares = split_rows(batch.rows, len(self._ranks))
        reports = await self._each(
            [
                rank.forward(replace(batch, rows=tuple(batch.rows[index] for index in share)), wants)
                for rank, share in zip(self._ranks, shares, strict=True)
            ]
        )
        columns: dict[str, list[Any]] = {name: [None] * len(batch.rows) for name in wants}
        for report, share in zip(reports, shares, strict=True):
            for name, values in report.columns.items():
                for index, value in zip(share, values, strict=True):
                    columns[name][index] = value
        return ForwardReport(columns=columns, seconds=max(report.seconds for report in reports))

    async def forward_backward(self, batch: MicroBatch) -> GradientReport:
        shares = split_rows(batch.rows, len(self._ranks))
        reports = await self._each(
            [
                rank.forward_backward(replace(batch, rows=tuple(batch.rows[index] for index in share)))
                for rank, share in zip(self._ranks, shares, strict=True)
            ]
        )
        return merge_gradient_reports(reports)

    async def export_gradients(self, *, path: str) -> GradientSums:
        return (await self._alike(lambda rank: rank.export_gradients(path=path)))[0]

    async def add_gradients(self, *, path: str) -> None:
        await self._alike(lambda rank: rank.add_gradients(path=path))

    async def optim_step(self, *, scale: float, warm: bool = False) -> UpdateReport:
        return (await self._alike(lambda rank: rank.optim_step(scale=scale, warm=warm)))[0]

    async def publish(self, *, weights_dir: str, version: int) -> Published:
        return (await self._alike(lambda rank: rank.publish(weights_dir=weights_dir, version=version)))[0]

    async def save(self, *, state_path: str) -> str | None:
        return (await self._all(lambda rank: rank.save(state_path=state_path)))[0]  # the rank that writes

    async def close(self) -> None:
        await asyncio.gather(*(rank.close() for rank in self._ranks))

    async def _all(self, call: Callable[[Trainer], Awaitable[Report]]) -> list[Report]:
        return await self._each([call(rank) for rank in self._ranks])

    async def _alike(self, call: Callable[[Trainer], Awaitable[Report]]) -> list[Report]:
        return await self._each([call(rank) for rank in self._ranks], are_alike=True)

    async def _each(self, calls: Sequence[Awaitable[Report]], *, are_alike: bool = False) -> list[Report]:
        """The answers of all ranks, in their order; calls in flight are cancelled on an error.

        `are_alike`: ranks of which only some have failed are lost.
        """
        tasks = [asyncio.ensure_future(call) for call in calls]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            _, late = await asyncio.wait(tasks, timeout=self._grace_s)
        finally:
            for task in tasks:
                task.cancel()
        errors = {
            number: error
            for number, task in enumerate(tasks)
            if task not in late and not task.cancelled() and (error := task.exception()) is not None
        }
        if not errors:
            return [task.result() for task in tasks]
        number, cause = _cause(errors)
        lost = [rank for rank, error in errors.items() if isinstance(error, TrainerLost)]
        num_done = len(tasks) - len(late) - len(errors)
        if late or lost or (are_alike and num_done):
            await self.close()
            waiting = f"; {len(late)} ranks still waited {self._grace_s:.0f} s later" if late else ""
            ahead = f"; {num_done} other ranks went on" if are_alike and num_done else ""
            raise TrainerLost(f"policy={self._policy} rank {number}: {cause}{waiting}{ahead}") from cause
        if isinstance(cause, TrainerError):
            raise TrainerError(f"rank {number}: {cause}") from cause
        raise cause


def split_rows(rows: Sequence[TrainingRow], num_ranks: int) -> list[list[int]]:
    """The indices of the rows of every rank, ascending; about equal numbers of tokens.

    The longest first, each to the rank with the fewest tokens so far (the lowest of equals). Rows of one
    episode stay together: they may share a prefix. The split depends on the rows alone.
    """
    units: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        units.setdefault(f"episode {row.episode_id}" if row.episode_id else f"row {index}", []).append(index)

    def num_tokens(unit: list[int]) -> int:
        return sum(len(rows[index].token_ids) for index in unit)

    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for unit in sorted(units.values(), key=lambda unit: (-num_tokens(unit), unit[0])):
        rank = loads.index(min(loads))
        shares[rank].extend(unit)
        loads[rank] += num_tokens(unit)
    return [sorted(share) for share in shares]


def merge_gradient_reports(reports: Sequence[GradientReport]) -> GradientReport:
    """One report of a micro-batch whose rows were split: counts and sums add, the rest are maxima."""
    sums: dict[str, tuple[float, int]] = {}
    for report in reports:
        for name, (value, count) in report.sums.items():
            total, counted = sums.get(name, (0.0, 0))
            sums[name] = total + value, counted + count
    gaps = [report.max_logprob_gap for report in reports if report.max_logprob_gap is not None]
    return replace(
        reports[0],
        num_rows=sum(report.num_rows for report in reports),
        num_tokens=sum(report.num_tokens for report in reports),
        num_trainable=sum(report.num_trainable for report in reports),
        loss_sum=sum(report.loss_sum for report in reports),
        num_clipped=sum(report.num_clipped for report in reports),
        max_logprob_gap=max(gaps, default=None),
        seconds=max(report.seconds for report in reports),
        num_empty_rows=sum(report.num_empty_rows for report in reports),
        sums=sums,
    )


def _cause(errors: dict[int, BaseException]) -> tuple[int, BaseException]:
    """The rank that failed by itself, and its error: a gone one first, then one that echoes no other."""
    order = sorted(
        errors.items(),
        key=lambda item: (not isinstance(item[1], TrainerLost), ECHO in str(item[1]), item[0]),
    )
    return order[0]
