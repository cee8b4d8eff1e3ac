"""A few fixed tokens that every engine answers after it has loaded a version, before traffic returns.

The digests say that the file is right; the canary says that the engine computes with it: the logprobs of its
greedy answer must be those of the trainer's own weights, or of the policy's first engine if no trainer can be
asked. It finds wrong or torn weights, not small differences of arithmetic.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megloom.compute.engines.protocol import Engine, EngineError, EngineInfo, GenerateRequest
from megloom.compute.graph.seeds import stable_id
from megloom.compute.trainers.protocol import MicroBatch, Trainer, TrainerError, TrainingRow

log = logging.getLogger(__name__)
PROMPT_TOKENS, ANSWER_TOKENS = 8, 4
TOLERANCES = {"float32": 0.02, "bfloat16": 0.2}  # of a logprob; the trainer computes with float32 masters


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What an engine said; `logprobs` are of `token_ids`, at temperature 1."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


# From a policy and an engine's answer to what the trainer makes of its tokens.
Reference = Callable[[str, Answer], Awaitable[Sequence[float]]]


class Canary:
    """`reference` None compares a policy's engines with each other; `dtypes` are the published ones."""

    def __init__(self, *, run: str, dtypes: Mapping[str, str], reference: Reference | None) -> None:
        self._run, self._dtypes, self._reference = run, dtypes, reference

    async def ask(self, cell: str, engine: Engine, info: EngineInfo) -> Answer:
        """An engine's greedy answer. Raises: EngineError."""
        length = max(1, min(PROMPT_TOKENS, info.context_length - ANSWER_TOKENS))
        prompt_ids = tuple((3 * at + 1) % info.vocab_size for at in range(length))
        completion = await engine.generate(
            GenerateRequest(
                rid=stable_id(self._run, "canary", cell, info.version),
                token_ids=prompt_ids,
                max_tokens=ANSWER_TOKENS,
                temperature=0.0,
                seed=0,
                stop_token_ids=(),
                training=False,
            )
        )
        spans = {span.version for span in completion.version_spans}
        if spans != {info.version}:
            raise EngineError(f"{cell}: canary sampled by versions {sorted(spans)}, expected {info.version}")
        return Answer(prompt_ids=prompt_ids, token_ids=completion.token_ids, logprobs=completion.logprobs)

    async def disagreements(self, policy: str, answers: Mapping[str, Answer]) -> dict[str, str]:
        """Which cells' answers are not those of the weights, and how."""
        first = next(iter(answers.values()), None)
        found: dict[str, str] = {}
        for cell, answer in answers.items():
            if (expected := await self._expected(policy, answer)) is not None:
                complaint = self._complaint(policy, _gap(answer.logprobs, expected), "the trainer's")
            else:
                assert first is not None
                complaint = self.difference(policy, answer, first)
            if complaint is not None:
                found[cell] = complaint
        return found

    def difference(self, policy: str, answer: Answer, first: Answer) -> str | None:
        """How an answer is not that of another engine on the same version; None if it is."""
        num_alike = _common_prefix(answer.token_ids, first.token_ids) + 1
        gap = _gap(answer.logprobs[:num_alike], first.logprobs[:num_alike])
        return self._complaint(policy, gap, "the first engine's")

    def _complaint(self, policy: str, gap: float, of: str) -> str | None:
        tolerance = TOLERANCES.get(self._dtypes.get(policy, ""), TOLERANCES["float32"])
        if gap <= tolerance:
            return None
        return f"canary logprobs are {gap:.3g} from {of}, tolerance {tolerance:g}"

    async def _expected(self, policy: str, answer: Answer) -> Sequence[float] | None:
        if self._reference is None:
            return None
        try:
            return await self._reference(policy, answer)
        except TrainerError as error:  # its lane finds out and brings it back
            log.info("policy=%s: no canary from the trainer: %s", policy, error)
            return None


async def trainer_logprobs(trainer: Trainer, answer: Answer) -> list[float]:
    """What the trainer's loaded weights make of an answer's tokens. Raises: TrainerError."""
    token_ids = np.array([*answer.prompt_ids, *answer.token_ids], dtype=np.int32)
    loss_mask = np.zeros(len(token_ids), dtype=np.uint8)
    loss_mask[len(answer.prompt_ids) :] = 1
    row = TrainingRow(
        sample_id="canary",
        token_ids=token_ids,
        loss_mask=loss_mask,
        logprobs=np.zeros(len(token_ids), dtype=np.float32),
        advantage=0.0,
        weight=1.0,
        temperature=1.0,
    )
    batch = MicroBatch(micro_batch_id="canary", loss="policy_gradient", rows=(row,))
    report = await trainer.forward(batch, ("proximal_logprobs",))
    values = report.columns["proximal_logprobs"][0]
    return [float(value) for value in values[len(answer.prompt_ids) :]]


def _gap(got: Sequence[float], expected: Sequence[float]) -> float:
    """The largest difference; infinite if the lengths differ or a value is not a number."""
    if len(got) != len(expected) or not got:
        return float("inf")
    gaps = [abs(one - other) for one, other in zip(got, expected, strict=True)]
    return max(gaps) if all(gap == gap for gap in gaps) else float("inf")


def _common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """How many first tokens agree; where two greedy answers part, both logprobs are still of a maximum."""
    num = 0
    while num < min(len(one), len(other)) and one[num] == other[num]:
        num += 1
    return num
