"""loading: a pipeline stage that a job starts with is given its part of the model's files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from nereus_adapters.verl.shards import local, local_box
from nereus_core.state import Box


def load_stage(
    module: nn.Module,
    files: Mapping[str, torch.Tensor],
    group: Any,
    device: Any,
    *,
    offload: bool,
) -> None:
    """Fill a stage's shards from what its first tensor-parallel rank has read.

    Args:
        module: The stage, sharded.
        files: Its state on the first rank of the group, empty tensors on others.
        group: Its tensor-parallel ranks.
        device: Of the engine.
        offload: Whether parameters live on the host.
    """
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    module.to_empty(device=device)
    leads = dist.get_rank(group) == 0
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            whole = _from_first(files[name], device, group, leads=leads)
            box = local_box(parameter)
            local(parameter).copy_(whole[box.within(Box((0,) * whole.dim(), tuple(whole.shape)))])
        for name, buffer in sorted(module.named_buffers()):
            buffer.data = _from_first(buffers[name], device, group, leads=leads)
    if offload:
        module.to("cpu")
        for buffer in module.buffers():
            buffer.data = buffer.data.to(device)


def _from_first(tensor: torch.Tensor, device: Any, group: Any, *, leads: bool) -> torch.Tensor:
    whole = tensor.to(device) if leads else torch.empty_like(tensor, device=device)
    dist.broadcast(whole, group=group, group_src=0)
    return whole
