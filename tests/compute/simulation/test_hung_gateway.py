"""A gateway that is there and answers nothing is replaced once, whoever waits, and costs no episode."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from megloom.compute.simulation import backend as cells
from megloom.compute.simulation.gateway import ModelledGateway
from megloom.compute.simulation.store import MemoryStore
from tests.compute.simulation.test_admission_deadline import STEPS, run


@pytest.mark.parametrize("verb", ["admit", "close_episode"])
def test_a_gateway_that_hangs_is_restarted_once_and_costs_no_episode(
    monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    class Hangs(ModelledGateway):
        """The first of its name, from 3 s on: in one of its verbs."""

    async def hang(self: Any, *arguments: Any) -> Any:
        if self.name.endswith(".1") and asyncio.get_running_loop().time() > 3.0:
            await asyncio.sleep(1e6)
        return await getattr(ModelledGateway, verb)(self, *arguments)

    setattr(Hangs, verb, hang)
    monkeypatch.setattr(cells, "ModelledGateway", Hangs)
    store = MemoryStore(keep_steps=STEPS + 1)
    simulated = run(store)
    assert (simulated.state, simulated.failure, len(simulated.reports)) == ("finished", None, STEPS + 1)
    assert not any(report.failures for report in simulated.reports)
    downs = [line for line in map(json.loads, simulated.events) if line["kind"] == "gateway_down"]
    assert len(downs) == 1
