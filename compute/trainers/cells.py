"""The trainer cells of a session, and the groups that share them. `scheduling/trainer_cells.py` decides."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from megloom.compute.scheduling.trainer_cells import Holding, Rules, TrainerCell, Waiting, choose, spare

BIND_TIMEOUT_S = 3600.0  # a holder in a long verb is not late; one that long in it hangs


class Tenant(Protocol):
    """A training group, as its cells see it."""

    policy: str

    @property
    def switch_s(self) -> float:
        """What its last load took."""
        ...

    def idle_since_s(self, cell: str) -> float | None:
        """Since when its replica on the cell has nothing to do; None while it has."""
        ...

    @property
    def can_leave(self) -> bool:
        """False while its state cannot be written."""
        ...

    def leave(self, cell: str) -> None:
        """Begins to give the cell back; returns at once. `TrainerCells.release` or `stay` ends it."""
        ...

    def describe(self) -> str:
        """What it is doing, for whoever waits for its cell."""
        ...


@dataclass(kw_only=True, slots=True)
class _Claim:
    """A tenant that waits for a cell."""

    tenant: Tenant
    since_s: float
    cell: asyncio.Future[str]


class TrainerCells:
    """Gives cells out and asks for them back. Only the event loop's thread may use it."""

    def __init__(
        self,
        cells: Sequence[TrainerCell],
        *,
        clock: Callable[[], float],
        rules: Rules | None = None,
        bind_timeout_s: float = BIND_TIMEOUT_S,
    ) -> None:
        if not cells:
            raise ValueError("trainers need at least one cell")
        self._cells, self._clock, self._rules = tuple(cells), clock, rules or Rules()
        self._bind_timeout_s = bind_timeout_s
        self._node_of = {cell.name: cell.node for cell in cells}
        self._tenants: dict[str, Tenant] = {}  # by the cell that they hold
        self._holdings: dict[str, Holding] = {}  # by cell; idleness is asked for when it matters
        self._claims: list[_Claim] = []
        self._last: dict[str, str] = {}  # policy → the cell that it had last
        self._timer: asyncio.TimerHandle | None = None

    async def bind(self, tenant: Tenant) -> str:
        """A cell for the tenant's core, as soon as its turn comes.

        Raises: TimeoutError that says who holds the cells.
        """
        claim = _Claim(tenant=tenant, since_s=self._clock(), cell=asyncio.get_running_loop().create_future())
        self._claims.append(claim)
        try:
            self.look()
            async with asyncio.timeout(self._bind_timeout_s):
                return await claim.cell
        except TimeoutError:
            raise TimeoutError(
                f"trainers of {tenant.policy}: no trainer cell within {self._bind_timeout_s:g} s: "
                f"{self.describe()}"
            ) from None
        except asyncio.CancelledError:
            if claim.cell.done() and not claim.cell.cancelled():
                self.release(claim.cell.result())
            raise
        finally:
            if claim in self._claims:
                self._claims.remove(claim)

    def bind_spare(self, tenant: Tenant) -> str | None:
        """A cell for a satellite of the tenant, if one is free and nobody waits for it."""
        node = self.last_node(tenant.policy)
        cell = spare(self._cells, list(self._holdings.values()), self._waiting(), node=node)
        if cell is not None:
            self._hold(cell, tenant, is_core=False)
        return cell

    def release(self, cell: str) -> None:
        """The cell is empty again."""
        del self._tenants[cell], self._holdings[cell]
        self.look()

    def stay(self, cell: str, tenant: Tenant) -> None:
        """The tenant that was asked to leave the cell cannot now; nothing if the cell is not its any more."""
        if self._tenants.get(cell) is tenant:
            self._holdings[cell] = replace(self._holdings[cell], is_leaving=False)

    def look(self) -> None:
        """Decides anew: a tenant turned idle, came, went, or time has passed."""
        if not self._claims and self._rules.idle_s is None:
            return
        now = self._clock()
        choice = choose(self._cells, self._present(), self._waiting(), now=now, rules=self._rules)
        for policy, cell in choice.binds:
            claim = next(claim for claim in self._claims if claim.tenant.policy == policy)
            self._claims.remove(claim)
            self._hold(cell, claim.tenant, is_core=True)
            claim.cell.set_result(cell)
        for cell in choice.leaves:
            self._holdings[cell] = replace(self._holdings[cell], is_leaving=True)
            self._tenants[cell].leave(cell)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if choice.ask_again_s is not None:
            delay_s = max(0.0, choice.ask_again_s - now) + 1e-6  # past it in spite of rounding
            self._timer = asyncio.get_running_loop().call_later(delay_s, self.look)

    def last_node(self, policy: str) -> str | None:
        """The node that hosted the policy's core last, where its state lies."""
        cell = self._last.get(policy)
        return None if cell is None else self._node_of[cell]

    def describe(self) -> str:
        """Who holds which cell, in words."""
        held = [f"{cell} is held by {tenant.describe()}" for cell, tenant in sorted(self._tenants.items())]
        return "; ".join(held) or "all are free"

    def close(self) -> None:
        """No more decisions by time."""
        if self._timer is not None:
            self._timer.cancel()

    def _hold(self, cell: str, tenant: Tenant, *, is_core: bool) -> None:
        self._tenants[cell] = tenant
        self._holdings[cell] = Holding(
            cell=cell,
            policy=tenant.policy,
            is_core=is_core,
            since_s=self._clock(),
            idle_since_s=None,
        )
        if is_core:
            self._last[tenant.policy] = cell

    def _present(self) -> list[Holding]:
        """The holdings with what changes without telling us."""
        present = []
        for cell, holding in self._holdings.items():
            tenant = self._tenants[cell]
            holding = replace(holding, idle_since_s=tenant.idle_since_s(cell))
            if holding.is_core:
                holding = replace(holding, can_leave=tenant.can_leave, switch_s=tenant.switch_s)
            present.append(holding)
        return present

    def _waiting(self) -> list[Waiting]:
        return [
            Waiting(
                policy=claim.tenant.policy,
                since_s=claim.since_s,
                last_cell=self._last.get(claim.tenant.policy),
                last_node=self.last_node(claim.tenant.policy),
            )
            for claim in self._claims
        ]
