"""What a job learns: prompts by step and a rule that scores responses."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from nereus_core.errors import ConfigError


class Task(Protocol):
    """Deterministic: the same step gives the same prompts, whatever happened before."""

    def prompts(self, step: int) -> Sequence[tuple[int, Sequence[int]]]:
        """Return (prompt id, token ids) for every prompt of an RL step."""
        ...

    def max_response_tokens(self, step: int) -> int:
        """Return the longest response at a step; the job's own bound holds beside it."""
        ...

    def score(self, prompt_id: int, tokens: Sequence[int]) -> float:
        """Return the reward of a response, given without its prompt."""
        ...


class CopyTask:
    """Say the prompt's last token again and again: learnable by a tiny model without a tokenizer.

    Args:
        vocab: token ids are drawn below it.
        seed: of the prompts.
        prompts_per_step: as the job's.
        prompt_tokens: shortest and longest prompt.
        response_tokens: longest response.
        growth: added to ``response_tokens`` from ``growth_step`` on.
        growth_step: RL step at which responses may become longer.
    """

    def __init__(
        self,
        vocab: int,
        seed: int,
        prompts_per_step: int,
        prompt_tokens: tuple[int, int] = (4, 8),
        response_tokens: int = 16,
        growth: int = 0,
        growth_step: int = 0,
    ) -> None:
        self._vocab, self._seed, self._prompts_per_step = vocab, seed, prompts_per_step
        self._shortest, self._longest = prompt_tokens
        self._response_tokens, self._growth = response_tokens, growth
        self._growth_step = growth_step

    def prompts(self, step: int) -> list[tuple[int, list[int]]]:
        """Return the prompts of an RL step; ids are never used twice."""
        first = step * self._prompts_per_step
        return [(i, self._prompt(i)) for i in range(first, first + self._prompts_per_step)]

    def _prompt(self, prompt_id: int) -> list[int]:
        random = np.random.default_rng([self._seed, prompt_id])
        length = int(random.integers(self._shortest, self._longest + 1))
        tokens: list[int] = random.integers(1, self._vocab, length).tolist()
        return tokens

    def max_response_tokens(self, step: int) -> int:
        """Return the longest response at a step."""
        return self._response_tokens + (self._growth if step >= self._growth_step else 0)

    def score(self, prompt_id: int, tokens: Sequence[int]) -> float:
        """Return the part of the response that equals the prompt's last token, with partial credit.

        A token that is near the wanted one counts a little, so that a random model sees a slope.
        """
        wanted = self._prompt(prompt_id)[-1]
        near = [1.0 - abs(token - wanted) / self._vocab for token in tokens]
        return sum(near) / max(1, len(near))


def load_task(
    name: str | None,
    args: Mapping[str, Any],
    *,
    tokenizer: object,
    vocab: int,
    seed: int,
    prompts_per_step: int,
) -> Task:
    """Build the task that a configuration names; without a name, `CopyTask`.

    Raises:
        ConfigError: the factory cannot be imported or does not take these arguments.
    """
    try:
        if name is None:
            return CopyTask(vocab, seed, prompts_per_step, **args)
        module, separator, factory = name.partition(":")
        if not separator:
            raise ConfigError("job.task", f"got {name!r}; expected 'module:factory'")
        task: Task = getattr(importlib.import_module(module), factory)(tokenizer, **args)
    except (ImportError, AttributeError) as error:
        raise ConfigError("job.task", f"{name!r} cannot be imported: {error}") from error
    except TypeError as error:
        raise ConfigError("job.task_args", f"{dict(args)!r} does not fit: {error}") from error
    return task
