"""What an engine's driver asks of every rank, and what each answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

TIED = "nereus_tied"
"""In a rank's model configuration: the head is tied, though SGLang was told that it is not."""


@dataclass(frozen=True, slots=True)
class Call:
    """What every rank is to do with its model."""

    function: Callable[..., object]
    """Takes the model, the rank's number in its engine, and the argument."""
    argument: object = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """How it went on one rank."""

    value: object = None
    problem: str | None = None
    garbled: bool = False
    """Whether the problem is a digest."""


def outcome_file(path: Path, rank: int) -> Path:
    """Return the file in which a rank says how it went, as a pickled `Outcome`."""
    return path.with_name(f"{path.name}.rank{rank}")
