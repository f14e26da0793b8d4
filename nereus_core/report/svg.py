"""SVG by hand: elements with escaped text, ticks, and a frame with axes.

Colors come from CSS classes (style.py), so that one drawing serves light and dark pages. A drawing
is made for one width in CSS pixels and never scaled: text stays readable on a phone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

CHAR_WIDTH = 6.4
"""Mean width of a character at 11 px in common sans-serif fonts; chosen, not measured."""

WIDE, HALF, MIDDLE, PHONE = 1104, 530, 620, 318
"""Widths drawn, in CSS pixels: the full column, half of it, a tablet's and a phone's column."""

_SCREENS = {WIDE: "wide", HALF: "wide", MIDDLE: "middle", PHONE: "narrow"}


def element(tag: str, text: str | None = None, /, **attributes: object) -> str:
    """Return one element; ``text`` is escaped, ``class_`` becomes ``class``, ``_`` becomes ``-``.

    >>> element("text", "a < b", x=1, class_="tick")
    '<text x="1" class="tick">a &lt; b</text>'
    """
    parts = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{escape(_plain(value))}"'
        for name, value in attributes.items()
        if value is not None
    )
    return f"<{tag}{parts}/>" if text is None else f"<{tag}{parts}>{escape(text)}</{tag}>"


def titled(shape: str, title: str) -> str:
    """Group a shape with a title that browsers show on hover."""
    return f"<g>{element('title', title)}{shape}</g>"


def svg(width: float, height: float, label: str, content: Sequence[str]) -> str:
    """Return a drawing with an accessible label; its class says which screens show it."""
    size = element("svg", "", width=width, height=height, viewBox=f"0 0 {width:g} {height:g}",
                   role="img", aria_label=label,
                   class_=_SCREENS.get(int(width)))  # fmt: skip
    return size.removesuffix("</svg>") + "".join(content) + "</svg>"


def _plain(value: object) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def fitted(text: str, width: float) -> str:
    """Cut text to a width, with an ellipsis; empty when not even three characters fit."""
    room = int(width / CHAR_WIDTH)
    if len(text) <= room:
        return text
    return f"{text[: room - 1].rstrip()}…" if room >= 4 else ""


def ticks(low: float, high: float, most: int) -> list[float]:
    """Return at most ``most`` + 1 round values that lie in a range, 1-2-5 apart.

    >>> ticks(0, 9.3, 5)
    [0.0, 2.0, 4.0, 6.0, 8.0]
    """
    if high <= low:
        return [low]
    step = 10.0 ** math.floor(math.log10((high - low) / max(most, 1)))
    for factor in (1, 2, 5, 10):
        if (high - low) / (step * factor) <= most:
            step *= factor
            break
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def tick_text(value: float, step: float) -> str:
    """Write a tick with as many decimals as the distance between ticks needs."""
    decimals = max(0, -math.floor(math.log10(step) + 1e-9)) if step > 0 else 0
    return f"{value:,.{decimals}f}"


@dataclass(frozen=True, slots=True)
class Frame:
    """A plotting area and its two linear scales."""

    width: float
    height: float
    left: float
    right: float
    top: float
    bottom: float
    x_range: tuple[float, float]
    y_range: tuple[float, float]

    def x(self, value: float) -> float:
        """Place a value on the horizontal axis."""
        low, high = self.x_range
        return self.left + (value - low) / (high - low) * (self.width - self.left - self.right)

    def y(self, value: float) -> float:
        """Place a value on the vertical axis, which points up."""
        low, high = self.y_range
        floor = self.height - self.bottom
        return floor - (value - low) / (high - low) * (floor - self.top)

    @property
    def floor(self) -> float:
        """Vertical position of the horizontal axis."""
        return self.height - self.bottom


def x_axis(frame: Frame, label: str, *, whole: bool = True) -> list[str]:
    """Draw the horizontal axis with ticks and its label at the right end."""
    span = frame.width - frame.left - frame.right
    values = ticks(*frame.x_range, max(2, int(span / 80)))
    if whole:
        values = [v for v in values if v == int(v)]
    step = values[1] - values[0] if len(values) > 1 else 1.0
    parts = [
        element("line", x1=frame.left, x2=frame.width - frame.right, y1=frame.floor,
                y2=frame.floor, class_="axis")
    ]  # fmt: skip
    limit = frame.width - frame.right - len(label) * CHAR_WIDTH - 12
    for value in values:
        at = frame.x(value)
        parts.append(
            element("line", x1=at, x2=at, y1=frame.floor, y2=frame.floor + 4, class_="axis")
        )
        text = tick_text(value, step)
        if at + len(text) * CHAR_WIDTH / 2 < limit:
            parts.append(
                element("text", text, x=at, y=frame.floor + 17, class_="tick", text_anchor="middle")
            )
    parts.append(
        element("text", label, x=frame.width - frame.right, y=frame.floor + 17,
                class_="tick label", text_anchor="end")
    )  # fmt: skip
    return parts


def y_axis(frame: Frame) -> list[str]:
    """Draw horizontal grid lines with their values."""
    values = ticks(*frame.y_range, 5)
    step = values[1] - values[0] if len(values) > 1 else abs(values[0]) or 1.0
    parts = []
    for value in values:
        at = frame.y(value)
        parts.append(
            element("line", x1=frame.left, x2=frame.width - frame.right, y1=at, y2=at,
                    class_="grid")
        )  # fmt: skip
        parts.append(
            element("text", tick_text(value, step), x=frame.left - 7, y=at + 4, class_="tick",
                    text_anchor="end")
        )  # fmt: skip
    return parts
