"""The controller: one call at every boundary observes, learns, decides, and acts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from nereus_core.acting import carry_out, finish
from nereus_core.adapter import Adapter, Receipt
from nereus_core.admission import Decision
from nereus_core.capabilities import Capabilities, Feature
from nereus_core.cluster import Device
from nereus_core.config import NereusConfig
from nereus_core.cost import CostModel
from nereus_core.cost.op_classes import OpClass
from nereus_core.deciding import Decided, asked_for, decide
from nereus_core.errors import BoundaryTimeout, TransitionFailed, UnitLost
from nereus_core.events import EventLog, Recovered, RunFinished, RunStarted
from nereus_core.knowledge import Knowledge
from nereus_core.observation import TokenStats
from nereus_core.outlook import Outlook
from nereus_core.plan import Plan
from nereus_core.planner import Constraints
from nereus_core.primitives import Primitive
from nereus_core.records import refused
from nereus_core.sane import check_job
from nereus_core.transition import Conditions, Journal, TransitionGraph, compile_transition
from nereus_core.triggers import Trigger, Wake
from nereus_core.units import Unit, UnitMap
from nereus_core.workload import Job

Notify = Callable[..., None]
"""``notify(hook_name, **kwargs)``: tells plugins; never raises."""
Veto = Callable[[Decision], str | None]
"""Returns the reason against an admitted opportunistic transition, or None."""

ATTEMPTS = 3
"""Transitions tried at one boundary when devices go on failing; chosen, not measured."""


class Controller:
    """Adapts a running job through its adapter, at the boundaries its runner gives it.

    Not thread-safe: it belongs to the thread that drives the job.
    """

    def __init__(
        self,
        adapter: Adapter,
        config: NereusConfig,
        log: EventLog,
        notify: Notify,
        clock: Callable[[], float] = time.monotonic,
        *,
        veto: Veto = lambda decision: None,
        capabilities: Capabilities | None = None,
        backend_version: str | None = None,
        measured: Mapping[OpClass, float] | None = None,
        journal: Journal | None = None,
    ) -> None:
        """Attach to a running job.

        Args:
            adapter: Speaks to the job.
            config: Mode, policy, constraints, timeouts.
            log: Where every event goes.
            notify: Tells plugins.
            clock: Seconds; a simulated job brings its own.
            veto: Asked before an opportunistic transition.
            capabilities: What the adapter declares; everything when None.
            backend_version: Of the adapter's framework, for capabilities that depend on it.
            measured: Efficiencies to start from, by operation class; conservative where absent.
            journal: Written ahead of every transition; in memory, which no crash survives, when
                None. With a transition pending in it, call `recover` before the next step.

        Raises:
            JobError: the job's sizes, rates or devices make no sense.
        """
        self._adapter, self._config, self._log = adapter, config, log
        self._notify, self._clock, self._veto = notify, clock, veto
        can = capabilities or Capabilities.everything()
        self._constraints = Constraints.of(config.constraints, can, backend_version)
        digests = can.features.get(Feature.FINGERPRINT)
        self._verify = config.verify == "fingerprint" and bool(
            digests and digests.at(backend_version)
        )
        job = adapter.job()
        check_job(job)
        self._outlook = Outlook(adapter, log, Knowledge.of_job(job, config.policy, measured))
        self._journal = journal or Journal()
        self._cancel = threading.Event()
        self._transition_s, self._start_s = 0.0, clock()
        log.emit(
            RunStarted(
                adapter.name,
                job.workload.algorithm,
                config.mode,
                self.plan.to_json(),
                tuple(map(str, job.cluster.devices)),
                job.global_batch,
            )
        )

    @property
    def plan(self) -> Plan:
        """The plan the job runs."""
        return self._outlook.now.plan

    @property
    def job(self) -> Job:
        """Static facts of the job, as the adapter told them last."""
        return self._outlook.now.job

    @property
    def lost(self) -> frozenset[Device]:
        """Devices of the plan that the job says are gone, seen now: no step that uses them ends."""
        return self._outlook.lost

    @property
    def predicted_s(self) -> float:
        """Predicted seconds of the next step."""
        return self._outlook.predicted_s

    @property
    def epoch(self) -> int:
        """Transitions committed: what the job steps on has changed so many times."""
        return self._journal.epoch

    def cancel(self) -> None:
        """Let the transition in progress, if there is one, end in the old plan. Thread-safe."""
        self._cancel.set()

    def recover(self) -> None:
        """Finish the transition that an earlier controller left pending, before the next step.

        Raises:
            StateLost, NoFeasiblePlan, TransitionFailed: as `at_boundary` does.
        """
        pending = self._journal.pending()
        if pending is None or self._config.mode != "adapt":
            return
        graph = pending.graph
        try:
            timeouts = self._config.timeouts
            outcome = finish(pending, self._adapter, self._conditions(graph), timeouts)
        except (TransitionFailed, UnitLost) as failure:
            linked = isinstance(failure, TransitionFailed) and failure.rolled_back
            self._outlook.after_failure(graph, failure, linked=linked)
            outcome = "old plan goes on" if linked else "left as it stands"
        else:
            self._outlook.look()
        plan = Plan.of_units(self._adapter.units())
        self._log.emit(Recovered(self._outlook.known.step, graph.name, outcome, plan.to_json()))
        if self._outlook.now.problem:
            wake = Wake(
                Trigger.DEVICES, f"{graph.name} left what cannot step: {self._outlook.now.problem}"
            )
            self._act(self._decide(wake, time.perf_counter()))

    def at_boundary(self) -> Decision | None:
        """Do all there is to do between two RL steps; returns what was decided, if anything was.

        Called after every step, and after a step that failed because a device was lost.

        Raises:
            StateLost: a model has no intact unit left.
            NoFeasiblePlan: nothing fits on the devices that are left.
            TransitionFailed: the job cannot go on; names what is intact.
        """
        begin_s = time.perf_counter()
        wake = self._outlook.observe()
        if wake is None or self._config.mode == "observe":
            return None
        found = self._decide(wake, begin_s)
        if found.graph is not None and found.decision.admitted and self._config.mode == "adapt":
            self._act(found)
        return found.decision

    def before_training(self, prompt: TokenStats, response: TokenStats) -> Decision | None:
        """Change the plan at once where a batch that was just sampled would not fit in memory.

        Called, where a framework has such a moment, when generation of a step is done and its real
        lengths are known, before any of it is trained on. Nothing opportunistic is decided here.

        Args:
            prompt: Tokens of the batch's prompts.
            response: Tokens of its responses.

        Raises:
            StateLost, NoFeasiblePlan, TransitionFailed: as `at_boundary` does.
        """
        begin_s = time.perf_counter()
        if self._config.mode == "observe":
            return None
        why = self._outlook.sampled(prompt, response)
        if why is None:
            return None
        found = self._decide(Wake(Trigger.MEMORY, f"the batch just sampled: {why}"), begin_s)
        if found.graph is not None and found.decision.admitted and self._config.mode == "adapt":
            self._act(found)
        return found.decision

    def go_to(self, plan: Plan, why: str) -> Decision:
        """Carry out, at this boundary, a transition that somebody else has decided on.

        Raises:
            StateLost, NoFeasiblePlan, TransitionFailed: as `at_boundary` does.
        """
        found = asked_for(
            plan, why, self._outlook.now, self._outlook.known, self._compile(plan, UnitMap())
        )
        self._log.emit(found.decision.event())
        self._notify("nereus_decided", decision=found.decision)
        self._act(found)
        return found.decision

    def finished(self, outcome: str) -> None:
        """Record that the job ended: ``done``, or why not."""
        elapsed_s = self._clock() - self._start_s
        self._log.emit(
            RunFinished(self._outlook.known.step + 1, outcome, elapsed_s, self._transition_s)
        )

    def _decide(self, wake: Wake, begin_s: float, parked: UnitMap | None = None) -> Decided:
        """Decide, record it, and tell plugins."""
        compiled = partial(self._compile, parked=parked or UnitMap())
        found = decide(
            wake,
            self._outlook.now,
            self._outlook.known,
            self._constraints,
            self._config.policy,
            compiled,
            begin_s,
        )
        decision = found.decision
        if decision.admitted and decision.path == "opportunistic" and (why := self._veto(decision)):
            decision = replace(decision, admitted=False, rule=f"vetoed: {why}")
        self._outlook.known = self._outlook.known.decided(decision, wake, found.watch)
        self._log.emit(decision.event())
        self._notify("nereus_decided", decision=decision)
        return replace(found, decision=decision)

    def _compile(self, target: Plan, parked: UnitMap) -> TransitionGraph:
        return compile_transition(
            self._outlook.now.units,
            target,
            self._outlook.now.job,
            prefix=f"t{self._journal.num_begun}",
            parked=parked,
            serials=self._journal.serials,
            forbidden=self._constraints.forbidden,
        )

    def _act(self, found: Decided) -> None:
        """Carry a decision out; when that fails part-way, plan again from what is intact."""
        units_lost = False
        for attempt in range(1, ATTEMPTS + 1):
            units_lost = units_lost or bool(self._outlook.now.lost_units)
            decision, graph = found.decision, found.graph
            assert graph is not None
            try:
                self._transition(graph, found.cost, everything=decision.path == "urgent")
                return
            except BoundaryTimeout as error:
                if decision.path == "urgent":
                    raise
                seconds = graph.predicted(found.cost).mean_s
                self._log.emit(
                    refused(graph, self._outlook.now, self._outlook.known.step, seconds, error)
                )
                return
            except (TransitionFailed, UnitLost) as failure:
                back = isinstance(failure, TransitionFailed) and failure.rolled_back
                linked = back and not units_lost  # without them the old plan is none
                self._outlook.after_failure(graph, failure, linked=linked)
                if linked:
                    return
                wrong = isinstance(failure, TransitionFailed) and failure.failed == "verification"
                if wrong or attempt == ATTEMPTS:
                    raise
                kept = failure.parked if isinstance(failure, TransitionFailed) else ()
                parked = UnitMap(unit for unit in kept if isinstance(unit, Unit))
                found = self._decide(
                    Wake(Trigger.DEVICES, f"transition {graph.name} failed"),
                    time.perf_counter(),
                    parked.intact(self._outlook.now.job.cluster.failed),
                )

    def _transition(self, graph: TransitionGraph, cost: CostModel, *, everything: bool) -> None:
        """Carry a graph out and learn what it cost."""
        known, now, clock = self._outlook.known, self._outlook.now, self._clock
        self._cancel.clear()
        begin_s = clock()
        try:
            outcome, held_s = carry_out(
                graph,
                self._adapter,
                now.job.workload.stages if everything else sorted(graph.stages),
                self._conditions(graph, cost),
                self._config.timeouts,
                verify=self._verify,
            )
        finally:
            self._outlook.known = known.attempted()
            self._transition_s += clock() - begin_s
        self._outlook.known = self._outlook.known.transitioned(graph, cost, held_s)
        self._outlook.look()
        self._notify("nereus_transition_finished", outcome=outcome)

    def _conditions(self, graph: TransitionGraph, cost: CostModel | None = None) -> Conditions:
        return Conditions(
            self._log,
            self._config.timeouts.primitive_s * max(1, graph.depth),
            cost or self._outlook.known.cost.on(self._outlook.now.job),
            self._cancel,
            self._outlook.known.step,
            self._clock,
            self._tell_primitive,
            self._journal,
        )

    def _tell_primitive(self, op: Primitive, receipt: Receipt, predicted_s: float | None) -> None:
        self._notify("nereus_primitive_finished", op=op, receipt=receipt, predicted_s=predicted_s)
