"""The plan timeline: per model-stage a strip of segments over RL steps, colored by layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nereus_core.report.plots import Marker, marker_glyph
from nereus_core.report.svg import CHAR_WIDTH, Frame, element, fitted, svg, titled, x_axis

_LANE = 26


@dataclass(frozen=True, slots=True)
class Segment:
    """Steps from ``first`` to ``last``, both included, with one text."""

    first: int
    last: int
    text: str
    title: str


@dataclass(frozen=True, slots=True)
class Row:
    """A strip."""

    name: str
    segments: tuple[Segment, ...]


def timeline(
    width: float,
    label: str,
    rows: Sequence[Row],
    markers: Sequence[Marker],
    styles: Mapping[str, str],
) -> str:
    """Draw strips one below the other; ``styles`` gives the CSS class of a segment's text."""
    first = min(s.first for r in rows for s in r.segments)
    last = max(s.last for r in rows for s in r.segments)
    beside = width > 600
    left = 12 + max(len(r.name) for r in rows) * CHAR_WIDTH if beside else 1
    pitch = _LANE + (8 if beside else 22)
    top = 30 if beside else 38
    height = top + pitch * len(rows) + 24
    frame = Frame(width, height, left, 10, top, 26, (first - 0.5, last + 0.5), (0, 1))
    parts = [*x_axis(frame, "RL step"), *_markers(frame, markers, first, last)]
    for index, row in enumerate(rows):
        y = top + index * pitch
        if beside:
            parts.append(element("text", row.name, x=0, y=y + 17, class_="row"))
        else:
            parts.append(element("text", row.name, x=0, y=y - 4, class_="row"))
        parts += [_segment(frame, s, y, styles[s.text]) for s in row.segments]
    return svg(width, height, label, parts)


def _segment(frame: Frame, segment: Segment, y: float, style: str) -> str:
    x, end = frame.x(segment.first - 0.5), frame.x(segment.last + 0.5)
    box = element("rect", x=x + 0.75, y=y, width=max(end - x - 1.5, 1.0), height=_LANE, rx=3,
                  class_=f"band {style}")  # fmt: skip
    text = segment.text if len(segment.text) * CHAR_WIDTH < end - x - 10 else ""
    if text:
        box += element("text", fitted(text, end - x), x=x + 7, y=y + 17, class_="inside")
    return titled(box, segment.title)


def _markers(frame: Frame, markers: Sequence[Marker], first: int, last: int) -> list[str]:
    parts = []
    shown = sorted((m for m in markers if first <= m.step <= last), key=lambda m: m.step)
    for index, marker in enumerate(shown):
        x = frame.x(marker.step + 0.5)
        line = element("line", x1=x, x2=x, y1=14, y2=frame.floor, class_=f"mark {marker.kind}")
        parts.append(titled(line + marker_glyph(marker.kind, x, 9), marker.title))
        after = [frame.x(m.step + 0.5) - 8 for m in shown[index + 1 :] if m.step > marker.step]
        short = marker.title.partition(":")[0]
        if marker.kind != "transition" and x + 8 + len(short) * CHAR_WIDTH < min(
            [*after, frame.width]
        ):
            parts.append(element("text", short, x=x + 8, y=13, class_=f"tick {marker.kind}"))
    return parts
