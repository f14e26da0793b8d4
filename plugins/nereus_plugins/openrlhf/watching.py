"""watching: the one method of OpenRLHF's trainers that Nereus wraps, and what it does there.

The wrapper travels by value to the actor in which the trainer runs; what it needs there is imported
there. `fit` is the whole loop of a trainer. Around it, a session attaches to the trainer; inside
it, `save_logs_and_checkpoints` of that very trainer object, called once per step after training and
after the weights went to the engines, becomes the boundary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from nereus_core.config import NereusConfig
from nereus_plugins.banner import refusal, say
from nereus_plugins.openrlhf import FRAMEWORK
from nereus_plugins.openrlhf.bounds import bounded
from nereus_plugins.openrlhf.directory import open_on
from nereus_plugins.openrlhf.ending import Ending
from nereus_plugins.openrlhf.surviving import recovered, survive
from nereus_plugins.session import Session, open_session


def watched(fit: Callable[..., Any], config: NereusConfig, name: str | None) -> Callable[..., Any]:
    """Return the loop of a trainer with Nereus around it.

    Args:
        fit: OpenRLHF's own loop.
        config: The settings.
        name: Of the directory, in mode adapt.
    """

    @functools.wraps(fit)
    def fit_watched(self: Any, global_step: int = 0) -> Any:
        return run_watched(self, functools.partial(fit, self, global_step), config, name)

    return fit_watched


def run_watched(
    trainer: Any, fit: Callable[[], Any], config: NereusConfig, name: str | None
) -> Any:
    """Run a trainer's loop under a session.

    Where Nereus cannot attach, the job goes on without it in modes observe and advise, with a
    warning; in mode adapt the error is the job's, before its first step.
    """
    ending = None
    try:
        if name is not None:
            open_on(trainer, name)
            ending = Ending(trainer)
        session = open_session(FRAMEWORK, trainer, bounded(config, trainer.args))
    except Exception as error:
        if config.enabled and config.mode == "adapt":
            raise
        say(refusal(FRAMEWORK, error))
        return fit()
    _at_every_boundary(trainer, session, ending)
    if ending is not None:
        session.explain = ending.explained
        survive(trainer, session)
    try:
        found = _named(fit, session)
    except Exception as error:
        told = error if ending is None else ending.last_word(error)
        session.close(f"failed: {type(told).__name__}: {told}")
        if told is error:
            raise
        raise told from error
    except BaseException as error:
        session.close(f"failed: {type(error).__name__}: {error}")
        raise
    session.close()
    return found


def _named(fit: Callable[[], Any], session: Session) -> Any:
    """Run a loop; where a call in it failed because a node is gone, say what is lost with it."""
    from ray.exceptions import RayActorError

    try:
        return fit()
    except RayActorError as error:
        if session.adapts:
            recovered(session, error)
        raise


def _at_every_boundary(trainer: Any, session: Session, ending: Ending | None) -> None:
    """Put the figures of each boundary into the next step's logs, and call the session after it."""
    save_logs = trainer.save_logs_and_checkpoints
    figures: dict[str, float] = {}

    @functools.wraps(save_logs)
    def saved(global_step: int, logs_dict: Any = None, client_states: Any = None) -> None:
        with nullcontext() if ending is None else ending.saving(global_step):
            save_logs(global_step, {**(logs_dict or {}), **figures}, client_states)
        figures.update(session.at_boundary())

    trainer.save_logs_and_checkpoints = saved
