"""Logical names of states: `run/policy/kind/v000012`. Callers hold keys, never addresses.

Every part is checked, so that a key is safe as a path and in a URL.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self

_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_VERSION = re.compile(r"v(\d{6,18})")


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Key:
    """`kind` says what of the policy it is ("trainer", "gradients", "weights"); `version` counts from 0.

    Raises: ValueError for a part that is not letters, digits, `_`, `.` or `-`, or begins with `.` or `-`.
    """

    run: str
    policy: str
    kind: str
    version: int

    def __post_init__(self) -> None:
        for name, value in (("run", self.run), ("policy", self.policy), ("kind", self.kind)):
            if not isinstance(value, str) or not _PART.fullmatch(value):
                raise ValueError(f"state key: {name} {value!r}, expected letters, digits, '_', '.' or '-'")
        if not isinstance(self.version, int) or not 0 <= self.version < 10**18:
            raise ValueError(f"state key: version {self.version!r}, expected an integer of 0 or more")

    def __str__(self) -> str:
        return f"{self.run}/{self.policy}/{self.kind}/v{self.version:06d}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """The inverse of `str`.

        Raises: ValueError if `text` is not the name of a key.
        """
        parts = text.split("/")
        if len(parts) != 4 or not (match := _VERSION.fullmatch(parts[3])):
            raise ValueError(f"state key {text!r}, expected run/policy/kind/v000012")
        return cls(run=parts[0], policy=parts[1], kind=parts[2], version=int(match[1]))
