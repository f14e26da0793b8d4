"""The report's sections about decisions, transitions, and another run of the same job."""

from __future__ import annotations

from html import escape

from nereus_core.events import Decided
from nereus_core.report.gantt import Arrow, Bar, gantt
from nereus_core.report.page import Column, Key, badge, figure, fold, inset, lines, table
from nereus_core.report.plots import Series, line_plot
from nereus_core.report.quantities import amount, changes, number, seconds, share
from nereus_core.report.record import RunRecord, TransitionRecord

KIND_STYLES = {"split": "c1", "merge": "c3", "extend": "c5", "destroy": "c7"}


def decisions(run: RunRecord) -> str:
    """Tabulate decisions; boundaries at which nothing had to be searched are folded."""
    woken = [d for d in run.decisions if d.path != "none"]
    quiet = [d for d in run.decisions if d.path == "none"]
    if not run.decisions:
        return '<p class="quiet">No decision was recorded.</p>'
    shown = _decision_table(woken) if woken else '<p class="quiet">Nothing woke the planner.</p>'
    if quiet:
        noun = "boundary" if len(quiet) == 1 else "boundaries"
        rows = [
            [str(d.step), escape(d.trigger), seconds(d.current_s), escape(d.rule)] for d in quiet
        ]
        columns = [
            Column("Step", True), Column("Trigger"), Column("Predicted", True), Column("Rule")
        ]  # fmt: skip
        shown += fold(f"{len(quiet)} {noun} kept the plan without a search", table(columns, rows))
    return f'<div class="card">{shown}</div>'


def _decision_table(found: list[Decided]) -> str:
    columns = [
        Column("Step", True), Column("Trigger"), Column("Path"), Column("Outcome"),
        Column("Change"), Column("Saving / step", True), Column("Cost", True),
        Column("Horizon", True), Column("Rule", wide=True),
    ]  # fmt: skip
    rows = []
    for d in found:
        change = changes(d.current_plan, d.candidate_plan) if d.candidate_plan else ()
        horizon = "–" if d.horizon_steps is None else f"{d.horizon_steps:,.0f} steps"
        rows.append(
            [
                str(d.step),
                escape(d.trigger),
                escape(d.path),
                badge("admitted", "yes") if d.admitted else badge("refused", "no"),
                lines(change) if change else "same plan" if d.candidate_plan else "–",
                "not asked" if d.path == "urgent" else seconds(d.saving_s),
                seconds(d.transition_s),
                horizon,
                escape(d.rule),
            ]
        )
    return table(columns, rows)


def transition(record: TransitionRecord) -> str:
    """Draw one transition: its outcome, what changed, its primitives in time, its edges."""
    started, end = record.started, record.finished
    if end is None:
        outcome, facts = badge("unfinished", "bad"), "the events end before it does"
    else:
        outcome = badge(end.outcome.replace("_", " "), "yes" if end.outcome == "done" else "bad")
        facts = (
            f"{seconds(end.elapsed_s)}, predicted {seconds(end.predicted_s)}; "
            f"{amount(end.moved_bytes)} moved between devices, "
            f"{amount(sum(p.kept_bytes for p in record.primitives))} stayed"
        )
    change = lines(changes(record.plan_before, end.plan)) if end else ""
    error = f'<p class="quiet">{escape(end.error)}</p>' if end and end.error else ""
    head = (
        f'<div class="head"><h3>After step {started.step}</h3>{outcome}'
        f'<span class="quiet">{escape(facts)}</span></div>{change}{error}'
    )
    drawn = _bars(record) if record.primitives else ""
    rows = [
        [escape(_name(record, e["before"])), escape(_name(record, e["after"])),
         escape(str(e["kind"])), escape(str(e["reason"]))]
        for e in started.edges
    ]  # fmt: skip
    columns = [Column("Before"), Column("After"), Column("Edge"), Column("Reason", wide=True)]
    noun = "edge" if len(rows) == 1 else "edges"
    edges = fold(f"{len(rows)} {noun} of the graph, with reasons", table(columns, rows))
    note = '<p class="quiet">No edges: all primitives were free to run at once.</p>'
    return f'<div class="card" style="margin-top:12px">{head}{drawn}{edges if rows else note}</div>'


def _name(record: TransitionRecord, op_id: object) -> str:
    return next((str(o["text"]) for o in record.started.ops if o["op_id"] == op_id), str(op_id))


def _bars(record: TransitionRecord) -> str:
    bars = [
        Bar(
            p.op_id,
            p.text,
            KIND_STYLES.get(p.kind, "c7"),
            p.start_s,
            p.end_s,
            p.predicted_s,
            f"{p.text}\n{seconds(p.end_s - p.start_s)}, predicted {seconds(p.predicted_s)}\n"
            f"{amount(p.moved_bytes)} moved, {amount(p.kept_bytes)} stayed"
            + (f"\n{p.error}" if p.error else ""),
            failed=p.error is not None,
        )
        for p in record.primitives
    ]
    arrows = [
        Arrow(str(e["before"]), str(e["after"]), f"{e['kind']}: {e['reason']}")
        for e in record.started.edges
    ]
    kinds = [k for k in KIND_STYLES if any(p.kind == k for p in record.primitives)]
    keys = [Key("bar", KIND_STYLES[k], k) for k in kinds]
    if any(p.predicted_s is not None for p in record.primitives):
        keys.append(Key("outline", "", "predicted"))

    def draw(width: float) -> str:
        return gantt(width, "Primitives of the transition in time", bars, arrows)

    return inset(draw, keys)


def comparison(run: RunRecord, baseline: RunRecord) -> str:
    """Overlay a run with another of the same job, and tabulate the differences."""
    steps = sorted({s.step for s in run.steps} | {s.step for s in baseline.steps})
    scale, unit = (1e3, "ms") if max(s.step_s for s in run.steps) < 1 else (1.0, "s")

    def overlay(title: str, unit: str, name: str | None, *, from_zero: bool) -> str:
        series = []
        for label, style, dashed, of in (
            ("this run", "c1", False, run), ("baseline", "c2", True, baseline)
        ):  # fmt: skip
            values = {
                s.step: s.step_s * scale if name is None else s.metrics.get(name) for s in of.steps
            }
            series.append(Series(label, [values.get(s) for s in steps], style, dashed))

        def draw(width: float) -> str:
            return line_plot(width, f"{title}, both runs", steps, series, from_zero=from_zero)

        keys = [Key("line", "c1", "this run"), Key("dashed", "c2", "baseline")]
        return figure(title, unit, draw, keys)

    names = [n for n in (run.metric("reward"), *run.metrics("loss")[:3]) if n]
    drawn = [overlay("Step latency", unit, None, from_zero=True)]
    drawn += [overlay(name, "", name, from_zero=False) for name in names]
    columns = [
        Column("Figure"), Column("This run", True), Column("Baseline", True),
        Column("Difference", True),
    ]  # fmt: skip
    return (
        f'<div class="card">{table(columns, _differences(run, baseline, names))}</div>'
        f'<div class="grid">{"".join(drawn)}</div>'
    )


def _differences(run: RunRecord, baseline: RunRecord, names: list[str]) -> list[list[str]]:
    mine, theirs = ({s.step: s for s in r.steps} for r in (run, baseline))
    common = sorted(mine.keys() & theirs.keys())
    rows = [["Steps", str(len(mine)), str(len(theirs)), f"{len(common)} in common"]]
    if not common:
        return rows
    sums = [sum(steps[i].step_s for i in common) for steps in (mine, theirs)]
    moved = [_transition_s(r, common[-1]) for r in (run, baseline)]
    for name, values in (
        ("Mean step latency", [s / len(common) for s in sums]),
        (
            "Median step latency",
            [sorted(st[i].step_s for i in common)[len(common) // 2] for st in (mine, theirs)],
        ),
        (
            "Steps and transitions",
            [sums[0] + moved[0], sums[1] + moved[1]],
        ),
    ):
        rows.append(
            [name, seconds(values[0]), seconds(values[1]),
             f"{seconds(values[0] - values[1])} ({_relative(*values)})"]
        )  # fmt: skip
    rows.append(
        ["Time in transitions", seconds(moved[0]), seconds(moved[1]),
         f"{share(moved[0], sums[0] + moved[0])} of this run"]
    )  # fmt: skip
    for name in names:
        pairs = [
            (mine[i].metrics[name], theirs[i].metrics[name])
            for i in common
            if name in mine[i].metrics and name in theirs[i].metrics
        ]
        if pairs:
            means = [sum(p[k] for p in pairs) / len(pairs) for k in (0, 1)]
            largest = max(abs(a - b) for a, b in pairs)
            rows.append(
                [f"Mean {escape(name)}", number(means[0]), number(means[1]),
                 f"largest on a step {largest:.3g}"]
            )  # fmt: skip
    return rows


def _transition_s(run: RunRecord, last: int) -> float:
    """Seconds in transitions before the step ``last`` of a run ended."""
    return sum(
        t.finished.elapsed_s for t in run.transitions if t.finished and t.started.step < last
    )


def _relative(value: float, reference: float) -> str:
    return f"{100 * (value / reference - 1):+.1f} %".replace("-", "−") if reference else "–"
