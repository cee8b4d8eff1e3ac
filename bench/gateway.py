"""The gateway under load: call rate, latency, records, the price of streaming, and memory.

256 episodes at a time make 8 chat-completion calls each over keep-alive connections; a call adds a message of
16 tokens and an answer of 32 to its conversation. The engine answers at once, so that all that is measured is
the gateway, which has one core of two (the load has the other). Prints one JSON object
`{figure: {value, unit, target, ok}}`:

calls_per_s         a closed loop, every episode sends as fast as it is answered; the median of the rounds
p50_ms, p99_ms      an open loop at half that rate, counted from when a call was due; medians of the rounds
cpu_ms_per_call     of the gateway's process at saturation
bad_records         calls that the conductor saw lost, doubled, cut off from their turn, or with other ids
stream_cost         CPU of a streamed call (4 pieces) over that of one that is not, less one
memory_growth       bytes kept per new token over turns 64 to 128 of a conversation, over those of 32 to 64
rss_growth_mib      resident memory after `--calls` calls in closed episodes, less that after the first tenth

Run from the root of a checkout: `python bench/gateway.py [--calls N | --soak]`. `--soak` makes 200,000 calls.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import statistics
from typing import Any

from gateway_load.generator import Generator, Load, build_request
from gateway_load.service import AGENT, Gateway, State

NUM_EPISODES, NUM_TURNS = 256, 8
NUM_ROUNDS, NUM_PAIRS = 5, 9
MESSAGE_TOKENS = 16
MESSAGE = " ".join(f"w{number}" for number in range(100, 100 + MESSAGE_TOKENS))
LONG_TURNS = (32, 64, 128)
DEFAULT_CALLS, SOAK_CALLS = 20_480, 200_000
TARGET_CALLS_PER_S, TARGET_P99_MS = 500.0, 100.0
TARGET_STREAM_COST, TARGET_MEMORY_GROWTH, TARGET_RSS_MIB = 0.2, 1.25, 50.0

Figures = dict[str, dict[str, Any]]


class Conversation:
    """One episode, call by call: what it sends is what every episode of the load sends."""

    def __init__(self, gateway: Gateway, episode_id: str) -> None:
        self._connection = http.client.HTTPConnection(*gateway.address)
        ((self._path, self._token),) = gateway.admit([episode_id])
        self._messages: list[dict[str, Any]] = []
        self.bodies: list[dict[str, Any]] = []

    def ask(self) -> None:
        """Sends the next message and keeps the answer as the client got it."""
        self._messages.append({"role": "user", "content": MESSAGE})
        body = {"model": AGENT, "messages": list(self._messages)}
        self.bodies.append(body)
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"}
        path = f"{self._path}/chat/completions"
        self._connection.request("POST", path, body=json.dumps(body), headers=headers)
        response = self._connection.getresponse()
        answer = response.read()
        if response.status != 200:
            raise RuntimeError(f"{path}: expected 200, got {response.status} {answer[:500]!r}")
        self._messages.append(json.loads(answer)["choices"][0]["message"])

    def close(self) -> None:
        self._connection.close()


class Bench:
    """A gateway, its load, and the bodies that every episode sends."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._names = itertools.count()
        first = Conversation(gateway, "first")
        for _ in range(NUM_TURNS):
            first.ask()
        first.close()
        gateway.close_episodes(["first"], NUM_TURNS)
        self._bodies = {
            is_stream: [json.dumps({**body, "stream": is_stream}).encode() for body in first.bodies]
            for is_stream in (False, True)
        }
        self._generator = Generator(gateway.address, NUM_EPISODES)
        self.num_sent = NUM_TURNS

    def round(self, *, rate: float | None = None, is_stream: bool = False) -> Load:
        """All episodes of one round, from their admission to their closing."""
        names = [f"e{next(self._names):06d}" for _ in range(NUM_EPISODES)]
        requests = [
            [build_request(f"{path}/chat/completions", token, body) for body in self._bodies[is_stream]]
            for path, token in self._gateway.admit(names)
        ]
        load = self._generator.run(requests, rate)
        self._gateway.close_episodes(names, NUM_TURNS)
        self.num_sent += NUM_EPISODES * NUM_TURNS
        return load

    def close(self) -> None:
        self._generator.close()


def load_figures(bench: Bench) -> Figures:
    """Rate at saturation, latency at half of it; rounds take turns, so that other load hits both alike."""
    bench.round()  # warms up
    rates: list[float] = []
    loads: list[Load] = []
    for _ in range(NUM_ROUNDS):
        full = bench.round()
        rates.append(len(full.latencies_s) / full.elapsed_s)
        loads.append(bench.round(rate=rates[-1] / 2))

    def percentile_ms(percent: float) -> float:
        return statistics.median(load.percentile_ms(percent) for load in loads)

    return {
        "calls_per_s": figure(statistics.median(rates), "1/s", TARGET_CALLS_PER_S),
        "p50_ms": figure(percentile_ms(50), "ms"),
        "p99_ms": figure(percentile_ms(99), "ms", TARGET_P99_MS, at_least=False),
    }


def stream_figures(bench: Bench, gateway: Gateway) -> Figures:
    """What streaming costs: the median over pairs of a whole round and a streamed one."""

    def cpu_ms(*, is_stream: bool) -> float:
        before = gateway.cpu_s()
        bench.round(is_stream=is_stream)
        return (gateway.cpu_s() - before) * 1e3 / (NUM_EPISODES * NUM_TURNS)

    pairs = [(cpu_ms(is_stream=False), cpu_ms(is_stream=True)) for _ in range(NUM_PAIRS)]
    return {
        "cpu_ms_per_call": figure(statistics.median(whole for whole, _ in pairs), "ms"),
        "stream_cost": figure(
            statistics.median(streamed / whole for whole, streamed in pairs) - 1,
            "ratio",
            TARGET_STREAM_COST,
            at_least=False,
        ),
    }


def memory_figures() -> Figures:
    """Whether a conversation's memory follows its new tokens, in a gateway that traces its allocations."""
    with Gateway(is_traced=True) as gateway:
        conversation = Conversation(gateway, "long")
        states: list[State] = []
        for turn in range(1, LONG_TURNS[-1] + 1):
            conversation.ask()
            if turn in LONG_TURNS:
                states.append(gateway.state())
        conversation.close()
    assert not states[-1].problems, states[-1].problems[:5]
    early, late = (
        (after.traced_bytes - before.traced_bytes) / (after.num_new_tokens - before.num_new_tokens)
        for before, after in itertools.pairwise(states)
    )
    return {
        "bytes_per_new_token": figure(late, "B"),
        "memory_growth": figure(late / early, "ratio", TARGET_MEMORY_GROWTH, at_least=False),
    }


def soak_figures(bench: Bench, gateway: Gateway, num_calls: int) -> Figures:
    """What `num_calls` calls leave behind when their episodes are closed."""
    num_rounds = max(10, -(-num_calls // (NUM_EPISODES * NUM_TURNS)))
    start_mib = 0.0
    for number in range(1, num_rounds + 1):
        bench.round()
        if number == num_rounds // 10:
            start_mib = gateway.state().rss_mib
    growth = gateway.state().rss_mib - start_mib
    made = num_rounds * NUM_EPISODES * NUM_TURNS
    return {"rss_growth_mib": figure(growth, f"MiB over {made} calls", TARGET_RSS_MIB, at_least=False)}


def record_figures(bench: Bench, gateway: Gateway) -> Figures:
    """What the conductor has seen. Raises: AssertionError for a call that is lost or recorded wrongly."""
    state = gateway.state()
    assert not state.problems, f"{len(state.problems)} problems, such as {state.problems[:5]}"
    assert (state.num_ended, state.num_open_episodes) == (bench.num_sent, 0), (state, bench.num_sent)
    return {
        "records": figure(state.num_ended, "calls"),
        "bad_records": figure(len(state.problems), "calls", 0.0, at_least=False),
    }


def figure(value: float, unit: str, target: float | None = None, *, at_least: bool = True) -> dict[str, Any]:
    """Returns one figure; without a target it is only reported."""
    ok = None if target is None else bool(value >= target if at_least else value <= target)
    return {"value": round(value, 3), "unit": unit, "target": target, "ok": ok}


def main() -> None:
    """Runs the benchmark and prints its figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--calls", type=int, default=DEFAULT_CALLS, help="of the memory figure")
    parser.add_argument("--soak", action="store_true", help=f"{SOAK_CALLS} calls")
    arguments = parser.parse_args()
    with Gateway() as gateway:
        bench = Bench(gateway)
        found = load_figures(bench) | stream_figures(bench, gateway)
        found |= soak_figures(bench, gateway, SOAK_CALLS if arguments.soak else arguments.calls)
        found |= record_figures(bench, gateway)
        bench.close()
    print(json.dumps(found | memory_figures(), indent=2))


if __name__ == "__main__":
    main()
