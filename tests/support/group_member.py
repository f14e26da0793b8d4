"""One process that meets others in a gloo group; here, since a spawned child must find it."""

import torch

from nereus_adapters.torch.engine import make_group
from nereus_adapters.torch.store import open_store
from nereus_core.errors import NereusError

CPU = torch.device("cpu")


def member(address, size, rank, secret, seal, answers):
    """Meet in a group; tell what came of it."""
    try:
        met = open_store(address, 120.0, seal)
        group = make_group(met, "g/1", rank, size, CPU, 40.0, secret)
        total = float(group.all_reduce(torch.full((3,), float(rank + 1)))[0])
        answers.put((rank, total))
        group.close()
    except NereusError as error:
        answers.put((rank, f"{type(error).__name__}: {error}"))
