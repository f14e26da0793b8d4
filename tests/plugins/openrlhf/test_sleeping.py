"""Engines that sleep while experience is made; vLLM on a CPU cannot sleep, so none is there."""

from types import SimpleNamespace

import pytest
import ray
from ray.exceptions import RayActorError

from nereus_plugins.openrlhf.surviving import survive

pytestmark = pytest.mark.real


class Engine:
    """Notes what it is told."""

    def __init__(self):
        self.told = []
        for name in ("wake_up", "sleep"):
            call = SimpleNamespace(remote=lambda name=name: self.told.append(name))
            setattr(self, name, call)


class Session:
    """Says that a node is lost until the job has been changed."""

    def __init__(self, change):
        self.lost, self._change = {"a node"}, change

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
