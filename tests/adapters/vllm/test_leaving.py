"""However a driver ends, its engines' processes, shared memory and folders go with it."""

import signal

import leaving
import pytest

pytestmark = pytest.mark.real


@pytest.mark.parametrize("how", [signal.SIGKILL, "group"], ids=str)
def test_a_driver_that_is_killed_leaves_nothing(how):
    leaving.require_nothing_left("vllm", how)


def test_nor_does_one_with_an_async_front():
    leaving.require_nothing_left("async", signal.SIGKILL)
