"""styles: a module and its parameters, shared by the ranks of a mesh as its `Share` says.

Every parameter becomes a DTensor on the mesh, those that all ranks hold whole too, so that one norm
of gradients and one optimizer step are over tensors of one mesh.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional as F

from nereus_adapters.verl.tensor_parallel.plan import Share, at, tied


def share_out(model: nn.Module, mesh: DeviceMesh, shares: Mapping[str, Share]) -> None:
    """Share a model's modules out among the ranks of a one-dimensional mesh, in place.

    Nothing is sent: each rank cuts its part out of what it has, be it nothing (meta tensors).
    Parameters that were tied are tied after.
    """
    groups = tied(model)
    styles = {
        Share.COLUMN: ColwiseParallel,
        Share.ROW: RowwiseParallel,
        Share.HEAD: lambda: ColwiseParallel(output_layouts=Replicate()),
        Share.VOCABULARY: Vocabulary,
        Share.WHOLE: lambda: Whole(Replicate()),
        Share.PER_HEAD: lambda: Whole(Partial()),
    }
    for name, share in shares.items():
        module = model.get_submodule(name)
        style = styles[at(share, module, mesh.size())]()
        parallelize_module(module, mesh, style, src_data_rank=None)
    readers = Counter(n.rpartition(".")[0] for n, share in shares.items() if share is Share.COLUMN)
    for name, number in readers.items():
        if number > 1:
            _read_once(model.get_submodule(name), mesh)
    for first, *others in groups:
        for other in others:
            owner, _, name = other.rpartition(".")
            model.get_submodule(owner).register_parameter(name, model.get_parameter(first))


def _read_once(block: nn.Module, mesh: DeviceMesh) -> None:
    """Let projections that read the same input share one sum of its gradients.

    The input of the block becomes one replicated DTensor, in place of one for each projection.
    """

    def shared(found: Any) -> Any:
        return DTensor.from_local(found, mesh, [Replicate()], run_check=False)

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (shared(args[0]), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": shared(kwargs["hidden_states"])}

    block.register_forward_pre_hook(before, with_kwargs=True)


class Whole(ParallelStyle):  # type: ignore[misc]  # torch's is known at run time only
    """Every rank holds all of a module; the module computes on plain tensors.

    Args:
        gradient: Replicate where all ranks compute the same, Partial where each has a part of what
            goes in, so that gradients are to be added up.
    """

    def __init__(self, gradient: Placement) -> None:
        super().__init__()
        self._gradient = gradient

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _distribute(module, device_mesh, Replicate())
        once, gradient = module.forward, (self._gradient,)

        def forward(*args: Any, **kwargs: Any) -> Any:
            for name, parameter in module.named_parameters(recurse=False):
                # Found before the parameter of that name, which FSDP puts there at each step.
                module.__dict__[name] = parameter.to_local(grad_placements=gradient)
            try:
                return once(*args, **kwargs)
            finally:
                for name in module._parameters:
                    module.__dict__.pop(name, None)

        module.forward = forward
        return module


class Vocabulary(ParallelStyle):  # type: ignore[misc]
    """Rows of an embedding are cut: each rank looks up those tokens that it has, zeros else.

    torch's RowwiseParallel would do so too, but takes ``padding_idx``, whose row gets no gradient,
    for a row of every rank.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.Embedding)
        rows = module.num_embeddings // device_mesh.size()
        first = rows * device_mesh.get_local_rank()
        _distribute(module, device_mesh, Shard(0))
        padding = module.padding_idx
        mine = padding is not None and first <= padding < first + rows

        def forward(tokens: torch.Tensor) -> torch.Tensor:
            weight: Any = module.weight
            others = (tokens < first) | (tokens >= first + rows)
            found = F.embedding(
                (tokens - first).masked_fill(others, 0),
                weight.to_local(),
                padding_idx=padding - first if mine and padding is not None else None,
            ).masked_fill(others.unsqueeze(-1), 0)
            parts = DTensor.from_local(found, device_mesh, [Partial()], run_check=False)
            return parts.redistribute(placements=[Replicate()]).to_local()

        module.forward = forward
        return module


def _distribute(module: nn.Module, mesh: DeviceMesh, placement: Placement) -> None:
    for name, parameter in list(module.named_parameters(recurse=False)):
        cut = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(cut, requires_grad=parameter.requires_grad))
