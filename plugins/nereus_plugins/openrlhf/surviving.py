"""surviving: a step that a lost node cut short goes on with what is left of the job.

A node that goes without notice shows in the middle of a step: a call to an engine or to a rank
fails. Generation, the making of experience and the broadcast of weights change nothing that a job
learns, so once the session has changed the job they are done again. Where a node took state along -
a rank of a group that trains - the session says so, and the job ends with that error. OpenRLHF
waits for all of them without an end; here each has one, of `timeouts.step_s`, and a name.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Iterator
from typing import Any, Self, TypeVar

from nereus_core.errors import WaitTimeout
from nereus_plugins.ray_waits import limited
from nereus_plugins.session import Session

T = TypeVar("T")
NODE_S = 60.0
"""Longest wait, after a call failed, until Ray says which node is gone. Chosen: Ray takes 30 s with
its own settings (RAY_health_check_period_ms, ..._timeout_ms and ..._failure_threshold)."""
_NOT_LOST = "[nereus] no node of the job's plan is lost"
_OF_AN_END = re.compile(r"(?i)\b(died|dead|killed|connection|closed|peer|gloo|nccl|timed? ?out)")
"""What errors say that come of another process's end. Chosen; others are looked into at once."""
_LOOK_S = 0.5
"""Between two looks at Ray's nodes. Chosen."""
SLEEP_S = 120.0
"""For engines to wake up, and to go to sleep; chosen, not measured."""
GENERATIONS = 8
"""Times `timeouts.step_s` that what waits for generation may take: filtering of prompts, agents of
several turns and evaluations are in it. Chosen, not measured."""
TIMES_LONGEST = 3.0
"""Of the longest such part so far; chosen, not measured."""
ATTEMPTS = 3
"""Nodes that may be lost in one part of a step; chosen, not measured."""


class Drawn:
    """Prompts that were drawn from a data loader, to be drawn once more."""

    def __init__(self, source: Iterator[Any]) -> None:
        self._source, self._given, self._at = source, list[Any](), 0

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        if self._at == len(self._given):
            self._given.append(next(self._source))
        self._at += 1
        return self._given[self._at - 1]

    def rewind(self) -> None:
        """Give again what was given."""
        self._at = 0

    def used(self) -> None:
        """Forget what was given since the last rewind; what was given before and not again, stays.

        With dynamic filtering, a second attempt may need fewer prompts than the first drew.
        """
        del self._given[: self._at]
        self._at = 0

    def draws_from(self, source: Iterator[Any]) -> bool:
        """Whether this is the data loader that prompts are drawn from."""
        return self._source is source


def limited_part(part: str, run: Callable[..., Any], limit_s: float) -> Callable[..., Any]:
    """Return a part of a step, which ends with WaitTimeout where it takes too long.

    That is longer than the limit and several times what it ever took: what has grown slowly is slow
    and does not hang.
    """
    longest_s = 0.0

    @functools.wraps(run)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        nonlocal longest_s
        start_s = time.monotonic()
        awaited = f"{part} (--nereus.timeouts.step_s allows for more)"
        with limited(awaited, max(limit_s, TIMES_LONGEST * longest_s)):
            found = run(*args, **kwargs)
        longest_s = max(longest_s, time.monotonic() - start_s)
        return found

    return bounded


def survive(trainer: Any, session: Session) -> None:
    """Let a trainer's steps go on after a node is lost.

    The generator of an asynchronous job is another process, of which nothing is done again.
    """
    step_s = session.config.timeouts.step_s
    long_s = GENERATIONS * step_s
    sync_s = step_s
    if (queue := getattr(trainer, "rollout_queue", None)) is not None:
        queue.get = limited_part("the generator's responses", queue.get, long_s)
        sync_s = long_s  # its lock is the generator's too
    if (generator := getattr(trainer, "samples_generator", None)) is not None:
        generate, last = (
            limited_part("generation", generator._generate_vllm, long_s),
            Drawn(iter(())),
        )

        @functools.wraps(generate)
        def generated(dataloader_iter: Iterator[Any], *args: Any, **kwargs: Any) -> Any:
            nonlocal last
            if not last.draws_from(dataloader_iter):
                last = Drawn(dataloader_iter)

            def attempt() -> Any:
                last.rewind()
                return generate(last, *args, **kwargs)

            found = _redone(session, attempt)
            last.used()
            return found

        generator._generate_vllm = generated
    maker = trainer.experience_maker
    make = limited_part("the experience", maker.make_experience_batch, step_s)
    broadcast = limited_part("the broadcast of weights", trainer.broadcast_to_vllm, sync_s)
    train = limited_part("the training", trainer.ppo_train, step_s)

    @functools.wraps(make)
    def made(rollout_samples: Any) -> Any:
        return _redone(session, lambda: make(rollout_samples), lambda: _asleep(trainer))

    @functools.wraps(broadcast)
    def sent() -> None:
        from ray.exceptions import RayError

        try:
            broadcast()
        except RayError as error:
            if not recovered(session, error):
                raise
            broadcast()  # the change may have been of other stages alone

    @functools.wraps(train)
    def trained(global_steps: int) -> Any:
        from ray.exceptions import RayError

        try:
            return train(global_steps)
        except RayError as error:
            recovered(
                session, error
            )  # says what is lost, where a node went with a rank that trained
            raise

    maker.make_experience_batch, trainer.broadcast_to_vllm = made, sent
    trainer.ppo_train = trained


def _asleep(trainer: Any) -> None:
    """Put engines to sleep as they were, after a change that has woken them for their weights.

    Some are half awake then, and vLLM frees what is awake and what sleeps already alike: all of
    them have to be awake first.
    """
    if trainer.args.vllm.enable_sleep:
        import ray

        engines = trainer.vllm_engines
        for call in ("wake_up", "sleep"):
            try:
                ray.get([getattr(engine, call).remote() for engine in engines], timeout=SLEEP_S)
            except ray.exceptions.GetTimeoutError as error:
                raise WaitTimeout(f"{call} of {len(engines)} engines", SLEEP_S) from error


def _redone(
    session: Session, attempt: Callable[[], T], changed: Callable[[], None] = lambda: None
) -> T:
    """Do a part of a step; once more when a node was lost meanwhile and the job has been changed.

    Args:
        session: Changes the job.
        attempt: The part.
        changed: Called after a change, as a part of the next attempt.

    Raises:
        RayError: what a call raised, where no node is lost.
        NereusError: the job cannot go on; says what is lost.
    """
    from ray.exceptions import RayError

    def once_more() -> T:
        changed()
        return attempt()

    do = attempt
    for _ in range(ATTEMPTS - 1):
        try:
            return do()
        except RayError as error:  # in any form: a rank may hear of another's end first
            if not recovered(session, error):
                raise
            do = once_more
    return do()


def recovered(session: Session, error: Exception) -> bool:
    """Change the job when Ray says that devices of its plan are gone; returns whether it did.

    Where no node is lost, the error says so in a note, and is not looked into again.

    Raises:
        NereusError: the session knows better what the error comes of.
    """
    from ray.exceptions import ObjectLostError, RayActorError

    if any(note.startswith(_NOT_LOST) for note in getattr(error, "__notes__", ())):
        return False
    dead = isinstance(error, RayActorError | ObjectLostError) or bool(_OF_AN_END.search(str(error)))
    wait_s = NODE_S if dead else 0.0
    deadline_s = time.monotonic() + wait_s
    while not session.lost:
        if (told := session.explain(error)) is not error:
            raise told from error
        if time.monotonic() > deadline_s:
            error.add_note(f"{_NOT_LOST}, as Ray says {wait_s:.0f} s later.")
            return False
        time.sleep(_LOOK_S)
    session.amid_step()
    return not session.lost
