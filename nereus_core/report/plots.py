"""Line plots over RL steps, with the moments at which something happened marked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nereus_core.report.svg import (
    CHAR_WIDTH,
    HALF,
    MIDDLE,
    Frame,
    element,
    svg,
    tick_text,
    ticks,
    titled,
    x_axis,
    y_axis,
)


@dataclass(frozen=True, slots=True)
class Series:
    """A line: one value per step, None where there is none."""

    name: str
    values: Sequence[float | None]
    style: str
    """CSS class of the line: ``c1`` ... ``c7``."""
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Marker:
    """Something that happened after a step."""

    step: int
    kind: str
    """``transition``, ``lost`` or ``returned``."""
    title: str


def line_plot(
    width: float,
    label: str,
    steps: Sequence[int],
    series: Sequence[Series],
    markers: Sequence[Marker] = (),
    *,
    from_zero: bool = True,
    height: float = 216,
) -> str:
    """Draw lines over steps; ``label`` names the drawing for screen readers."""
    found = [v for s in series for v in s.values if v is not None]
    low, high = (min(found), max(found)) if found else (0.0, 1.0)
    low = min(low, 0.0) if from_zero else low
    margin = (high - low) * 0.08 or abs(high) * 0.1 or 1.0
    y_range = (low if from_zero else low - margin, high + margin)
    shown = ticks(*y_range, 5)
    apart = shown[1] - shown[0] if len(shown) > 1 else 1.0
    left = 14 + max(len(tick_text(v, apart)) for v in shown) * CHAR_WIDTH
    x_range = (steps[0], steps[-1]) if len(steps) > 1 else (steps[0] - 1, steps[0] + 1)
    frame = Frame(width, height, left, 8, 16, 26, x_range, y_range)
    parts = [*y_axis(frame), *x_axis(frame, "RL step")]
    parts += [_marker(frame, m) for m in markers if x_range[0] <= m.step <= x_range[1]]
    for line in series:
        parts += _line(frame, steps, line)
    parts += _hover(frame, steps, series)
    return svg(width, height, label, parts)


def marker_glyph(kind: str, x: float, y: float) -> str:
    """Draw the sign of a kind of marker: diamond, triangle down, triangle up."""
    shapes: dict[str, list[tuple[float, float]]] = {
        "transition": [(0, -4.5), (4.5, 0), (0, 4.5), (-4.5, 0)],
        "lost": [(-5, -4), (5, -4), (0, 4.5)],
        "returned": [(-5, 4), (5, 4), (0, -4.5)],
    }
    points = " ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in shapes[kind])
    return element("polygon", points=points, class_=f"glyph {kind}")


def _marker(frame: Frame, marker: Marker) -> str:
    # A boundary lies between two steps.
    x = min(frame.x(marker.step + 0.5), frame.width - frame.right)
    line = element("line", x1=x, x2=x, y1=frame.top - 4, y2=frame.floor, class_="mark")
    return titled(line + marker_glyph(marker.kind, x, frame.top - 8), marker.title)


def _line(frame: Frame, steps: Sequence[int], line: Series) -> list[str]:
    runs: list[list[tuple[float, float]]] = [[]]
    for step, value in zip(steps, line.values, strict=True):
        if value is None:
            runs.append([])
        else:
            runs[-1].append((frame.x(step), frame.y(value)))
    dense = len(steps) > frame.width / 2
    css = f"line {line.style}{' dashed' if line.dashed else ''}{' dense' if dense else ''}"
    parts = []
    for run in filter(None, runs):
        if len(run) == 1:
            parts.append(element("circle", cx=run[0][0], cy=run[0][1], r=2.5, class_=css + " dot"))
        else:
            parts.append(
                element("polyline", points=" ".join(f"{x:.1f},{y:.1f}" for x, y in run), class_=css)
            )
    return parts


def _hover(frame: Frame, steps: Sequence[int], series: Sequence[Series]) -> list[str]:
    """Invisible columns, one per step, whose titles give the values."""
    # Phones do not hover, and hundreds of columns are no longer something to point at.
    if frame.width not in (HALF, MIDDLE) or len(steps) > 300:
        return []
    width = (frame.width - frame.left - frame.right) / max(len(steps) - 1, 1)
    parts = []
    for index, step in enumerate(steps):
        values = [f"{s.name} {s.values[index]:.4g}" for s in series if s.values[index] is not None]
        column = element("rect", x=frame.x(step) - width / 2, y=frame.top, width=width,
                         height=frame.floor - frame.top, class_="hover")  # fmt: skip
        parts.append(titled(column, "\n".join([f"step {step}", *values])))
    return parts
