"""A decision in plain words, from its written record alone."""

from __future__ import annotations

from collections.abc import Sequence

from nereus_core.events import Decided, Json
from nereus_core.plan import Plan

_THEN = {
    "tokens": "then response lengths are expected to have moved",
    "devices": "then devices are expected to leave",
    "end": "then the job ends",
    "none": "nothing is in sight, so the cap applies",
}


def explain_event(event: Decided) -> str:
    """Explain a decision: signal, plans, bounds, horizon, payback, rule, losers."""
    verdict = "admitted" if event.admitted else "not admitted"
    lines = [
        f"step {event.step}: {event.path} decision, {verdict} "
        f"(policy {event.policy}; thought for {event.decision_s * 1e3:.3g} ms)",
        f"  woken by   {event.trigger}{f': {event.signal}' if event.signal else ''}",
    ]
    unpriced = "seconds not asked" if event.path == "none" else "cannot go on"
    now = _seconds(event, "current", event.current_s) or unpriced
    lines.append(f"  current    {_plan(event.current_plan)}: {now}")
    if event.candidate_plan is not None:
        then = _seconds(event, "candidate", event.candidate_s)
        lines.append(f"  candidate  {_plan(event.candidate_plan)}: {then}")
    saving = _seconds(event, "saving", event.saving_s)
    transition = _seconds(event, "transition", event.transition_s)
    if saving:
        lines.append(f"  saving     {saving} per step")
    if transition:
        lines.append(f"  transition {transition}")
    if event.saving_s is not None and event.horizon_steps is not None:
        lines.append(f"  horizon    {_horizon(event)}")
        low_s = event.bounds_s.get("saving", [event.saving_s])[0]
        lines.append(
            f"  payback    {low_s:.3g} s x {event.horizon_steps:.3g} steps = "
            f"{low_s * event.horizon_steps:.3g} s"
        )
    lines.append(f"  rule       {event.rule}")
    lines += _losers(event.runner_ups)
    return "\n".join(lines)


def _horizon(event: Decided) -> str:
    text = f"{event.horizon_steps:.3g} steps expected"
    if event.horizon_bounds:
        low, high = event.horizon_bounds
        text += f" ({low:.3g} to {high:.3g})"
    then = _THEN.get(event.horizon_signal)
    return f"{text}; {then}" if then else text


def _seconds(event: Decided, name: str, mean_s: float | None) -> str:
    return "" if mean_s is None else f"{mean_s:.3g} s{_bounds(event.bounds_s.get(name))}"


def _bounds(low_high: Sequence[float] | None) -> str:
    return f" ({low_high[0]:.3g} to {low_high[1]:.3g})" if low_high else ""


def _plan(value: Json) -> str:
    return str(Plan.from_json(value))


def _losers(runner_ups: Sequence[Json]) -> list[str]:
    return [
        f"  lost       {_plan(r['plan'])}: {r['predicted_s']:.3g} s{_bounds(r.get('bounds_s'))}, "
        f"{r['reason']}"
        for r in runner_ups
    ]
