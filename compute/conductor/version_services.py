"""What a session on real files has for its versions: a keeper, a stager and a canary."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megloom.compute.conductor.canary import Answer, Canary, trainer_logprobs
from megloom.compute.conductor.keeping import FileKeeper, VersionKeeper
from megloom.compute.conductor.run import Run
from megloom.compute.conductor.stager import ChunkStager, FolderNode, LocalStager, Stager
from megloom.compute.store.offload import Offload
from megloom.compute.trainers.lifecycle import GroupLife
from megloom.compute.trainers.protocol import TrainerError


@dataclass(frozen=True, kw_only=True, slots=True)
class VersionServices:
    """A session in simulation has none of it."""

    keeper: VersionKeeper
    stager: Stager


def local_services(
    weights: Callable[[str], str], offload: Offload, *, engine_folders: Sequence[Path] = ()
) -> VersionServices:
    """Those of one machine; `weights` gives a policy's folder.

    A policy's engines load from `engine_folders` in turn, if there are any, else from there too.
    """
    stager: Stager = LocalStager(offload)
    if engine_folders:
        nodes = [FolderNode(folder.absolute(), offload) for folder in engine_folders]
        stager = ChunkStager(
            node_of=lambda cell: nodes[int(cell.rpartition("/")[2]) % len(nodes)], offload=offload
        )
    return VersionServices(keeper=FileKeeper(weights, offload), stager=stager)


def serve_versions(run: Run, services: VersionServices) -> None:
    """From now on versions of the run are staged before they are published, answered for, kept and pruned."""
    run.keeper = services.keeper
    run.publisher.stager = services.stager

    async def reference(policy: str, answer: Answer) -> Sequence[float]:
        group = run.groups[policy]
        if policy not in run.lanes or group.life is not GroupLife.COMPUTE:
            raise TrainerError("it has no process now, and four tokens are not worth one")
        return await trainer_logprobs(run.lanes[policy].trainer, answer)

    dtypes = {
        policy: spec["publishing"].get("dtype", "float32") for policy, spec in run.plan.policies.items()
    }
    run.publisher.canary = Canary(run=run.name, dtypes=dtypes, reference=reference)
