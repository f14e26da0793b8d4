"""Inside a rank process: read this rank's pieces of a manifest into its model.

`install` puts two functions around SGLang's weight updater, by SGLang's own plugin hooks. Each rank
writes how it went into a file of its own: SGLang's answer is rank 0's alone, given while later
pipeline stages have not begun. A collective here would wait for them for ever.
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

LOAD, SAVE = "nereus-load:", "nereus-save:"
"""Load formats of an update that carries no tensor; a path follows, and each rank opens it for
itself: a file with a manifest to load, or a folder to save into."""
DIGESTS = "nereus-digests:"
"""Name of the tensor that follows those of a group, and a path for outcomes: int64, xxh3 of each."""
_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"


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
    what = load_format or ""
    for prefix, do in ((LOAD, load), (SAVE, save)):
        if what.startswith(prefix):
            path = Path(what.removeprefix(prefix))
            return _told(path, lambda do=do: do(updater.get_model(), path, _rank()))  # type: ignore[misc]
    return original(updater, named_tensors, load_format)


def _from_group(
    original: Callable[..., tuple[bool, str]], updater: Any, named_tensors: Any
) -> tuple[bool, str]:
    if not named_tensors or not named_tensors[-1][0].startswith(DIGESTS):
        return original(updater, named_tensors)
    *tensors, (last, digests) = named_tensors

    def receive() -> None:
        for (name, tensor), digest in zip(tensors, digests.tolist(), strict=True):
            if digest_of(tensor) != digest:
                raise ValueError(f"{name} arrived with another digest than it was sent with")
        succeeded, message = original(updater, tensors)
        if not succeeded:
            raise ValueError(message)

    return _told(Path(last.removeprefix(DIGESTS)), receive)


def digest_of(tensor: torch.Tensor) -> int:
    """Return xxh3 of a tensor's bytes as a signed number, as an int64 tensor holds it."""
    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    found = xxhash.xxh3_64_intdigest(content.data)
    return found - 2**64 if found >= 2**63 else found


def _rank() -> int:
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    return int(parallel.pp_rank * parallel.tp_size + parallel.tp_rank)


def outcome(path: Path, rank: int) -> Path:
    """Return the file in which a rank says how it went; empty when it went well."""
    return path.with_name(f"{path.name}.rank{rank}")


def _told(path: Path, do: Callable[[], None]) -> tuple[bool, str]:
    """Do it, and tell the host; SGLang is told that all is well, so that it goes on."""
    problem = ""
    try:
        do()
    except Exception as error:
        problem = f"rank {_rank()}: {type(error).__name__}: {error}"
    file = outcome(path, _rank())
    part = file.with_name(f"{file.name}.part")
    part.write_text(problem)
    part.rename(file)
    return True, ""


def load(model: Any, path: Path, rank: int) -> None:
    """Read a rank's pieces of a manifest, check them, and give them to the model one by one.

    SGLang's loaders take whole tensors and cut their own part out. A whole tensor here is address
    space in which only this rank's cells are filled: the rest is never touched and costs no memory.
    """
    manifest: Manifest = pickle.loads(path.read_bytes())
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
