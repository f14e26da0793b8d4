"""Whose timeout it was, where Ray gives up a little early: it counts whole milliseconds."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from nereus_core.errors import WaitTimeout
from nereus_plugins.ray_waits import ray_waits


class GetTimeoutError(Exception):
    """As Ray's."""


@pytest.fixture
def ray(monkeypatch):
    """As much of Ray as waits in vain, and not quite as long as it was told."""

    def get(refs, timeout=None):
        assert timeout is not None, "would wait for ever"
        raise GetTimeoutError

    module = ModuleType("ray")
    module.get, module.exceptions = get, SimpleNamespace(GetTimeoutError=GetTimeoutError)
    monkeypatch.setitem(sys.modules, "ray", module)
    return module


def test_a_wait_without_a_timeout_is_named_though_it_ended_early(ray):
    once = ray.get
    with pytest.raises(WaitTimeout, match="waited 30 s for weights"), ray_waits("weights", 30.0):
        ray.get("never")
    assert ray.get is once


def test_the_callers_own_shorter_timeout_stays_the_callers(ray):
    with pytest.raises(GetTimeoutError), ray_waits("weights", 30.0):
        ray.get("never", timeout=1.0)


def test_the_callers_longer_timeout_is_cut_short_and_named(ray):
    with pytest.raises(WaitTimeout), ray_waits("weights", 30.0):
        ray.get("never", timeout=60.0)
