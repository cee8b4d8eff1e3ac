"""The gateways of a session: which one an attempt's programs call, and what befalls it there.

An episode stays with one gateway, chosen by its id: its token trees live there. A gateway that is lost costs
the attempts that it held, never their episodes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from megloom.compute.conductor.events import Clock, EventLog
from megloom.compute.conductor.gateway_desk import GatewayDesk, SeedOf
from megloom.compute.gateway.protocol import Admission, AgentRoute, EpisodeCounts, Gateway, GatewayLost
from megloom.compute.graph.seeds import derive_seed
from megloom.compute.rollout.protocol import AgentPlan, Endpoint

ADMIT_TIMEOUT_S = 10.0  # it only makes an entry: more means that it hangs
CLOSE_TIMEOUT_S = (
    20.0  # a gateway gives the ends of its calls ten seconds to be told; more means that it hangs
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Admitted:
    """An attempt at its gateway. `lost` gets the cause if that goes away."""

    name: str
    attempt: int
    endpoint: Endpoint
    lost: asyncio.Future[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Closed:
    """What an attempt leaves: its calls' ids, what there is to say of them, and why its gateway went away."""

    calls: frozenset[str]
    warnings: tuple[str, ...]
    lost: str | None


class Gateways:
    """Only the episode desk admits and closes; only the supervisor says what is up and down."""

    def __init__(
        self,
        *,
        run: str,
        names: Sequence[str],
        agents: Mapping[str, AgentPlan],
        leaf_classes: str,
        desk: GatewayDesk,
        new_token: Callable[[], str],
        suspects: asyncio.Queue[str],
        clock: Clock,
        events: EventLog,
    ) -> None:
        self._run, self.names, self.desk, self._new_token = run, tuple(names), desk, new_token
        self._leaf_classes = leaf_classes
        self._routes = {
            name: AgentRoute(policy=a.policy, max_tokens=a.max_tokens, temperature=a.temperature)
            for name, a in agents.items()
        }
        self._suspects, self._clock, self._events = suspects, clock, events
        self._gateways: dict[str, Gateway] = {}
        self._is_up = {name: asyncio.Event() for name in names}
        self._admitted: dict[str, Admitted] = {}
        self._suspected: set[str] = set()  # until they are up anew: one restart, however many episodes wait

    def up(self, name: str, gateway: Gateway) -> None:
        self._gateways[name] = gateway
        self._suspected.discard(name)
        self._is_up[name].set()
        self._events.add("gateway_up", cell=name)

    def down(self, name: str, cause: str) -> None:
        """The gateway takes no more attempts; those that it held are lost."""
        if self._gateways.pop(name, None) is None:
            return
        self._is_up[name].clear()
        self._events.add("gateway_down", cell=name, cause=cause[:200])
        for admitted in self._admitted.values():
            if admitted.name == name and not admitted.lost.done():
                admitted.lost.set_result(f"{name}: {cause}")

    async def admit(
        self, episode_id: str, attempt: int, *, ends_s: float, grace_s: float, seed_of: SeedOf
    ) -> Admitted:
        """Lets an attempt call; waits for its gateway if that is down.

        Raises: GatewayLost if it goes away meanwhile.
        """
        name = self.names[derive_seed(self._run, episode_id) % len(self.names)]
        while (gateway := self._gateways.get(name)) is None:  # what was up may be down before this wakes
            await self._is_up[name].wait()
        admission = Admission(
            run=self._run,
            episode_id=episode_id,
            attempt=attempt,
            token=self._new_token(),
            agents=self._routes,
            lifetime_s=max(0.0, ends_s - self._clock()) + grace_s,
            leaf_classes=self._leaf_classes,
        )
        self.desk.open_attempt(episode_id, attempt, ends_s=ends_s, seed_of=seed_of)
        endpoint = None
        try:
            async with asyncio.timeout(ADMIT_TIMEOUT_S):
                endpoint = await gateway.admit(admission)
        except TimeoutError:
            cause = f"did not admit an episode in {ADMIT_TIMEOUT_S:g} s"
            self.down(name, cause)
            self._suspect(name)
            raise GatewayLost(f"{name}: {cause}") from None
        except GatewayLost as error:
            self.down(name, str(error))  # at once: the next attempt must not meet it again
            raise
        finally:
            if endpoint is None:
                self.desk.close_attempt(episode_id)
        lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        admitted = Admitted(name=name, attempt=attempt, endpoint=endpoint, lost=lost)
        self._admitted[episode_id] = admitted
        if name not in self._gateways:
            lost.set_result(f"{name}: lost while it admitted the episode")
        return admitted

    async def close(self, episode_id: str) -> Closed:
        """Ends the attempt's calls; later requests with its token are refused.

        A program whose gateway went away may end as if all were well, and before anybody else has noticed:
        so the gateway is asked, and says here that it is lost.
        """
        admitted = self._admitted[episode_id]
        warnings: tuple[str, ...] = ()
        try:
            if not admitted.lost.done():
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    counts = await self._gateways[admitted.name].close_episode(episode_id, admitted.attempt)
                warnings = _described(counts)
        except GatewayLost as error:
            self.down(admitted.name, str(error))
        except TimeoutError:
            self._suspect(admitted.name)
            warnings = (f"gateway: {admitted.name} did not close the episode in {CLOSE_TIMEOUT_S:g} s",)
        finally:
            del self._admitted[episode_id]
            calls = self.desk.close_attempt(episode_id)
        lost = admitted.lost.result() if admitted.lost.done() else None
        return Closed(calls=calls, warnings=warnings, lost=lost)

    def _suspect(self, name: str) -> None:
        if name not in self._suspected:
            self._suspected.add(name)
            self._suspects.put_nowait(name)

    def __len__(self) -> int:
        """Attempts that may call."""
        return len(self._admitted)


def _described(counts: EpisodeCounts) -> tuple[str, ...]:
    """Only what a reader should know: nothing of an episode whose calls all went well."""
    odd = {"failed": counts.num_failed, "unusable": counts.num_unusable, "late": counts.late}
    parts = [f"{count} {name}" for name, count in odd.items() if count]
    told = (f"gateway: of {counts.num_calls} calls {', '.join(parts)}",) if parts else ()
    return (*told, *(f"gateway: {problem}" for problem in counts.problems))
