"""A run that is killed again and again until it is through, drawn from one seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from tests.kills.disk import Disk, Promise, check_after_death, check_same_run, read_disk
from tests.kills.life import Order
from tests.kills.nursery import Lived, Nursery

PLACES = ("before", "midway", "after")
RESUME_OPERATIONS = 30  # about as many as a life passes before its first own step: recovery

# From the number of a life, its order and the last sealed step to the order that kills, or None: it may live.
Kills = Callable[[int, Order, int], Order | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Undisturbed:
    """The run that nobody killed: the measure of all others."""

    home: Path
    order: Order
    disk: Disk
    operations: tuple[str, ...]
    seconds: float


def undisturbed(nursery: Nursery, home: Path, *, steps: int, seed: int) -> Undisturbed:
    order = Order(home=str(home), steps=steps, seed=seed, epoch=1)
    lived = nursery.live(order)
    assert lived.end["state"] == "finished", lived.end
    disk = read_disk(home)
    assert disk.last_step == steps
    again = nursery.live(replace(order, home=str(home / "again")))  # the first life pays for cold caches
    return Undisturbed(
        home=home,
        order=order,
        disk=disk,
        operations=tuple(lived.end["operations"]),
        seconds=min(lived.seconds, again.seconds),
    )


def run_through(nursery: Nursery, home: Path, measure: Undisturbed, kills: Kills) -> list[Order]:
    """Lives one life after another in `home` until the run is finished; returns the orders that killed.

    Everything that must hold is asserted after each death and at the end. A failure names all orders so far.
    """
    deadly: list[Order] = []
    before: Disk | None = None
    number = 0
    while True:
        plain = replace(measure.order, home=str(home), epoch=number + 1)
        order = kills(number, plain, before.last_step if before else -1) or plain
        lived = nursery.live(order)
        trail = f"lives so far: {[*deadly, order]}"
        try:
            disk = read_disk(home)
            check_after_death(disk, before, promises(lived), home)
            check_progress(disk, lived)
            if not lived.was_killed:
                assert lived.end["state"] == "finished", lived.end
                check_same_run(disk, measure.disk, home, measure.home)
                return deadly
        except Exception as error:
            error.add_note(trail)
            raise
        deadly.append(order)
        before, number = disk, number + 1


def promises(lived: Lived) -> list[Promise]:
    return [
        (step, table, key, digest)
        for message in lived.told
        for step, table, key, digest in message.get("acknowledged", ())
    ]


def check_progress(disk: Disk, lived: Lived) -> None:
    """A step that the conductor was told is sealed, is sealed."""
    assert not lived.is_hung, f"no end after {lived.seconds:.0f} s: {lived.told[-1:]}"
    told = [message["sealed"] for message in lived.told if "sealed" in message]
    assert disk.last_step >= max(told, default=-1), f"told {told}, sealed up to {disk.last_step}"


def random_kills(seed: int, measure: Undisturbed, num_kills: int) -> Kills:
    """Kills at random operations, at first operations of a resume, and at random times from outside.

    The same seed draws the same kills; those by time hit where the machine happens to be.
    """
    dice = random.Random(seed)

    def draw(number: int, order: Order, last_step: int) -> Order | None:
        if number >= num_kills:
            return None
        left = 1.0 - (last_step + 1) / (order.steps + 1)  # a life that resumes late is shorter
        way = dice.random()
        if way < 0.3:
            return replace(order, kill_after_s=0.9 * dice.random() * left * measure.seconds)
        resuming = number > 0 and way < 0.6
        at = dice.randrange(RESUME_OPERATIONS if resuming else max(1, int(left * len(measure.operations))))
        return replace(order, at=at, place=dice.choice(PLACES))

    return draw


def killed_at(*deaths: tuple[int, str]) -> Kills:
    """The first lives die at the given operations and places."""

    def draw(number: int, order: Order, last_step: int) -> Order | None:
        if number >= len(deaths):
            return None
        at, place = deaths[number]
        return replace(order, at=at, place=place)

    return draw
