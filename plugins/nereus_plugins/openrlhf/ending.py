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
import logging
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from nereus_core.errors import NereusError, StateLost, WaitTimeout
from nereus_plugins.banner import say
from nereus_plugins.openrlhf.checkpoints import Checkpoints
from nereus_plugins.openrlhf.directory import ATTRIBUTE, CALL_S, find

ENDS_S = 30.0
"""For the trainer to end by itself, and again when its step was cut short. Chosen, not measured."""
_log = logging.getLogger("nereus")
_OF_ACTOR = re.compile(r"(?m)^\s*(class_name|pid|ip): (\S+)$")
"""Lines by which Ray's error of a dead actor says which it was."""


class StepLost(NereusError):
    """A step cannot be ended, for a process has died or hangs; the job has to be resumed."""

    def __init__(self, what: str, step: int, checkpoints: Checkpoints) -> None:
        newest = checkpoints.newest
        self.what, self.step = what, step
        self.checkpoint = None if newest is None else newest.folder
        where = (
            checkpoints.why_none
            if newest is None
            else f"the newest checkpoint is {newest}. Resume with: {newest.resume}"
        )
        super().__init__(f"step {step} was not ended: {what}; {where}.")


class Ending:
    """Says of a trainer's error what is known of its cause, and where to go on.

    Args:
        trainer: The trainer, before its first step.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._checkpoints = Checkpoints(trainer)
        loaded = self._checkpoints.newest
        self._step = 1 if loaded is None else loaded.step + 1

    @contextmanager
    def saving(self, step: int) -> Iterator[None]:
        """Note that a step has ended, and that OpenRLHF saves what it keeps of it in this block."""
        due = self._checkpoints.due(step)
        if due:
            self._ask("saving", True)
        try:
            yield
            self._checkpoints.saved(step)
            self._step = step + 1
        finally:
            if due:
                self._ask("saving", False)

    def explained(self, error: Exception) -> Exception:
        """Return the error, or what it comes of."""
        newest = self._checkpoints.newest
        if isinstance(error, StateLost):
            if newest is None or error.checkpoint is not None:
                return error
            return StateLost(error.stage, str(newest), newest.resume)
        from ray.exceptions import RayError

        if isinstance(error, RayError) and (what := self._ask("failed")) is not None:
            return StepLost(what, self._step, self._checkpoints)
        return error

    def last_word(self, error: Exception) -> Exception:
        """Return what the job ends with; the controller of an asynchronous one is told it too.

        Args:
            error: It ended the trainer's loop, and nothing can be done about it.
        """
        from ray.exceptions import RayError

        told = self.explained(error)
        if isinstance(told, RayError | WaitTimeout):
            told = StepLost(said(told), self._step, self._checkpoints)
        if isinstance(told, NereusError):
            self._ask("end", told)
        return told

    def _ask(self, method: str, *args: Any) -> Any:
        """Ask the directory; None where it is gone, which must not hide why the job ends."""
        import ray

        directory = getattr(self._trainer, ATTRIBUTE, None)
        if directory is None:
            return None
        try:
            return ray.get(getattr(directory, method).remote(*args), timeout=CALL_S)
        except ray.exceptions.RayError as error:
            _log.warning("the directory of this run does not answer: %s", error)
            return None


def named(fit: Callable[[Any], Any], name: str, step_s: float) -> Callable[[Any], Any]:
    """Return the loop of an asynchronous job's controller, which ends with a name.

    Args:
        fit: OpenRLHF's own loop.
        name: Of the directory.
        step_s: Longest wait for the trainer, which may be saving a checkpoint.
    """

    @functools.wraps(fit)
    def fit_named(self: Any) -> Any:
        from ray.exceptions import RayError

        try:
            return fit(self)
        except RayError as error:
            told = _cause(self.trainer_actor, name, error, step_s)
            if told is error:
                raise
            raise told from error

    return fit_named


def _cause(trainer_actor: Any, name: str, error: Exception, step_s: float) -> Exception:
    """Let the trainer end, and return the error that it ended with; or the one that there was.

    It may be in the middle of a step, or of a broadcast to an engine that is gone: what it then
    waits for is cut short, but not a checkpoint.
    """
    import ray

    directory = find(name)
    if directory is None:  # the trainer has not begun, or its process is what has died
        return error
    try:
        say(f"[nereus] the job ends: {said(error)}")
        ray.get(directory.fail.remote(said(error)), timeout=CALL_S)
        left, cut = [trainer_actor.__ray_ready__.remote()], False  # behind the loop that it is in
        end_s = time.monotonic() + step_s
        while left and not cut and time.monotonic() < end_s:
            _, left = ray.wait(left, timeout=ENDS_S)
            cut = bool(left) and ray.get(directory.cut_short.remote(), timeout=CALL_S)
        if left and not ray.wait(left, timeout=ENDS_S)[0]:
            say(f"[nereus] the trainer has not ended {ENDS_S:.0f} s after its ranks were")
        told: Exception | None = ray.get(directory.ended.remote(), timeout=CALL_S)
    except Exception as another:  # must not hide why the job ends
        say(f"[nereus] the trainer could not be asked: {type(another).__name__}: {another}")
        return error
    return told or error


def said(error: BaseException) -> str:
    """Say what failed: the actor that died, else the error that was raised."""
    from ray.exceptions import RayActorError

    cause = error
    while isinstance(inner := getattr(cause, "cause", None), BaseException) and inner is not cause:
        cause = inner
    if isinstance(cause, RayActorError):
        found = dict(_OF_ACTOR.findall(str(cause)))
        if {"class_name", "pid", "ip"} <= found.keys():
            return f"{found['class_name']} died (pid {found['pid']} on {found['ip']})"
    lines = str(cause).strip().splitlines()
    return f"{type(cause).__name__}: {lines[-1].rstrip('.')}" if lines else type(cause).__name__
