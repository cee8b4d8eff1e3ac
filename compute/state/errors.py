"""The state store's error tree. A key that no node knows is `FileNotFoundError`, never one of these."""

from __future__ import annotations

import errno

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # what a write says when its disk or quota is full


class StateError(Exception):
    """The state store cannot keep its promise. The message names the key, and the tier or node."""


class ConflictingState(StateError):
    """One key, two contents. The message names both digests."""


class StateFull(StateError):
    """No tier has room: kept objects fill its budget, or its disk is full. The message names the tier."""


class NoValidCopy(StateError):
    """The key is known, and every copy was missing, corrupt or unreachable. The message lists the causes."""


class TransportError(StateError):
    """Another node, or the place between nodes, did not answer or refused. The message names it."""
