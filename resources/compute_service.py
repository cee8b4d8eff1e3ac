"""The compute service as Dagster sees it: the address of its home folder.

A resource is built again in every process of a run (dagster#12707), so it owns nothing: the service is a
process of its own, which outlives runs and the code location.
"""

from __future__ import annotations

import os
from pathlib import Path

import dagster as dg
from pydantic import Field

from megloom.compute.conductor.client import ServiceClient, ensure_service

HOME_VARIABLE = "MEGLOOM_HOME"
DEFAULT_HOME = ".megloom"


def default_home() -> Path:
    """The folder that `MEGLOOM_HOME` names, else `.megloom` in the working directory."""
    return Path(os.environ.get(HOME_VARIABLE) or DEFAULT_HOME).resolve()


class ComputeService(dg.ConfigurableResource):
    """Finds the service, and starts it where that is wanted."""

    home: str = Field(
        default="",
        description=f"Folder of the service. Default: ${HOME_VARIABLE}, else {DEFAULT_HOME}.",
    )
    autostart: bool = Field(default=True, description="Start the service if none answers in that folder.")

    @property
    def home_path(self) -> Path:
        return Path(self.home).expanduser().resolve() if self.home else default_home()

    def connect(self) -> ServiceClient:
        """A client of the running service; starts one that outlives this process if `autostart` is set.

        Raises: ServiceDown if none answers.
        """
        if self.autostart:
            return ensure_service(self.home_path)
        client = ServiceClient(self.home_path)
        client.health()
        return client
