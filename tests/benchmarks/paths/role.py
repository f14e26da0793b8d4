"""Role: what one process of a state-transfer path holds, needs, and may use.

State is a mapping ``slot/name -> tensor``. Layouts in these scenarios cut by pipeline only (the
nine heads of SmolLM2 divide by no power of two), so a tensor is held whole or not at all.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from nereus_adapters.torch.engine import Group

Shape = tuple[int, ...]


@dataclass(slots=True)
class Role:
    """One rank. A path moves what is in ``needed`` from its holders and puts it in ``state``."""

    rank: int
    group: Group
    """Of all ranks, connected before the clock starts."""
    state: dict[str, torch.Tensor]
    """What this rank holds; afterwards everything it needs."""
    needed: dict[str, Shape]
    """What this rank must hold afterwards."""
    shapes: dict[str, Shape]
    """Of the whole model, in its order."""
    holders: dict[str, tuple[int, ...]]
    """Key -> ranks that hold it before, in model order."""
    needers: dict[str, tuple[int, ...]]
    """Key -> ranks that must hold it afterwards."""
    disk: Path
    """An empty folder on disk, the same for all ranks."""
    memory: Path
    """An empty folder in memory (tmpfs), the same for all ranks."""
    moved_bytes: int = 0
    """Bytes that this rank sent, or wrote where another rank or its next life reads them."""
    marks: dict[str, float] = field(default_factory=dict)
    """Name of a part -> seconds."""

    def new(self, key: str) -> torch.Tensor:
        """Allocate the storage of a needed tensor."""
        return torch.empty(self.needed[key])

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Send to another rank, and count it."""
        self.group.send(tensor, to)
        self.moved_bytes += tensor.nbytes

    def owner(self, key: str) -> int:
        """The lowest rank that holds a tensor."""
        return self.holders[key][0]

    def timed(self, name: str, do: Callable[[], None]) -> None:
        """Do a part, wait for all ranks, and note its seconds."""
        begin_s = time.perf_counter()
        do()
        self.group.barrier()
        self.marks[name] = round(time.perf_counter() - begin_s, 4)
