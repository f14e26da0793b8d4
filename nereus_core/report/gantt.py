"""The primitives of one transition as bars on its clock; bars above each other ran concurrently."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nereus_core.report.quantities import seconds
from nereus_core.report.svg import Frame, element, fitted, svg, titled, x_axis

_PITCH, _BAR = 38, 12
_MOST_PREDICTED = 1.5
"""Length of the axis over what ran, for predictions that were too long; chosen, not measured."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A primitive from ``start_s`` to ``end_s``; ``style`` is its CSS class."""

    key: str
    text: str
    style: str
    start_s: float
    end_s: float
    predicted_s: float | None
    title: str
    failed: bool = False


@dataclass(frozen=True, slots=True)
class Arrow:
    """An edge between two bars, named by their keys."""

    before: str
    after: str
    title: str


def gantt(width: float, label: str, bars: Sequence[Bar], arrows: Sequence[Arrow] = ()) -> str:
    """Draw bars in order of start, with their predicted length as an outline."""
    ordered = sorted(bars, key=lambda b: (b.start_s, b.end_s, b.key))
    ran_s = max((b.end_s for b in ordered), default=0.0)
    predicted_s = max((b.start_s + (b.predicted_s or 0) for b in ordered), default=0.0)
    # A prediction far too long must not squeeze what happened: its outline runs off the edge.
    end_s = min(max(ran_s, predicted_s), _MOST_PREDICTED * ran_s or predicted_s)
    scale, unit = (1e3, "ms") if end_s < 1 else (1.0, "s")
    top, height = 6, 6 + _PITCH * len(ordered) + 26
    frame = Frame(width, height, 10, 10, top, 26, (0, end_s * scale * 1.02 or 1.0), (0, 1))
    parts = x_axis(frame, f"{unit} since the transition began", whole=False)
    at = {bar.key: top + index * _PITCH for index, bar in enumerate(ordered)}
    ends = {bar.key: bar for bar in ordered}
    for arrow in arrows:
        if arrow.before in at and arrow.after in at:
            x1 = frame.x(ends[arrow.before].end_s * scale)
            x2 = frame.x(ends[arrow.after].start_s * scale)
            y1, y2 = at[arrow.before] + 18 + _BAR, at[arrow.after] + 18
            bend = f"M{x1:.1f},{y1:.1f} V{(y1 + y2) / 2:.1f} H{x2:.1f} V{y2:.1f}"
            parts.append(titled(element("path", d=bend, class_="edge"), arrow.title))
    for bar in ordered:
        parts.append(_bar(frame, bar, at[bar.key], scale))
    return svg(width, height, label, parts)


def _bar(frame: Frame, bar: Bar, y: float, scale: float) -> str:
    x, end = frame.x(bar.start_s * scale), frame.x(bar.end_s * scale)
    failed = " failed" if bar.failed else ""
    shapes = element("rect", x=x, y=y + 18, width=max(end - x, 1.5), height=_BAR, rx=2,
                     class_=f"bar {bar.style}{failed}")  # fmt: skip
    if bar.predicted_s is not None:
        until = frame.x((bar.start_s + bar.predicted_s) * scale)
        wide = min(until, frame.width - 2) - x
        shapes += element("rect", x=x, y=y + 18, width=max(wide, 1.5), height=_BAR, rx=2,
                          class_="predicted")  # fmt: skip
    took = seconds(bar.end_s - bar.start_s)
    # Text starts at its bar, but never so far right that it is cut.
    text = fitted(f"{bar.text}  {took}", frame.width - 20)
    start = max(10.0, min(x, frame.width - 10 - len(text) * 6.1))
    return titled(shapes + element("text", text, x=start, y=y + 13, class_="bartext"), bar.title)
