"""Puts a trainer on what the ledger says: a policy's committed weights, their state, and the KL reference."""

from __future__ import annotations

from megloom.compute.conductor.ledger import Ledger
from megloom.compute.trainers.protocol import Trainer


async def load_committed(trainer: Trainer, ledger: Ledger, policy: str) -> None:
    """What the trainer held before is gone. Raises: TrainerError, TrainerLost."""
    entry, reference = ledger.policies[policy], ledger.references.get(policy)
    await trainer.load(
        weights_uri=entry.uri,
        state_path=entry.state_path,
        reference_uri=None if reference is None else reference.uri,
    )
