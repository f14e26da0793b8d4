import pytest

from nereus_core.cluster import Device
from nereus_core.errors import PlanError, SeatDead, UnitLost
from nereus_core.launched import Launched
from nereus_core.runner import MAX_LOSSES_IN_A_ROW, Ran, drive


class Job:
    """A job whose attempts are scripted: None is a step done, an exception is raised."""

    handle = None

    def __init__(self, attempts, steps=3):
        self.attempts, self.left, self.log = iter(attempts), steps, []

    @property
    def finished(self):
        return self.left == 0

    def step(self):
        self.log.append("step")
        if error := next(self.attempts, None):
            raise error
        self.left -= 1
        return {}

    def close(self):
        self.log.append("close")

    def boundary(self):
        self.log.append("boundary")


def lost():
    return UnitLost(["actor/train#0"], [])


def dead():
    return SeatDead(Device("node0", 1), -9, "a step")


def test_a_boundary_follows_every_step():
    job = Job([])
    assert isinstance(job, Launched)
    assert drive(job, job.boundary) == Ran(3, 0)
    assert job.log == ["step", "boundary"] * 3


def test_the_number_of_steps_can_be_limited():
    job = Job([], steps=100)
    assert drive(job, job.boundary, max_steps=2) == Ran(2, 0)


def test_a_step_that_loses_a_device_is_asked_for_again_after_a_boundary():
    job = Job([None, dead(), lost(), None])
    assert drive(job, job.boundary) == Ran(3, 2)
    assert job.log == ["step", "boundary"] * 5


def test_losses_without_a_step_in_between_are_bounded():
    job = Job([None, *[dead() for _ in range(50)]])
    with pytest.raises(SeatDead):
        drive(job, job.boundary)
    assert job.log.count("step") == 1 + MAX_LOSSES_IN_A_ROW + 1


def test_other_errors_are_not_taken_for_losses():
    job = Job([PlanError(["broken"])])
    with pytest.raises(PlanError):
        drive(job, job.boundary)
    assert job.log == ["step"]
