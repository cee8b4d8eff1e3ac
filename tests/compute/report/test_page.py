from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any

import pytest

from megloom.compute.report.curves import Panel
from megloom.compute.report.page import Headline, Page, Table, render_page

VOID = {"meta"}


class Outline(HTMLParser):
    """Collects headings, and checks that every tag is closed where it should be."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.headings: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("h1", "h2"):
            self.headings.append(data)


@pytest.fixture
def page(make: Any) -> Page:
    series = {"solver": [(0, 0.1), (1, 0.7)]}
    return Page(
        title="arithmetic_team · demo",
        subtitle="60 steps",
        headlines=[Headline(label="held-out success", value=0.862, note="0.18 before")],
        results=Table(
            headers=("agent", "before", "after"), rows=[("solver", 0.18, 0.842), ("judge", None, None)]
        ),
        panels=[Panel(title="Training reward", x_label="step", y_label="mean", series=series)],
        timeline_title="Step 12",
        intervals=[make.interval()],
        story=make.story(),
        lineage_command="megloom lineage version solver@last --run demo",
        lineage="demo/solver@61",
        config={"group_size": 8, "mode": "frozen", "warm": True},
    )


def test_the_page_has_all_its_parts_in_order(page: Page) -> None:
    assert Outline(render_page(page)).headings == [
        "arithmetic_team · demo",
        "Results",
        "Learning curves",
        "Who did what when",
        "One episode",
        "Where a version comes from",
        "Configuration",
    ]


def test_numbers_are_shown_for_people_and_what_was_not_measured_as_a_dash(page: Page) -> None:
    html = render_page(page)
    assert "<strong>0.862</strong>" in html
    assert "<td class=num>0.842</td>" in html
    assert "<td class=num>–</td>" in html
    assert "<td>True</td>" in html


def test_an_empty_part_is_left_out() -> None:
    assert Outline(render_page(Page(title="t", subtitle="s"))).headings == ["t"]


def test_the_page_needs_nothing_from_outside_and_runs_nothing(page: Page) -> None:
    html = render_page(page)
    links = re.findall(r"""(?:src|href)=|url\((?!#)|@import|https?://(?!www\.w3\.org/2000/svg)""", html)
    assert links == []
    assert "script" not in Outline(html).tags


def test_the_same_page_gives_the_same_bytes(page: Page) -> None:
    assert render_page(page) == render_page(page)


def test_every_text_is_escaped(make: Any, evil: str) -> None:
    series = {evil: [(0, 0.1), (1, 0.7)]}
    html = render_page(
        Page(
            title=evil,
            subtitle=evil,
            headlines=[Headline(label=evil, value=evil, note=evil)],
            results=Table(headers=(evil,), rows=[(evil,)]),
            panels=[Panel(title=evil, x_label=evil, y_label=evil, series=series)],
            timeline_title=evil,
            intervals=[make.interval(evil)],
            story=make.story(prompt=evil, episode=make.episode(episode_id=evil, state=evil)),
            lineage_command=evil,
            lineage=evil,
            config={evil: evil},
        )
    )
    assert "script" not in Outline(html).tags
    html.encode()
