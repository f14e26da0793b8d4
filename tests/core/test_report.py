import io
import random
import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from rich.console import Console

from nereus_core.errors import ConfigError, NereusError
from nereus_core.events import EventLog, RunFinished, RunStarted, StepObserved, read_events
from nereus_core.report import quantities
from nereus_core.report.gantt import Arrow, Bar, gantt
from nereus_core.report.html import render, write_report
from nereus_core.report.live import LiveTable, PlainLines, view_on
from nereus_core.report.plots import Marker, Series, line_plot
from nereus_core.report.record import RunRecord, last_run
from nereus_core.report.svg import HALF, MIDDLE, PHONE, WIDE, element, fitted, ticks

VOID = {"meta", "br", "line", "rect", "polyline", "polygon", "circle", "path", "img"}


class Page(HTMLParser):
    """Collects text and tags; fails on tags that do not nest."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data + "\n"


def page(path: Path, **kwargs) -> Page:
    return Page(render(RunRecord.read(path), title="a run", **kwargs))


# --- Reading ----------------------------------------------------------------------------------


def test_a_record_knows_the_plan_of_every_step(recorded):
    run = RunRecord.read(recorded)
    layouts = [p["actor/train"]["layout"] for p in run.plans]
    assert [layouts[i] for i in (0, 9, 10, 16, 17, 29)] == ["tp2pp1", "tp2pp1", "tp2pp2", "tp2pp2",
                                                            "tp2pp1", "tp2pp1"]  # fmt: skip
    assert [len(t.primitives) for t in run.transitions] == [3, 1, 3]
    assert run.transition_s == pytest.approx(0.98 + 0.36 + 0.85)
    assert run.elapsed_s == run.finished.elapsed_s


def test_of_several_runs_in_a_file_the_last_counts(recorded):
    first = RunRecord.read(recorded)
    with EventLog(recorded, lambda: 0.0) as log:
        log.emit(replace(first.started, adapter="second"))
    assert RunRecord.read(recorded).started.adapter == "second"
    assert RunRecord.read(recorded).steps == []
    assert [e for e, _ in last_run(recorded)] == [replace(first.started, adapter="second")]


def test_a_step_done_again_counts_once(recorded):
    events = list(read_events(recorded))
    at = next(i for i, (e, _) in enumerate(events) if isinstance(e, StepObserved) and e.step == 5)
    again = replace(events[at][0], step_s=99.0)
    run = RunRecord.of([*events[: at + 1], (again, 1.0), *events[at + 1 :]])
    assert [s.step for s in run.steps] == list(range(30))
    assert run.steps[5].step_s == 99.0


def test_files_without_a_run_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        RunRecord.read(tmp_path / "absent")
    (tmp_path / "empty").touch()
    with pytest.raises(NereusError, match="no RunStarted"):
        RunRecord.read(tmp_path / "empty")


def test_the_reward_is_found_by_its_shortest_name(recorded):
    run = RunRecord.read(recorded)
    run.steps = [replace(s, metrics={"rewards/std": 1.0, "reward_mean": 2.0}) for s in run.steps]
    assert run.metric("reward") == "reward_mean"
    assert run.metrics("reward") == ("reward_mean", "rewards/std")
    assert run.metric("loss") is None


# --- The page ---------------------------------------------------------------------------------


def test_the_page_stands_alone(recorded, recorded_baseline):
    html = render(RunRecord.read(recorded), title="t", baseline=RunRecord.read(recorded_baseline))
    tags = {tag for tag, _ in Page(html).tags}
    assert not tags & {"script", "link", "img", "iframe", "object"}
    assert not re.search(r"https?://|url\(|@import|\bsrc=|\bhref=", html)


def test_every_decision_and_transition_is_on_the_page(recorded):
    run, shown = RunRecord.read(recorded), page(recorded)
    for decision in run.decisions:
        assert decision.rule in shown.text
    for transition in run.transitions:
        for primitive in transition.primitives:
            assert primitive.text in shown.text
        for edge in transition.started.edges:
            assert edge["reason"] in shown.text
    assert shown.text.count("rolled back") == 1
    assert "26 boundaries kept the plan without a search" in shown.text


def test_numbers_of_the_summary_are_those_of_the_run(recorded):
    text = " ".join(page(recorded).text.split())
    assert "RL steps 30" in text
    assert "Transitions 2 1 failed or unfinished" in text
    assert "Time in transitions 2.19 s" in text
    assert "Decisions admitted 3 of 4" in text


def test_the_comparison_tabulates_differences(recorded, recorded_baseline):
    mine, theirs = RunRecord.read(recorded), RunRecord.read(recorded_baseline)
    text = " ".join(page(recorded, baseline=theirs).text.split())
    assert "30 in common" in text
    pair = [quantities.seconds(r.mean_step_s) for r in (mine, theirs)]
    assert f"Mean step latency {pair[0]} {pair[1]}" in text
    other = [replace(s, metrics={"reward": s.metrics["reward"] + 0.25}) for s in theirs.steps]
    theirs.steps = other
    assert "largest on a step 0.25" in " ".join(page(recorded, baseline=theirs).text.split())


def test_a_run_cut_short_still_gives_a_page(recorded):
    events = list(read_events(recorded))
    # Wherever a run is killed, what was recorded can be read.
    for end in [1, 2, 3, *range(5, len(events), 7)]:
        html = render(RunRecord.of(events[:end]), title="cut")
        assert "The events end before the run does." in Page(html).text


def test_text_from_a_job_cannot_leave_its_place(tmp_path):
    evil = '<script>alert("x")</script>'
    started = RunStarted(evil, evil, evil, {evil: {"layout": evil, "units": [[evil]]}}, (evil,), 1)
    step = StepObserved(0, 1.0, None, {evil: 1.0}, 1.0, 1.0, 1.0, {evil: 5}, (evil,),
                        {f"reward{evil}": 1.0, f"loss{evil}": 0.5})  # fmt: skip
    run = RunRecord.of([(started, 0.0), (step, 1.0), (RunFinished(1, evil, 1.0, 0.0), 1.0)])
    html = render(run, title=evil, baseline=run)
    assert "script" not in {tag for tag, _ in Page(html).tags}


def test_every_figure_is_drawn_for_three_screens(recorded):
    svgs = [a for tag, a in page(recorded).tags if tag == "svg" and a.get("role") == "img"]
    screens = ("wide", "middle", "narrow")
    widths = {css: {a["width"] for a in svgs if a["class"] == css} for css in screens}
    assert widths == {"wide": {str(WIDE), str(HALF)}, "middle": {str(MIDDLE)},
                      "narrow": {str(PHONE)}}  # fmt: skip
    counts = {css: sum(a["class"] == css for a in svgs) for css in widths}
    assert len(set(counts.values())) == 1
    assert all(a["aria-label"] for a in svgs)


def test_nothing_is_drawn_outside_its_drawing(recorded):
    html = render(RunRecord.read(recorded), title="t")
    drawings = re.findall(r"<svg width=.*?</svg>", html, re.S)
    assert len(drawings) > 30
    for svg in drawings:
        width = float(re.match(r'<svg width="(\d+)"', svg)[1])
        xs = [float(x) for x in re.findall(r'\b(?:x|x1|x2|cx)="(-?[\d.]+)"', svg)]
        xs += [float(p.split(",")[0]) for ps in re.findall(r'points="([^"]*)"', svg)
               for p in ps.split()]  # fmt: skip
        assert min(xs) >= -10
        assert max(xs) <= width + 5


def test_write_report_makes_the_folder_and_names_what_it_cannot_read(recorded, tmp_path):
    write_report(recorded, tmp_path / "new" / "r.html")
    assert (tmp_path / "new" / "r.html").read_text().startswith("<!doctype html>")
    with pytest.raises(ConfigError, match="absent"):
        write_report(recorded, tmp_path / "r.html", baseline=tmp_path / "absent")


# --- Drawing ----------------------------------------------------------------------------------


@given(
    st.floats(-1e9, 1e9), st.floats(1e-6, 1e9), st.integers(2, 10)
)  # a range no narrower than what floats can divide
def test_ticks_are_round_inside_and_evenly_spaced(low, span, most):
    high = low + span
    assume((high - low) > 1e-9 * max(abs(low), abs(high), 1.0))
    values = ticks(low, high, most)
    slack = (high - low) * 1e-6
    assert all(low - slack <= v <= high + slack for v in values)
    assert len(values) <= most + 1
    steps = [b - a for a, b in pairwise(values)]
    assert not steps or max(steps) - min(steps) <= 1e-6 * max(steps) + 1e-9 * abs(high)


@given(st.text(max_size=60), st.floats(0, 400))
def test_fitted_text_fits(text, width):
    assert len(fitted(text, width)) <= max(width / 6.4, 0)


def test_gaps_break_a_line_and_single_points_show():
    drawn = line_plot(HALF, "l", range(6), [Series("s", [1, 2, None, 4, None, 6], "c1")])
    assert drawn.count("<polyline") == 1
    assert drawn.count("<circle") == 2


def test_long_runs_have_no_hover_columns():
    values = [random.Random(1).random()] * 1000
    assert "hover" not in line_plot(WIDE, "l", range(1000), [Series("s", values, "c1")])


@pytest.mark.parametrize("values", [[0.0], [5.0, 5.0], [-1.0, 1.0], [None, None]])
def test_odd_values_still_draw(values):
    drawn = line_plot(HALF, "l", range(len(values)), [Series("s", values, "c1")],
                      [Marker(0, "lost", "gone")])  # fmt: skip
    assert "nan" not in drawn
    assert "inf" not in drawn


def test_bars_that_ran_at_once_overlap_in_x():
    bars = [Bar("a", "one", "c1", 0.0, 2.0, 1.0, "a"), Bar("b", "two", "c1", 1.0, 3.0, None, "b"),
            Bar("c", "three", "c1", 3.0, 4.0, None, "c")]  # fmt: skip
    drawn = gantt(WIDE, "g", bars, [Arrow("b", "c", "release: <why>")])
    spans = [
        (float(x), float(x) + float(w))
        for x, w in re.findall(r'<rect x="([\d.]+)" y="[\d.]+" width="([\d.]+)"[^>]*class="bar',
                               drawn)
    ]  # fmt: skip
    assert spans[0][1] > spans[1][0]
    assert spans[1][1] == pytest.approx(spans[2][0], abs=0.05)
    assert "release: &lt;why&gt;" in drawn


def test_elements_escape_text_and_attributes():
    assert element("a", "<&>", title='"<') == '<a title="&quot;&lt;">&lt;&amp;&gt;</a>'


# --- Live -------------------------------------------------------------------------------------


def test_elsewhere_than_on_a_terminal_there_is_a_plain_line_per_step(recorded):
    out = io.StringIO()
    with view_on(Console(file=out, width=80)) as view:
        assert isinstance(view, PlainLines)
        for event, at_s in read_events(recorded):
            view(event, at_s)
    lines = out.getvalue().splitlines()
    assert sum(line.startswith("step ") for line in lines) == 30
    assert "\x1b" not in out.getvalue()
    step = next(line for line in lines if line.startswith("step 10 "))
    assert "actor/train=tp2pp2dp1" in step
    assert "latency" in step
    assert any("devices: lost node0:2, node0:3" in line for line in lines)
    assert any("rolled back in 850 ms: seat node0:3 <hung>" in line for line in lines)
    assert re.fullmatch(r"after 30 steps, .*: done", lines[-1])


def test_on_a_terminal_the_last_steps_are_a_table(recorded):
    out = io.StringIO()
    console = Console(file=out, width=160, force_terminal=True, color_system=None)
    with view_on(console) as view:
        assert isinstance(view, LiveTable)
        for event, at_s in read_events(recorded):
            view(event, at_s)
        table = view.table()
    assert table.row_count == 16
    shown = io.StringIO()
    Console(file=shown, width=200).print(table)
    text = " ".join(shown.getvalue().split())
    assert "GRPO on sim, adapt" in text
    assert "gen=2·1·1 inf=2·1·1 train=2·1·1" in text
    assert "urgent admitted" in text
    assert out.getvalue().count("\x1b[?25l") == out.getvalue().count("\x1b[?25h")
