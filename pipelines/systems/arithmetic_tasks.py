"""The arithmetic team's tasks (chains of one-digit terms from `reasoning-gym`) and its careless teacher.

The teacher writes the warm start's demonstrations. It forgets terms, slips in sums and stops early, at the
rates below: imitation learns its form together with its carelessness, and only a verified reward gets beyond
it. `reasoning_gym` takes seconds to import, so it is imported where tasks are made.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any

from megloom.compute.workload import Demonstration

NUM_TERMS = (3, 3)
NUM_HELD_OUT, HELD_OUT_SEED = 500, 777
NUM_TRAIN, TRAIN_SEED = 2600, 1000
FORGETS, SLIPS, STOPS_EARLY, CHOOSES_BLINDLY = 0.2, 0.1, 0.25, 0.5  # the teacher's carelessness

PLAN = re.compile(r"\d [+-] \d( then [+-] \d)*")  # "7 - 5 then - 9"
TRY = re.compile(r"\d( [+-] \d = (-?\d+))+")  # "7 - 5 = 2 - 9 = -7", whose answer is -7


def held_out_rows() -> list[dict[str, Any]]:
    """The held-out set; shares no task with the training set."""
    return _rows(NUM_HELD_OUT, HELD_OUT_SEED, avoid=set())


def train_rows() -> list[dict[str, Any]]:
    """The training set."""
    return _rows(NUM_TRAIN, TRAIN_SEED, avoid={row["prompt"] for row in held_out_rows()})


def answer_of(text: str) -> str:
    """The answer of a well-formed try, else "none"."""
    match = TRY.fullmatch(text)
    return match[2] if match else "none"


def teach(num: int, seed: int) -> Iterator[Demonstration]:
    """`num` dialogues on training tasks: a plan, six tries, and a choice among the first three."""
    dice = random.Random(seed)
    rows = train_rows()
    for _ in range(num):
        row = dice.choice(rows)
        task, truth = row["prompt"], row["reward_model"]["ground_truth"]
        plan = _plan(task, dice)
        tries = [_try(plan, dice) for _ in range(6)]
        right = [name for name, text in zip("abc", tries[:3], strict=True) if answer_of(text) == truth]
        blind = not right or dice.random() < CHOOSES_BLINDLY
        yield Demonstration(agent="planner", arguments=(task,), answer=plan)
        for text in tries:
            yield Demonstration(agent="solver", arguments=(task, plan), answer=text)
        choice = dice.choice("abc" if blind else right)
        yield Demonstration(agent="verifier", arguments=(task, *tries[:3]), answer=choice)


def _plan(task: str, dice: random.Random) -> str:
    start, *signed = re.findall(r"^\d|[+-] \d", task)
    if len(signed) > 1 and dice.random() < FORGETS:
        signed.pop(dice.randrange(len(signed)))
    return f"{start} {' then '.join(signed)}"


def _try(plan: str, dice: random.Random) -> str:
    start, *signed = re.findall(r"^\d|[+-] \d", plan)
    if len(signed) > 1 and dice.random() < STOPS_EARLY:
        signed.pop()
    value, text = int(start), start
    for term in signed:
        value += int(term.replace(" ", "")) + (dice.choice((-1, 1)) if dice.random() < SLIPS else 0)
        text += f" {term} = {value}"
    return text


def _rows(num: int, seed: int, avoid: set[str]) -> list[dict[str, Any]]:
    import reasoning_gym

    low, high = NUM_TERMS
    dataset = reasoning_gym.create_dataset(
        "chain_sum", size=8 * num, seed=seed, min_terms=low, max_terms=high, min_digits=1, max_digits=1
    )
    rows: dict[str, dict[str, Any]] = {}
    for item in dataset:
        expression = item["metadata"]["expression"]
        if expression not in avoid and expression not in rows:
            rows[expression] = {
                "prompt": expression,
                "reward_model": {"ground_truth": str(item["answer"])},
                "data_source": "reasoning_gym/chain_sum",
                "extra_info": {"question": item["question"], "seed": seed},
            }
        if len(rows) == num:
            break
    return list(rows.values())
