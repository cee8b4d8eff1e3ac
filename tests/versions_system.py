"""The tiny system with versions as a real run keeps them: deltas, one policy rounded, old ones pruned.

It learns as slowly as a large model, so that most bits of its weights stay.
"""

from __future__ import annotations

from dataclasses import replace

from megloom.compute.workload import Optimizer, Publishing
from tests import tiny_system

_PUBLISHING = {
    "writer": Publishing(anchor_every=3, keep_versions=3),
    "critic": Publishing(anchor_every=3, dtype="bfloat16"),
}
workload = replace(
    tiny_system.workload,
    name="versions",
    policies={
        name: policy.model_copy(
            update={"publishing": _PUBLISHING[name], "optimizer": Optimizer(learning_rate=1e-6)}
        )
        for name, policy in tiny_system.workload.policies.items()
    },
)
