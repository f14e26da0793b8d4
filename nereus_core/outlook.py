"""What the controller sees of a job and knows about it, and how both change."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from nereus_core.adapter import Adapter
from nereus_core.cluster import Device
from nereus_core.errors import NereusError
from nereus_core.events import EventLog
from nereus_core.knowledge import Knowledge
from nereus_core.observation import TokenStats
from nereus_core.records import devices_changed, input_ignored, step_observed, supply
from nereus_core.sane import sane
from nereus_core.situation import Situation
from nereus_core.transition import TransitionGraph
from nereus_core.triggers import Signals, Wake


class Outlook:
    """The situation of a job now, and what has been learned of it; records whatever changes."""

    def __init__(self, adapter: Adapter, log: EventLog, known: Knowledge) -> None:
        """Look for the first time."""
        self._adapter, self._log = adapter, log
        self._num_ignored = 0
        self.known = known
        self.now = self._look(adapter.job().cluster.healthy, None)

    @property
    def predicted_s(self) -> float:
        """Predicted seconds of the next step."""
        return self.known.predicted_s(self.now)

    @property
    def lost(self) -> frozenset[Device]:
        """Devices of the plan that are gone, as the job says at this moment."""
        return self._adapter.job().cluster.failed & self.now.plan.devices

    def look(self) -> None:
        """Look again, after a transition: units and plan are others."""
        self.now = self._look(self.now.usable, None)

    def observe(self) -> Wake | None:
        """Drain what the adapter has seen, record it and learn; return what woke the controller."""
        known, before = self.known, self.now
        seen = self._adapter.observe()  # first: devices that it names may be new to the job
        seen, ignored = sane(seen, self._adapter.job(), known.step)
        for part in ignored:
            self._num_ignored += 1
            self._log.emit(input_ignored(seen.step, part, self._num_ignored))
        stepped = seen.step > known.step
        predicted_s = self.predicted_s
        if stepped:
            self._log.emit(step_observed(seen, predicted_s))
            self.known = known.stepped(before.plan, seen)
        self.now = now = self._look(seen.healthy - seen.draining, before)
        changed = now.usable != before.usable or bool(now.lost_units)
        used_left = self._count_loss(before, now.usable)
        if changed:
            self._log.emit(devices_changed(self.known.step, before, now))
        came = bool(now.usable - before.usable)
        self.known, wake = self.known.woken(
            Signals.of(
                seen,
                stepped=stepped,
                devices=supply(before, now) if came or used_left or now.lost_units else None,
                memory_problem=now.memory_problem,
                capacity_bytes=now.job.cluster.device_spec.memory_bytes,
                predicted_s=predicted_s if known.plan_was_seen else None,
            )
        )
        return wake

    def sampled(self, prompt: TokenStats, response: TokenStats) -> str | None:
        """Look at the plan with the lengths of a batch that is about to be trained on.

        Returns why it does not fit in memory; None where it does, and nothing is remembered then:
        the step will report its lengths itself.
        """
        if not response.count:
            return None
        known = self.known.sampled(prompt, response)
        now = replace(self.now, memory_problem=self._memory_problem(known))
        if now.memory_problem is not None:
            self.known, self.now = known, now
        return now.memory_problem

    def _memory_problem(self, known: Knowledge) -> str | None:
        if self.now.problem is not None:  # what runs cannot be priced
            return None
        return known.cost.on(self.now.job).memory_problem(self.now.plan, known.lengths)

    def after_failure(self, graph: TransitionGraph, failure: NereusError, *, linked: bool) -> None:
        """Look again after a transition that failed; units that are not linked cannot step."""
        before = self.now
        left = before.usable - self._adapter.job().cluster.failed
        now = self._look(left, None)
        if not linked:
            plan = before.plan if now.problem else now.plan
            now = replace(now, plan=plan, problem=f"transition {graph.name} failed: {failure}")
        self.now = now
        self._count_loss(before, left)
        if left != before.usable:
            gone = tuple(u for u in before.units if u not in now.units)
            self._log.emit(devices_changed(self.known.step, before, replace(now, lost_units=gone)))

    def _count_loss(self, before: Situation, usable: Collection[Device]) -> bool:
        """Remember a loss where devices of the plan are not usable any more; say whether."""
        lost = bool(before.plan.devices & before.usable.difference(usable))
        if lost:
            self.known = self.known.lost_devices()
        return lost

    def _look(self, usable: Collection[Device], last: Situation | None) -> Situation:
        return Situation.of(self._adapter, usable, last, self.known.cost, self.known.lengths)
