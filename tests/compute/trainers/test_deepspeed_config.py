"""Users may set what they like in the raw config, but not what the system owns."""

from __future__ import annotations

from typing import Any

import pytest

from megloom.compute.trainers.deepspeed_config import OWNED, deepspeed_config
from megloom.compute.workload import Optimizer, Trainer

OPTIMIZER = Optimizer(learning_rate=1e-3, grad_clip=0.7)


def config(raw: dict[str, Any], stage: int = 1) -> dict[str, Any]:
    return deepspeed_config(
        Trainer.parse({"backend": "deepspeed", "zero_stage": stage, "deepspeed": raw}), OPTIMIZER
    )


def nested(key: str) -> dict[str, Any]:
    outer, _, inner = key.partition(".")
    return {outer: {inner: 1} if inner else {"enabled": True}}


@pytest.mark.parametrize("key", OWNED)
def test_what_the_system_owns_is_refused_by_name_with_what_to_set_instead(key: str) -> None:
    with pytest.raises(ValueError, match=f"trainer.deepspeed sets {key}, which the system owns: .+"):
        config(nested(key))


def test_everything_else_is_merged_in_as_it_is() -> None:
    raw = {"zero_optimization": {"reduce_bucket_size": 9}, "wall_clock_breakdown": True, "steps_per_print": 3}
    merged = config(raw, stage=2)
    assert merged["zero_optimization"] == {"reduce_bucket_size": 9, "stage": 2}
    assert (merged["wall_clock_breakdown"], merged["steps_per_print"]) == (True, 3)
    assert merged["managed_gradient_accumulation"] is False
    assert raw["zero_optimization"] == {"reduce_bucket_size": 9}  # the user's own is left alone


def test_the_engine_clips_where_it_reduces() -> None:
    assert [config({}, stage)["gradient_clipping"] for stage in (0, 1, 2, 3)] == [0.0, 0.7, 0.7, 0.7]


def test_autocast_needs_a_stage_that_has_it() -> None:
    raw = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    assert config(raw)["torch_autocast"]["enabled"] is True
    with pytest.raises(ValueError, match="torch_autocast, which needs zero_stage 1"):
        config(raw, stage=0)


def test_ranks_and_raw_configs_need_the_backend() -> None:
    with pytest.raises(ValueError, match="need backend"):
        Trainer.parse({"ranks": 2})
