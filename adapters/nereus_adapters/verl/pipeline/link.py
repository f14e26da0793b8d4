"""link: what one stage of a pipeline sends to the next, and what comes back.

Activations go forward and their gradients backward in two process groups, so that neither waits in
the other's queue. Nothing of a shape is sent: all stages of a unit have the same micro-batches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist


class Link:
    """The ends of one rank to its neighbours in the stages before and after.

    Args:
        forward: Process group of the ranks with the same place in every stage of a unit.
        backward: Another of the same ranks.
        hidden: Width of activations.
        dtype: In which they are sent.
        device: On which they arrive.
    """

    def __init__(
        self, forward: Any, backward: Any, hidden: int, dtype: torch.dtype, device: Any
    ) -> None:
        self._forward, self._backward = forward, backward
        self._hidden, self._dtype, self._device = hidden, dtype, device
        self._stage = dist.get_rank(forward)
        self._under_way: deque[tuple[Any, torch.Tensor]] = deque()
        self.came: torch.Tensor | None = None
        """Activations of the micro-batch at hand, from the stage before; a leaf of its graph."""
        self.leaves: torch.Tensor | None = None
        """Activations of the micro-batch at hand, for the stage after."""

    def receive(self, tokens: Sequence[int]) -> torch.Tensor:
        """Await the activations of a micro-batch, shaped (*tokens, hidden)."""
        shape = (*tokens, self._hidden)
        self.came = self._await(shape, self._forward, self._stage - 1)
        self.came.requires_grad_(torch.is_grad_enabled())
        return self.came

    def leaving(self) -> torch.Tensor:
        """Return the activations that leave this stage."""
        if self.leaves is None:
            raise RuntimeError("no layer of a later stage was asked: the model's forward skips it")
        return self.leaves

    def clear(self) -> torch.Tensor | None:
        """End a micro-batch; returns what came for it, if anything."""
        came, self.came, self.leaves = self.came, None, None
        return came

    def send(self, leaves: torch.Tensor) -> None:
        """Send activations to the stage after; awaits older ones that it has not taken yet.

        With 1F1B that never happens; without backward passes nothing else holds a stage back from
        computing, and keeping, a whole batch. With nccl it is the stream that waits.
        """
        while len(self._under_way) > 2 * dist.get_world_size(self._forward):
            self._under_way.popleft()[0].wait()
        self._send(leaves.detach().to(self._dtype), self._forward, self._stage + 1)

    def receive_back(self, leaves: torch.Tensor) -> torch.Tensor:
        """Await the gradient of what was sent."""
        return self._await(leaves.shape, self._backward, self._stage + 1).to(leaves.dtype)

    def send_back(self, gradient: torch.Tensor) -> None:
        """Send the gradient of what came to the stage before."""
        self._send(gradient.to(self._dtype), self._backward, self._stage - 1)

    def settle(self) -> None:
        """Await what was sent."""
        while self._under_way:
            self._under_way.popleft()[0].wait()

    def _await(self, shape: Sequence[int], group: Any, stage: int) -> torch.Tensor:
        room = torch.empty(tuple(shape), dtype=self._dtype, device=self._device)
        dist.recv(room, group=group, group_src=stage)
        return room

    def _send(self, tensor: torch.Tensor, group: Any, stage: int) -> None:
        # Kept until it has gone: nobody else refers to it.
        tensor = tensor.contiguous()
        self._under_way.append((dist.isend(tensor, group=group, group_dst=stage), tensor))
