"""One self-contained HTML file about a run: numbers, curves, a step's timeline, an episode, its lineage.

No scripts, no external resources; every text is escaped. Readable in the light and in the dark.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megloom.compute.graph.records import CellIntervalRecord
from megloom.compute.report.curves import Panel, curves
from megloom.compute.report.drawing import FONT, MONO, escape, number
from megloom.compute.report.episode import EpisodeStory, episode_graph
from megloom.compute.report.timeline import timeline

Cell = str | float | int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Cells are text or numbers; None is shown as a dash ("not measured")."""

    headers: Sequence[str]
    rows: Sequence[Sequence[Cell]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Headline:
    """A number that the page opens with; `note` says what it is compared to, or its unit."""

    label: str
    value: Cell
    note: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    """All that a report shows; a part that is None or empty is left out.

    `lineage_command` is what the reader types to see where a version comes from, `lineage` its output.
    """

    title: str
    subtitle: str
    headlines: Sequence[Headline] = ()
    results: Table | None = None
    panels: Sequence[Panel] = ()
    timeline_title: str = ""
    intervals: Sequence[CellIntervalRecord] = ()
    story: EpisodeStory | None = None
    lineage_command: str = ""
    lineage: str = ""
    config: Mapping[str, Cell] = field(default_factory=dict)


def render_page(page: Page) -> str:
    """The HTML text."""
    story = page.story
    sections = [
        _headlines(page.headlines),
        _section("Results", _table(page.results) if page.results else ""),
        _section("Learning curves", curves(page.panels) if page.panels else ""),
        _section(
            "Who did what when", timeline(page.intervals, title=page.timeline_title) if page.intervals else ""
        ),
        _section("One episode", episode_graph(story) if story else "", _about(story) if story else ""),
        _section("Where a version comes from", _lineage(page)),
        _section("Configuration", _config(page.config) if page.config else ""),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(page.title)}</title><style>{_STYLE}</style></head><body><main>"
        f"<header><h1>{escape(page.title)}</h1><p>{escape(page.subtitle)}</p></header>"
        f"{''.join(sections)}</main></body></html>\n"
    )


def _section(heading: str, body: str, about: str = "") -> str:
    if not body:
        return ""
    return f"<section><h2>{escape(heading)}</h2>{about}<div class=scroll>{body}</div></section>"


def _headlines(headlines: Sequence[Headline]) -> str:
    if not headlines:
        return ""
    cards = "".join(
        f"<div class=card><span>{escape(h.label)}</span><strong>{_cell(h.value)}</strong>"
        f"<small>{escape(h.note)}</small></div>"
        for h in headlines
    )
    return f"<div class=cards>{cards}</div>"


def _table(table: Table) -> str:
    numeric = [
        any(isinstance(row[column], int | float) for row in table.rows)
        for column in range(len(table.headers))
    ]
    marks = [" class=num" if is_numeric else "" for is_numeric in numeric]
    head = "".join(f"<th{mark}>{escape(h)}</th>" for mark, h in zip(marks, table.headers, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td{mark}>{_cell(c)}</td>" for mark, c in zip(marks, row, strict=True)) + "</tr>"
        for row in table.rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _config(config: Mapping[str, Cell]) -> str:
    rows = "".join(
        f"<tr><td><code>{escape(k)}</code></td><td>{_cell(v)}</td></tr>" for k, v in config.items()
    )
    return f"<table class=config><tbody>{rows}</tbody></table>"


def _lineage(page: Page) -> str:
    command = f"<pre class=command>{escape(page.lineage_command)}</pre>" if page.lineage_command else ""
    return command + (f"<pre>{escape(page.lineage)}</pre>" if page.lineage else "")


def _about(story: EpisodeStory) -> str:
    episode = story.episode
    return (
        f"<p>Episode <code>{escape(episode.episode_id)}</code> of step {episode.step}: "
        f"{len(story.calls)} calls, {escape(episode.state)}, reward {number(episode.reward)}. "
        "Arrows show whose text went into whose prompt; full texts appear under the pointer.</p>"
    )


def _cell(value: Cell) -> str:
    return escape(value) if isinstance(value, bool | str) else number(value)


_STYLE = f"""
:root{{color-scheme:light dark;--page:#fff;--ink:#1f2937;--faint:#6b7280;--grid:#e5e7eb;--track:#f3f4f6;
--card:#fff;--line:#e5e7eb;--soft:#f9fafb;--accent:#2563eb}}
@media (prefers-color-scheme:dark){{:root{{--page:#0f141b;--ink:#e5e7eb;--faint:#9aa4b2;--grid:#2a3340;
--track:#182029;--card:#131a22;--line:#2a3340;--soft:#151c25;--accent:#7aa7ff}}}}
*{{box-sizing:border-box}}
body{{margin:0;background:var(--page);color:var(--ink);font:15px/1.55 {FONT}}}
main{{max-width:1120px;margin:0 auto;padding:36px 24px 64px}}
h1{{font-size:26px;line-height:1.25;margin:0 0 4px;letter-spacing:-.01em}}
h2{{font-size:17px;margin:40px 0 12px;padding-top:14px;border-top:1px solid var(--line)}}
p{{margin:0 0 12px;color:var(--faint)}}
.cards{{display:grid;grid-template-columns:repeat(auto-fit,minmax(170px,1fr));gap:12px;margin-top:22px}}
.card{{background:var(--soft);border:1px solid var(--line);border-radius:8px;padding:12px 14px}}
.card span,.card small{{display:block;color:var(--faint);font-size:12.5px}}
.card strong{{display:block;font-size:24px;line-height:1.3;font-variant-numeric:tabular-nums}}
.scroll{{overflow-x:auto}}
table{{border-collapse:collapse;font-size:14px}}
th,td{{text-align:left;padding:6px 18px 6px 0;border-bottom:1px solid var(--line);vertical-align:top}}
th{{color:var(--faint);font-weight:600;font-size:12.5px}}
.num{{text-align:right;font-variant-numeric:tabular-nums}}
code,pre{{font-family:{MONO};font-size:12.5px}}
pre{{background:var(--soft);border:1px solid var(--line);border-radius:8px;padding:12px 14px;margin:0 0 10px;
overflow-x:auto;line-height:1.5}}
.command::before{{content:"$ ";color:var(--faint)}}
.command{{color:var(--accent)}}
svg{{display:block}}
"""
