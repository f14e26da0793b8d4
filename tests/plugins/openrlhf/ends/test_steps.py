"""Jobs in which something dies or hangs in a step: they say what, and where they can go on."""

import contextlib
import os
import re
import signal

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
    found, _ = killed(assets, tmp_path, "dead generator")
    assert found[2] == "GenerateSamplesActor"
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


def ends(assets, folder, fault, outcome, **changes):
    """Run a job in which a process is stopped in its second step, and end that one after it."""
    try:
        ran, _, _ = adapt(
            assets, folder, {}, faults={"1": [fault]}, ends=outcome, group_s=900,
            **JOB | {"data__max_samples": 24} | changes,
        )  # fmt: skip
        assert len(ran.steps()) == 1
        assert outcome.removeprefix("failed: ") in ran.output
    finally:  # a process that is stopped does not see that those it served are gone
        pids = folder / "seen.pids"
        for pid in pids.read_text().split() if pids.exists() else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


def test_a_broadcast_that_hangs_in_a_step_ends_the_job_by_name(assets, tmp_path):
    """OpenRLHF alone would wait for the engine for ever."""
    says = "failed: StepLost: step 2 was not ended: WaitTimeout: waited 60 s for the broadcast of"
    ends(assets, tmp_path, "hung broadcast", says, step_s=60, train__async_enable=False)


def test_a_trainer_in_a_broadcast_that_hangs_ends_when_the_generator_has_died(assets, tmp_path):
    """It is given half a minute, then what it waits for is ended."""
    says = "failed: StepLost: step 2 was not ended: GenerateSamplesActor died"
    ends(assets, tmp_path, "hung broadcast and dead generator", says)


def test_a_rank_that_is_killed_while_it_trains_ends_the_job_by_name(assets, tmp_path):
    """Its peer may be the first to hear of it, and say so in its own words."""
    says = "failed: StepLost: step 2 was not ended: "
    ends(assets, tmp_path, "dead rank", says, train__async_enable=False, actor__num_gpus_per_node=2)


def test_a_changed_job_goes_on_from_its_checkpoint_with_the_flags_that_it_said(assets, tmp_path):
    """DeepSpeed loads it on as many ranks as saved it: one, where the job began on two."""
    job = JOB | {"train__async_enable": False, "actor__num_gpus_per_node": 2}
    _, _, events = adapt(
        assets, tmp_path, {"1": {"actor/train": [[0]]}}, faults={"2": ["dead engine"]},
        ends="failed: StepLost: step 3 was not ended", **job,
    )  # fmt: skip
    outcome = events[-1].outcome
    assert "ckpt/_actor/global_step2. Resume with: the same command and " in outcome
    flags = outcome.partition("the same command and ")[2].rstrip(".").split()
    assert flags == ["--actor.num_gpus_per_node", "1", "--ckpt.load_enable"]
    again = openrlhf_job.run(
        [*openrlhf_job.flags(assets, tmp_path, **job), *flags],
        tmp_path / "again",
        module="openrlhf.cli.train_ppo_ray",
    )
    assert again.code == 0, again.output[-6000:]
    assert [step["step"] for step in again.steps()] == [3.0, 4.0, 5.0]
