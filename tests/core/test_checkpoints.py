"""When checkpoints are written, which are kept, and what a loss says about them."""

import pytest

from nereus_core.checkpoints import Checkpoints, newest, resolved
from nereus_core.cluster import Device
from nereus_core.config import CheckpointConfig
from nereus_core.errors import CheckpointError, SeatDead, StateLost
from nereus_core.launched import Saves
from nereus_core.runner import Ran, drive


class Mute:
    """A job of six steps that cannot be saved."""

    handle = None

    def __init__(self):
        self.steps_done, self.log = 0, []

    @property
    def finished(self):
        return self.steps_done == 6

    def step(self):
        self.steps_done += 1
        return {}

    def close(self):
        pass

    def boundary(self):
        self.log.append("boundary")


class Job(Mute):
    """One that can; its saves are scripted: True is a device that dies meanwhile."""

    def __init__(self, dying=()):
        super().__init__()
        self.dying = iter(dying)

    def save(self, folder):
        if next(self.dying, False):
            self.log.append("died")
            raise SeatDead(Device("node0", 0), -9, "save")
        self.log.append(self.steps_done)
        folder.mkdir()
        (folder / "manifest.json").write_text("{}")


def checkpoints(tmp_path, **config):
    config = CheckpointConfig(**config)
    return Checkpoints(config, tmp_path, lambda folder: f"go on --resume {folder}")


def test_checkpoints_are_written_before_the_boundary_and_the_newest_are_kept(tmp_path):
    job, kept = Job(), checkpoints(tmp_path, every_steps=2)
    assert isinstance(job, Saves)
    assert drive(job, job.boundary, checkpoints=kept) == Ran(6, 0)
    assert job.log == ["boundary", 2, "boundary", "boundary", 4, "boundary", "boundary", 6,
                       "boundary"]  # fmt: skip
    left = sorted(c.name for c in (tmp_path / "checkpoints").iterdir())
    assert left == ["step-00000004", "step-00000006"]
    assert newest(tmp_path / "checkpoints") == resolved(tmp_path / "checkpoints")
    assert newest(tmp_path / "checkpoints").name == "step-00000006"
    assert resolved(tmp_path / "checkpoints" / "step-00000004").name == "step-00000004"


def test_none_is_written_unless_asked_for(tmp_path):
    job = Job()
    drive(job, job.boundary, checkpoints=checkpoints(tmp_path))
    assert job.log == ["boundary"] * 6


def test_one_that_lost_a_device_is_written_after_the_boundary_or_after_the_next_step(tmp_path):
    job = Job(dying=[True, False])
    drive(job, job.boundary, max_steps=2, checkpoints=checkpoints(tmp_path, every_steps=2))
    assert job.log == ["boundary", "died", "boundary", 2]
    job = Job(dying=[True, True, False])
    kept = checkpoints(tmp_path, every_steps=2, folder=tmp_path / "other")
    drive(job, job.boundary, max_steps=3, checkpoints=kept)
    assert job.log == ["boundary", "died", "boundary", "died", 3, "boundary"]


def test_a_job_that_cannot_be_saved_is_refused_when_one_is_due(tmp_path):
    job = Mute()
    with pytest.raises(CheckpointError, match=r"write none; set checkpoint\.every_steps = 0"):
        drive(job, job.boundary, checkpoints=checkpoints(tmp_path, every_steps=1))


def test_lost_state_names_the_newest_checkpoint_and_the_command(tmp_path):
    job = Job()

    def boundary():
        if job.steps_done == 3:
            raise StateLost("actor/train", None)

    with pytest.raises(StateLost, match="no intact copy of actor/train") as caught:
        drive(job, boundary, checkpoints=checkpoints(tmp_path, every_steps=1))
    newest = tmp_path / "checkpoints" / "step-00000003"
    assert caught.value.checkpoint == str(newest)
    assert f"Resume with: go on --resume {newest}" in str(caught.value)

    job = Job()
    with pytest.raises(StateLost, match="no checkpoint was kept"):
        drive(job, boundary, checkpoints=checkpoints(tmp_path))


def test_a_run_that_was_resumed_names_where_it_came_from(tmp_path):
    job = Job()
    folder = tmp_path / "old"
    job.save(folder)
    kept = checkpoints(tmp_path, resume=folder)
    assert kept.named(StateLost("actor/train", None)).checkpoint == str(folder)


def test_a_folder_without_a_checkpoint_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"is no checkpoint .* and holds none"):
        resolved(tmp_path)
