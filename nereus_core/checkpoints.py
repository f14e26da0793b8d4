"""Checkpoints: which boundaries of a run are kept on disk, and how the run goes on from one.

A checkpoint is a folder that the job writes. It appears under its name complete (written beside it,
then renamed), so whatever bears a checkpoint's name can be resumed from.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from nereus_core.config import CheckpointConfig
from nereus_core.errors import CheckpointError, StateLost
from nereus_core.launched import Launched, Saves

MANIFEST = "manifest.json"
"""Every checkpoint has one; an adapter decides what else."""
_PREFIX = "step-"


def newest(folder: Path) -> Path | None:
    """Return the checkpoint written last in a folder of checkpoints."""
    return max(_all(folder), default=None, key=_written)


def resolved(path: Path) -> Path:
    """Return the checkpoint that a user means: ``path`` itself, or the newest one in it.

    Raises:
        CheckpointError: there is none.
    """
    if (path / MANIFEST).is_file():
        return path
    found = newest(path)
    if found is None:
        raise CheckpointError(
            path, f"is no checkpoint ({MANIFEST} is missing) and holds none",
            "name a folder that [checkpoint] wrote",
        )  # fmt: skip
    return found


class Checkpoints:
    """The checkpoints of one run.

    Args:
        config: how often, where, how many.
        run_dir: of the run; checkpoints lie in it by default.
        command: gives the command that resumes from a checkpoint.
    """

    def __init__(
        self, config: CheckpointConfig, run_dir: Path, command: Callable[[Path], str]
    ) -> None:
        self._every, self._keep, self._command = config.every_steps, config.keep, command
        self._folder = config.folder or run_dir / "checkpoints"
        self._last = resolved(config.resume) if config.resume else None
        self._saved_step: int | None = None

    def due(self, launched: Launched) -> bool:
        """Whether the boundary that a job stands at is one to keep.

        Raises:
            CheckpointError: checkpoints are wanted, and this job writes none.
        """
        if not self._every:
            return False
        if not isinstance(launched, Saves):
            raise CheckpointError(
                self._folder, "this adapter's jobs write none", "set checkpoint.every_steps = 0"
            )
        if self._saved_step is None:
            self._saved_step = (launched.steps_done - 1) // self._every * self._every
        return launched.steps_done - self._saved_step >= self._every

    def save(self, launched: Saves) -> None:
        """Let a job write a checkpoint; then delete those beyond the number to keep.

        Raises:
            CheckpointError: the disk does not take it.
            SeatDead, UnitLost: a device was lost; nothing was written.
        """
        step = launched.steps_done
        target = self._folder / f"{_PREFIX}{step:08d}"
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        launched.save(target)
        self._last, self._saved_step = target, step
        for checkpoint in sorted(_all(self._folder), key=_written)[: -self._keep]:
            shutil.rmtree(checkpoint)

    def named(self, lost: StateLost) -> StateLost:
        """Return the error with the newest checkpoint and the command that resumes from it."""
        if self._last is None:
            return lost
        return StateLost(lost.stage, str(self._last), self._command(self._last))


def _all(folder: Path) -> list[Path]:
    found = folder.glob(f"{_PREFIX}*")
    return [c for c in found if c.name.removeprefix(_PREFIX).isdigit() and (c / MANIFEST).is_file()]


def _written(checkpoint: Path) -> int:
    # Not the number of the step: another run may have left later ones behind.
    return (checkpoint / MANIFEST).stat().st_mtime_ns
