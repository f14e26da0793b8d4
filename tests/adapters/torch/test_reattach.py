"""A driver is killed in every phase of a primitive; the next one goes on with what seats hold."""

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from nereus_adapters.torch.folder import PoolFolder
from nereus_adapters.torch.pool import LocalPool
from nereus_core.layout import Layout
from nereus_core.plan import Placement, Plan
from nereus_core.workload import ACTOR_TRAIN

pytestmark = pytest.mark.real

DRIVER = Path(__file__).parent / "killed_driver.py"


PHASES = ["prepare", "transfer", "verify", "commit", "release", "step"]


def chain():
    """Run the drivers; return what each said when it had taken over, and stepped once."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    ran = subprocess.run(
        [sys.executable, str(DRIVER), *PHASES],
        stdout=subprocess.PIPE,
        timeout=300,
        env=environment | {"OMP_NUM_THREADS": "1"},
        check=True,
    )
    return [json.loads(line) for line in ran.stdout.splitlines()]


def test_the_next_driver_finds_old_units_before_commit_and_new_ones_after(harness, tools, tmp_path):
    """One chain of drivers on the same two seats; each dies in the phase after the one before's."""
    job = harness.job()
    one = Placement.packed(Layout(1, 1), job.cluster.devices[:1])
    harness.launch(job, Plan(dict.fromkeys(job.workload.stages, one)))
    expected = [harness.step() for _ in range(7)]

    said = chain()
    folder = Path(said[0]["folder"])
    try:
        for step, (before, found) in enumerate(pairwise(said), 1):
            assert found["found"] == before["state"], PHASES[step - 1]
            assert len(found["state"]) == 1
            assert found["loss"] == pytest.approx(expected[step].losses["actor"], abs=1e-9)
        two = ["actor/train#0 tp1pp1", "actor/train#1 tp1pp1"]
        # What died before commit is as if it had not begun, though the seats had got further.
        assert [s["before"] for s in said[:4]] == [two] * 4
        # In commit: one seat had done it, so the other one has to.
        assert said[4]["before"] == ["actor/train#2 tp2pp1"]
        # In release: done.
        assert said[5]["before"] == ["actor/train#3 tp1pp1", "actor/train#4 tp1pp1"]
        # Between the stages of a step: it is done once more, from the same state.
        pool = LocalPool.attach(folder, "cpu")
        other = tools.TorchHarness(pool=pool)
        adapter = other.take_over()
        assert len(adapter.units().of(ACTOR_TRAIN)) == 2
        assert other.step().losses == pytest.approx(expected[6].losses, abs=1e-9)
        other.close()
        pool.close()
    finally:
        left = PoolFolder(folder)
        if left.path.exists():
            LocalPool.attach(left.path, "cpu").close()
    assert not left.path.exists()
