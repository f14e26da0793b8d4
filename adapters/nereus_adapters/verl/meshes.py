"""meshes: what torch remembers of device meshes whose process groups are gone.

torch keeps the result of laying out each operation on DTensors, with the mesh that it met first.
Meshes are equal when their ranks are, so in a process group that was left and met again, or beside
an engine that was built anew, results would lie on the old mesh, whose groups are found by name: a
number that by now is another group's, or nobody's (torch 2.13, `DeviceMesh.__eq__`). Each thread
remembers for itself, so this has to run where verl's own methods do.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import _redistribute
from torch.distributed.tensor.debug import _clear_sharding_prop_cache


def forget_meshes(worker: Any) -> None:
    """Let the next operation of this thread lay its result out on the mesh that it is given."""
    _clear_sharding_prop_cache()
    for kept in vars(_redistribute).values():
        if callable(clear := getattr(kept, "cache_clear", None)):
            clear()
