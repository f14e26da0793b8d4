"""Signals: seconds, tokens and figures of a step, from what OpenRLHF computes anyway.

The trainer and its groups are listened to as objects: an attribute of the instance covers the
method, which runs unchanged. Nothing waits for a device: the end of a remote call is noticed by a
thread that waits for its references.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import ray

from nereus_core.observation import TokenStats
from nereus_core.workload import ACTOR_GENERATE, ModelStage

_WORK = ("forward", "fit")
"""Methods of a group whose seconds are those of its stage."""
_WAIT_S = 3600.0
"""Longest that a thread waits for the end of a remote call; chosen, not measured."""


@dataclass(frozen=True, slots=True)
class Heard:
    """What was heard of one step."""

    step: int
    step_s: float
    stage_s: Mapping[ModelStage, float]
    prompts: TokenStats
    responses: tuple[int, ...]
    """Tokens of every response."""
    metrics: Mapping[str, float]
    """The job's own figures."""


class Signals:
    """Listens to one trainer; `drain` hands out what was heard since the last call."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._spent_s: dict[ModelStage, float] = {}
        self._watchers: list[threading.Thread] = []
        self._responses: list[int] = []
        self._prompts: list[int] = []
        self._logs: Mapping[str, Any] = {}
        self.step = -1
        """Last completed RL step, from 0."""

    # --- Listening ------------------------------------------------------------------------------

    def listen_to_group(self, stage: ModelStage, group: Any) -> None:
        """Time what a group of ranks does for its stage."""
        for name in ("async_run_method", "async_run_method_batch"):
            setattr(group, name, self._timed(stage, getattr(group, name)))

    def listen_to_steps(self, trainer: Any) -> None:
        """Take token counts and logs of every step of a trainer."""
        train_step, save_logs = trainer.train_step, trainer.save_logs_and_checkpoints

        @functools.wraps(train_step)
        def stepped(rollout_samples: Iterable[Any], global_step: int) -> Any:
            self._count_tokens(rollout_samples)
            return train_step(rollout_samples, global_step)

        @functools.wraps(save_logs)
        def logged(global_step: int, logs_dict: Any = None, client_states: Any = None) -> None:
            self.step, self._logs = global_step - 1, dict(logs_dict or {})
            save_logs(global_step, logs_dict, client_states)

        trainer.train_step, trainer.save_logs_and_checkpoints = stepped, logged

    def _timed(self, stage: ModelStage, run: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(run)
        def timed(method_name: str, *args: Any, **kwargs: Any) -> Any:
            start_s = self._clock()
            refs = run(method_name, *args, **kwargs)
            if method_name in _WORK:
                watcher = threading.Thread(
                    target=self._note_end, args=(stage, start_s, list(refs)), daemon=True
                )
                with self._lock:
                    self._watchers.append(watcher)
                watcher.start()
            return refs

        return timed

    def _note_end(self, stage: ModelStage, start_s: float, refs: list[Any]) -> None:
        ready, _ = ray.wait(refs, num_returns=len(refs), timeout=_WAIT_S, fetch_local=False)
        if len(ready) == len(refs):
            with self._lock:
                spent_s = self._clock() - start_s
                self._spent_s[stage] = self._spent_s.get(stage, 0.0) + spent_s

    def _count_tokens(self, samples: Iterable[Any]) -> None:
        for sample in samples:
            responses = [int(n) for n in sample.response_length.tolist()]
            totals = [int(n) for n in sample.total_length.tolist()]
            self._responses += responses
            self._prompts += [max(0, t - r) for t, r in zip(totals, responses, strict=True)]

    # --- Handing out ----------------------------------------------------------------------------

    def drain(self) -> Heard:
        """Return what was heard since the last call; waits for no step."""
        for watcher in self._watchers:
            watcher.join(1.0)  # its references are there: the step is over
        with self._lock:
            spent_s, self._spent_s, self._watchers = self._spent_s, {}, []
        logs, self._logs = self._logs, {}
        if (generation := logs.get("timing/generation")) is not None:
            spent_s[ACTOR_GENERATE] = float(generation)
        responses, self._responses = self._responses, []
        prompts, self._prompts = self._prompts, []
        return Heard(
            self.step,
            float(logs.get("timing/step_total", 0.0)),
            spent_s,
            TokenStats.of(prompts),
            tuple(responses),
            _figures(logs),
        )


def _figures(logs: Mapping[str, Any]) -> dict[str, float]:
    """Numbers among a step's logs, except Nereus's own."""
    return {
        key: float(value)
        for key, value in logs.items()
        if isinstance(value, int | float) and not key.startswith("nereus/")
    }
