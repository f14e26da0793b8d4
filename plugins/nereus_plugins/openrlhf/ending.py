"""ending: a job that cannot go on says what has died, in which step, and where it can resume.

In a synchronous job the trainer hears of it. OpenRLHF's controller of an asynchronous job waits for
generator and trainer at once. When the generator dies, or an engine under it, the controller ends
in Ray's words and takes the trainer along, wherever that waits: for responses, or for the lock that
the dead generator held. Here the controller first says in the directory what failed, which ends the
trainer's wait; the trainer, which knows step and checkpoint, closes its session with the error that
the controller then ends with.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nereus_core.errors import NereusError, StateLost
from nereus_plugins.banner import say
from nereus_plugins.openrlhf.directory import ATTRIBUTE, CALL_S, find

ENDS_S = 30.0
"""For the trainer to end by itself, and again when its step was cut short. Chosen, not measured."""
RESUME = "the same command and --ckpt.load_enable"
_OF_ACTOR = re.compile(r"(?m)^\s*(class_name|pid|ip): (\S+)$")
"""Lines by which Ray's error of a dead actor says which it was."""


class StepLost(NereusError):
    """A step cannot be ended, for a process has died; the job must resume from a checkpoint."""

    def __init__(self, what: str, step: int, checkpoint: str | None) -> None:
        self.what, self.step, self.checkpoint = what, step, checkpoint
        where = (
            f"the newest checkpoint is {checkpoint}. Resume with: {RESUME}."
            if checkpoint
            else "no checkpoint was kept: set --ckpt.save_steps."
        )
        super().__init__(f"step {step} was not ended: {what}; {where}")


@dataclass(slots=True)
class Ending:
    """Says of a trainer's error what is known of its cause, and where to go on.

    Args:
        trainer: The trainer.
        since_s: When the job began, in seconds of the clock of files.
    """

    trainer: Any
    since_s: float
    step: int = 1
    """In which the job is, from 1."""

    def explained(self, error: Exception) -> Exception:
        """Return the error, or what it comes of."""
        checkpoint = newest_checkpoint(self.trainer.args, self.since_s)
        if isinstance(error, StateLost):
            return StateLost(error.stage, checkpoint, RESUME) if checkpoint else error
        from ray.exceptions import RayError

        if isinstance(error, RayError) and (what := self._failed()) is not None:
            return StepLost(what, self.step, checkpoint)
        return error

    def last_word(self, error: Exception) -> Exception:
        """Return what the job ends with; the controller of an asynchronous one is told it too.

        Args:
            error: It ended the trainer's loop, and nothing can be done about it.
        """
        from ray.exceptions import RayActorError

        told = self.explained(error)
        if isinstance(told, RayActorError):
            checkpoint = newest_checkpoint(self.trainer.args, self.since_s)
            told = StepLost(_said(told), self.step, checkpoint)
        if isinstance(told, StepLost):
            self._ask("end", told)
        return told

    def _failed(self) -> str | None:
        found: str | None = self._ask("failed")
        return found

    def _ask(self, method: str, *args: Any) -> Any:
        import ray

        directory = getattr(self.trainer, ATTRIBUTE, None)
        if directory is None:
            return None
        return ray.get(getattr(directory, method).remote(*args), timeout=CALL_S)


def newest_checkpoint(args: Any, since_s: float) -> str | None:
    """Return the folder of OpenRLHF's newest checkpoint; None where the job has none.

    Args:
        args: Of the job.
        since_s: What is older than this is another job's, unless this one was told to load it.
    """
    latest = Path(args.ckpt.path) / "_actor" / "latest"
    try:
        newest = latest.with_name(latest.read_text(encoding="utf-8").strip())
        if latest.stat().st_mtime < since_s and not args.ckpt.load_enable:
            return None
    except OSError:
        return None
    return str(newest)


def named(fit: Callable[[Any], Any], name: str) -> Callable[[Any], Any]:
    """Return the loop of an asynchronous job's controller, which ends with a name.

    Args:
        fit: OpenRLHF's own loop.
        name: Of the directory.
    """

    @functools.wraps(fit)
    def fit_named(self: Any) -> Any:
        from ray.exceptions import RayError

        try:
            return fit(self)
        except RayError as error:
            raise _cause(self.trainer_actor, name, error) from error

    return fit_named


def _cause(trainer_actor: Any, name: str, error: Exception) -> Exception:
    """Let the trainer end, and return the error that it ended with; or the one that there was.

    It may be in the middle of a step, or of a broadcast to an engine that is gone: what it then
    waits for is cut short.
    """
    import ray

    directory = find(name)
    if directory is None:  # the trainer has not begun, or its process is what has died
        return error
    try:
        say(f"[nereus] the job ends: {_said(error)}")
        ray.get(directory.fail.remote(_said(error)), timeout=CALL_S)
        left = [trainer_actor.__ray_ready__.remote()]  # behind the loop that it is in
        _, left = ray.wait(left, timeout=ENDS_S)
        if left:
            ray.get(directory.cut_short.remote(), timeout=CALL_S)
            ray.wait(left, timeout=ENDS_S)
        told: Exception | None = ray.get(directory.ended.remote(), timeout=CALL_S)
    except ray.exceptions.RayError:
        return error
    return told or error


def _said(error: Exception) -> str:
    """Say what failed: the actor that died, else the error that was raised."""
    found = dict(_OF_ACTOR.findall(str(error)))
    if {"class_name", "pid", "ip"} <= found.keys():
        return f"{found['class_name']} died (pid {found['pid']} on {found['ip']})"
    cause = getattr(error, "cause", None) or error
    return f"{type(cause).__name__}: {str(cause).strip().splitlines()[-1]}"
