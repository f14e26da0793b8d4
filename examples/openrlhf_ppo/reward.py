"""The reward of the example: 1 for a response that ends in the right sum."""

import re


def reward_func(queries: list[str], prompts: list[str], labels: list[str]) -> dict[str, object]:
    """Score one response, as OpenRLHF's ``--reward.remote_url FILE.py`` asks for them."""
    (query,), (prompt,), (label,) = queries, prompts, labels
    numbers = re.findall(r"-?\d+", query[len(prompt) :])
    right = float(bool(numbers) and numbers[-1] == label)
    return {"rewards": right, "scores": right, "extra_logs": {"right": right}}
