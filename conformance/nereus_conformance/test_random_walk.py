"""The last word: primitives drawn at random."""

from __future__ import annotations

import pytest

from nereus_conformance.arrange import MODEL_STAGES, Arranger
from nereus_conformance.suite import Suite
from nereus_core.capabilities import Feature
from nereus_core.harness import Tier
from nereus_core.layout import Layout
from nereus_core.primitives import Kind
from nereus_core.workload import Stage


@pytest.mark.needs(Feature.OPTIMIZER_STATE, Feature.COLOCATED_STAGES)
def test_random_walk_agrees_with_the_model(suite: Suite, arrange: Arranger) -> None:
    """I1, I2, I4, I5: after any walk, units are those of `primitives.apply`, and state is kept.

    If this fails, check the last primitive of the walk printed above, alone and then after the one
    before it.
    """
    # Hypothesis takes a second to import: only where it is used.
    from nereus_conformance.machine import walk

    can = frozenset(
        (kind, MODEL_STAGES[stage])
        for kind in Kind
        for stage in Stage
        if suite.holds((kind, stage))
    )
    if not can:
        pytest.skip("the adapter has no primitive")
    examples, steps = (25, 10) if suite.tier is Tier.CONTRACT else (3, 5)
    walk(
        lambda: arrange.everywhere(Stage.TRAIN, Layout(2, 1)),
        can,
        pipelines=suite.support(Feature.PIPELINE_STAGES) is None
        or suite.holds(Feature.PIPELINE_STAGES),
        seed=suite.seed,
        examples=examples,
        steps=steps,
    )
