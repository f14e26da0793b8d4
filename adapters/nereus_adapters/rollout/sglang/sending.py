"""Sender: a process that holds weights, as rank 0 of a group in which engines' ranks receive."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from nereus_adapters.rollout.sglang.loading import DIGESTS, digest_of


class Sender:
    """Broadcasts tensors. Implements `groups.Source` where the tensors are; blocking.

    Args:
        name: for errors and the order in which groups are formed.
        tensors: by name, as in a Hugging Face checkpoint; read when they are sent.
        backend: ``gloo`` or ``nccl``.
    """

    def __init__(
        self, name: str, tensors: Mapping[str, torch.Tensor], backend: str = "gloo"
    ) -> None:
        self.name = name
        self._tensors, self._backend = tensors, backend
        self._group: dist.ProcessGroup | None = None

    @property
    def listing(self) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
        """Name, type and shape of everything that is sent, the digests included."""
        own = [
            (name, str(t.dtype).removeprefix("torch."), tuple(t.shape))
            for name, t in self._tensors.items()
        ]
        return (*own, (DIGESTS, "int64", (len(own),)))

    def join(self, address: str, port: int, group: str, size: int, timeout_s: float) -> None:
        """Hold the group's store, and wait for the others.

        The store's prefixes are those of torch's `new_group`, which the ranks go through.
        """
        timeout = timedelta(seconds=timeout_s)
        store: dist.Store = dist.TCPStore(
            address, port, size, is_master=True, timeout=timeout, multi_tenant=True
        )
        kind = "cuda" if self._backend == "nccl" else "cpu"
        for prefix in (group, f"{group}/", f"{kind}/"):
            store = dist.PrefixStore(prefix, store)
        made = dist.ProcessGroupNCCL if self._backend == "nccl" else dist.ProcessGroupGloo
        self._group = made(store, 0, size, timeout)

    def send(self, timeout_s: float) -> None:
        """Broadcast all tensors, then their digests."""
        tensors = [t.detach().contiguous() for t in self._tensors.values()]
        digests = torch.tensor([digest_of(t) for t in tensors], dtype=torch.int64)
        self.broadcast([*tensors, digests.to(tensors[0].device)], timeout_s)

    def broadcast(self, tensors: Sequence[torch.Tensor], timeout_s: float) -> None:
        """Broadcast these tensors, in their order."""
        if self._group is None:
            raise RuntimeError(f"{self.name} has joined no group")
        options = dist.BroadcastOptions()
        options.rootRank = 0
        for tensor in tensors:
            self._group.broadcast([tensor], options).wait(timedelta(seconds=timeout_s))

    def leave(self) -> None:
        """Leave the group."""
        self._group = None
