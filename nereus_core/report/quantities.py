"""Seconds, bytes, shares and plans as short text. Binary units for bytes, as everywhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_SHORT_STAGES = {"generate": "gen", "infer": "inf", "train": "train"}


def seconds(value_s: float | None) -> str:
    """Write seconds with three digits that matter.

    >>> seconds(0.01234), seconds(4.2), seconds(200.0), seconds(None)
    ('12.3 ms', '4.20 s', '3 min 20 s', '–')
    """
    if value_s is None:
        return "–"
    if value_s < 0:
        return f"−{seconds(-value_s)}"
    if value_s == 0:
        return "0 s"
    if value_s < 1e-3:
        return f"{value_s * 1e6:.3g} µs"
    if value_s < 0.9995:
        return f"{value_s * 1e3:.3g} ms"
    if value_s < 120:
        return f"{value_s:.2f} s" if value_s < 9.995 else f"{value_s:.1f} s"
    minutes, rest = divmod(round(value_s), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def amount(num_bytes: float) -> str:
    """Write bytes.

    >>> amount(1536), amount(3 * 2**30)
    ('1.50 KiB', '3.00 GiB')
    """
    size, unit = float(num_bytes), 0
    while size >= 1024 and unit < len(_BYTE_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.0f} B" if unit == 0 else f"{size:.2f} {_BYTE_UNITS[unit]}"


def number(value: float | None) -> str:
    """Write a figure with four digits, large ones with separators.

    >>> number(0.123456), number(12345.6), number(None)
    ('0.1235', '12,346', '–')
    """
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def share(part: float, whole: float) -> str:
    """Write a part of a whole in percent.

    >>> share(1, 8), share(0, 0)
    ('12.5 %', '–')
    """
    return f"{100 * part / whole:.1f} %" if whole > 0 else "–"


def placement(entry: Mapping[str, Any]) -> str:
    """Write one model-stage of a plan in JSON form, e.g. ``tp2pp1dp4``."""
    return f"{entry['layout']}dp{len(entry['units'])}"


def plan_line(plan: Mapping[str, Any]) -> str:
    """Write a plan in JSON form on one line."""
    return " ".join(f"{stage}={placement(entry)}" for stage, entry in plan.items())


def degrees(plan: Mapping[str, Any]) -> str:
    """Write a plan as tp·pp·dp per model-stage, short enough for a column.

    >>> degrees({"actor/train": {"layout": "tp2pp1", "units": [[], []]}})
    'train=2·1·2'
    """
    models = {stage.partition("/")[0] for stage in plan if stage.endswith(("train", "generate"))}
    parts = []
    for stage, entry in plan.items():
        model, _, kind = stage.partition("/")
        tp, _, pp = str(entry["layout"]).removeprefix("tp").partition("pp")
        name = _SHORT_STAGES.get(kind, kind)
        label = name if len(models) <= 1 else f"{model}/{name}"
        parts.append(f"{label}={tp}·{pp}·{len(entry['units'])}")
    return " ".join(parts)


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[str, ...]:
    """Say per model-stage how two plans in JSON form differ."""
    lines = []
    for stage, entry in after.items():
        old = before.get(stage)
        if old is None or old == entry:
            continue
        if placement(old) == placement(entry):
            lines.append(f"{stage}: {placement(entry)} on other devices")
        else:
            lines.append(f"{stage}: {placement(old)} → {placement(entry)}")
    return tuple(lines)
