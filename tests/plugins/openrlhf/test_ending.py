"""How a job ends of what Ray raises; Ray is there, OpenRLHF's trainer is not."""

from types import SimpleNamespace

import pytest
import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from nereus_core.errors import StateLost, WaitTimeout
from nereus_plugins.openrlhf.directory import Directory
from nereus_plugins.openrlhf.ending import Ending, StepLost, named, said
from nereus_plugins.openrlhf.surviving import survive

pytestmark = pytest.mark.real

DEAD = "The actor died.\n\tclass_name: RolloutRayActor\n\tpid: 7\n\tip: 10.0.0.1\nIt is gone."


def raised_in_a_task(cause):
    return RayTaskError("fit", "a traceback", cause).as_instanceof_cause()


@pytest.mark.parametrize(
    ("cause", "says"),
    [
        (RayActorError("id", DEAD), "RolloutRayActor died (pid 7 on 10.0.0.1)"),
        (AssertionError(), "AssertionError"),
        (ValueError("no number\nin the response."), "ValueError: in the response"),
        (ValueError(f"after a retry of\n{DEAD}"), "ValueError: It is gone"),
    ],
)
def test_what_failed_is_said_of_the_cause(cause, says):
    assert said(raised_in_a_task(cause)) == says


def trainer_of(directory=None):
    args = SimpleNamespace(
        ckpt=SimpleNamespace(path="nowhere", load_enable=False, save_steps=-1, disable_ds=False),
        train=SimpleNamespace(
            colocate_actor_ref=False, colocate_all=False, colocate_critic_reward=False
        ),
        actor=SimpleNamespace(num_nodes=1, num_gpus_per_node=1),
        critic=SimpleNamespace(num_nodes=1, num_gpus_per_node=1),
        ds=SimpleNamespace(tensor_parallel_size=1),
        vllm=SimpleNamespace(enable_sleep=False),
    )
    return SimpleNamespace(args=args, critic_model_group=None, nereus_directory=directory)


class Asked:
    """A directory that is asked as an actor, in this process."""

    def __init__(self, directory):
        for name in ("fail", "failed", "end", "ended", "saving", "cut_short"):
            call = SimpleNamespace(remote=getattr(directory, name))
            setattr(self, name, call)


@pytest.fixture
def at_once(monkeypatch):
    """What was asked is there when it is waited for."""
    monkeypatch.setattr(ray, "get", lambda found, timeout=None: found)


@pytest.mark.parametrize(
    "error",
    [
        RayActorError("id", DEAD),
        raised_in_a_task(RuntimeError("gloo: closed")),
        WaitTimeout("x", 1),
    ],
    ids=["actor", "task", "wait"],
)
def test_whatever_of_ray_ends_a_loop_is_told_with_step_and_checkpoint(at_once, error):
    directory = Directory()
    told = Ending(trainer_of(Asked(directory))).last_word(error)
    assert isinstance(told, StepLost)
    assert "step 1 was not ended" in str(told)
    assert directory.ended() is told


def test_lost_state_is_told_to_the_controller_too(at_once):
    directory, lost = Directory(), StateLost("actor/train", None)
    assert Ending(trainer_of(Asked(directory))).last_word(lost) is lost
    assert directory.ended() is lost


def test_a_directory_that_is_gone_does_not_hide_why_a_job_ends(monkeypatch):
    def gone(found, timeout=None):
        raise RayActorError

    monkeypatch.setattr(ray, "get", gone)
    ending, error = Ending(trainer_of(Asked(Directory()))), RayActorError("id", DEAD)
    assert ending.explained(error) is error
    assert "RolloutRayActor died" in str(ending.last_word(error))


def test_ranks_are_ended_but_not_while_they_write_a_checkpoint(monkeypatch):
    killed = []
    monkeypatch.setattr(ray, "kill", killed.append)
    directory = Directory(["lock"], ["rank"])
    directory.saving(True)
    directory.fail("it died")
    assert not directory.cut_short()
    assert killed == ["lock"]
    directory.saving(False)
    assert directory.cut_short()
    assert killed == ["lock", "rank"]
    directory.publish([], {"rank": ["other"]})
    directory.cut_short()
    assert killed[-1] == "other"


def test_a_controller_whose_trainer_cannot_be_asked_ends_with_its_own_error(monkeypatch):
    monkeypatch.setattr("nereus_plugins.openrlhf.ending.find", lambda name: object())
    error = raised_in_a_task(AssertionError())

    def fit(self):
        raise error

    with pytest.raises(AssertionError) as info:
        named(fit, "a run", 1.0)(SimpleNamespace(trainer_actor=None))
    assert info.value is error
    assert info.value.__cause__ is not error


PARTS = {
    "generation": lambda t: t.samples_generator._generate_vllm(iter(())),
    "the experience": lambda t: t.experience_maker.make_experience_batch(()),
    "the training": lambda t: t.ppo_train(0),
    "the broadcast of weights": lambda t: t.broadcast_to_vllm(),
    "the generator's responses": lambda t: t.rollout_queue.get(block=True),
}


@pytest.mark.parametrize("part", PARTS)
def test_each_part_of_a_step_has_an_end_and_a_name(monkeypatch, part):
    def late(refs, timeout=None):
        assert timeout is not None, "would wait for ever"
        raise GetTimeoutError

    def waits(*args, **kwargs):
        ray.get("never")

    monkeypatch.setattr(ray, "get", late)
    trainer = SimpleNamespace(
        samples_generator=SimpleNamespace(_generate_vllm=waits),
        experience_maker=SimpleNamespace(make_experience_batch=waits),
        rollout_queue=SimpleNamespace(get=waits),
        ppo_train=waits,
        broadcast_to_vllm=waits,
    )
    config = SimpleNamespace(timeouts=SimpleNamespace(step_s=60.0))
    survive(trainer, SimpleNamespace(config=config, lost=frozenset()))
    with pytest.raises(WaitTimeout, match=rf"s for {part} \(--nereus.timeouts.step_s allows"):
        PARTS[part](trainer)
