"""Speed of the hot store and of sealing, against the bare libraries underneath, in one run.

An invocation stands for a finished call: its `InvocationRecord`, and its completion `SegmentRecord` with 300
tokens and 300 logprobs. Appending: `append` and one `flush` per batch, durable when the flush returns,
against `executemany` of the same bytes (one row per record, with its key) in the same batches, in a file with
the same WAL and synchronous settings; `append_same_page_ratio` gives the bare side the journal's page size
too, which makes it faster. Sealing: `MegStore.seal` with digests, index and the emptying of the journal,
against `pyarrow.parquet` writing the same tables from memory to the same files with the same options. The
sides take turns, and each ratio is the median over the rounds, so that other load on the machine hits all
alike.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from megloom.compute.graph.records import InvocationRecord, SegmentRecord, record_key
from megloom.compute.graph.schemas import to_table
from megloom.compute.store.codec import encode
from megloom.compute.store.offload import ThreadOffload
from megloom.compute.store.seal import parquet_options
from megloom.compute.store.sqlite_journal import PAGE_BYTES, SqliteJournal
from megloom.compute.store.store import MegStore

NUM_TOKENS, VOCAB_SIZE, TEXT_CHARS = 300, 150_000, 300
AGENTS = ("planner", "solver", "verifier")
NUM_PAYLOADS = 512  # different token arrays; records share them, so that making records costs little memory
BATCH = 256  # invocations per flush
TARGET_RATIO, TARGET_APPEND_PER_S = 0.5, 5_000.0

Figures = dict[str, dict[str, Any]]


def finished_calls(num: int) -> Iterator[tuple[InvocationRecord, SegmentRecord]]:
    """`num` invocations of one step, each with its completion."""
    rng = random.Random(0)
    tokens = [[rng.randrange(VOCAB_SIZE) for _ in range(NUM_TOKENS)] for _ in range(NUM_PAYLOADS)]
    logprobs = [[-rng.expovariate(1.0) for _ in range(NUM_TOKENS)] for _ in range(NUM_PAYLOADS)]
    texts = ["".join(rng.choices("abcdefghij      ", k=TEXT_CHARS)) for _ in range(NUM_PAYLOADS)]
    for number in range(num):
        group, index = f"g000001-{number // 20:04d}", number % 5
        episode = f"{group}-m{number // 5 % 4:03d}"
        call = f"{episode}-a0-i{index:03d}"
        agent = AGENTS[0 if index == 0 else 2 if index == 4 else 1]
        payload = number % NUM_PAYLOADS
        yield (
            InvocationRecord(
                invocation_id=call,
                episode_id=episode,
                run="bench",
                step=1,
                task_id=f"task{number // 20:08d}",
                group_id=group,
                member=number // 5 % 4,
                attempt=0,
                agent=agent,
                policy=agent,
                index=index,
                num_reentries=0,
                state="done",
                version_min=7,
                version_max=7,
                cell=f"engine/{agent}/0",
                engine=f"engine/{agent}/0#1",
                registered_s=number * 0.001,
                ready_s=number * 0.001,
                started_s=number * 0.001 + 0.01,
                finished_s=number * 0.001 + 1.5,
                prompt_segment=f"{call}-p",
                completion_segment=f"{call}-c",
                message=None,
                num_prompt_tokens=200,
                num_completion_tokens=NUM_TOKENS,
                finish_reason="stop",
                seed=rng.randrange(2**62),
                temperature=1.0,
                max_tokens=512,
                text=texts[payload],
                reward=1.0,
                reward_status="scored",
                failure=None,
            ),
            SegmentRecord(
                segment_id=f"{call}-c",
                episode_id=episode,
                run="bench",
                step=1,
                policy=agent,
                parent=f"{call}-p",
                start=200,
                sampled=True,
                token_ids=tokens[payload],
                logprobs=logprobs[payload],
                version_spans=[[7, 0, NUM_TOKENS]],
            ),
        )


def append_figures(num: int = 20_000, rounds: int = 5) -> Figures:
    """Durable appends: their rate, and that rate over bare SQLite's."""
    calls = list(finished_calls(num))
    bodies = [row_of(record) for pair in calls for record in pair]
    size = sum(len(body) for _, _, body in bodies)
    ours, bare, same_page = in_turns(
        rounds,
        lambda at: _append(at, calls),
        lambda at: _insert(at, bodies, None),
        lambda at: _insert(at, bodies, PAGE_BYTES),
    )
    unit = f"of bare SQLite with {size // num} bytes each"
    return {
        "append_per_s": figure(num / statistics.median(ours), "invocations/s", TARGET_APPEND_PER_S),
        "append_ratio": figure(ratio(ours, bare), unit, TARGET_RATIO),
        "append_same_page_ratio": figure(ratio(ours, same_page), unit),
        "append_bare_per_s": figure(num / statistics.median(bare), "invocations/s"),
    }


def seal_figures(num: int = 100_000, rounds: int = 3) -> Figures:
    """Sealing one step of `num` invocations and their segments, over bare Parquet writing."""
    calls = list(finished_calls(num))
    segments = pa.concat_tables(
        to_table("segments", [s for _, s in calls[at : at + 10_000]]) for at in range(0, num, 10_000)
    ).combine_chunks()
    tables = [("segments", segments)]
    for agent in AGENTS:
        tables.append(
            (f"invocations-{agent}", to_table("invocations", [i for i, _ in calls if i.agent == agent]))
        )
    ours, bare = in_turns(rounds, lambda at: _seal(at, calls), lambda at: _write(at, tables))
    return {
        "seal_ratio": figure(ratio(ours, bare), "of bare Parquet writing", TARGET_RATIO),
        "seal_s": figure(statistics.median(ours), f"s for {num} invocations"),
        "seal_bare_s": figure(statistics.median(bare), f"s for {num} invocations"),
    }


def figure(value: float, unit: str, target: float | None = None) -> dict[str, Any]:
    """`target` is a lower bound, None for a figure that only informs."""
    return {"value": value, "unit": unit, "target": target, "ok": target is None or value >= target}


def ratio(ours: list[float], bare: list[float]) -> float:
    """Our rate over the bare one: the median over the rounds."""
    return statistics.median(b / o for o, b in zip(ours, bare, strict=True))


def in_turns(rounds: int, *sides: Callable[[Path], float]) -> list[list[float]]:
    """The seconds of each side in each round. Each call gets an empty folder."""
    seconds: list[list[float]] = [[] for _ in sides]
    for number in range(rounds):
        order = list(enumerate(sides))
        for at, side in order if number % 2 == 0 else reversed(order):
            with tempfile.TemporaryDirectory() as folder:
                seconds[at].append(side(Path(folder)))
    return seconds


def row_of(record: Any) -> tuple[str, str, bytes]:
    """The record as its own row: table, key, and the bytes that the journal keeps of it."""
    entry = encode(record)
    packed = [value for value in entry.row if isinstance(value, bytes)]
    rest = json.dumps([value for value in entry.row if not isinstance(value, bytes)])
    return entry.table, record_key(record), rest.encode() + b"".join(packed)


def _append(folder: Path, calls: list[tuple[Any, Any]]) -> float:
    async def main() -> float:
        with ThreadOffload("bench") as offload:
            async with SqliteJournal.open(folder / "journal.sqlite", offload) as journal:
                start = time.perf_counter()
                flushes: list[asyncio.Task[None]] = []
                for at in range(0, len(calls), BATCH):
                    for invocation, segment in calls[at : at + BATCH]:
                        journal.append(invocation, 1)
                        journal.append(segment, 1)
                    # The conductor goes on while a flush runs; the next one waits for it.
                    if flushes:
                        await flushes.pop()
                    flushes.append(asyncio.create_task(journal.flush()))
                    await asyncio.sleep(0)
                await journal.flush()
                return time.perf_counter() - start

    return asyncio.run(main())


def _insert(folder: Path, bodies: list[tuple[str, str, bytes]], page_bytes: int | None) -> float:
    with closing(sqlite3.connect(folder / "bare.sqlite", isolation_level=None)) as connection:
        if page_bytes is not None:
            connection.execute(f"PRAGMA page_size = {page_bytes}")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("CREATE TABLE records (tbl TEXT, key TEXT, body BLOB, PRIMARY KEY (tbl, key))")
        start = time.perf_counter()
        for at in range(0, len(bodies), 2 * BATCH):
            with connection:
                connection.execute("BEGIN IMMEDIATE")
                connection.executemany(
                    "INSERT INTO records VALUES (?, ?, ?) ON CONFLICT DO NOTHING", bodies[at : at + 2 * BATCH]
                )
        return time.perf_counter() - start


def _seal(folder: Path, calls: list[tuple[Any, Any]]) -> float:
    async def main() -> float:
        with ThreadOffload("bench") as offload:
            async with SqliteJournal.open(folder / "journal.sqlite", offload) as journal:
                store = MegStore(root=str(folder), journal=journal, offload=offload)
                await store.recover("bench")
                for at in range(0, len(calls), 10 * BATCH):
                    for invocation, segment in calls[at : at + 10 * BATCH]:
                        store.record(invocation)
                        store.record(segment)
                    await store.flush()
                start = time.perf_counter()
                await store.seal("bench", 1, {"cursor": len(calls)})
                return time.perf_counter() - start

    return asyncio.run(main())


def _write(folder: Path, tables: list[tuple[str, pa.Table]]) -> float:
    start = time.perf_counter()
    for name, table in tables:
        pq.write_table(table, folder / f"{name}.parquet", **parquet_options(table.schema))
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--appends", type=int, default=20_000, help="invocations to append per round")
    parser.add_argument("--seals", type=int, default=100_000, help="invocations to seal per round")
    args = parser.parse_args()
    figures = append_figures(args.appends) | seal_figures(args.seals)
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
