"""Faults in every phase of whole transitions, under a controller."""

from __future__ import annotations

from pathlib import Path

import pytest

from nereus_conformance.arrange import Arranger
from nereus_conformance.assertions import require
from nereus_conformance.suite import Suite
from nereus_conformance.trial import Trials
from nereus_core.capabilities import Feature
from nereus_core.harness import Harness
from nereus_core.primitives import Kind


@pytest.mark.needs(Feature.UNIT_LOSS, Feature.COLOCATED_STAGES)
@pytest.mark.needs(Kind.SPLIT, Kind.MERGE, Kind.EXTEND, Kind.DESTROY)
def test_faults_in_transitions_lose_nothing(
    suite: Suite, harness: Harness, arrange: Arranger, tmp_path: Path, num_trials: int
) -> None:
    """I2, I4, I12: with a fault in any phase the job steps on unharmed, or stops with a name.

    If this fails, check the trial alone: `python -m nereus_conformance.trials --seed N --trials 1`.
    """
    if together := harness.job().together:
        stages = ", ".join(map(str, sorted(together[0])))
        pytest.skip(f"{stages} are tied: plans are drawn stage by stage")
    trials = Trials(harness, tmp_path)
    for seed in range(suite.seed, suite.seed + num_trials):
        result = trials.run(trials.draw(seed))
        require(
            result.problem is None, "I4 strong", f"trial {seed}, {result.trial}: {result.problem}"
        )
