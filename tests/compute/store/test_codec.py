from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megloom.compute.store.codec import decode, encode


def test_a_body_gives_the_record_back(build: Any) -> None:
    for record in (build.task(), build.segment(), build.invocation(), build.sample(), build.version()):
        entry = encode(record)
        assert decode(entry.table, entry.body) == record


def test_logprobs_keep_their_full_precision(build: Any) -> None:
    record = build.segment(logprobs=[-0.1, -1 / 3, -1e-17])
    assert decode("segments", encode(record).body) == record


def test_equal_records_have_equal_digests_and_other_content_another(build: Any) -> None:
    assert encode(build.edge()).digest == encode(build.edge()).digest
    assert encode(build.edge()).digest != encode(build.edge(kind="order")).digest


def test_a_lone_surrogate_from_a_model_becomes_the_replacement_character(build: Any) -> None:
    entry = encode(build.invocation(text="ok \udcff 好", failure="\ud800"))
    stored = decode(entry.table, entry.body)
    assert (stored.text, stored.failure) == ("ok \ufffd 好", "\ufffd")


def test_a_missing_required_value_is_refused_with_the_key_and_the_field(build: Any) -> None:
    with pytest.raises(ValueError, match="invocations i9: agent must not be None"):
        encode(build.invocation("i9", agent=None))


def test_a_seed_beyond_64_bits_is_refused_now_and_not_at_the_seal(build: Any) -> None:
    with pytest.raises(ValueError, match=r"invocations i1: cannot be stored: integers must be below 2\*\*63"):
        encode(build.invocation(seed=2**63))
    encode(build.invocation(seed=2**63 - 1))


def test_a_numpy_scalar_is_refused_and_the_next_record_is_not_harmed(build: Any) -> None:
    with pytest.raises(ValueError, match="samples x1: cannot be stored"):
        encode(replace(build.sample(), num_tokens=np.int64(3)))
    assert decode("samples", encode(build.sample()).body) == build.sample()
