"""However a driver ends, its engines' processes, shared memory and folders go with it."""

import signal

import leaving
import pytest

pytestmark = pytest.mark.real


@pytest.mark.parametrize(
    ("engine", "how"), [("vllm", "group"), ("async", signal.SIGKILL)], ids=["SIGTERM", "SIGKILL"]
)
def test_a_driver_that_is_killed_leaves_nothing(engine, how):
    leaving.require_nothing_left(engine, how)
