"""Engines that sleep while experience is made; vLLM on a CPU cannot sleep, so none is there."""

from types import SimpleNamespace

import pytest
import ray
from ray.exceptions import RayActorError

from nereus_core.errors import WaitTimeout
from nereus_plugins.openrlhf.surviving import survive

pytestmark = pytest.mark.real


class Engine:
    """Notes what it is told."""

    def __init__(self):
        self.told = []
        self.lost = False
        for name in ("wake_up", "sleep"):
            call = SimpleNamespace(remote=lambda name=name: self.hear(name))
            setattr(self, name, call)

    def hear(self, name):
        if self.lost:
            raise RayActorError
        self.told.append(name)


class Session:
    """Says that a node is lost until the job has been changed."""

    def __init__(self, change):
        self.lost, self._change = {"a node"}, change
        self.explain = lambda error: error
        self.config = SimpleNamespace(timeouts=SimpleNamespace(step_s=60.0))

    def amid_step(self):
        self._change()
        self.lost = frozenset()


def trainer_of(engines, enable_sleep, attempts):
    def make(samples):
        attempts.append(list(engines))
        if len(attempts) == 1:
            raise RayActorError
        return samples

    return SimpleNamespace(
        args=SimpleNamespace(vllm=SimpleNamespace(enable_sleep=enable_sleep)),
        vllm_engines=engines,
        experience_maker=SimpleNamespace(make_experience_batch=make),
        broadcast_to_vllm=lambda: None,
        ppo_train=lambda step: None,
    )


@pytest.mark.parametrize("enable_sleep", [True, False])
def test_engines_sleep_again_when_a_change_amid_experience_has_woken_them(
    monkeypatch, enable_sleep
):
    """Awake, they would hold what training needs; woken in part, vLLM cannot put them to sleep."""
    monkeypatch.setattr(ray, "get", lambda refs, timeout: refs)
    left, new, attempts = Engine(), Engine(), []
    engines = [left, Engine()]
    trainer = trainer_of(engines, enable_sleep, attempts)
    survive(trainer, Session(lambda: engines.__setitem__(1, new)))
    assert trainer.experience_maker.make_experience_batch("samples") == "samples"
    assert len(attempts) == 2
    assert left.told == new.told == (["wake_up", "sleep"] if enable_sleep else [])


def test_a_node_that_is_lost_while_engines_go_to_sleep_is_survived_too(monkeypatch):
    monkeypatch.setattr(ray, "get", lambda refs, timeout: refs)
    left, second, attempts = Engine(), Engine(), []
    engines = [left, Engine(), Engine()]
    session = Session(lambda: None)

    def change():
        if len(engines) == 3:  # of the first node; the second goes while its engine wakes up
            engines[1:] = [second]
            second.lost = True
        else:
            engines[1:] = []
        session.lost = frozenset()

    session._change = change
    trainer = trainer_of(engines, True, attempts)
    survive(trainer, session)
    told = second.hear

    def hear(name):
        session.lost = {"another node"}
        told(name)

    second.hear = hear
    assert trainer.experience_maker.make_experience_batch("samples") == "samples"
    assert engines == [left]
    assert len(attempts) == 2
    assert left.told[-2:] == ["wake_up", "sleep"]


def test_engines_that_do_not_wake_up_are_named(monkeypatch):
    def late(refs, timeout):
        raise ray.exceptions.GetTimeoutError

    monkeypatch.setattr(ray, "get", late)
    trainer = trainer_of([Engine()], True, [])
    survive(trainer, Session(lambda: None))
    with pytest.raises(WaitTimeout, match="waited 120 s for wake_up of 1 engines"):
        trainer.experience_maker.make_experience_batch("samples")
