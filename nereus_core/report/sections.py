"""The report's sections about one run: tiles, plots, timeline."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import Any

from nereus_core.report.page import Draw, Key, figure, tile
from nereus_core.report.plots import Marker, Series, line_plot
from nereus_core.report.quantities import changes, number, placement, seconds, share
from nereus_core.report.record import RunRecord
from nereus_core.report.strips import Row, Segment, timeline

_STYLES = ("c1", "c5", "c3", "c4", "c6", "c2", "c7")
_MANY_DEVICES = 6
"""More lines than this are drawn as their range; chosen, not measured."""

MARKER_KEYS = {
    "transition": Key("transition", "", "transition"),
    "lost": Key("lost", "", "devices lost"),
    "returned": Key("returned", "", "devices back"),
}


def tiles(run: RunRecord) -> str:
    """Summarize a run in a few figures."""
    done = [t for t in run.transitions if t.finished and t.finished.outcome == "done"]
    other = len(run.transitions) - len(done)
    woken = [d for d in run.decisions if d.path != "none"]
    admitted = sum(d.admitted for d in woken)
    found = [
        tile(str(len(run.steps)), "RL steps", f"{seconds(run.elapsed_s)} in all"),
        tile(seconds(run.mean_step_s), "Mean step latency", _prediction_note(run)),
        tile(str(len(done)), "Transitions", f"{other} failed or unfinished" if other else ""),
        tile(
            seconds(run.transition_s),
            "Time in transitions",
            f"{share(run.transition_s, run.elapsed_s)} of the run",
        ),
        tile(f"{admitted} of {len(woken)}", "Decisions admitted"),
    ]
    if run.ignored:
        fields = ", ".join(sorted({i.field.partition("[")[0] for i in run.ignored}))
        found.append(tile(str(len(run.ignored)), "Measurements ignored", fields))
    if reward := run.metric("reward"):
        values = [s.metrics[reward] for s in run.steps if reward in s.metrics]
        fifth = max(1, len(values) // 5)
        first, last = sum(values[:fifth]) / fifth, sum(values[-fifth:]) / fifth
        note = f"first fifth {number(first)}"
        found.append(tile(number(last), "Reward, last fifth", note))
    return f'<div class="tiles">{"".join(found)}</div>'


def _prediction_note(run: RunRecord) -> str:
    errors = [
        abs(s.predicted_s - s.step_s) / s.step_s
        for s in run.steps
        if s.predicted_s is not None and s.step_s > 0
    ]
    if not errors:
        return ""
    return f"predicted within {100 * sorted(errors)[len(errors) // 2]:.0f} % (median)"


def markers(run: RunRecord) -> tuple[Marker, ...]:
    """Collect what happened between steps."""
    found = []
    for transition in run.transitions:
        end = transition.finished
        took = f"{end.outcome} in {seconds(end.elapsed_s)}" if end else "unfinished"
        what = "; ".join(changes(transition.plan_before, end.plan)) if end else ""
        step = transition.started.step
        found.append(
            Marker(step, "transition", f"transition after step {step}: {took}\n{what}".strip())
        )
    for change in run.device_changes:
        for kind, devices, sign in (
            ("lost", change.lost, "−"),
            ("returned", change.returned, "+"),
        ):
            if devices:
                noun = "device" if len(devices) == 1 else "devices"
                title = (
                    f"{sign}{len(devices)} {noun}: {', '.join(devices)} after step {change.step}"
                )
                found.append(Marker(change.step, kind, title))
    return tuple(found)


def marker_keys(found: tuple[Marker, ...]) -> list[Key]:
    """Return legend entries for the kinds of markers that occur."""
    return [key for kind, key in MARKER_KEYS.items() if any(m.kind == kind for m in found)]


def plots(run: RunRecord) -> str:
    """Draw latency, response tokens, rewards, losses and memory over steps."""
    steps, marked = [s.step for s in run.steps], markers(run)
    scale, unit = (1e3, "ms") if max(s.step_s for s in run.steps) < 1 else (1.0, "s")
    measured = Series("measured", [s.step_s * scale for s in run.steps], "c1")
    predicted = Series(
        "predicted",
        [None if s.predicted_s is None else s.predicted_s * scale for s in run.steps],
        "c2",
        dashed=True,
    )

    def plot(title: str, unit: str, series: list[Series], *, from_zero: bool = True) -> str:
        def draw(width: float) -> str:
            return line_plot(width, f"{title} over RL steps", steps, series, marked,
                             from_zero=from_zero)  # fmt: skip

        named = series if len(series) > 1 else []
        keys = [Key("dashed" if s.dashed else "line", s.style, s.name) for s in named]
        return figure(title, unit, draw, keys)

    stages = list(dict.fromkeys(stage for s in run.steps for stage in s.stage_s))
    by_stage = [
        Series(
            stage,
            [s.stage_s[stage] * scale if stage in s.stage_s else None for s in run.steps],
            _STYLES[i % len(_STYLES)],
            dashed=i % 2 == 1,
        )
        for i, stage in enumerate(stages)
    ]
    found = [
        plot("Step latency", f"{unit}, transitions not counted", [measured, predicted]),
        plot("Stage latency", f"{unit} of each model-stage", by_stage),
        plot(
            "Response tokens",
            "tokens per sequence",
            [
                Series("mean", [s.response_tokens_mean for s in run.steps], "c1"),
                Series("95th percentile", [s.response_tokens_p95 for s in run.steps], "c5",
                       dashed=True),
            ],
        ),
    ]  # fmt: skip
    if reward := run.metric("reward"):
        values = [s.metrics.get(reward) for s in run.steps]
        found.append(plot("Reward", reward, [Series(reward, values, "c1")], from_zero=False))
    if losses := run.metrics("loss")[:4]:
        lines = [
            Series(name, [s.metrics.get(name) for s in run.steps], _STYLES[i])
            for i, name in enumerate(losses)
        ]
        unit = losses[0] if len(losses) == 1 else "by model"
        found.append(plot("Loss", unit, lines, from_zero=False))
    if memory := _memory(run):
        unit, lines = memory
        found.append(plot("Peak memory per device", unit, lines))
    return f'<div class="grid">{"".join(found)}</div>'


def _memory(run: RunRecord) -> tuple[str, list[Series]] | None:
    devices = sorted({d for s in run.steps for d in s.peak_bytes})
    if not devices:
        return None
    top = max(b for s in run.steps for b in s.peak_bytes.values())
    divisor, unit = next(
        ((2.0**k, u) for k, u in ((30, "GiB"), (20, "MiB"), (10, "KiB")) if top >= 2**k),
        (1.0, "B"),
    )
    if len(devices) <= _MANY_DEVICES:
        return unit, [
            Series(
                device,
                [
                    None if device not in s.peak_bytes else s.peak_bytes[device] / divisor
                    for s in run.steps
                ],
                _STYLES[i],
                dashed=i % 2 == 1,
            )
            for i, device in enumerate(devices)
        ]
    ordered = [sorted(b / divisor for b in s.peak_bytes.values()) for s in run.steps]
    return f"{unit}, {len(devices)} devices", [
        Series("largest", [v[-1] if v else None for v in ordered], "c1"),
        Series("median", [v[len(v) // 2] if v else None for v in ordered], "c3", dashed=True),
        Series("smallest", [v[0] if v else None for v in ordered], "c7"),
    ]


def plan_timeline(run: RunRecord) -> str:
    """Draw which layout and dp each model-stage had at each step."""
    stages = list(dict.fromkeys(stage for plan in run.plans for stage in plan))
    rows = [Row(stage, _segments(run, stage)) for stage in stages]
    texts = list(dict.fromkeys(s.text for r in rows for s in r.segments))
    styles = {text: _STYLES[i % len(_STYLES)] for i, text in enumerate(texts)}
    marked = markers(run)

    draw: Draw = lambda width: timeline(width, "Plan over RL steps", rows, marked, styles)  # noqa: E731  (a figure is a function of its width)
    keys = [Key("band", styles[text], text) for text in texts]
    return figure("Plan timeline", "layout and dp of each model-stage", draw,
                  [*keys, *marker_keys(marked)], full=True)  # fmt: skip


def _segments(run: RunRecord, stage: str) -> tuple[Segment, ...]:
    """Join neighboring steps in which a stage kept its layout and devices."""
    found = []
    pairs = [
        (step.step, plan[stage])
        for step, plan in zip(run.steps, run.plans, strict=True)
        if stage in plan
    ]
    for entry, group in groupby(pairs, key=lambda p: p[1]):
        steps = [step for step, _ in group]
        title = f"{stage}: {placement(entry)}, steps {steps[0]} to {steps[-1]}\n{_units(entry)}"
        found.append(Segment(steps[0], steps[-1], placement(entry), title))
    return tuple(found)


def _units(entry: Mapping[str, Any]) -> str:
    return "\n".join(f"unit on {', '.join(map(str, unit))}" for unit in entry["units"])
