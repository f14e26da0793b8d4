"""verl_trainer: what a verl trainer does besides, with ``nereus.enable=true``.

The boundary is the entry of ``on_step_end``: training of the step is done and the weights have not
yet gone to the rollout, so that units made there are served new weights by verl's own next
synchronization. A second one is ``_balance_batch``: the batch has been sampled and its lengths are
known, nothing of it has been trained on; a plan that would not hold it is changed there and then.
``nereus/*`` figures join the step's metrics and reach whatever loggers the job has. A checkpoint of
another number of ranks, which verl cannot load, is read by the adapter.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from nereus_core.config import NereusConfig
from nereus_core.plan import Plan
from nereus_core.registry import Registry
from nereus_plugins import hookspecs
from nereus_plugins.banner import refusal, say
from nereus_plugins.ray_waits import limited
from nereus_plugins.session import Session, open_session
from nereus_plugins.settings import settings_of

FRAMEWORK = "verl"


def built(trainer: Any, config: Any, *args: Any, **kwargs: Any) -> object:
    """Build a trainer under Nereus, or verl's own where ``nereus.enable`` is not true.

    Raises:
        ConfigError: a key under ``nereus`` cannot be used; better at once than after an hour.
    """
    found = asked(config)
    if found is None:
        return trainer(config, *args, **kwargs)
    settings = _bounded(found, config)

    class Adapted(trainer):  # type: ignore[misc]  # verl's class is known at run time only
        """verl's trainer with a boundary at every ``on_step_end``."""

        _nereus: Session | None = None
        _nereus_figures: dict[str, float]

        def fit(self, *args: Any, **kwargs: Any) -> Any:
            self._nereus_figures = {}
            try:
                self._nereus = open_session(FRAMEWORK, self, settings)
            except Exception as error:
                # Nereus's own engine may be what is wrong, and it would train on.
                if settings.mode == "adapt" or settings.backend.get("engine") == "tp":
                    raise
                say(refusal(FRAMEWORK, error))
                return super().fit(*args, **kwargs)
            self._nereus.spell = partial(_spelled, self, self._nereus)
            try:
                result = super().fit(*args, **kwargs)
            except BaseException as error:
                self._nereus.close(f"failed: {type(error).__name__}: {error}")
                raise
            self._nereus.close()
            return result

        def _load_checkpoint(self) -> Any:
            with ExitStack() as wrapped:
                wrapped.enter_context(any_world(self, "actor", self.actor_rollout_wg, settings))
                if self.use_critic:
                    wrapped.enter_context(any_world(self, "critic", self.critic_wg, settings))
                return super()._load_checkpoint()

        def step(self, *args: Any, **kwargs: Any) -> Any:
            with self._limited("verl's step", settings.timeouts.step_s):
                return super().step(*args, **kwargs)

        def _balance_batch(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
            # Later mini-batches of separate_async have old weights aside, cut as the engine is.
            if self._nereus is not None and self.local_trigger_step == 0:
                tags = [tag for tag in batch.tags if not tag.get("is_padding", False)]
                prompt, response = (
                    [int(tag[key]) for tag in tags if key in tag]
                    for key in ("prompt_len", "response_len")
                )
                self._nereus.before_training(prompt, response)
            return super()._balance_batch(batch, *args, **kwargs)

        def on_step_end(self) -> Any:
            if self._nereus is not None:
                self._nereus_figures = self._nereus.at_boundary()
            awaited = "verl's weight synchronization"
            with self._limited(awaited, settings.timeouts.boundary_s):
                return super().on_step_end()

        @contextmanager
        def _limited(self, awaited: str, timeout_s: float) -> Iterator[None]:
            """Give verl's own waits an end; a job that is only watched keeps them as they are."""
            if self._nereus is None or not self._nereus.adapts:
                yield
                return
            with limited(f"{awaited} {self.global_steps}", timeout_s):
                yield

        def _compute_metrics(self, batch: Any, metrics: Any, *args: Any, **kwargs: Any) -> Any:
            metrics.update(self._nereus_figures)
            return super()._compute_metrics(batch, metrics, *args, **kwargs)

    Adapted.__name__ = Adapted.__qualname__ = trainer.__name__
    return Adapted(config, *args, **kwargs)


def _spelled(trainer: Any, session: Session, current: Plan, wanted: Plan) -> str | None:
    """Ask the adapter for verl's words for a plan."""
    registry = Registry.load()
    registry.add_hookspecs(hookspecs)
    asked = {
        "handle": trainer,
        "job": session.controller.job,
        "backend": session.config.backend,
        "current": current,
        "wanted": wanted,
    }
    found: str | None = registry.ask(FRAMEWORK, "nereus_overrides", **asked)
    return found


def asked(config: Any) -> NereusConfig | None:
    """Return the settings of a job that has a ``nereus`` section; None unless it is switched on."""
    from omegaconf import OmegaConf

    keys: Any = OmegaConf.to_container(config.nereus, resolve=True)
    return settings_of(keys, adapter=FRAMEWORK)


def _bounded(settings: NereusConfig, config: Any) -> NereusConfig:
    """Return settings that keep trainers and rollouts apart where verl has a pool for each."""
    if str(config.trainer.v1.trainer_mode) != "separate_async":
        return settings
    constraints = settings.constraints
    apart = (*constraints.apart, ("actor/generate", "actor/train"))
    return settings.model_copy(
        update={"constraints": constraints.model_copy(update={"apart": apart})}
    )


@contextmanager
def any_world(trainer: Any, part: str, group: Any, settings: NereusConfig) -> Iterator[None]:
    """Let a worker group load what another number of ranks saved, where verl's own way cannot."""
    once = group.load_checkpoint

    def load(local_path: str, **kwargs: Any) -> Any:
        asked = {"handle": trainer, "part": part, "folder": Path(local_path)}
        try:
            registry = Registry.load()
            registry.add_hookspecs(hookspecs)
            ranks = registry.ask(FRAMEWORK, "nereus_saved_ranks", **asked)
        except Exception as error:  # no rank has been touched: verl may load it yet
            if settings.mode == "adapt":
                raise
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            say(f"[nereus] WARNING: {part}: verl loads {local_path} without Nereus. {reason}")
            ranks = None
        if ranks is None:
            return once(local_path=local_path, **kwargs)
        limit_s = settings.timeouts.step_s
        registry.ask(FRAMEWORK, "nereus_resume", **asked, ranks=ranks, timeout_s=limit_s)
        say(f"[nereus] {part}: the checkpoint of {ranks} ranks was read by {group.world_size}")
        return None

    group.load_checkpoint = load
    try:
        yield
    finally:
        group.load_checkpoint = once
