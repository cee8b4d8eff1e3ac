"""The benchmark of the store prints its figures in the shape that is compared with the targets."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture(autouse=True)
def bench_is_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))


def test_the_chosen_parts_print_one_object_of_figures(capsys: pytest.CaptureFixture[str]) -> None:
    import meg_store

    meg_store.main(["--only", "storage"])
    figures = json.loads(capsys.readouterr().out)
    assert figures == {"stored_tokens_ratio": {"value": 1.0, "unit": "ratio", "target": 1.0, "ok": True}}


def test_every_part_is_there() -> None:
    import meg_store

    for module, function in meg_store.PARTS.values():
        path = BENCH / f"{module.replace('.', '/')}.py"
        assert f"def {function}(" in path.read_text(), f"{path}: no {function}"


def test_the_ready_set_is_measured_at_both_sizes_with_all_calls_still_open() -> None:
    from meg.ready import OpenGraph, ready_figures

    assert OpenGraph(60).num_open() == 60
    figures = ready_figures(small=60, large=120, turns=2, per_turn=30)
    assert {name: figure["unit"] for name, figure in figures.items()} == {
        "ready_us_100k": "us",
        "ready_growth": "ratio",
    }
    assert all(set(figure) == {"value", "unit", "target", "ok"} for figure in figures.values())
    assert all(figure["value"] > 0 for figure in figures.values())


def test_an_unknown_part_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    import meg_store

    with pytest.raises(SystemExit):
        meg_store.main(["--only", "everything"])
    assert "everything" in capsys.readouterr().err
    assert "meg.lineage" not in sys.modules
