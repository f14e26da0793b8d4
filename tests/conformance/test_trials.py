"""Trials and the fault matrix, on the simulated world; and that trials can fail."""

from contextlib import closing
from pathlib import Path

import pytest

from nereus_adapters.sim.adapter import SimAdapter
from nereus_adapters.sim.harness import SimHarness
from nereus_conformance.fault_matrix import marks, matrix, read, replaced, table
from nereus_conformance.points import FAULTS, KILL_CONTROLLER, POINTS
from nereus_conformance.trial import Trial, Trials
from nereus_core.layout import Layout
from nereus_core.phases import Phase
from nereus_core.plan import Placement, Plan
from nereus_core.state import Slot
from nereus_core.workload import ACTOR_GENERATE, ACTOR_TRAIN, REF_INFER

README = Path(__file__).parents[2] / "conformance" / "README.md"
NUM_TRIALS = 200


@pytest.fixture
def harness():
    with closing(SimHarness()) as opened:
        yield opened


def test_two_hundred_faults_lose_no_state_and_hang_nothing(harness, tmp_path):
    trials = Trials(harness, tmp_path)
    results = [trials.run(trials.draw(seed)) for seed in range(NUM_TRIALS)]

    assert [f"{r.trial}: {r.problem}" for r in results if r.problem] == []
    assert {r.trial.fault for r in results} == set(FAULTS)
    assert {r.trial.point for r in results} == set(POINTS)
    assert {
        "goes through",
        "old plan goes on",
        "replanned",
        "resumed",
        "linked again",
        "StateLost named",
    } <= {r.outcome for r in results}


def test_the_fault_matrix_in_the_readme_is_what_happens(harness, tmp_path):
    found = matrix(Trials(harness, tmp_path), harness.job())
    rows = table(found)

    assert "WRONG" not in rows
    text = README.read_text(encoding="utf-8")
    assert text == replaced(text, "sim", "contract", rows), (
        "the table is stale: python -m nereus_conformance.trials --adapter sim "
        "--matrix conformance/README.md"
    )
    assert read(text, "sim", "contract") == found
    with pytest.raises(ValueError, match="no line"):
        replaced(text.replace(marks("sim", "contract")[1], ""), "sim", "contract", rows)


class Scrambles(SimAdapter):
    """After a relink, a unit of training holds something else."""

    def relink(self, plan):
        super().relink(plan)
        store = self._running.live(self.units().of(ACTOR_TRAIN)[0].id).stores[0]
        next(a for (slot, _), a in store.arrays.items() if slot is Slot.EXP_AVG)[...] += 1


class ScramblingHarness(SimHarness):
    def launch(self, job, plan):
        super().launch(job, plan)
        self._adapter = Scrambles(self.running_job)
        return self._adapter


def test_a_trial_notices_state_that_changed(tmp_path):
    with closing(ScramblingHarness()) as harness:
        d, one = harness.job().cluster.healthy, Layout(1, 1)
        rest = {
            ACTOR_GENERATE: Placement(one, ((d[2],),)),
            REF_INFER: Placement(one, ((d[3],),)),
        }
        trial = Trial(
            Plan({ACTOR_TRAIN: Placement(one, ((d[0],),)), **rest}),
            Plan({ACTOR_TRAIN: Placement(one, ((d[0],), (d[1],))), **rest}),
            KILL_CONTROLLER,
            Phase.RELEASE,
            0,
        )
        result = Trials(harness, tmp_path).run(trial)

    assert result.outcome == "resumed"
    assert "holds other state" in result.problem
