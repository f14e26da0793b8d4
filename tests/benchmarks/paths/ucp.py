"""Universal checkpoint (UCP): save, convert to one atomic checkpoint per parameter, load.

What is reproduced: the path of DeepSpeed's universal checkpointing (Lian et al., USENIX ATC 2025;
`deepspeed/checkpoint/ds_to_universal.py`): ranks save their distributed checkpoint with torch.save;
a conversion extracts each parameter's fragments and writes them as ``fp32.pt``, ``exp_avg.pt`` and
``exp_avg_sq.pt`` in a folder per parameter; every rank of the new layout then loads the files of
its parameters. Nothing is flushed to the disk itself (`fsync`), which is in its favor. The restart
of the job's processes, which UCP also needs, is left out.
"""

from __future__ import annotations

import torch
from paths.role import Role

FILES = {"param": "fp32.pt", "exp_avg": "exp_avg.pt", "exp_avg_sq": "exp_avg_sq.pt"}


def path(role: Role) -> None:
    """Save, convert on rank 0, load everywhere."""

    def save() -> None:
        mine = {k: t for k, t in role.state.items() if role.owner(k) == role.rank}
        if mine:
            torch.save(mine, role.disk / f"rank{role.rank}.pt")
            role.moved_bytes += sum(t.nbytes for t in mine.values())

    def convert() -> None:
        if role.rank != 0:
            return
        for file in sorted(role.disk.glob("rank*.pt")):
            for key, tensor in torch.load(file, weights_only=True).items():
                slot, _, name = key.partition("/")
                folder = role.disk / "zero" / name
                folder.mkdir(parents=True, exist_ok=True)
                torch.save(tensor, folder / FILES[slot])
                role.moved_bytes += tensor.nbytes

    def load() -> None:
        state = {}
        for key in role.needed:
            slot, _, name = key.partition("/")
            loaded = torch.load(role.disk / "zero" / name / FILES[slot], weights_only=True)
            state[key] = role.new(key).copy_(loaded)
        role.state = state

    role.timed("save", save)
    role.timed("convert", convert)
    role.timed("load", load)
