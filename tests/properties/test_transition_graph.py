"""Transitions between random plans: acyclic, safe in every order, exact at the end."""

import random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from memory_adapter import MemoryAdapter, units_of
from plans import changes

from nereus_core.errors import StateLost
from nereus_core.events import EventLog
from nereus_core.plan import Plan
from nereus_core.primitives import (
    Destroy,
    Extend,
    acquired,
    apply,
    created,
    ended,
    model_stage_of,
    sources,
    touched,
)
from nereus_core.state import moved_elements, placed, routes
from nereus_core.transition import compile_transition, execute

THOROUGH = settings(max_examples=60, deadline=None)


def compiled(change):
    job, before, lost, after = change
    units = units_of(before)
    gone = {s for s in job.workload.stages if not units.intact(lost).of(s)}
    nodes = [n for n in job.workload.nodes if n.model_stage in gone and not n.origin]
    hopeless = [n for n in nodes if (n.weights_from or n.model_stage) in gone]
    if hopeless:
        with pytest.raises(StateLost):
            compile_transition(units, after, job, lost=lost, prefix="t")
        assume(False)
    return compile_transition(units, after, job, lost=lost, prefix="t")


def ancestors(graph):
    before = graph.predecessors()
    found = {}
    for op in graph.topological():
        direct = before[op.op_id]
        found[op.op_id] = set(direct).union(*(found[p] for p in direct))
    return found


def any_order(graph, seed):
    """Draw one of the orders that keep every edge."""
    rng, before = random.Random(seed), graph.predecessors()
    while before:
        op_id = rng.choice(sorted(i for i, waits in before.items() if not waits))
        del before[op_id]
        for waits in before.values():
            waits.discard(op_id)
        yield graph.by_id[op_id]


@given(changes(), st.integers(0, 2**32))
@THOROUGH
def test_every_order_keeps_preconditions_and_ends_in_the_target(change, seed):
    graph, target = compiled(change), change[3]
    initial = Plan.of_units(graph.units_before)
    units, parked = graph.units_before, set()
    for op in any_order(graph, seed):
        stage = model_stage_of(op)
        if stage in initial:
            for device in acquired(op, units) - initial[stage].devices:
                leaving = {
                    u.model_stage
                    for u in units.on(device)
                    if device not in target[u.model_stage].devices
                }
                assert leaving <= {stage}, f"{op} takes {device} before {leaving} left it"
        if isinstance(op, Destroy) and op.park:
            parked.add(op.unit)
        units = apply(op, units, parked)  # raises when a precondition does not hold
    assert units == graph.units_after()
    assert {s: p.layout for s, p in Plan.of_units(units).items()} == {
        s: p.layout for s, p in target.items()
    }
    assert {s: set(p.units) for s, p in Plan.of_units(units).items()} == {
        s: set(p.units) for s, p in target.items()
    }


@given(changes())
@THOROUGH
def test_primitives_that_share_a_device_are_ordered(change):
    graph = compiled(change)
    before = ancestors(graph)
    ops = graph.topological()
    for i, one in enumerate(ops):
        for other in ops[i + 1 :]:
            if touched(one, graph.atlas) & touched(other, graph.atlas):
                assert one.op_id in before[other.op_id]


@given(changes())
@THOROUGH
def test_unchanged_stages_and_units_are_not_touched(change):
    graph, target = compiled(change), change[3]
    for unit in graph.units_before.values():
        placement = target[unit.model_stage]
        if unit.layout == placement.layout and unit.devices in placement.units:
            assert unit.id in graph.units_after()


@given(changes())
@THOROUGH
def test_a_surplus_unit_ends_last_unless_its_devices_are_awaited(change):
    graph = compiled(change)
    before = ancestors(graph)
    for destroy in (op for op in graph.ops if isinstance(op, Destroy)):
        devices = set(graph.atlas[destroy.unit].devices)
        followers = [op for op in graph.ops if destroy.op_id in before[op.op_id]]
        awaited = any(not devices.isdisjoint(acquired(op, graph.atlas)) for op in followers)
        own = [op for op in followers if model_stage_of(op) == destroy.unit.model_stage]
        assert awaited or all(isinstance(op, Destroy) for op in own)
        assert awaited or not destroy.park


@given(changes())
@THOROUGH
def test_no_more_bytes_move_than_if_all_were_built_anew(change):
    graph, job = compiled(change), change[0]
    moved = anew = 0
    for op in graph.ops:
        model = job.model(model_stage_of(op))
        made = [pair for u in created(op) for pair in placed(model, u.layout, u.devices)]
        read = [graph.atlas[u] for u in sources(op)]
        held = [pair for u in read for pair in placed(model, u.layout, u.devices)]
        whole = sum(box.num_elements for _, shard in made for box in shard.values())
        from_origin = isinstance(op, Extend) and not op.sources
        moved += whole if from_origin else moved_elements(routes(held, made))
        anew += sum(box.num_elements for _, shard in made for box in shard.values())
    assert moved <= anew


@given(changes())
@THOROUGH
def test_new_ids_were_never_used_and_the_graph_is_deterministic(change):
    graph = compiled(change)
    used = set(units_of(change[1]))
    made = [u.id for op in graph.ops for u in created(op)]
    assert used.isdisjoint(made)
    assert len(made) == len(set(made))
    again = compiled(change)
    assert again.ops == graph.ops
    assert again.edges == graph.edges


@given(changes())
@THOROUGH
def test_every_unit_of_a_stage_that_extends_is_read_or_kept_until_another_was(change):
    graph = compiled(change)
    extended = {}
    for op in graph.ops:
        if isinstance(op, Extend) and op.sources:
            extended.setdefault(model_stage_of(op), []).append(op)
    for ops in extended.values():
        if len(ops) == 1:
            (op,) = ops
            if op.unit.model_stage != op.sources[0].model_stage:
                continue
            stay = set(graph.units_after()) - {op.unit.id}
            same = {u for u in stay if u.model_stage == op.unit.model_stage}
            assert same <= set(op.sources)


@given(changes(), st.integers(0, 2**32))
@settings(max_examples=30, deadline=None)
def test_threads_reach_the_target_and_state_arrives_unchanged(change, seed):
    job, before, lost, after = change
    graph = compiled(change)
    adapter = MemoryAdapter(job, before, seed=seed, with_state=True)
    adapter.failed = set(lost)
    adapter._units = adapter.units()
    with EventLog(None, lambda: 0.0) as log:
        outcome = execute(graph, adapter, log=log, timeout_s=60, verify=True)
    assert {s: set(p.units) for s, p in outcome.plan.items()} == {
        s: set(p.units) for s, p in after.items()
    }
    assert set(outcome.receipts) == set(graph.by_id)
    assert all(ended(graph.by_id[i]) == r.ended for i, r in outcome.receipts.items())
