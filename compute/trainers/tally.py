"""Running sums of one micro-batch, from which its report is made."""

from __future__ import annotations

from dataclasses import dataclass, field

from megloom.compute.trainers.heads import Readout
from megloom.compute.trainers.objective import Objective
from megloom.compute.trainers.passes import Pass
from megloom.compute.trainers.protocol import GradientReport, MicroBatch


@dataclass(kw_only=True, slots=True)
class Tally:
    """Only `add` writes. `sums` holds (sum, number of trainable tokens) by name."""

    loss_sum: float = 0.0
    num_clipped: int = 0
    num_trainable: int = 0
    num_computed: int = 0
    max_logprob_gap: float | None = None
    sums: dict[str, tuple[float, int]] = field(default_factory=dict)

    def add(self, objective: Objective, readout: Readout, part: Pass, *, has_behaviour: bool) -> None:
        """Adds one pass, in float64."""
        self.loss_sum += objective.losses_N.detach().double().sum().item()
        self.num_clipped += int(objective.is_clipped_N.sum())
        self.num_trainable += len(part.targets_N)
        self.num_computed += part.num_computed
        for name, values_N in objective.metrics_N.items():
            total, count = self.sums.get(name, (0.0, 0))
            self.sums[name] = total + values_N.double().sum().item(), count + len(values_N)
        if has_behaviour:
            gap = (readout.logprobs_N.detach() - part.behaviour_N).abs().max().item()
            self.max_logprob_gap = max(gap, self.max_logprob_gap or 0.0)

    def report(self, batch: MicroBatch, *, seconds: float) -> GradientReport:
        num_rows = sum(bool(row.loss_mask.any()) for row in batch.rows)
        num_tokens = sum(len(row.token_ids) for row in batch.rows)
        return GradientReport(
            micro_batch_id=batch.micro_batch_id,
            num_rows=num_rows,
            num_empty_rows=len(batch.rows) - num_rows,
            num_tokens=num_tokens,
            num_trainable=self.num_trainable,
            loss_sum=self.loss_sum,
            num_clipped=self.num_clipped,
            max_logprob_gap=self.max_logprob_gap,
            seconds=seconds,
            sums={**self.sums, "num_computed": (float(self.num_computed), num_tokens)},
        )
