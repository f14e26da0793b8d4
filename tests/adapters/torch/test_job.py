"""A job whose plan changes has the losses, rewards and state of one whose plan does not."""

import math
from dataclasses import replace

import pytest

from nereus_adapters.torch.setup import BFLOAT16
from nereus_core.layout import Layout
from nereus_core.state import Slot, unit_shards
from nereus_core.workload import (
    ACTOR_GENERATE,
    ACTOR_TRAIN,
    CRITIC_INFER,
    CRITIC_TRAIN,
    FLOAT32,
    REF_INFER,
)

pytestmark = pytest.mark.real

STEPS = 8


def steps(harness, adapter, count, change=None):
    """Run steps; ``change[i]`` is done at the boundary before step i. Returns the figures."""
    found = []
    for index in range(count):
        if change and index in change:
            with adapter.boundary(adapter.job().workload.stages, timeout_s=60):
                change[index]()
        result = harness.step()
        metrics = dict(adapter.observe().metrics)
        assert metrics.keys() >= {"reward", "actor/loss", "actor/grad_norm"}
        found.append((result, metrics))
    return found


def deviation(one, other):
    """Return the largest difference of any figure at any step, relative for large figures."""
    assert [r.sample_ids for r, _ in one] == [r.sample_ids for r, _ in other]
    return max(
        abs(a[name] - b[name]) / max(1.0, abs(a[name]))
        for (_, a), (_, b) in zip(one, other, strict=True)
        for name in a
    )


def walk(harness, adapter, tools):
    """Seven primitives on actor/train between the steps, and some on other stages.

    Each one asserts that the logical state of the stage is the same to the bit before and after.
    """
    hand = tools.Hand(adapter)

    def unchanged(stage, *acts):
        before = tools.sha256(harness.peek(hand.ids(stage)[0]))
        for act in acts:
            receipt = act()
            assert receipt.moved_bytes + receipt.kept_bytes > 0
            for unit in hand.ids(stage):
                assert tools.sha256(harness.peek(unit)) == before

    def destroyed(stage, which):
        before = tools.sha256(harness.peek(hand.ids(stage)[0]))
        hand.destroy(which, stage)
        assert tools.sha256(harness.peek(hand.ids(stage)[0])) == before

    def first():  # dp 1 -> 2
        unchanged(ACTOR_TRAIN, lambda: hand.extend(Layout(1, 1), [1]))

    def second():  # tp 1 -> 2
        unchanged(ACTOR_TRAIN, lambda: hand.merge(Layout(2, 1), [0, 1]))
        unchanged(ACTOR_GENERATE, lambda: hand.merge(Layout(2, 1), [0, 1], ACTOR_GENERATE))

    def third():  # pp 1 -> 2, onto seats it did not have
        unchanged(ACTOR_TRAIN, lambda: hand.merge(Layout(2, 2), [0, 1, 2, 3]))
        unchanged(ACTOR_GENERATE, lambda: hand.merge(Layout(4, 1), [3, 2, 1, 0], ACTOR_GENERATE))

    def fourth():  # one unit -> two
        unchanged(ACTOR_TRAIN, lambda: hand.split(Layout(1, 2), [1, 0], [3, 2]))
        unchanged(REF_INFER, lambda: hand.split(Layout(1, 1), [0], stage=REF_INFER))

    def fifth():
        destroyed(ACTOR_TRAIN, 1)
        unchanged(
            ACTOR_GENERATE,
            lambda: hand.split(Layout(1, 2), [0, 2], [1, 3], stage=ACTOR_GENERATE),
        )

    def sixth():
        unchanged(ACTOR_TRAIN, lambda: hand.split(Layout(1, 1), [1]))
        destroyed(ACTOR_GENERATE, 0)

    return {1: first, 2: second, 3: third, 4: fourth, 5: fifth, 6: sixth}


def start(harness, tools, algorithm, precision=None):
    job = harness.job(algorithm)
    if precision is not None:
        job = replace(job, precision=precision)
    plan = tools.packed(job, {ACTOR_GENERATE: (Layout(1, 1), 2), REF_INFER: (Layout(2, 1), 1)})
    return harness.launch(job, plan)


@pytest.mark.parametrize(
    ("algorithm", "precision", "tolerance"),
    [("grpo", None, 1e-9), ("remax", None, 1e-9), ("grpo", FLOAT32, 1e-5)],
    ids=["grpo-float64", "remax-float64", "grpo-float32"],
)
def test_a_job_that_changes_its_plan_equals_one_that_does_not(
    harness, tools, algorithm, precision, tolerance
):
    adapter = start(harness, tools, algorithm, precision)
    fixed = steps(harness, adapter, STEPS)
    adapter = start(harness, tools, algorithm, precision)
    changed = steps(harness, adapter, STEPS, walk(harness, adapter, tools))
    assert deviation(fixed, changed) <= tolerance


def test_a_ppo_job_that_changes_actor_and_critic_equals_one_that_does_not(harness, tools):
    adapter = start(harness, tools, "ppo")
    fixed = steps(harness, adapter, STEPS)
    adapter = start(harness, tools, "ppo")
    hand = tools.Hand(adapter)
    change = walk(harness, adapter, tools)

    def also(index, act):
        before = change[index]
        change[index] = lambda: (before(), act())

    also(2, lambda: hand.merge(Layout(1, 4), [0, 1, 2, 3], CRITIC_TRAIN))
    also(3, lambda: hand.extend(Layout(1, 1), [3], CRITIC_INFER, sources=hand.ids(CRITIC_TRAIN)))
    also(5, lambda: hand.split(Layout(2, 1), [0, 1], [2, 3], stage=CRITIC_TRAIN))
    changed = steps(harness, adapter, STEPS, change)
    assert deviation(fixed, changed) <= 1e-9
    assert {name for name, _ in changed[0][1].items()} >= {"critic/loss", "critic/grad_norm"}


def test_lost_moments_are_noticed_by_the_same_check(harness, tools):
    """Negative control: were moments zeroed in one transition, losses would tell."""
    adapter = start(harness, tools, "grpo")
    fixed = steps(harness, adapter, STEPS)
    adapter = start(harness, tools, "grpo")
    hand = tools.Hand(adapter)

    def forgetful():
        hand.merge(Layout(2, 1), [0, 1])
        unit = hand.ids(ACTOR_TRAIN)[0]
        for name in {key.partition("/")[2] for key in harness.peek(unit)}:
            for slot in (Slot.EXP_AVG, Slot.EXP_AVG_SQ):
                harness.scale(unit, f"{slot}/{name}", 0.0)

    changed = steps(harness, adapter, STEPS, {4: forgetful})
    assert deviation(fixed[:4], changed[:4]) <= 1e-9
    assert deviation(fixed, changed) > 1e-4


def test_figures_move_and_are_finite(harness, tools):
    """The equality above would hold for a job that does nothing."""
    adapter = start(harness, tools, "grpo")
    figures = steps(harness, adapter, 4)
    losses = [m["actor/loss"] for _, m in figures]
    assert len(set(losses)) == 4
    assert all(math.isfinite(v) for _, m in figures for v in m.values())
    assert all(m["actor/grad_norm"] > 0 for _, m in figures)


def test_observation_tells_lengths_seconds_and_bytes(harness, tools):
    adapter = start(harness, tools, "grpo")
    harness.step()
    seen = adapter.observe()
    assert (seen.step, seen.response_tokens.count) == (0, 8)
    assert seen.response_tokens.max == 8
    assert set(seen.stage_s) == set(adapter.job().workload.stages)
    assert 0 < sum(seen.stage_s.values()) < 4 * seen.step_s
    assert set(seen.peak_bytes) == set(adapter.job().cluster.devices)
    assert adapter.observe().response_tokens.count == 0


def test_tied_embeddings_reach_generation(harness, tools):
    """Megatron-LM#6940: lost when training state is laid out anew for generation."""
    job = harness.job()
    assert job.model(ACTOR_TRAIN).tied_embeddings
    placements = {ACTOR_TRAIN: (Layout(1, 4), 1), ACTOR_GENERATE: (Layout(2, 1), 2)}
    adapter = harness.launch(job, tools.packed(job, placements))
    hand = tools.Hand(adapter)
    steps(harness, adapter, 2)
    trained = harness.peek(hand.ids(ACTOR_TRAIN)[0])
    for unit in hand.ids(ACTOR_GENERATE):
        served = harness.peek(unit)
        assert served.keys() == {name for name in trained if name.startswith("param/")}
        assert all((served[name] == trained[name]).all() for name in served)


def test_bfloat16_keeps_its_moments_in_float32(harness, tools):
    job = replace(harness.job(), precision=BFLOAT16)
    adapter = harness.launch(job, tools.packed(job))
    hand = tools.Hand(adapter)
    steps(harness, adapter, 2)
    before = tools.sha256(harness.peek(hand.ids(ACTOR_TRAIN)[0]))
    with tools.at_boundary(adapter):
        receipt = hand.merge(Layout(2, 2), [3, 2, 1, 0])
    whole = sum(b.num_elements for b in unit_boxes(job))
    assert receipt.moved_bytes + receipt.kept_bytes == whole * (2 + 4 + 4)
    assert tools.sha256(harness.peek(hand.ids(ACTOR_TRAIN)[0])) == before
    steps(harness, adapter, 1)


def unit_boxes(job):
    shards = unit_shards(job.model(ACTOR_TRAIN), Layout(2, 2))
    return [box for shard in shards for box in shard.values()]


def test_counters_and_schedule_go_along(harness, tools):
    """The learning rate is a function of the step count, which every new unit inherits."""
    adapter = start(harness, tools, "grpo")
    hand = tools.Hand(adapter)
    figures = steps(harness, adapter, 3, {2: lambda: hand.merge(Layout(2, 1), [0, 1])})
    # Warm-up over two steps to 1e-2.
    assert [m["actor/lr"] for _, m in figures] == pytest.approx([5e-3, 1e-2, 1e-2])
    assert adapter.fingerprint(hand.ids(ACTOR_TRAIN)[0]).steps["step"] == 3
