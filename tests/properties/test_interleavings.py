"""All interleavings of small transitions: none is stuck, none overfills or loses anything."""

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from interleavings import distinct_pairs, explore, small_plans
from memory_adapter import units_of
from plans import changes, tiny_job

from nereus_core.errors import Infeasible, StateLost
from nereus_core.layout import Layout
from nereus_core.plan import Placement, Plan
from nereus_core.primitives import Destroy, Extend, created, model_stage_of, sources
from nereus_core.state import moved_elements, needed_elements, placed, routes
from nereus_core.transition import compile_transition
from nereus_core.transition.room import unit_bytes
from nereus_core.workload import ACTOR_GENERATE, ACTOR_TRAIN, REF_INFER, Node, Workload

TWO_STAGES = Workload("grpo", (Node(REF_INFER), Node(ACTOR_TRAIN)))
LAYOUTS = (Layout(1, 1), Layout(2, 1), Layout(4, 1))


def test_no_plan_of_four_units_on_four_devices_can_be_stuck_on_the_way_to_another():
    job = tiny_job(4, TWO_STAGES)
    devices = job.cluster.devices
    plans = small_plans(job.workload.stages, devices, LAYOUTS, max_units=4)
    graphs = 0
    # Half of the targets of every plan; tests/benchmarks/transition.py goes through all.
    for number, (before, afters) in enumerate(distinct_pairs(plans, devices)):
        units = units_of(before)
        for after in afters[number % 2 :: 2]:
            explore(compile_transition(units, after, job, prefix="t"), job)
            graphs += 1
    assert graphs > 5_000


def fullest(job, units):
    """Bytes of state on the fullest device."""
    held = {}
    for unit in units.values():
        for device, size in unit_bytes(job, unit).items():
            held[device] = held.get(device, 0) + size
    return max(held.values())


def tight(job, capacity):
    spec = replace(job.cluster.device_spec, memory_bytes=capacity)
    return replace(job, cluster=replace(job.cluster, device_spec=spec))


@given(changes(), st.sampled_from([1.0, 1.1, 1.5]))
@settings(max_examples=60, deadline=None)
def test_no_device_ever_holds_more_than_its_capacity(change, slack):
    job, before, lost, after = change
    units = units_of(before)
    capacity = int(slack * max(fullest(job, units), fullest(job, units_of(after))))
    job = tight(job, capacity)
    try:
        graph = compile_transition(units, after, job, lost=lost, prefix="t")
    except StateLost:
        assume(False)
    assume(len(graph.ops) <= 10)
    explore(graph, job, capacity)


def test_a_unit_on_the_way_is_released_by_nobody_before_it_is_made():
    """Too little memory to grow beside the reference: a unit on the way is parked in its turn."""
    job = tiny_job(6)
    d = job.cluster.devices
    one = Placement.packed(Layout(1, 1), d[:1])
    before = Plan(
        {
            ACTOR_GENERATE: one,
            REF_INFER: one,
            ACTOR_TRAIN: Placement.packed(Layout(1, 4), d[1:5]),
        }
    )
    after = Plan(
        {
            **before,
            REF_INFER: Placement.packed(Layout(1, 1), d[2:3]),
            ACTOR_TRAIN: Placement.packed(Layout(2, 2), d[2:6]),
        }
    )
    units = units_of(before)
    capacity = max(fullest(job, units), fullest(job, units_of(after)))
    job = tight(job, capacity)
    explore(compile_transition(units, after, job, prefix="t"), job, capacity)


def test_state_that_cannot_fit_is_refused_by_name():
    job = tiny_job(4, TWO_STAGES)
    before, *_ = small_plans(job.workload.stages, job.cluster.devices[:1], LAYOUTS, 2)
    capacity = fullest(job, units_of(before)) - 1
    after = small_plans(job.workload.stages, job.cluster.devices[1:2], LAYOUTS, 2)[0]
    with pytest.raises(Infeasible, match=r"node0:1 beside .* GiB; it has"):
        compile_transition(units_of(before), after, tight(job, capacity), prefix="t")


def in_part(change, stage, graph):
    """Whether a unit's place covers old units in part: neither inside, nor around, nor over all."""
    old = [set(u.devices) for u in graph.units_before.of(stage)]
    for place in map(set, change[3][stage].units):
        touching = [u for u in old if u & place]
        nested = len(touching) == 1 and (place <= touching[0] or touching[0] <= place)
        if touching and not nested:
            return True
    return False


@given(changes())
@settings(max_examples=60, deadline=None)
def test_bytes_moved_are_the_least_except_for_places_that_cover_old_units_in_part(change):
    """The known gap: such a place may be built anew (Destroy and Extend) or over a bridge.

    Even then no more is moved than all units of the stage have.
    """
    job, before, lost, after = change
    try:
        graph = compile_transition(units_of(before), after, job, lost=lost, prefix="t")
    except StateLost:
        assume(False)
    by_stage = {}
    for op in graph.ops:
        by_stage.setdefault(model_stage_of(op), []).append(op)
    for stage, ops in by_stage.items():
        model = job.model(stage)

        def shards(units, model=model):
            return [pair for u in units for pair in placed(model, u.layout, u.devices)]

        if any(isinstance(op, Extend) and not op.sources for op in ops):
            continue
        if not graph.units_before.of(stage):
            continue
        moved = sum(
            moved_elements(routes(shards(graph.atlas[u] for u in sources(op)), shards(created(op))))
            for op in ops
        )
        final = graph.units_after().of(stage)
        least = needed_elements(shards(graph.units_before.of(stage)), shards(final))
        parked = any(isinstance(op, Destroy) and op.park for op in ops)
        assert moved >= least or parked
        if not in_part(change, stage, graph) and not parked:
            assert moved == least
        assert moved <= sum(box.num_elements for _, s in shards(final) for box in s.values())
