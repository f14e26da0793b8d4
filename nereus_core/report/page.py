"""Building blocks of the page: tiles, figures with legends, tables. All text is escaped here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from nereus_core.report.plots import marker_glyph
from nereus_core.report.svg import HALF, MIDDLE, PHONE, WIDE, element

Draw = Callable[[float], str]
"""Draws a figure for a width in CSS pixels."""


@dataclass(frozen=True, slots=True)
class Key:
    """An entry of a legend: ``line``, ``dashed``, ``band``, ``bar``, ``outline`` or a marker."""

    shape: str
    style: str
    text: str


def tile(value: str, name: str, note: str = "") -> str:
    """Return a summary tile."""
    below = f"<span>{escape(note)}</span>" if note else ""
    return f'<div class="card tile"><span>{escape(name)}</span><b>{escape(value)}</b>{below}</div>'


def figure(
    title: str, unit: str, draw: Draw, keys: Sequence[Key] = (), *, full: bool = False
) -> str:
    """Return a card with a drawing for each kind of screen, and its legend."""
    drawings = "".join(draw(width) for width in (WIDE if full else HALF, MIDDLE, PHONE))
    below = f'<span class="unit">{escape(unit)}</span>' if unit else ""
    return (
        f'<figure class="card"><figcaption><h3>{escape(title)}</h3>{below}{legend(keys)}'
        f"</figcaption>{drawings}</figure>"
    )


def inset(draw: Draw, keys: Sequence[Key]) -> str:
    """Return a drawing that stands inside a card, without a title of its own."""
    drawings = "".join(draw(width) for width in (WIDE, MIDDLE, PHONE))
    return f'<figure class="inset"><figcaption>{legend(keys)}</figcaption>{drawings}</figure>'


def legend(keys: Sequence[Key]) -> str:
    """Return a legend, or nothing when there is nothing to tell apart."""
    if not keys:
        return ""
    items = "".join(f"<li>{_swatch(key)}{escape(key.text)}</li>" for key in keys)
    return f'<ul class="legend">{items}</ul>'


def _swatch(key: Key) -> str:
    match key.shape:
        case "line" | "dashed":
            css = f"line {key.style}{' dashed' if key.shape == 'dashed' else ''}"
            inner, width = element("line", x1=0, x2=20, y1=6, y2=6, class_=css), 20
        case "band" | "bar":
            inner = element("rect", x=1, y=1, width=12, height=10, rx=2,
                            class_=f"{key.shape} {key.style}")  # fmt: skip
            width = 14
        case "outline":
            inner = element("rect", x=1, y=1, width=18, height=10, rx=2, class_="predicted")
            width = 20
        case _:
            inner, width = marker_glyph(key.shape, 6, 6), 12
    return f'<svg width="{width}" height="12" aria-hidden="true">{inner}</svg>'


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table; numbers are set to the right."""

    name: str
    numeric: bool = False
    wide: bool = False


def table(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> str:
    """Return a table that becomes a list of labeled lines on a phone; cells are HTML."""
    head = "".join(f"<th{' class=num' if c.numeric else ''}>{escape(c.name)}</th>" for c in columns)
    body = []
    for row in rows:
        cells = []
        for column, cell in zip(columns, row, strict=True):
            css = " ".join(n for n, on in (("num", column.numeric), ("wide", column.wide)) if on)
            cells.append(
                f'<td data-label="{escape(column.name)}"'
                f"{f' class={chr(34)}{css}{chr(34)}' if css else ''}><div>{cell}</div></td>"
            )
        body.append(f"<tr>{''.join(cells)}</tr>")
    return (
        f'<div class="scroll"><table class="stack"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


def badge(text: str, mood: str) -> str:
    """Return a small label; ``mood`` is ``yes``, ``no`` or ``bad``."""
    return f'<span class="badge {mood}">{escape(text)}</span>'


def lines(texts: Sequence[str]) -> str:
    """Return texts as a plain list, one a line."""
    return f'<ul class="changes">{"".join(f"<li>{escape(t)}</li>" for t in texts)}</ul>'


def fold(summary: str, content: str) -> str:
    """Return something the reader opens when it is wanted."""
    return f"<details><summary>{escape(summary)}</summary>{content}</details>"
