"""A version's lineage as text for a terminal and as JSON for programs. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from megloom.compute.store.lineage import VersionLineage

MAX_CELL = 48  # characters of one table cell


def lineage_json(lineage: VersionLineage) -> str:
    """The whole lineage, nothing cut, keys as in the dataclasses."""
    return json.dumps(asdict(lineage), indent=2, ensure_ascii=False)


def lineage_text(lineage: VersionLineage, max_rows: int = 10) -> str:
    """Tables of at most `max_rows` rows each; a cut table says how many rows it leaves out."""
    row = lineage.row
    parent = "none" if row.parent_version is None else f"{row.policy}@{row.parent_version}"
    head = [
        f"{row.run}/{row.policy}@{row.version}  ({row.kind}, step {row.step}, parent {parent})",
        f"  weights {row.uri}  digest {row.digest}",
        f"  config {row.config_hash}  code {row.code_hash}  created {row.created_at}",
        f"  loss {_show(row.loss)}  grad_norm {_show(row.grad_norm)}"
        f"  optimizer steps {row.num_optimizer_steps}  trainable tokens {row.num_trainable}",
    ]
    sections = [
        _section(
            "made by micro-batches",
            ("micro-batch", "position", "on", "cell", "samples", "trainable"),
            [
                (
                    m.micro_batch_id,
                    m.position,
                    f"{m.policy}@{m.base_version}",
                    m.cell,
                    len(m.sample_ids),
                    m.num_trainable,
                )
                for m in lineage.micro_batches
            ],
            max_rows,
        ),
        _section(
            "samples",
            ("agent", "step", "kind", "samples"),
            [(s.agent, s.step, s.kind, s.num_samples) for s in lineage.sample_counts],
            max_rows,
        ),
        _section(
            "largest advantages",
            ("sample", "agent", "task", "advantage", "reward", "sampled by"),
            [
                (
                    s.sample_id,
                    s.agent,
                    s.task_id,
                    s.advantage,
                    s.reward,
                    _span(s.sampled_by_min, s.sampled_by_max),
                )
                for s in sorted(lineage.samples, key=lambda s: (-abs(s.advantage), s.sample_id))
            ],
            max_rows,
        ),
        _section(
            "tasks",
            ("task", "samples", "prompt"),
            [(t.task_id, t.num_samples, t.prompt) for t in lineage.tasks],
            max_rows,
        ),
        _section(
            "its episodes were sampled by",
            ("version", "calls"),
            [(f"{e.from_policy}@{e.from_version}", e.num_calls) for e in lineage.sampled_by],
            max_rows,
        ),
        _section(
            "all versions behind it",
            ("version", "step", "kind", "samples", "tasks"),
            [
                (f"{a.policy}@{a.version}", a.step, a.kind, a.num_samples, a.num_tasks)
                for a in lineage.ancestors
            ],
            max_rows,
        ),
    ]
    return "\n".join([*head, *sections])


def _section(title: str, headers: Sequence[str], rows: Sequence[Sequence[Any]], max_rows: int) -> str:
    lines = ["", f"{title} ({len(rows)})"]
    if rows:
        lines += _table(headers, rows[:max_rows])
    if len(rows) > max_rows:
        lines.append(f"  … {len(rows) - max_rows} more")
    return "\n".join(lines)


def _table(headers: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    cells = [list(headers), *([_show(value) for value in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        ("  " + "  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True))).rstrip() for line in cells
    ]


def _show(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    text = " ".join(str(value).split())
    return text if len(text) <= MAX_CELL else text[: MAX_CELL - 1] + "…"


def _span(low: int | None, high: int | None) -> str | None:
    if low is None or low == high:
        return None if low is None else str(low)
    return f"{low} to {high}"
