"""What every algorithm shares: the knobs of its loss, and the questions that the conductor asks it.

An algorithm turns outcomes into advantages. An outcome is what one member of a group earned for one agent:
its episode's reward, or that of a call that was scored for itself. Groups are keyed (task, agent, round) and
may be ragged. A member that could not be scored is not among the outcomes.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, model_validator

from megloom.compute.algorithms.statistics import require_finite
from megloom.compute.closed import Closed
from megloom.compute.workload import Algorithm

Scope = Literal["group", "step"]
Aggregate = Literal[
    "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "episode-mean"
]


class Clip(Closed):
    """PPO's clipped token ratios (arXiv 1707.06347).

    `dual_clip` bounds −A·ratio for negative advantages (arXiv 1912.09729).
    """

    name: Literal["clip"] = "clip"
    dual_clip: float | None = Field(default=None, gt=1)


class Gspo(Closed):
    """One ratio per sequence, exp(mean log ratio), clipped (arXiv 2507.18071).

    "sequence": the sequence ratio on every token, gradient split evenly. "token": stop-gradient of the
    sequence ratio times each token's own ratio. `token_cap` bounds each token's ratio (QwenGyre: 5).
    """

    name: Literal["gspo"] = "gspo"
    form: Literal["sequence", "token"] = "sequence"
    token_cap: float | None = Field(default=None, gt=0)


class Cispo(Closed):
    """The clipped ratio as a constant weight of the log-probability (arXiv 2506.13585)."""

    name: Literal["cispo"] = "cispo"


class Sapo(Closed):
    """A soft gate instead of a clip, with a temperature for each sign of the advantage (arXiv 2511.20347)."""

    name: Literal["sapo"] = "sapo"
    tau_positive: float = Field(default=1.0, gt=0)
    tau_negative: float = Field(default=1.05, gt=0)


Surrogate = Annotated[Clip | Gspo | Cispo | Sapo, Field(discriminator="name")]


class Kl(Closed):
    """A penalty against the policy's reference version; k3 is unbiased and never negative."""

    coefficient: float = Field(gt=0)
    estimator: Literal["k1", "k2", "k3"] = "k3"


class Correction(Closed):
    """How samples of older (or differently computed) weights are corrected.

    π_new / π_behaviour is split at the proximal policy, that of the batch's first gradient:

        "behaviour"        the surrogate's ratio is π_new / π_behaviour; no further weight
        "token-tis"        ratio π_new / π_proximal, weight min(π_proximal / π_behaviour, high) per token
        "sequence-tis"     the same with one weight per sequence, of the product of its tokens' ratios
        "icepop"           as token-tis, but weight 0 outside [low, high]
        "sequence-mask"    weight 0 for a sequence whose geometric mean ratio is outside [low, high]
        "decoupled"        as token-tis without a bound: decoupled PPO (arXiv 2505.24298)
    """

    name: Literal["behaviour", "token-tis", "sequence-tis", "icepop", "sequence-mask", "decoupled"]
    low: float = Field(default=0.5, ge=0)
    high: float = Field(default=2.0, gt=0)

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> Correction:
        if self.low >= self.high:
            raise ValueError(f"low {self.low} must be below high {self.high}")
        return self


class Overlong(Closed):
    """A linear penalty on answers near their limit (DAPO, arXiv 2503.14476).

    With L tokens of a limit M: 0 up to M − buffer, then falling to −penalty at M.
    """

    buffer_tokens: int = Field(ge=1)
    penalty: float = Field(default=1.0, gt=0)

    def of(self, num_tokens: int, limit_tokens: int) -> float:
        """What is taken off the reward, from 0 to `penalty`."""
        over = num_tokens - (limit_tokens - self.buffer_tokens)
        return self.penalty * min(max(over / self.buffer_tokens, 0.0), 1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """`key` is the outcome's name, unique within its agent: the invocation that was scored for itself, or the
    episode whose reward all calls of the agent share. `round` is the call's turn among the agent's calls of
    the episode. `num_tokens` are the tokens that carry the outcome's advantage, `num_calls` the calls that
    they come from. `limit_tokens` − `num_tokens` is what the answer nearest to its own limit had left.
    """

    key: str
    episode_id: str
    group_id: str
    agent: str
    reward: float
    round: int = 0
    num_tokens: int = 0
    limit_tokens: int = 0
    num_calls: int = 1


class PolicyGradient(Algorithm):
    """Base of all: what a loss is made of, each part documented at its class."""

    surrogate: Surrogate = Clip()
    clip_low: float = Field(default=0.2, ge=0, description="the ratio is clipped to [1 − clip_low, …")
    clip_high: float = Field(default=0.28, ge=0, description="… 1 + clip_high]")
    aggregation: Aggregate = "token-mean"
    norm_tokens: int | None = Field(default=None, ge=1, description="divisor of seq-mean-token-sum-norm")
    kl: Kl | None = None
    entropy: float = Field(default=0.0, ge=0, description="coefficient of the entropy bonus")
    correction: Correction | None = None
    overlong: Overlong | None = None
    min_group_size: int = Field(default=2, ge=1)
    reward_field: str | None = Field(default=None, description="the workload's field to take as reward")

    @property
    def needs(self) -> frozenset[str]:
        """The user-defined fields without which a call cannot be trained on."""
        return frozenset() if self.reward_field is None else frozenset({self.reward_field})

    @property
    def scope(self) -> Scope:
        """What must be complete before an advantage is final: the group, or all groups of the step."""
        return "group"

    @property
    def wants(self) -> tuple[str, ...]:
        """The columns that `Trainer.forward` must give before the gradient."""
        return ("reference_logprobs",) if self.kl is not None else ()

    @property
    def smallest_group(self) -> int:
        """Outcomes of one agent in one group below which none of them is used."""
        return self.min_group_size

    @property
    def trains_without_advantage(self) -> bool:
        """True if a row whose advantage is 0 has a gradient all the same: a KL, entropy or value term."""
        return self.kl is not None or self.entropy > 0 or self.has_critic

    def estimate(self, outcomes: Sequence[Outcome], state: Mapping[str, float]) -> list[float]:
        """One advantage per outcome, in the order given; outcomes of one policy, of the whole scope.

        `state` is the algorithm's own, as the last committed step left it. The outcomes of a group that is
        too small leave before any statistic and have exactly 0.
        Raises: ValueError for a reward that is not finite.
        """
        advantages = [0.0] * len(outcomes)
        used = self._used(outcomes)
        kept = [outcomes[position] for position in used]
        found = self.advantages_of(kept, self.shaped(kept), state)
        for position, advantage in zip(used, found, strict=True):
            advantages[position] = advantage
        return advantages

    def next_state(self, outcomes: Sequence[Outcome], state: Mapping[str, float]) -> dict[str, float]:
        """The state after a step with these outcomes; their order does not matter."""
        kept = [outcomes[position] for position in self._used(outcomes)]
        return self.state_after(kept, self.shaped(kept), state)

    @abstractmethod
    def advantages_of(
        self, outcomes: Sequence[Outcome], rewards: Sequence[float], state: Mapping[str, float]
    ) -> list[float]:
        """The formula: advantages of outcomes in groups that are large enough, from their shaped rewards."""

    def state_after(
        self, outcomes: Sequence[Outcome], rewards: Sequence[float], state: Mapping[str, float]
    ) -> dict[str, float]:
        """The formula of the state; most algorithms have none."""
        return dict(state)

    def shaped(self, outcomes: Sequence[Outcome]) -> list[float]:
        """The rewards less what `overlong` takes off. Raises: ValueError for one that is not finite."""
        rewards = [outcome.reward for outcome in outcomes]
        require_finite(rewards, "scope")
        if self.overlong is None:
            return rewards
        return [o.reward - self.overlong.of(o.num_tokens, o.limit_tokens) for o in outcomes]

    @property
    def has_critic(self) -> bool:
        """True if advantages are per token and come from `columns`, with values of a head on the policy."""
        return False

    def columns(self, reward: float, values: Sequence[float]) -> dict[str, list[float]]:
        """ "advantages" and "returns" of one row's trainable tokens, in order, from their values."""
        raise NotImplementedError(f"{type(self).__name__} has no critic, so no columns of its own")

    @model_validator(mode="after")
    def _a_norm_has_its_divisor(self) -> PolicyGradient:
        if (self.aggregation == "seq-mean-token-sum-norm") != (self.norm_tokens is not None):
            raise ValueError(
                f"aggregation {self.aggregation!r} with norm_tokens {self.norm_tokens}: the divisor belongs "
                "to seq-mean-token-sum-norm, which needs one"
            )
        return self

    def _used(self, outcomes: Sequence[Outcome]) -> list[int]:
        """Positions of the outcomes whose (group, agent) is large enough."""
        sizes = Counter((outcome.group_id, outcome.agent) for outcome in outcomes)
        return [i for i, o in enumerate(outcomes) if sizes[o.group_id, o.agent] >= self.smallest_group]
