"""surviving: a step that a lost node cut short goes on with what is left of the job.

A node that goes without notice shows in the middle of a step: a call to an engine or to a rank
fails. Generation, the making of experience and the broadcast of weights change nothing that a job
learns, so once the session has changed the job they are done again. Where a node took state along -
a rank of a group that trains - the session says so, and the job ends with that error.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self, TypeVar

from nereus_core.errors import StateLost
from nereus_plugins.session import Session

T = TypeVar("T")
NODE_S = 60.0
"""Longest wait, after a call failed, until Ray says which node is gone. Chosen: Ray takes 30 s with
its own settings (RAY_health_check_period_ms, ..._timeout_ms and ..._failure_threshold)."""
_LOOK_S = 0.5
"""Between two looks at Ray's nodes. Chosen."""
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


def survive(trainer: Any, session: Session) -> None:
    """Let a trainer's steps go on after a node is lost.

    The generator of an asynchronous job is another process, of which nothing is done again.
    """
    if (generator := getattr(trainer, "samples_generator", None)) is not None:
        generate = generator._generate_vllm

        @functools.wraps(generate)
        def generated(dataloader_iter: Iterator[Any], *args: Any, **kwargs: Any) -> Any:
            drawn = Drawn(dataloader_iter)

            def attempt() -> Any:
                drawn.rewind()
                return generate(drawn, *args, **kwargs)

            return _redone(session, attempt)

        generator._generate_vllm = generated
    maker, broadcast = trainer.experience_maker, trainer.broadcast_to_vllm
    make, train = maker.make_experience_batch, trainer.ppo_train

    @functools.wraps(make)
    def made(rollout_samples: Any) -> Any:
        return _redone(session, lambda: make(rollout_samples))

    @functools.wraps(broadcast)
    def sent() -> None:
        from ray.exceptions import RayError

        try:
            broadcast()
        except RayError:  # in any form: ranks hear of an engine's end by their process group
            if not _recovered(session):  # which has sent the weights
                raise

    @functools.wraps(train)
    def trained(global_steps: int) -> Any:
        from ray.exceptions import RayError

        try:
            return train(global_steps)
        except RayError:
            _recovered(session)  # says what is lost, where a node went with a rank that trained
            raise

    maker.make_experience_batch, trainer.broadcast_to_vllm = made, sent
    trainer.ppo_train = trained


def _redone(session: Session, attempt: Callable[[], T]) -> T:
    """Do a part of a step; once more when a node was lost meanwhile and the job has been changed.

    Raises:
        RayError: what a call raised, where no node is lost.
        NereusError: the job cannot go on; says what is lost.
    """
    from ray.exceptions import ObjectLostError, RayActorError

    for _ in range(ATTEMPTS - 1):
        try:
            return attempt()
        except (RayActorError, ObjectLostError):
            if not _recovered(session):
                raise
    return attempt()


def _recovered(session: Session) -> bool:
    """Change the job when Ray says that devices of its plan are gone; returns whether it did."""
    deadline_s = time.monotonic() + NODE_S
    while not session.lost:
        if time.monotonic() > deadline_s:
            return False
        time.sleep(_LOOK_S)
    session.at_boundary()
    return not session.lost


def resumable(lost: StateLost, args: Any) -> StateLost:
    """Return the error with OpenRLHF's newest checkpoint and how to go on from it."""
    latest = Path(args.ckpt.path) / "_actor" / "latest"
    try:
        newest = latest.with_name(latest.read_text(encoding="utf-8").strip())
    except OSError:
        return lost
    return StateLost(lost.stage, str(newest), "the same command and --ckpt.load_enable")
