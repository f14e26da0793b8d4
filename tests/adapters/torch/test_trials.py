"""Seeded faults on real seats: what strikes where is drawn; nothing is lost, nothing hangs."""

import random
from pathlib import Path

import pytest

from nereus_conformance.fault_matrix import cell, cells, read
from nereus_conformance.trial import Trials

pytestmark = pytest.mark.real

SEEDS = range(20)
"""`tests/benchmarks/faults.py --tier real --trials 200` runs more."""
README = Path(__file__).parents[3] / "conformance" / "README.md"
NUM_CELLS = 6


@pytest.fixture(scope="module")
def trials(pool, tools, tmp_path_factory):
    harness = tools.TorchHarness(pool=pool)
    yield Trials(harness, tmp_path_factory.mktemp("trials"), limit_s=120.0)
    harness.close()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_fault_in_a_transition_loses_no_state(trials, seed):
    result = trials.run(trials.draw(seed))
    assert result.problem is None, f"{result.trial}: {result.outcome}: {result.problem}"


def test_the_fault_matrix_in_the_readme_is_what_happens(trials, tools):
    """All its cells are there, and some of them, other ones whenever a fault or phase is added, are
    run again; `trials --adapter torch --tier real --matrix conformance/README.md` runs all.
    """
    found = read(README.read_text(encoding="utf-8"), "torch", "real")
    wanted = cells(trials.job)
    assert {t: list(row) for t, row in found.items()} == {t: list(r) for t, r in wanted.items()}
    assert not any(what.startswith("WRONG") for row in found.values() for what in row.values())
    every = [(title, point) for title, row in wanted.items() for point in row]
    for title, point in random.Random(len(every)).sample(every, NUM_CELLS):
        result = trials.run(wanted[title][point])
        assert found[title][point] == cell(result), f"{title} in {point}: the table is stale"
