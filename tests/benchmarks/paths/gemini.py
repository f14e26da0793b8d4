"""Gemini: recovery from checkpoints in the CPU memory of peers.

What is reproduced: the checkpoint and retrieval path (Wang et al., SOSP 2023, sections 3-5): every
rank copies its state into host memory and sends it to the host memory of a peer in small chunks
(here 32 MiB, several in flight), so that two copies exist; after a change a rank gets its state
from the nearest checkpoint, which it then loads onto its device. A planned change needs a
checkpoint of this boundary. The restart of the training processes, which Gemini also pays, is left
out.
"""

from __future__ import annotations

import torch
from paths.role import Role

CHUNK = 32 * 2**20 // 4  # elements; the paper splits checkpoints into chunks to fit its buffers


def path(role: Role) -> None:
    """Checkpoint to own and peer memory, then load."""
    host: dict[str, torch.Tensor] = {}

    def checkpoint() -> None:
        for key, tensor in role.state.items():
            if role.owner(key) == role.rank:
                host[key] = tensor.clone()

    def replicate() -> None:
        for key, needers in role.needers.items():
            owner = role.owner(key)
            for needer in needers:
                if needer == owner or needer in role.holders[key]:
                    continue
                if role.rank == owner:
                    pending = [
                        role.group.isend(chunk, needer) for chunk in host[key].view(-1).split(CHUNK)
                    ]
                    for wait in pending:
                        wait()
                    role.moved_bytes += host[key].nbytes
                elif role.rank == needer:
                    host[key] = role.new(key)
                    pending = [
                        role.group.irecv(chunk, owner) for chunk in host[key].view(-1).split(CHUNK)
                    ]
                    for wait in pending:
                        wait()

    def load() -> None:
        state = {}
        for key in role.needed:
            state[key] = role.state[key] if key in role.state else role.new(key).copy_(host[key])
        role.state = state

    role.timed("checkpoint", checkpoint)
    role.timed("replicate", replicate)
    role.timed("load", load)
