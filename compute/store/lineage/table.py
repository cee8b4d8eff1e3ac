"""Values, rows and sections as lines of a terminal. Pure. "-" stands for "not known"."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

MAX_CELL = 48  # characters of one table cell


def rows_text(columns: Sequence[str], rows: Sequence[Sequence[Any]], num_rows: int) -> str:
    """A query's rows; `num_rows` is how many there are in all."""
    lines = [line.removeprefix("  ") for line in table(columns, rows)]
    if num_rows > len(rows):
        lines.append(f"… {num_rows - len(rows)} more rows (--rows N shows more, --json all)")
    return "\n".join(lines)


def section(title: str, headers: Sequence[str], rows: Sequence[Sequence[Any]], max_rows: int) -> str:
    """A titled table, cut to `max_rows`."""
    lines = ["", f"{title} ({len(rows)})"]
    if rows:
        lines += table(headers, rows[:max_rows])
    if len(rows) > max_rows:
        lines.append(f"  … {len(rows) - max_rows} more")
    return "\n".join(lines)


def table(headers: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    """Lines with aligned columns."""
    cells = [list(headers), *([show(value) for value in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        ("  " + "  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True))).rstrip() for line in cells
    ]


def show(value: Any, width: int = MAX_CELL) -> str:
    """A value in one line of at most `width` characters."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    text = " ".join(str(value).split())
    return text if len(text) <= width else text[: width - 1] + "…"


def span(low: int | None, high: int | None) -> str | None:
    """The versions from `low` to `high`; None if there are none."""
    if low is None or low == high:
        return None if low is None else str(low)
    return f"{low} to {high}"
