"""Session settings: closed, checked in one line, hashed by what shapes the result."""

from __future__ import annotations

from typing import Any

import pytest

from megloom.compute.conductor.config import SessionConfig, set_path

GOOD = {"workload": "a.b:c", "run": "r1", "steps": 3}


def test_unknown_keys_are_refused_with_their_path_and_the_nearest_name() -> None:
    with pytest.raises(ValueError, match=r"unknown key 'training.group_sise', did you mean 'group_size'"):
        SessionConfig.parse({**GOOD, "training": {"group_sise": 4}})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": -1}, "steps: .*greater than or equal to 0"),
        ({"run": "../up"}, "run: .*a run name is"),
        ({"run": ""}, "run: .*a run name is"),
        ({"workload": "nothing"}, "workload: .*expected package.module:attribute"),
        ({"mode": "fast"}, "mode: .*'frozen' or 'sync'"),
        ({"cells": {"engine_slots": 0}}, "cells.engine_slots: "),
    ],
)
def test_bad_values_name_the_key_and_what_was_expected(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SessionConfig.parse({**GOOD, **change})


def test_a_longer_run_of_the_same_settings_has_the_same_hash() -> None:
    first = SessionConfig.parse(GOOD).config_hash()
    assert SessionConfig.parse({**GOOD, "steps": 9, "run": "r2", "lease_s": 5}).config_hash() == first
    assert SessionConfig.parse({**GOOD, "seed": 1}).config_hash() != first


def test_assignments_reach_nested_keys_and_keep_text_as_text() -> None:
    values: dict[str, Any] = {}
    for assignment in ("training.group_size=8", "cells.device=cuda", "mode=sync"):
        set_path(values, assignment)
    assert values == {"training": {"group_size": 8}, "cells": {"device": "cuda"}, "mode": "sync"}
    with pytest.raises(ValueError, match="expected key=value"):
        set_path(values, "steps")
