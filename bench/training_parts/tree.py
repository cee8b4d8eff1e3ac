"""Branches of an episode trained in one pass over their tree, against the same rows apart.

`tree_ratio`: an episode of 5 branches of 1,024 tokens that share 80 % of them, forward and backward of a
Llama with 26 million parameters, the tree over the rows; 0.36 is the share of tokens left to compute.
`tree_ratio_4m` and `tree_ratio_demo` are smaller models with shorter branches. The sides take turns; medians
of the ratios.

`jmax_saved`: the share of the forward-backward time that training at most 5 paths of an execution saves
against all of its paths, with rows apart, as QwenGyre reports it (25.2 %); `jmax_saved_tree` the same with
trees, where a further path costs only what is its own. Their trees are not public. Ours are drawn as follows:

    paths of an execution   the power law P(at least n) = n^−1.45, at even quantiles of 100 executions, whose
                            shares for at most 1 and 5 paths are close to QwenGyre's 41.4 % and 74.8 %
    a path's length         60 to 120 tokens
    what it shares          a third retries (from 50 to 90 % of an earlier path on), a third starts after a
                            compaction (after the task: 25 %), a third is a sub-agent (after the system
                            prompt: 5 %)
    which 5 are trained     drawn by their number of untrained sampled tokens, as in QwenGyre

So `jmax_saved` follows from the law that was fitted to it; what is measured is `jmax_saved_tree`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers.models.llama import LlamaConfig, LlamaForCausalLM

from megloom.compute.trainers.heads import read_out
from megloom.compute.trainers.passes import DEFAULT_BUDGET_TOKENS, Part, collate, cut
from megloom.compute.trainers.protocol import TrainingRow

CPU = torch.device("cpu")
VOCAB_SIZE = 512
DEMO = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "head_dim": 16}
SMALL = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 5, "head_dim": 64}
LARGE = {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 9, "head_dim": 64}
NUM_BRANCHES, SHARED = 5, 0.8
NUM_ROUNDS, NUM_JMAX_ROUNDS = 3, 2
TARGET_RATIO = 0.5
NUM_EXECUTIONS, MAX_PATHS, EXPONENT, MAX_TRAINED = 100, 64, 1.45, 5

Figures = dict[str, dict[str, Any]]


def tree_figures() -> Figures:
    """The five figures, in about a minute and a half."""
    torch.set_num_threads(1)
    small, unit = network(SMALL), "of the time of separate rows, {} branches of {} tokens, {} M parameters"

    def figure(model: Any, length: int, num_episodes: int, **target: Any) -> dict[str, Any]:
        rows = [row for number in range(num_episodes) for row in episode(number, length)]
        value = statistics.median(tree / apart for tree, apart in in_turns(model, [layouts(rows)])[0])
        size = round(sum(p.numel() for p in model.parameters()) / 1e6, 1)
        return {"value": value, "unit": unit.format(NUM_BRANCHES, length, size), **target}

    large = figure(network(LARGE), 1024, 1, target=TARGET_RATIO)
    return {
        "tree_ratio": {**large, "ok": large["value"] <= TARGET_RATIO},
        "tree_ratio_4m": figure(small, 200, 4),
        "tree_ratio_demo": figure(network(DEMO), 50, 8),
        **_jmax_figures(small),
    }


def _jmax_figures(model: Any) -> Figures:
    rng = np.random.default_rng(1)
    capped, full = [], []
    for number in range(NUM_EXECUTIONS):
        paths = execution(number, rng)
        full.extend(as_rows(paths, number))
        capped.extend(as_rows([paths[i] for i in chosen(paths, rng)], number))
    of_capped, of_full = in_turns(model, [layouts(capped), layouts(full)], NUM_JMAX_ROUNDS)
    pairs = list(zip(of_capped, of_full, strict=True))
    tree = statistics.median(1 - one[0] / other[0] for one, other in pairs)
    apart = statistics.median(1 - one[1] / other[1] for one, other in pairs)
    unit = f"of the time of all {len(full)} paths saved by training {len(capped)}"
    return {
        "jmax_saved": {"value": apart, "unit": f"{unit}, rows apart"},
        "jmax_saved_tree": {"value": tree, "unit": f"{unit}, trees"},
    }


def network(config: dict[str, int]) -> Any:
    """A Llama with random weights."""
    torch.manual_seed(0)
    made = LlamaConfig(
        **config,
        num_attention_heads=config["hidden_size"] // config["head_dim"],
        num_key_value_heads=config["hidden_size"] // config["head_dim"] // 2,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=4096,
        attn_implementation="sdpa",
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(made).eval()


def episode(number: int, length: int) -> list[TrainingRow]:
    """Branches off one past; the first of them trains on the past's last half."""
    rng = np.random.default_rng(number)
    num_shared = int(SHARED * length)
    past = rng.integers(0, VOCAB_SIZE, num_shared)
    paths = []
    for branch in range(NUM_BRANCHES):
        ids = np.concatenate([past, rng.integers(0, VOCAB_SIZE, length - num_shared)])
        mask = np.arange(length) >= (num_shared if branch else num_shared // 2)
        paths.append((ids, mask))
    return as_rows(paths, number)


Path = tuple[np.ndarray, np.ndarray]  # token ids and which of them were sampled


def execution(number: int, rng: np.random.Generator) -> list[Path]:
    """The paths of one execution of `NUM_EXECUTIONS`; the draw's law is in the module's docstring."""
    quantile = (number + 0.5) / NUM_EXECUTIONS
    num_paths = min(MAX_PATHS, int(quantile ** (-1 / EXPONENT)))
    paths: list[Path] = []
    for index in range(num_paths):
        length = int(rng.integers(60, 121))
        ids, is_sampled = rng.integers(0, VOCAB_SIZE, length), rng.random(length) < 0.4
        if index:
            past, past_sampled = paths[rng.integers(0, index)]
            share = (rng.uniform(0.5, 0.9), 0.25, 0.05)[index % 3]
            kept = min(int(share * len(past)), length - 20)
            ids[:kept], is_sampled[:kept] = past[:kept], past_sampled[:kept]
        is_sampled[: length // 20], is_sampled[-1] = False, True
        paths.append((ids, is_sampled))
    return paths


def chosen(paths: Sequence[Path], rng: np.random.Generator) -> list[int]:
    """Up to `MAX_TRAINED` paths, each drawn by its number of sampled tokens that none before it has."""
    trained: set[bytes] = set()
    taken: list[int] = []
    while len(taken) < min(MAX_TRAINED, len(paths)):
        left = np.array([0 if i in taken else len(own_tokens(p) - trained) for i, p in enumerate(paths)])
        if not left.any():
            break
        taken.append(int(rng.choice(len(paths), p=left / left.sum())))
        trained |= own_tokens(paths[taken[-1]])
    return taken


def own_tokens(path: Path) -> set[bytes]:
    """The sampled tokens of a path, each as the prefix that it ends."""
    ids, is_sampled = path
    return {ids[: i + 1].tobytes() for i in np.flatnonzero(is_sampled)}


def as_rows(paths: Sequence[Path], number: int) -> list[TrainingRow]:
    """Rows in which each sampled token is trainable once."""
    trained: set[bytes] = set()
    rows = []
    for index, (ids, is_sampled) in enumerate(paths):
        mask = np.zeros(len(ids), np.uint8)
        for i in np.flatnonzero(is_sampled):
            mask[i] = ids[: i + 1].tobytes() not in trained
        trained |= own_tokens((ids, is_sampled))
        rows.append(
            TrainingRow(
                sample_id=f"{number}-{index}",
                token_ids=ids.astype(np.int32),
                loss_mask=mask,
                logprobs=np.zeros(len(ids), np.float32),
                advantage=1.0,
                weight=1.0,
                temperature=1.0,
                episode_id=str(number),
            )
        )
    return [row for row in rows if row.loss_mask.any()]


def layouts(rows: Sequence[TrainingRow]) -> tuple[list[Part], list[Part]]:
    """The passes of the rows as trees, and of the rows apart."""
    budget = DEFAULT_BUDGET_TOKENS["cpu"]
    return cut(rows, budget), cut(rows, budget, shared_prefixes=False)


def in_turns(
    model: Any, sides: Sequence[tuple[list[Part], list[Part]]], num_rounds: int = NUM_ROUNDS
) -> list[list[tuple[float, float]]]:
    """Seconds of each side's two layouts, round by round, after one warm pass."""
    train(model, sides[0][0][:1])
    found: list[list[tuple[float, float]]] = [[] for _ in sides]
    for _ in range(num_rounds):
        for seconds, (tree, apart) in zip(found, sides, strict=True):
            seconds.append((train(model, tree), train(model, apart)))
    return found


def train(model: Any, parts: Sequence[Part]) -> float:
    """The seconds of collating, forward and backward."""
    model.zero_grad()
    start = time.perf_counter()
    for part in parts:
        read_out(model, collate(part, CPU)).logprobs_N.sum().backward()
    return time.perf_counter() - start
