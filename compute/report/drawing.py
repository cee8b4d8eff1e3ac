"""SVG as strings: elements, escaping, axes' numbers and the colours that all pictures share.

Text is drawn with classes (`ink`, `faint`) whose colours a page may set by the CSS variables `--ink`,
`--faint`, `--grid`, `--card`; a picture on its own falls back to greys that read on light and on dark.
"""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Sequence
from html import escape as html_escape

COLOURS = ("#3b82f6", "#d97706", "#059669", "#a855f7", "#ef4444", "#06b6d4", "#ec4899", "#84a316")
FONT = "ui-sans-serif,system-ui,-apple-system,'Segoe UI',Roboto,'Liberation Sans',sans-serif"
MONO = "ui-monospace,'SF Mono',Menlo,'DejaVu Sans Mono',monospace"
STYLE = (
    f"text{{font-family:{FONT};fill:var(--ink,#6b7280)}}"
    f".faint{{fill:var(--faint,#8b93a1)}}.mono{{font-family:{MONO}}}.on{{fill:#fff}}"
    ".grid{stroke:var(--grid,#8b93a133)}.track{fill:var(--track,#8b93a11f)}"
    ".card{fill:var(--card,#8b93a114)}.bold{font-weight:600}"
)
# XML 1.0 has no way to write these, escaped or not.
_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def escape(text: object) -> str:
    """`text` for XML or HTML content and attributes; characters that XML cannot hold become U+FFFD."""
    return html_escape(_NOT_XML.sub("\ufffd", str(text)))


def element(tag: str, *children: str, **attributes: object) -> str:
    """An element. Children are markup; attribute values are escaped, `_` in their names becomes `-`.

    A trailing `_` is dropped (`class_`), numbers are rounded to 0.1, attributes that are None left out.
    """
    shown = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{escape(_short(value))}"'
        for name, value in attributes.items()
        if value is not None
    )
    return f"<{tag}{shown}>{''.join(children)}</{tag}>" if children else f"<{tag}{shown}/>"


def text(x: float, y: float, content: object, size: float = 11, **attributes: object) -> str:
    return element("text", escape(content), x=x, y=y, font_size=size, **attributes)


def tooltip(content: object) -> str:
    """The child that browsers show while the pointer rests on its parent."""
    return element("title", escape(content))


def svg(width: float, height: float, *children: str, label: str) -> str:
    """A whole picture that scales down with its container; `label` is for screen readers."""
    return element(
        "svg",
        f"<style>{STYLE}</style>",
        *children,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {_short(width)} {_short(height)}",
        width=width,
        height=height,
        role="img",
        aria_label=label,
        style="max-width:100%;height:auto",
    )


def data_uri(picture: str) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(picture.encode()).decode()


def ticks(low: float, high: float, num: int = 5) -> list[float]:
    """About `num` round numbers that lie in `low` to `high`, in steps of 1, 2 or 5 times a power of ten."""
    if not high > low:
        return [low]
    rough = (high - low) / max(num, 1)
    unit = 10.0 ** math.floor(math.log10(rough))
    step = min((unit * factor for factor in (1, 2, 5, 10)), key=lambda s: abs(s - rough))
    first = math.ceil(low / step - 1e-9)
    return [round(k * step, 12) for k in range(first, math.floor(high / step + 1e-9) + 1)]


def number(value: float | None) -> str:
    """A number for people: 4 significant digits, thousands grouped, a dash for "not measured"."""
    if value is None or not math.isfinite(value):
        return "–"
    if abs(value) >= 1000 or float(value).is_integer():
        return f"{value:,.0f}"
    return f"{value:.4g}"


def cut(content: str, width: int) -> str:
    """At most `width` characters on one line; a cut is shown by an ellipsis."""
    line = " ".join(content.split())
    return line if len(line) <= width else line[: width - 1] + "…"


def wrap(content: str, width: int, max_lines: int) -> list[str]:
    """`content` in lines of at most `width` characters, broken at spaces where that is possible."""
    lines: list[str] = []
    rest = " ".join(content.split())
    while rest and len(lines) < max_lines:
        if len(lines) == max_lines - 1 or len(rest) <= width:
            lines.append(cut(rest, width))
            break
        at = rest.rfind(" ", 0, width + 1)
        at = at if at > width // 3 else width
        lines.append(rest[:at].rstrip())
        rest = rest[at:].lstrip()
    return lines


def colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def _short(value: object) -> object:
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else value


def points(path: Sequence[tuple[float, float]]) -> str:
    """Coordinates for a polyline."""
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in path)
