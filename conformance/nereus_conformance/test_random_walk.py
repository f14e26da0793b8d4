"""The last word: primitives drawn at random."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from nereus_conformance.arrange import MODEL_STAGES, Arranger
from nereus_conformance.machine import RandomWalk
from nereus_conformance.suite import Suite
from nereus_core.capabilities import Feature
from nereus_core.harness import Tier
from nereus_core.layout import Layout
from nereus_core.primitives import Destroy, Extend, Kind, Merge, Split
from nereus_core.workload import Stage

KINDS = {Kind.SPLIT: Split, Kind.MERGE: Merge, Kind.EXTEND: Extend, Kind.DESTROY: Destroy}


@pytest.mark.needs(Feature.OPTIMIZER_STATE, Feature.COLOCATED_STAGES)
def test_random_walk_agrees_with_the_model(suite: Suite, arrange: Arranger) -> None:
    """I1, I2, I4, I5: after any walk, units are those of `primitives.apply`, and state is kept.

    If this fails, check the last primitive of the walk printed above, alone and then after the one
    before it.
    """
    can = frozenset(
        (KINDS[kind], MODEL_STAGES[stage])
        for kind in Kind
        for stage in Stage
        if suite.holds((kind, stage))
    )
    if not can:
        pytest.skip("the adapter has no primitive")

    @seed(suite.seed)
    class Walk(RandomWalk):
        launch = staticmethod(lambda: arrange.everywhere(Stage.TRAIN, Layout(2, 1)))

    Walk.can = can
    contract = suite.tier is Tier.CONTRACT
    run_state_machine_as_test(
        Walk,
        settings=settings(
            max_examples=25 if contract else 3,
            stateful_step_count=10 if contract else 5,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
            report_multiple_bugs=False,
        ),
    )
