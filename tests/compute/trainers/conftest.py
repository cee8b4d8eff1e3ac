"""One thread: two OpenMP threads on busy cores are slower, and sums are then the same everywhere."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
