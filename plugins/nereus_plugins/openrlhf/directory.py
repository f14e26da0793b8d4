"""directory: where processes of a job that hold old handles find the ranks and engines of now.

OpenRLHF's driver saves the model through the group that it built at the start, and the generator of
an asynchronous job has its own list of engines. A small Ray actor, named after the run, tells them.
Its handle lies on the trainer as `nereus_directory`; the adapter publishes there while it still
holds the generator's lock, so that no generation starts on engines that have gone. It also says
what the generation of an asynchronous job failed of (ending.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

CALL_S = 60.0
"""Longest wait for the directory; chosen, not measured: it does nothing but keep lists."""
ATTRIBUTE = "nereus_directory"
"""Of the trainer."""


class Directory:
    """Keeps what was published last; runs as a Ray actor.

    Args:
        waited_for: Actors of Ray in which an asynchronous job's trainer waits for its generator.
        ranks: All ranks of the job's groups.
    """

    def __init__(self, waited_for: Sequence[Any] = (), ranks: Sequence[Any] = ()) -> None:
        self._waited_for, self._ranks = waited_for, list(ranks)
        self._failed: str | None = None
        self._ended: Exception | None = None
        self._saving = False
        self._version = 0
        self._engines: list[Any] = []
        self._groups: dict[str, list[Any]] = {}

    def publish(self, engines: Sequence[Any], groups: Mapping[str, Sequence[Any]]) -> None:
        """Take in all engines, and the ranks of each group by its first rank at the start."""
        self._version += 1
        self._engines = list(engines)
        self._groups = {first: list(handles) for first, handles in groups.items()}
        self._ranks = [handle for handles in groups.values() for handle in handles]

    def engines_since(self, version: int) -> tuple[int, list[Any]] | None:
        """Return the engines of now and their version, None when that is the one given."""
        return None if version == self._version else (self._version, self._engines)

    def group(self, first: str) -> list[Any] | None:
        """Return the ranks of the group that began with a rank; None before a change."""
        return self._groups.get(first)

    def fail(self, what: str) -> None:
        """Take in what generation failed of, and let the trainer wait for it no longer."""
        import ray

        self._failed = what
        for actor in self._waited_for:
            ray.kill(actor)

    def saving(self, begins: bool) -> None:
        """Take in that a checkpoint is being written, or is whole."""
        self._saving = begins

    def cut_short(self) -> bool:
        """End the ranks, and with them whatever the trainer has asked of them and waits for.

        Returns whether it did: not while they write a checkpoint.
        """
        import ray

        if self._saving:
            return False
        for rank in self._ranks:
            ray.kill(rank)
        return True

    def failed(self) -> str | None:
        """Return what generation failed of; None while it goes on."""
        return self._failed

    def end(self, error: Exception) -> None:
        """Take in what the trainer ends with."""
        self._ended = error

    def ended(self) -> Exception | None:
        """Return what the trainer has ended with, where generation failed."""
        return self._ended


def open_on(trainer: Any, name: str) -> None:
    """Start the directory on the trainer's own node: it lives as long as the trainer does."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor_class = ray.remote(num_cpus=0)(Directory)
    waited_for = []
    if (lock := getattr(trainer, "vllm_lock", None)) is not None:
        waited_for = [lock, trainer.rollout_queue.actor, trainer.rollout_slots.actor]
    named = ("actor", "critic", "reward", "reference")
    groups = [getattr(trainer, f"{which}_model_group", None) for which in named]
    ranks = [rank for group in groups if group is not None for rank in group._actor_handlers]
    opened = actor_class.options(name=name, scheduling_strategy=here).remote(waited_for, ranks)
    setattr(trainer, ATTRIBUTE, opened)


def find(name: str) -> Any:
    """Return the directory of a run; None where its trainer has not begun, or is gone."""
    import ray

    try:
        return ray.get_actor(name)
    except ValueError:
        return None


def following(fit: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return the loop of the asynchronous generator, which looks for new engines before use."""

    @functools.wraps(fit)
    def fit_following(self: Any, *args: Any, **kwargs: Any) -> Any:
        follow(self.samples_generator, name)
        return fit(self, *args, **kwargs)

    return fit_following


def follow(generator: Any, name: str) -> None:
    """Let a sample generator take its engines from the directory."""
    import ray

    generate, seen = generator._generate_vllm, 0

    @functools.wraps(generate)
    def generated(*args: Any, **kwargs: Any) -> Any:
        nonlocal seen
        directory = find(name)
        if directory is not None:
            news = ray.get(directory.engines_since.remote(seen), timeout=CALL_S)
            if news is not None:
                seen, generator.vllm_engines[:] = news
        return generate(*args, **kwargs)

    generator._generate_vllm = generated


def saving_current(save: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return the driver's `async_save_model`, which saves through the ranks of now."""

    @functools.wraps(save)
    def saved(self: Any) -> Any:
        import ray

        directory = find(name)
        if directory is not None:
            first = self._actor_handlers[0]._actor_id.hex()
            now = ray.get(directory.group.remote(first), timeout=CALL_S)
            self._actor_handlers = now or self._actor_handlers
        return save(self)

    return saved
