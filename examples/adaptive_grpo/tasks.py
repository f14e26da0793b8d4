"""Arithmetic from reasoning-gym: prompts, and answers scored by its own verifier.

The response budget grows during the run, as length curricula do in practice: early steps leave room
for the number alone, later ones for more.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import reasoning_gym
from transformers import PreTrainedTokenizerBase

_NUMBER = re.compile(r"-?\d+")


class ReasoningGymTask:
    """A procedural reasoning-gym data set as an RL task.

    A prompt id is the index of the problem, so a step that is run again asks the same problems.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        dataset: str,
        options: dict[str, object],
        prompts_per_step: int,
        seed: int,
        budget: Sequence[tuple[int, int]],
    ) -> None:
        self._tokenizer = tokenizer
        self._prompts_per_step = prompts_per_step
        self._budget = sorted(budget)
        self._problems = reasoning_gym.create_dataset(dataset, seed=seed, size=100_000, **options)

    def prompts(self, step: int) -> list[tuple[int, list[int]]]:
        """Return (prompt id, token ids) for every prompt of a step."""
        first = step * self._prompts_per_step
        return [(i, self._encode(i)) for i in range(first, first + self._prompts_per_step)]

    def max_response_tokens(self, step: int) -> int:
        """Return the response budget of a step: the last entry of ``budget`` that has begun."""
        return [tokens for begin, tokens in self._budget if begin <= step][-1]

    def score(self, prompt_id: int, tokens: Sequence[int]) -> float:
        """Reward 1 when the first number is right, 0.2 for any other, 0 for none."""
        text = self._tokenizer.decode(list(tokens), skip_special_tokens=True)
        numbers = _NUMBER.findall(text)
        if not numbers:
            return 0.0
        problem = self._problems[prompt_id]
        return max(0.2, float(self._problems.score_answer(numbers[0], problem)))

    def _encode(self, prompt_id: int) -> list[int]:
        # The question ends in "=": without a chat template around it, a small model goes on with
        # the number, and a sequence is a third as long.
        tokens: list[int] = self._tokenizer.encode(self._problems[prompt_id]["question"])
        return tokens


def make(tokenizer: PreTrainedTokenizerBase, **options: object) -> ReasoningGymTask:
    """Build the task from ``job.task_args``."""
    return ReasoningGymTask(tokenizer, **options)  # type: ignore[arg-type]  # validated by its use
