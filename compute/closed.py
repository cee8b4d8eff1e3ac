"""Closed configuration: unknown keys are refused with their path and the nearest known name."""

from __future__ import annotations

import difflib
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError


class Closed(BaseModel):
    """Base of every knob model: frozen, no unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @classmethod
    def parse(cls, values: dict[str, Any]) -> Self:
        """Returns the validated knobs.

        Raises: ValueError with one line that names each wrong key, what was expected, and the nearest name.
        """
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise ValueError("; ".join(_explain(cls, entry) for entry in error.errors())) from None


def told(error: ValidationError) -> str:
    """What was refused in one line, without pydantic's dump of the values: `Policy.trainer.ranks: …`."""
    return "; ".join(
        f"{'.'.join([error.title, *map(str, entry['loc'])])}: {entry['msg'].removeprefix('Value error, ')}"
        for entry in error.errors()
    )


def _explain(model: type[BaseModel], entry: Any) -> str:
    path = ".".join(str(part) for part in entry["loc"])
    if entry["type"] != "extra_forbidden":
        return f"{path}: {entry['msg']} (got {entry['input']!r})"
    known = _known_names(model, [str(part) for part in entry["loc"][:-1]])
    near = difflib.get_close_matches(str(entry["loc"][-1]), known, n=1, cutoff=0.0)
    hint = f", did you mean '{near[0]}'?" if near else ""
    return f"unknown key '{path}'{hint} (known: {', '.join(sorted(known))})"


def _known_names(model: type[BaseModel], path: list[str]) -> list[str]:
    """The field names of the model that `path` leads to."""
    for part in path:
        field = model.model_fields.get(part)
        inner = getattr(field, "annotation", None)
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            break
        model = inner
    return list(model.model_fields)
