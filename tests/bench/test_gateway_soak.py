"""A short soak of the benchmark's gateway: calls are recorded once, closed episodes leave next to nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"
NUM_ROUNDS, EPISODES_AT_ONCE, NUM_WAVES = 3, 8, 2
# What remains of a closed episode is what tells its late requests that it is over: about 1 KiB. With its
# history an episode of this load weighs about 13 KiB.
KEPT_BYTES = 4 << 10


def test_rounds_of_closed_episodes_lose_no_call_and_keep_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    import gateway
    from gateway_load.service import Gateway

    monkeypatch.setattr(gateway, "NUM_EPISODES", EPISODES_AT_ONCE)
    with Gateway(is_traced=True) as process:
        bench = gateway.Bench(process)
        states = []
        for _ in range(NUM_ROUNDS):
            bench.round()
            bench.round(is_stream=True)
            states.append(process.state())
        figures = gateway.record_figures(bench, process)
        bench.close()
    num_calls = gateway.NUM_TURNS * (1 + NUM_ROUNDS * NUM_WAVES * EPISODES_AT_ONCE)
    assert (figures["records"]["value"], figures["bad_records"]["value"]) == (num_calls, 0)
    assert [(state.num_open_episodes, state.problems) for state in states] == [(0, ())] * NUM_ROUNDS
    _, second, third = states
    grown = third.traced_bytes - second.traced_bytes
    assert second.traced_bytes > 0, "the process traces its memory"
    assert grown <= KEPT_BYTES * NUM_WAVES * EPISODES_AT_ONCE, f"{grown} bytes more after the third round"
