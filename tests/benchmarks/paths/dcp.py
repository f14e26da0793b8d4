"""Torch Distributed Checkpoint, resharded through disk.

What is reproduced: the library itself (`torch.distributed.checkpoint.save` and `.load`), as its
recipe says: the ranks of the old layout save what they own, the ranks of the new layout load what
they need into their tensors; the file format reshards. A process group of all ranks exists before.
"""

from __future__ import annotations

import torch
import torch.distributed.checkpoint as dcp
from paths.role import Role


def path(role: Role) -> None:
    """Save to disk, load from it."""

    def save() -> None:
        mine = {k: t for k, t in role.state.items() if role.owner(k) == role.rank}
        dcp.save(mine, checkpoint_id=role.disk / "dcp")
        role.moved_bytes += sum(t.nbytes for t in mine.values())

    def load() -> None:
        state: dict[str, torch.Tensor] = {key: role.new(key) for key in role.needed}
        dcp.load(state, checkpoint_id=role.disk / "dcp")
        role.state = state

    role.timed("save", save)
    role.timed("load", load)
