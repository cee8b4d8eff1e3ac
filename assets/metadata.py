"""Metadata values that every page of Dagster's UI can show: finite numbers, bounded tables, small pictures.

Dagster stores NaN and infinity as they are, which is not JSON and breaks pages (dagster#3930); here they
become text. An entry without a measurement is left out, never shown as zero.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

import dagster as dg

from megloom.compute.conductor.reports import Rate, ratio
from megloom.compute.report.curves import sparkline

Scalar = str | int | float | bool
MAX_ROWS = 24  # rows of one table; the rest is in the store. More would cost CPU on every step
MAX_PICTURE = 999  # letters of Markdown: from 1000 on Dagster shows a button instead of the picture
NOT_MEASURED = "–"


def finite(value: Any) -> Any:
    """`value`, or its name as text if it is a float that JSON does not have."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def entries(values: Mapping[str, Any]) -> dict[str, Any]:
    """The measured entries, each finite; floats are cut to 6 significant digits for reading."""
    return {name: _readable(value) for name, value in values.items() if value is not None}


def table(rows: Sequence[Mapping[str, Any]]) -> dg.TableMetadataValue | None:
    """The first `MAX_ROWS` rows as a table with typed columns; None if there are no rows."""
    if not rows:
        return None
    columns = list(dict.fromkeys(name for row in rows for name in row))
    cells = [{name: _cell(row.get(name)) for name in columns} for row in rows[:MAX_ROWS]]
    schema = dg.TableSchema(
        columns=[dg.TableColumn(name, type=_column_type([row[name] for row in cells])) for name in columns]
    )
    return dg.MetadataValue.table(records=[dg.TableRecord(row) for row in cells], schema=schema)


def picture(svg: str, *, title: str) -> dg.MarkdownMetadataValue | None:
    """The SVG inline; None if it is so large that Dagster would fold it away.

    Percent codes are shorter than base64 for text that is mostly digits.
    """
    code = quote(svg.replace('"', "'"), safe="/:=,;'-.!*")
    markdown = f"![{title}](data:image/svg+xml,{code})"
    return dg.MetadataValue.md(markdown) if len(markdown) <= MAX_PICTURE else None


def plot(values: Sequence[float], *, title: str) -> dg.MarkdownMetadataValue | None:
    """The series as a line; None below two points, where the number says it all."""
    return picture(sparkline(values, width=320, height=48), title=title) if len(values) > 1 else None


def rate_rows(rates: Mapping[str, Rate]) -> list[dict[str, Any]]:
    """One row per rate: its mean and what it was counted over."""
    return [{"rate": name, "mean": ratio(rate), "count": rate[1]} for name, rate in sorted(rates.items())]


def _readable(value: Any) -> Any:
    value = finite(value)
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _cell(value: Any) -> Scalar:
    if value is None:
        return NOT_MEASURED
    value = _readable(value)
    return value if isinstance(value, str | int | float | bool) else str(value)


def _column_type(cells: Sequence[Scalar]) -> str:
    kinds = {type(cell) for cell in cells}
    if kinds == {int}:
        return "int"
    return "float" if kinds <= {int, float} else "string"
