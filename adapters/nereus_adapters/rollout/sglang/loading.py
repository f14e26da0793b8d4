"""Inside a rank process: read this rank's pieces of a manifest into its model.

`install` puts two functions around SGLang's weight updater, by SGLang's own plugin hooks. Ranks tell
each other how it went, so that rank 0, which alone answers, fails when any of them did.
"""

from __future__ import annotations

import pickle
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from nereus_adapters.rollout.segment import Segment
from nereus_adapters.rollout.weights import Manifest, Piece
from nereus_core.state import Box

FORMAT = "nereus"
"""Load format of an update whose one tensor is a manifest."""
DIGESTS = "nereus.digests"
"""Name of the tensor that follows those of a group: int64, xxh3 of each, in their order."""
_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"


def packed(content: bytes) -> tuple[str, torch.Tensor]:
    """Return bytes as the tensor that carries them to the ranks."""
    return FORMAT, torch.frombuffer(bytearray(content), dtype=torch.uint8)


def run_rank(*args: Any, **kwargs: Any) -> None:
    """Be a rank: SGLang's own, with `install`."""
    from sglang.srt.managers.scheduler import run_scheduler_process

    install()
    run_scheduler_process(*args, **kwargs)


def install() -> None:
    """Put our functions around the weight updater of this process."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    hooks = {
        "update_weights_from_tensor": _from_tensor,
        "load_weights_from_distributed": _from_group,
    }
    for name, hook in hooks.items():
        HookRegistry.register(f"{_UPDATER}.{name}", hook, HookType.AROUND)
    HookRegistry.apply_hooks()


def _from_tensor(
    original: Callable[..., tuple[bool, str]],
    updater: Any,
    named_tensors: Any,
    load_format: str | None = None,
) -> tuple[bool, str]:
    content = bytes(named_tensors[0][1].numpy()) if load_format else b""
    if load_format == FORMAT:
        return _agreed(lambda: load(updater.get_model(), pickle.loads(content), _rank()))
    if load_format == f"{FORMAT}-peek":
        return _agreed(lambda: save(updater.get_model(), Path(content.decode()), _rank()))
    return original(updater, named_tensors, load_format)


def _from_group(
    original: Callable[..., tuple[bool, str]], updater: Any, named_tensors: Any
) -> tuple[bool, str]:
    if not named_tensors or named_tensors[-1][0] != DIGESTS:
        return original(updater, named_tensors)
    *tensors, (_, digests) = named_tensors

    def receive() -> None:
        for (name, tensor), digest in zip(tensors, digests.tolist(), strict=True):
            if digest_of(tensor) != digest:
                raise ValueError(f"{name} arrived with another digest than it was sent with")
        succeeded, message = original(updater, tensors)
        if not succeeded:
            raise ValueError(message)

    return _agreed(receive)


def digest_of(tensor: torch.Tensor) -> int:
    """Return xxh3 of a tensor's bytes as a signed number, as an int64 tensor holds it."""
    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    found = xxhash.xxh3_64_intdigest(content.data)
    return found - 2**64 if found >= 2**63 else found


def _rank() -> int:
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    return int(parallel.pp_rank * parallel.tp_size + parallel.tp_rank)


def _agreed(do: Callable[[], None]) -> tuple[bool, str]:
    """Do it on every rank of the engine; fail on all when it fails on one."""
    from sglang.srt.distributed.parallel_state import get_world_group

    problem = ""
    try:
        do()
    except Exception as error:  # told to the driver, by way of rank 0
        problem = f"rank {_rank()}: {type(error).__name__}: {error}"
    group = get_world_group().cpu_group
    problems: list[str] = [""] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(problems, problem, group=group)
    found = "; ".join(filter(None, problems))
    return not found, found


def load(model: Any, manifest: Manifest, rank: int) -> None:
    """Read a rank's pieces, check them, and give them to the model, a tensor at a time.

    SGLang's loaders take whole tensors and cut their own part out. A whole tensor here is address
    space in which only this rank's cells are filled: the rest is never touched and costs no memory.
    """
    segments: dict[str, Segment] = {}
    try:
        model.load_weights(_tensors(manifest, rank, segments))
    finally:
        for segment in segments.values():
            segment.close()


def _tensors(
    manifest: Manifest, rank: int, segments: dict[str, Segment]
) -> Iterator[tuple[str, torch.Tensor]]:
    dtype = getattr(torch, manifest.dtype)
    by_tensor: dict[str, list[Piece]] = defaultdict(list)
    for piece in manifest.ranks[rank]:
        by_tensor[piece.cell.tensor].append(piece)
    for name, pieces in by_tensor.items():
        shape = manifest.shapes[name]
        whole, origin = torch.empty(shape, dtype=dtype), Box((0,) * len(shape), shape)
        for piece in pieces:
            if piece.segment not in segments:
                segments[piece.segment] = Segment.open(piece.segment)
            content = segments[piece.segment].view(piece.offset, piece.num_bytes)
            piece.check(content, manifest.version)
            box = piece.cell.box
            part = torch.frombuffer(content, dtype=dtype).view(box.shape)
            whole[box.within(origin)].copy_(part)
        yield name, whole


def save(model: Any, folder: Path, rank: int) -> None:
    """Write a rank's parameters as they are, for those who look behind the adapter."""
    arrays = {
        name: parameter.detach().float().cpu().numpy()
        for name, parameter in model.named_parameters()
    }
    np.savez(folder / f"rank{rank}.npz", **arrays)
