"""What a user says of a policy: its model, how it learns, how its versions are kept. No torch.

Users import all of this from `megloom.compute.workload`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from megloom.compute.closed import Closed


class Tokenizer(Closed):
    """A word-level tokenizer made from a list of words; `special` words are never split.

    `pattern` cuts the text into words. `chat_template` is a Jinja template over `messages` that ends where
    the model's answer begins; `stop` is the special word that ends an answer. A piece that is no word becomes
    the special word `unknown`; without one it is refused.
    """

    words: tuple[str, ...]
    special: tuple[str, ...]
    pattern: str
    chat_template: str
    stop: str
    unknown: str | None = None

    @model_validator(mode="after")
    def _roles_are_special_words(self) -> Tokenizer:
        for role, word in (("stop", self.stop), ("unknown", self.unknown)):
            if word is not None and word not in self.special:
                raise ValueError(f"{role} word {word!r} must be one of the special words {self.special}")
        return self


class RandomModel(Closed):
    """A transformer with random initial weights: `architecture` is qwen3 or llama, `config` its HF config."""

    source: Literal["random"] = "random"
    architecture: Literal["qwen3", "llama"]
    config: dict[str, int | float | bool]
    tokenizer: Tokenizer


class PretrainedModel(Closed):
    """A Hugging Face `save_pretrained` directory on this machine."""

    source: Literal["pretrained"] = "pretrained"
    path: str


class PackagedGguf(Closed):
    """A GGUF file inside an installed Python package, converted once to safetensors and cached."""

    source: Literal["gguf"] = "gguf"
    package: str
    pattern: str = "*.gguf"


ModelSource = Annotated[RandomModel | PretrainedModel | PackagedGguf, Field(discriminator="source")]


class Optimizer(Closed):
    """AdamW. `grad_clip` bounds the gradient's norm after the one scaling at the optimizer boundary.

    The learning rate rises linearly over `warmup_steps`; with `total_steps` it then falls as a cosine and is
    0 from that optimizer step on.
    """

    learning_rate: float = Field(gt=0)
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = Field(default=0.0, ge=0)
    grad_clip: float = Field(default=1.0, gt=0)
    warmup_steps: int = Field(default=0, ge=0)
    total_steps: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _warmup_ends_before_the_last_step(self) -> Optimizer:
        if self.total_steps is not None and self.warmup_steps >= self.total_steps:
            raise ValueError(f"warmup_steps {self.warmup_steps} must be below total_steps {self.total_steps}")
        return self


class Algorithm(Closed):
    """Base of the algorithms in `megloom.compute.algorithms`; `name` picks the class from its table."""

    name: str


class Lora(Closed):
    """Low-rank adapters beside frozen weights. `targets` are names of linear layers.

    Source: LoRA (arXiv 2106.09685); the update of a layer is B·A·alpha/rank, B starts at zero.
    """

    rank: int = Field(ge=1)
    alpha: float = Field(gt=0)
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")


class Trainer(Closed):
    """How a policy is trained. What the system owns in a raw `deepspeed` config is refused by name.

    `replicas` bounds the core and the satellites that join it while a batch is under way, `ranks` the
    processes of each replica. `budget_tokens` bounds the padded tokens of one forward pass.
    """

    backend: Literal["torch", "deepspeed"] = "torch"
    ranks: int = Field(default=1, ge=1, description="processes of one replica; more than 1 needs deepspeed")
    zero_stage: Literal[0, 1, 2, 3] = 1
    deepspeed: dict[str, Any] = Field(default_factory=dict, description="raw DeepSpeed config, merged in")
    replicas: int = Field(default=1, ge=1)
    lora: Lora | None = None
    gradient_checkpointing: bool = False
    packing: bool = Field(default=True, description="rows of a pass in one line, without padding")
    shared_prefixes: bool = Field(default=True, description="compute what branches of an episode share once")
    budget_tokens: int | None = Field(default=None, ge=1, description="None takes the device's own")

    @model_validator(mode="after")
    def _only_deepspeed_has_ranks(self) -> Trainer:
        if self.backend == "torch" and (self.ranks > 1 or self.deepspeed):
            raise ValueError('ranks and a raw deepspeed config need backend "deepspeed"')
        return self


class Publishing(Closed):
    """How versions are kept: every `anchor_every`-th whole, those between as lossless deltas of it."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    anchor_every: int = Field(default=1, ge=1, description="1 keeps every version whole")
    keep_versions: int | None = Field(
        default=None, ge=1, description="prune older ones, never past the last anchor (None: keep all)"
    )


class Policy(Closed):
    """A set of trained weights. `warm_optimizer` serves the warm start; without it a new `optimizer` does.

    A sample may be trained on if the trainer's version is at most `max_off_policy_steps` (α) ahead of the
    version of the sample's oldest token; above 0 the algorithm must name a correction.
    """

    model: ModelSource
    algorithm: Any
    optimizer: Optimizer
    warm_optimizer: Optimizer | None = None
    trained: bool = True
    trainer: Trainer = Trainer()
    publishing: Publishing = Publishing()
    max_off_policy_steps: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _lag_has_a_correction(self) -> Policy:
        if self.max_off_policy_steps and getattr(self.algorithm, "correction", None) is None:
            raise ValueError(
                f"max_off_policy_steps {self.max_off_policy_steps} without a correction: samples would be "
                "trained on as if today's weights had made them; set the algorithm's `correction`"
            )
        return self
