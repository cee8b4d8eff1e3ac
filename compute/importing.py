"""Imports a workload by its name. Nothing heavy: Dagster's processes read workloads too."""

from __future__ import annotations

import importlib
import traceback

from pydantic import ValidationError

from megloom.compute.closed import told
from megloom.compute.workload import Workload


def import_workload(name: str) -> Workload:
    """Imports `package.module:attribute`.

    Raises: ValueError naming what is missing, or what the import raised, and where.
    """
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # the boundary of user code: a broken system file is bad input
        what = told(error) if isinstance(error, ValidationError) else f"{type(error).__name__}: {error}"
        raise ValueError(f"workload {name}: {_place(error)}{what}") from error
    workload = getattr(module, attribute, None)
    if not isinstance(workload, Workload):
        known = [key for key, value in vars(module).items() if isinstance(value, Workload)]
        raise ValueError(
            f"workload {name}: expected a Workload, found {type(workload).__name__} "
            f"(workloads in {module_name}: {', '.join(known) or 'none'})"
        )
    return workload


def _place(error: Exception) -> str:
    """The file and line of the system's code that raised; empty if none of it ran."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename != __file__
        and "importlib" not in frame.filename
        and "/pydantic/" not in frame.filename
    ]
    return f"{frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno}: " if frames else ""
