"""Seeded faults on real seats: what strikes where is drawn; nothing is lost, nothing hangs."""

import pytest

from nereus_conformance.trials import Keeper, Trial, run_trial, undisturbed

pytestmark = pytest.mark.real

SEEDS = range(20)
"""`tests/benchmarks/faults.py --tier real --trials 200` runs more."""


@pytest.fixture(scope="module")
def harness(pool, tools):
    """Waits are short: what hangs costs twice as much."""
    made = tools.TorchHarness(pool=pool, wait_s=3.0)
    yield made
    made.close()


@pytest.fixture(scope="module")
def expected(harness):
    return undisturbed(harness, harness.job())


@pytest.mark.parametrize("seed", SEEDS)
def test_a_fault_in_a_transition_loses_no_state(harness, expected, seed, tmp_path):
    trial = Trial.drawn(seed, harness.job())
    folder = tmp_path / "saved"
    keeper = Keeper(lambda: harness.save(folder), lambda: harness.resume(folder))
    verdict = run_trial(harness, trial, expected, keeper)
    assert verdict.outcome in ("done", "rolled back", "recovered", "state lost")
