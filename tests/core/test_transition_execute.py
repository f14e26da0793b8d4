"""Executing a graph: at once where devices allow, all or nothing, every wait with a name."""

import json
import threading

import pytest
from memory_adapter import MemoryAdapter, units_of
from plans import tiny_job

from nereus_core.cost import CostModel
from nereus_core.errors import (
    Cancelled,
    Infeasible,
    StateDiffers,
    TransitionFailed,
    UnitLost,
    WaitTimeout,
)
from nereus_core.events import EventLog, PrimitiveFinished, TransitionFinished, TransitionStarted
from nereus_core.layout import Layout
from nereus_core.phases import Phase
from nereus_core.plan import Placement, Plan
from nereus_core.primitives import Destroy, Extend, OpId, Split, created
from nereus_core.transition import (
    Listed,
    TransitionGraph,
    chrome_trace,
    compile_transition,
    execute,
    write_traces,
)
from nereus_core.units import Unit, UnitId
from nereus_core.workload import ACTOR_GENERATE, ACTOR_TRAIN, REF_INFER

JOB = tiny_job(8)
D = JOB.cluster.devices


def plan(train, generate, ref=((2, 1), (4, 5))):
    def place(layout, indices):
        return Placement.packed(Layout(*layout), tuple(D[i] for i in indices))

    return Plan(
        {ACTOR_TRAIN: place(*train), ACTOR_GENERATE: place(*generate), REF_INFER: place(*ref)}
    )


WIDE = plan(((2, 1), (0, 1, 2, 3)), ((1, 1), (6, 7)))
NARROW = plan(((1, 1), (0, 1)), ((2, 1), (2, 3, 6, 7)))


class Trial:
    """A graph on an adapter, and every event of its execution."""

    def __init__(self, before=WIDE, after=NARROW, **options):
        self.adapter = MemoryAdapter(JOB, before, **options)
        self.before = self.adapter.units()
        self.graph = compile_transition(self.before, after, JOB, prefix="t")
        self.events = []
        self.log = EventLog(None, lambda: 0.0)
        self.log.subscribe(lambda event, at_s: self.events.append(event))

    def go(self, **options):
        return execute(self.graph, self.adapter, log=self.log, timeout_s=30, **options)

    def of(self, kind):
        return [e for e in self.events if isinstance(e, kind)]


def failing(where, error):
    """A fault that raises once, at the first primitive that ``where`` picks."""
    raised = []

    def fault(op, phase):
        if phase == "commit" and not raised and where(op):
            raised.append(op)
            raise error

    return fault


def test_the_outcome_says_what_was_done():
    trial = Trial(with_state=True)
    cost = CostModel(JOB)
    outcome = trial.go(cost=cost, verify=True, step=4)
    assert outcome.plan == Plan.of_units(trial.graph.units_after())
    assert set(outcome.receipts) == {op.op_id for op in trial.graph.ops}
    assert outcome.moved_bytes == sum(r.moved_bytes for r in outcome.receipts.values()) > 0
    assert outcome.predicted == trial.graph.predicted(cost)
    (started,), (finished,) = trial.of(TransitionStarted), trial.of(TransitionFinished)
    assert [op["op_id"] for op in started.ops] == [op.op_id for op in trial.graph.ops]
    assert all(op["predicted_s"] > 0 for op in started.ops)
    assert (finished.outcome, finished.step, finished.error) == ("done", 4, None)
    assert finished.plan == outcome.plan.to_json()
    assert {e.op_id for e in trial.of(PrimitiveFinished)} == set(outcome.receipts)
    json.dumps([started.ops, started.edges, finished.plan])


def test_primitives_on_disjoint_devices_run_at_once():
    both = threading.Barrier(2, timeout=20)  # breaks when they do not
    trial = Trial(after=plan(((1, 1), (0, 1, 2, 3)), ((1, 1), (6, 7))))
    inner = trial.adapter.split

    def meet(op):
        both.wait()
        return inner(op)

    trial.adapter.split = meet
    trial.go()
    assert not both.broken


def test_ready_primitives_that_share_a_device_take_turns():
    """Without edges only their devices keep them apart; the adapter asserts that they do."""
    trial = Trial()
    source = units_of(WIDE).of(ACTOR_GENERATE)[0]
    extends = [
        Extend(
            OpId(f"bare/{i}"),
            (source.id,),
            Unit(UnitId(ACTOR_GENERATE, 10 + i), Layout(1, 1), (D[i],)),
        )
        for i in range(4)
    ]
    trial.graph = TransitionGraph("bare", trial.before, Listed(tuple(extends), ()))
    assert len(trial.go().receipts) == 4
    assert trial.adapter.most_at_once == 1


def test_a_failed_primitive_brings_the_old_plan_back():
    trial = Trial(
        with_state=True,
        fault=failing(lambda op: isinstance(op, Extend), Infeasible("no memory left")),
    )
    with pytest.raises(TransitionFailed, match=r"no memory left.*the old plan goes on") as caught:
        trial.go(verify=True)
    error = caught.value
    assert error.rolled_back
    assert isinstance(error.failed, Extend)
    assert error.done
    after = Plan.of_units(trial.adapter.units())
    assert {s: (p.layout, set(p.units)) for s, p in after.items()} == {
        s: (p.layout, set(p.units)) for s, p in WIDE.items()
    }
    ends = [(e.transition, e.outcome) for e in trial.of(TransitionFinished)]
    assert ends == [("t-undo", "done"), ("t", "rolled_back")]
    assert [e.error for e in trial.of(PrimitiveFinished) if e.error] == ["no memory left"]


def test_units_made_for_the_way_back_have_new_ids():
    trial = Trial(fault=failing(lambda op: isinstance(op, Extend), Infeasible("no")))
    with pytest.raises(TransitionFailed):
        trial.go()
    used = set(trial.graph.atlas)
    done = [op for kind, op in trial.adapter.log if kind == "done"]
    made = [u.id for op in done for u in created(op)]
    undone = [u for u in made if u not in used]
    assert undone
    assert len(made) == len(set(made))


def test_a_failure_before_anything_was_done_leaves_all_as_it_was():
    trial = Trial(fault=failing(lambda op: True, Infeasible("at once")))
    with pytest.raises(TransitionFailed) as caught:
        trial.go()
    assert caught.value.rolled_back
    assert trial.graph.name == "t"


def test_what_is_parked_comes_back_too():
    swap = plan(((2, 1), (0, 1, 2, 3)), ((2, 1), (4, 5)), ((2, 1), (6, 7)))
    before = plan(((2, 1), (0, 1, 2, 3)), ((2, 1), (6, 7)))
    trial = Trial(
        before,
        swap,
        with_state=True,
        fault=failing(lambda op: isinstance(op, Extend), Infeasible("no")),
    )
    assert any(op.park for op in trial.graph.ops if isinstance(op, Destroy))
    with pytest.raises(TransitionFailed) as caught:
        trial.go(verify=True)
    assert caught.value.rolled_back
    assert {u.devices for u in trial.adapter.units().values()} == {
        u.devices for u in units_of(before).values()
    }


def test_a_lost_unit_is_not_rolled_back_and_what_is_intact_is_named():
    trial = Trial()

    def strike(op, phase):
        if phase == "commit" and isinstance(op, Extend):
            trial.adapter.failed.add(D[2])
            raise UnitLost([op.unit.id], tuple(trial.adapter.units()), "killed")

    trial.adapter.fault = strike
    with pytest.raises(TransitionFailed) as caught:
        trial.go()
    error = caught.value
    assert not error.rolled_back
    assert isinstance(error.cause, UnitLost)
    assert error.intact == tuple(trial.adapter.units())
    assert set(error.done) | set(error.pending) == set(trial.graph.by_id)
    assert trial.of(TransitionFinished)[0].outcome == "failed"


def test_cancelling_brings_the_old_plan_back():
    trial, cancel = Trial(), threading.Event()

    def first_done(op, receipt, predicted_s):
        cancel.set()

    with pytest.raises(TransitionFailed) as caught:
        trial.go(cancel=cancel, on_primitive=first_done)
    assert isinstance(caught.value.cause, Cancelled)
    assert caught.value.rolled_back


def test_a_primitive_that_hangs_is_named_and_does_not_hold_the_caller():
    trial, release = Trial(), threading.Event()
    hung = next(op for op in trial.graph.ops if isinstance(op, Split))
    inner = trial.adapter.split
    trial.adapter.split = lambda op: (release.wait(60), inner(op))[1]
    try:
        with pytest.raises(TransitionFailed) as caught:
            execute(trial.graph, trial.adapter, log=trial.log, timeout_s=0.2)
    finally:
        release.set()
    assert isinstance(caught.value.cause, WaitTimeout)
    assert f"waited 0.2 s for {hung}" in str(caught.value)
    assert not caught.value.rolled_back


def test_an_adapter_whose_units_differ_from_the_graph_is_found_out():
    trial = Trial(after=plan(((2, 1), (0, 1)), ((1, 1), (6, 7))))
    truth = trial.adapter.units
    trial.adapter.units = lambda: trial.before
    with pytest.raises(TransitionFailed, match="unexpected actor/train#1") as caught:
        trial.go()
    assert not caught.value.rolled_back
    assert truth() == trial.graph.units_after()


def test_state_that_arrives_changed_is_found_out():
    trial = Trial(with_state=True)
    inner = trial.adapter.extend

    def spoil(op):
        receipt = inner(op)
        next(iter(trial.adapter.state[op.unit.id, 0].values()))[...] = 3
        return receipt

    trial.adapter.extend = spoil
    with pytest.raises(TransitionFailed, match="holds param/") as caught:
        trial.go(verify=True)
    assert isinstance(caught.value.cause, StateDiffers)
    assert caught.value.failed == "verification"


def test_counters_are_state_too():
    trial = Trial(with_state=True)
    inner = trial.adapter.split

    def forget(op):
        trial.adapter.steps[ACTOR_TRAIN] = 0
        return inner(op)

    trial.adapter.split = forget
    with pytest.raises(TransitionFailed, match="counters"):
        trial.go(verify=True)


@pytest.mark.parametrize("rolled_back", [True, False])
def test_a_switch_that_fails_is_recorded_with_how_it_ended(rolled_back):
    trial, lost = Trial(), WaitTimeout("a broadcast", 1.0)

    def relink(plan):
        raise TransitionFailed("linking", lost, rolled_back=rolled_back)

    trial.adapter.relink = relink
    with pytest.raises(
        TransitionFailed, match="linking failed: waited 1 s for a broadcast"
    ) as seen:
        trial.go()
    assert seen.value.rolled_back == rolled_back
    (finished,) = trial.of(TransitionFinished)
    assert finished.outcome == ("rolled_back" if rolled_back else "failed")
    assert finished.error == "linking: waited 1 s for a broadcast."
    assert finished.epoch is None


def test_the_makespan_is_the_longest_path():
    cost = CostModel(JOB)
    graph = Trial().graph
    each = graph.prices(cost)
    total = graph.predicted(cost)
    assert max(p.mean_s for p in each.values()) <= total.mean_s
    assert total.mean_s <= sum(p.mean_s for p in each.values())
    assert total.low_s <= total.mean_s <= total.high_s


def test_the_trace_has_a_row_per_device_and_an_arrow_per_edge(tmp_path):
    trial = Trial()
    trial.go()
    trace = chrome_trace(trial.events, "t")["traceEvents"]
    rows = [e["args"]["name"] for e in trace if e["name"] == "thread_name"]
    touched = {d for e in trial.of(PrimitiveFinished) for d in e.devices}
    assert rows == sorted(touched)
    slices = [e for e in trace if e["ph"] == "X"]
    drawn = sum(len(e.devices) for e in trial.of(PrimitiveFinished))
    assert len([e for e in slices if e["cat"] != "phase"]) == drawn
    assert len([e for e in slices if e["cat"] == "phase"]) == drawn * len(Phase)
    assert len([e for e in trace if e["ph"] == "s"]) == len(trial.graph.edges)
    (path,) = write_traces([(e, 0.0) for e in trial.events], tmp_path / "traces")
    assert path.name == "t.json"
    assert json.loads(path.read_text())["traceEvents"] == trace
