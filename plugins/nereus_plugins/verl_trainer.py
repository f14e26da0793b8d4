"""verl_trainer: what a verl trainer does besides, with ``nereus.enable=true``.

The boundary is the entry of ``on_step_end``: training of the step is done and the weights have not
yet gone to the rollout, so that units made there are served new weights by verl's own next
synchronization. ``nereus/*`` figures join the step's metrics and reach whatever loggers the job
has.
"""

from __future__ import annotations

from typing import Any

from nereus_plugins.banner import refusal, say
from nereus_plugins.session import Session, open_session
from nereus_plugins.settings import settings_of

FRAMEWORK = "verl"


def built(trainer: Any, config: Any, *args: Any, **kwargs: Any) -> object:
    """Build a trainer under Nereus, or verl's own where ``nereus.enable`` is not true.

    Raises:
        ConfigError: a key under ``nereus`` cannot be used; better at once than after an hour.
    """
    from omegaconf import OmegaConf

    keys: Any = OmegaConf.to_container(config.nereus, resolve=True)
    settings = settings_of(keys, adapter=FRAMEWORK)
    if settings is None:
        return trainer(config, *args, **kwargs)

    class Adapted(trainer):  # type: ignore[misc]  # verl's class is known at run time only
        """verl's trainer with a boundary at every ``on_step_end``."""

        _nereus: Session | None = None
        _nereus_figures: dict[str, float]

        def fit(self, *args: Any, **kwargs: Any) -> Any:
            self._nereus_figures = {}
            try:
                self._nereus = open_session(FRAMEWORK, self, settings)
            except Exception as error:
                if settings.mode == "adapt":
                    raise
                say(refusal(FRAMEWORK, error))
                return super().fit(*args, **kwargs)
            try:
                result = super().fit(*args, **kwargs)
            except BaseException as error:
                self._nereus.close(f"failed: {type(error).__name__}: {error}")
                raise
            self._nereus.close()
            return result

        def on_step_end(self) -> Any:
            if self._nereus is not None:
                self._nereus_figures = self._nereus.at_boundary()
            return super().on_step_end()

        def _compute_metrics(self, batch: Any, metrics: Any, *args: Any, **kwargs: Any) -> Any:
            metrics.update(self._nereus_figures)
            return super()._compute_metrics(batch, metrics, *args, **kwargs)

    Adapted.__name__ = Adapted.__qualname__ = trainer.__name__
    return Adapted(config, *args, **kwargs)
