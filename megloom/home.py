"""Where things live: the service's home (`MEGLOOM_HOME`, else `.megloom`) and Dagster's (`DAGSTER_HOME`)."""

from __future__ import annotations

import os
from importlib import resources
from pathlib import Path


def service_home(argument: str | None = None) -> Path:
    """The folder of the service: argument, `MEGLOOM_HOME`, or `.megloom` here."""
    return Path(argument or os.environ.get("MEGLOOM_HOME") or ".megloom").expanduser().resolve()


def prepare_dagster_home() -> Path:
    """Sets `DAGSTER_HOME` (kept if set, else `.dagster` here) and gives it our `dagster.yaml` if it has none.

    Telemetry and the sign-up window are off in ours.
    """
    home = Path(os.environ.get("DAGSTER_HOME") or ".dagster").expanduser().resolve()
    home.mkdir(parents=True, exist_ok=True)
    config = home / "dagster.yaml"
    if not config.exists():
        config.write_text((resources.files("megloom") / "dagster.yaml").read_text())
    os.environ["DAGSTER_HOME"] = str(home)
    return home
