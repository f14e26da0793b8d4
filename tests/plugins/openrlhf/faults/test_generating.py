"""Asynchronous jobs whose generator or engine is killed, and a broadcast that hangs, in a step."""

import contextlib
import os
import re
import signal
import time

import openrlhf_job
import pytest
from openrlhf_seen import adapt

pytestmark = pytest.mark.real

JOB = {
    "train__async_enable": True,
    "algo__kl__init_coef": 0,
    "algo__kl__use_loss": False,
    "ckpt__save_steps": 1,
    "ckpt__max_num": 5,
    "data__max_samples": 40,
}
ENDED = re.compile(
    r"StepLost: step (\d) was not ended: (\w+) died \(pid \d+ on [\d.]+\); "
    r"the newest checkpoint is (\S+/ckpt/_actor/global_step(\d))\. "
    r"Resume with: the same command and --ckpt\.load_enable\."
)


def killed(assets, folder, fault):
    """Run a job in which it strikes after two steps; returns what was said, and the job.

    The trainer may then be in a broadcast to an engine that is gone, which ends after `group_s`:
    later than the job may last.
    """
    ran, _, events = adapt(
        assets,
        folder,
        {},
        faults={"2": [fault]},
        ends="failed: StepLost",
        group_s=900,
        **JOB,
    )
    found = ENDED.search(events[-1].outcome)
    assert found, events[-1].outcome
    # the driver, and with it the user, is told the same
    assert found[0] in ran.output
    steps = len(ran.steps())
    assert steps >= 2
    assert int(found[4]) == steps
    assert int(found[1]) == steps + 1
    return found, ran


def test_a_killed_generator_is_named_with_the_step_and_the_job_goes_on_from_its_checkpoint(
    assets, tmp_path
):
    start_s = time.monotonic()
    found, ran = killed(assets, tmp_path, "dead generator")
    assert found[2] == "GenerateSamplesActor"
    assert ran.wall_s <= time.monotonic() - start_s < 240
    again = openrlhf_job.run(
        openrlhf_job.flags(assets, tmp_path, ckpt__load_enable=True, **JOB),
        tmp_path / "again",
        module="openrlhf.cli.train_ppo_ray",
    )
    assert again.code == 0, again.output[-6000:]
    numbers = [step["step"] for step in again.steps()]
    assert numbers == [float(n) for n in range(int(found[1]), 6)]


def test_a_killed_engine_of_a_generator_is_named_with_the_step(assets, tmp_path):
    found, _ = killed(assets, tmp_path, "dead engine")
    assert found[2] == "RolloutRayActor"


def test_a_broadcast_that_hangs_in_a_step_ends_the_job_by_name(assets, tmp_path):
    """OpenRLHF alone would wait for the engine for ever."""
    try:
        ran, _, _ = adapt(
            assets,
            tmp_path,
            {},
            faults={"1": ["hung broadcast"]},
            step_s=40,
            ends="failed: WaitTimeout: waited 40 s for the broadcast of weights of a step",
            **JOB | {"train__async_enable": False, "data__max_samples": 24},
        )
        assert len(ran.steps()) == 1
        assert "waited 40 s for the broadcast of weights of a step" in ran.output
    finally:  # a process that is stopped does not see that those it served are gone
        for pid in (tmp_path / "seen.pids").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
