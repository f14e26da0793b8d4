"""Oobleck: a new replica gets layer after layer from one that has it.

What is reproduced: the copy of missing layers when pipelines are re-instantiated (Jang et al.,
SOSP 2023, section 5; `oobleck/execution/engine.py`, ReconfigurationEngine, which broadcasts the
parameters and optimizer states of each missing layer, tensor by tensor, from the lowest rank that
owns it). Only what is missing moves; there is one source per layer and one operation at a time.
"""

from __future__ import annotations

from paths.role import Role


def path(role: Role) -> None:
    """Copy every missing tensor from its first owner, in layer order."""

    def copy() -> None:
        for key, needers in role.needers.items():
            for needer in needers:
                if needer in role.holders[key]:
                    continue
                if role.rank == role.owner(key):
                    role.send(role.state[key], needer)
                elif role.rank == needer:
                    role.state[key] = role.group.recv(role.new(key), role.owner(key))

    role.timed("layers", copy)
