"""Seeded faults on real seats: what strikes where is drawn; nothing is lost, nothing hangs."""

import pytest

from nereus_conformance.trials import Trials

pytestmark = pytest.mark.real

SEEDS = range(20)
"""`tests/benchmarks/faults.py --tier real --trials 200` runs more."""


@pytest.fixture(scope="module")
def trials(pool, tools, tmp_path_factory):
    harness = tools.TorchHarness(pool=pool)
    yield Trials(harness, tmp_path_factory.mktemp("trials"), limit_s=120.0)
    harness.close()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_fault_in_a_transition_loses_no_state(trials, seed):
    result = trials.run(trials.draw(seed))
    assert result.problem is None, f"{result.trial}: {result.outcome}: {result.problem}"
