"""Session: a controller inside somebody else's trainer, which calls it once per RL step.

In modes observe and advise nothing that goes wrong here may end the user's job: the session says so
once, closes, and the job goes on. In mode adapt an error that the controller raises is the job's:
it says that the job cannot take its next step, and why.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from nereus_core.admission import Decision
from nereus_core.attach import attached
from nereus_core.cluster import Device
from nereus_core.config import NereusConfig
from nereus_core.controller import Controller
from nereus_core.errors import NoFeasiblePlan
from nereus_core.events import EventLog
from nereus_core.observation import TokenStats
from nereus_core.plan import Plan
from nereus_core.registry import Registry
from nereus_core.report.html import write_report
from nereus_plugins.banner import banner, refusal, say
from nereus_plugins.figures import Figures


@dataclass(slots=True)
class Session:
    """One job's time under Nereus; build it with `open_session`."""

    framework: str
    config: NereusConfig
    controller: Controller
    figures: Figures
    _opened: ExitStack
    explain: Callable[[Exception], Exception] = lambda error: error
    """Returns an error with what the framework's plugin knows of its cause and its checkpoints."""
    spell: Callable[[Plan, Plan], str | None] = lambda current, wanted: None
    """Says in the framework's own words how to start it on the second plan instead of the first."""
    _amid_s: float = 0.0
    """Seconds spent in the middle of steps since the last boundary."""
    _closed: bool = False
    _said: set[str] = field(default_factory=set)

    def at_boundary(self) -> dict[str, float]:
        """Observe, decide, and in mode adapt act; returns ``nereus/*`` figures for the job's log.

        Raises:
            NereusError: in mode adapt, when the job cannot go on.
        """
        if self._closed:
            return {}
        start_s = time.perf_counter()
        if not self._guarded(lambda: self._advise(self.controller.at_boundary())):
            return {}
        held_s, amid_s = time.perf_counter() - start_s, self._amid_s
        self._amid_s = 0.0
        plan, predicted_s = self.controller.plan, self.controller.predicted_s
        return self.figures.drained(plan, predicted_s, held_s, amid_s)

    def amid_step(self) -> None:
        """Do all that is done at a boundary in the middle of a step, which a lost node cut short.

        What it brought is among the figures of the next boundary.

        Raises:
            NereusError: in mode adapt, when the job cannot go on.
        """
        if not self._closed:
            self._amid(lambda: self._advise(self.controller.at_boundary()))

    def before_training(self, prompt: Sequence[int], response: Sequence[int]) -> None:
        """Say how long the sequences of a batch are that is about to be trained on.

        Where the plan is predicted not to hold it, it is changed at once (mode adapt) or what would
        be done is recorded (advise).

        Raises:
            NereusError: in mode adapt, when the job cannot go on.
        """
        if not self._closed:
            stats = TokenStats.of(list(prompt)), TokenStats.of(list(response))
            self._amid(lambda: self._advise(self.controller.before_training(*stats)))

    def _amid(self, decide: Callable[[], object]) -> None:
        start_s = time.perf_counter()
        self._guarded(decide)
        self._amid_s += time.perf_counter() - start_s

    def _advise(self, decision: Decision | None) -> None:
        """In mode advise, say how the user would have what was decided on; once for each plan."""
        if decision is None or not decision.admitted or self.adapts:
            return
        wanted = decision.candidate_plan
        if wanted is None or str(wanted) in self._said:
            return
        self._said.add(str(wanted))
        try:
            words = self.spell(decision.current_plan, wanted)
        except Exception as error:  # no reason to stop watching the job
            words = f"(no words for it: {type(error).__name__}: {error})"
        if words:
            say(f"[nereus] advice after step {decision.step}: {wanted}; to start on it: {words}")

    def _guarded(self, decide: Callable[[], object]) -> bool:
        """Let the controller do its work; what it raises ends the job in mode adapt alone.

        Returns whether the session goes on.
        """
        try:
            decide()
        except NoFeasiblePlan as error:
            # Nothing was touched. What is predicted not to fit may still run: the job will tell.
            if str(error) not in self._said:
                self._said.add(str(error))
                say(f"[nereus] {error} The job goes on as it is.")
        except Exception as error:
            told = self.explain(error)
            self._end(f"failed: {type(told).__name__}: {told}")
            if self.adapts:
                raise told from (error.__cause__ if told is error else error)
            say(refusal(self.framework, told))
            return False
        return True

    @property
    def lost(self) -> frozenset[Device]:
        """Devices of the plan that are gone; none once the session is closed."""
        return frozenset() if self._closed else self.controller.lost

    @property
    def adapts(self) -> bool:
        """Whether it may change the job."""
        return self.config.enabled and self.config.mode == "adapt"

    def close(self, outcome: str = "done") -> None:
        """Record how the job ended, write the report, release everything. Safe to call twice."""
        if not self._closed:
            self._end(outcome)

    def _end(self, outcome: str) -> None:
        self._closed = True
        try:
            self.controller.finished(outcome)
        finally:
            self._opened.close()
        folder = self.config.run_dir
        write_report(folder / "events.jsonl", folder / "report.html")
        say(f"[nereus] {outcome}; report in {folder / 'report.html'}")


def open_session(framework: str, handle: object, config: NereusConfig) -> Session:
    """Attach to a running job and print the banner.

    Args:
        framework: For people, e.g. ``verl``.
        handle: What the configured adapter attaches to.
        config: The job's settings.

    Raises:
        NereusError: it cannot be attached to; nothing is left behind.
    """
    with ExitStack() as opened:
        config.run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        log = opened.enter_context(EventLog(config.run_dir / "events.jsonl", time.monotonic))
        figures = Figures()
        log.subscribe(figures.take)
        controller = opened.enter_context(
            attached(Registry.load(), handle, config, log, time.monotonic)
        )
        session = Session(framework, config, controller, figures, opened.pop_all())
    say(banner(config, framework, controller.plan))
    return session
