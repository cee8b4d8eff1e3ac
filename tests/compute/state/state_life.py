"""A process that forks lives of a state store and kills each with SIGKILL at one operation.

A life puts, gets, secures and deletes small states in a seeded order, on tiers so small that most puts demote
others, and says what has returned. Its death is before, midway in, or after the n-th change of the disk or
statement of the index. The parent then opens the store and checks what the dead one said. Used by
`test_state_kills.py`; `python -m tests.compute.state.state_life FOLDER SEED FIRST STEP` prints one JSON line.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from megloom.compute.state.errors import NoValidCopy
from megloom.compute.state.index import Index
from megloom.compute.state.keys import Key
from megloom.compute.state.tiers import Tier
from tests.compute.state.node_store import a_store, content, files_under, key
from tests.kills.tripwire import Tripwire, wire_the_disk

BUDGETS = {Tier.TMPFS: 200, Tier.DISK: 300, Tier.REMOTE: None}
NUM_ACTIONS = 14
PLACES = ("before", "midway", "after")


def content_of(wanted: Key, seed: int) -> bytes:
    return random.Random(f"{seed} {wanted}").randbytes(60)


def actions(seed: int) -> list[tuple[str, Key]]:
    """What a life does, in order; a key is deleted only after it was put."""
    rng = random.Random(seed)
    put: list[Key] = []
    found = []
    for number in range(NUM_ACTIONS):
        verb = rng.choice(("put", "put", "put", "draft", "get", "secure", "delete")) if put else "put"
        if verb in ("put", "draft"):
            put.append(key(number))
            found.append((verb, put[-1]))
        else:
            wanted = rng.choice(put)
            if verb == "delete":
                put.remove(wanted)
            found.append((verb, wanted))
    return found


async def live(folder: Path, seed: int, say: Callable[[str], None]) -> None:
    """All actions; `say` after each."""
    async with a_store(folder, budgets=BUDGETS) as store:
        say("open")
        for verb, wanted in actions(seed):
            if verb == "put":
                await store.put(wanted, content_of(wanted, seed))
            elif verb == "draft":
                draft = await store.draft(60)
                draft.path.write_bytes(content_of(wanted, seed))
                await store.put(wanted, draft)
            else:
                await getattr(store, verb)(wanted)
            say(verb)


async def check(folder: Path, seed: int, num_done: int) -> None:
    """Raises: AssertionError if the store is not what `num_done` acknowledged actions leave behind."""
    promised: set[Key] = set()
    for verb, wanted in actions(seed)[:num_done]:
        if verb in ("put", "draft"):
            promised.add(wanted)
        elif verb == "delete":
            promised.remove(wanted)
    open_actions = actions(seed)[num_done : num_done + 1]
    in_doubt = {wanted for verb, wanted in open_actions if verb in ("put", "draft", "delete")}
    async with a_store(folder, budgets=BUDGETS) as store:
        known = set(await store.keys())
        assert promised - in_doubt <= known <= promised | in_doubt, f"{promised=} {known=}"
        held = await store.held_bytes()
        assert all(budget is None or held[tier] <= budget for tier, budget in BUDGETS.items()), held
        num_copies = sum(held[tier] for tier in (Tier.TMPFS, Tier.DISK)) // 60
        files = [*files_under(folder / "tmpfs"), *files_under(folder / "disk")]
        assert len(files) == num_copies, f"files without a row: {files}"
        for wanted in sorted(known):
            try:
                assert await content(store, wanted) == content_of(wanted, seed)
            except NoValidCopy as error:
                assert wanted in in_doubt and open_actions[0][0] == "delete", f"{wanted} is lost: {error}"
        await store.put(key(99), bytes(60))


def die_at(folder: Path, seed: int, number: int | None, place: str) -> tuple[int, int]:
    """Forks a life that is killed there; how many actions it said, and its operations if it lived to its end.

    It does if the operation fails by itself, as the making of a folder that is there.
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            wire = Tripwire(at=number, place=place)
            wire_the_disk(wire)
            Index._rows = wire.wrap("sql", Index._rows)  # type: ignore[method-assign]
            shutil.copyfile = wire.wrap("copyfile", shutil.copyfile)  # type: ignore[assignment]
            asyncio.run(live(folder, seed, lambda _: os.write(writing, b".") and None))
            os.write(writing, f"{len(wire.names)}".encode())
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writing)
    said = b"".join(iter(lambda: os.read(reading, 4096), b""))
    os.close(reading)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status in (0, -9), f"seed={seed} at={number} {place}: the life failed, code {status}"
    num_said = said.count(b".")
    return max(num_said - 1, 0), int(said[num_said:] or b"0")


def main(folder: Path, seed: int, first: int, step: int) -> dict[str, int]:
    """Kills lives at operations first, first + step, … of the seed's life, in turn before, midway, after."""
    (folder / "whole").mkdir()
    _, num_operations = die_at(folder / "whole", seed, None, PLACES[0])
    num_kills = 0
    for count, number in enumerate(range(first, num_operations, step)):
        home = folder / f"{number}"
        home.mkdir()
        num_done, lived = die_at(home, seed, number, PLACES[count % 3])
        asyncio.run(check(home, seed, num_done))
        shutil.rmtree(home)
        num_kills += not lived
    return {"kills": num_kills, "operations": num_operations}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))))
