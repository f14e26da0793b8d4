"""Inside a rank process: read this rank's pieces of a manifest into its model.

`install` puts two functions around SGLang's weight updater, by SGLang's own plugin hooks. Each rank
writes how it went into a file of its own: SGLang's answer is rank 0's alone, given while later
pipeline stages have not begun. A collective here would wait for them for ever.
"""

from __future__ import annotations

import pickle
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import xxhash

from nereus_adapters.rollout.segment import Segment
from nereus_adapters.rollout.sglang.calls import TIED, Call, Outcome, outcome_file
from nereus_adapters.rollout.weights import GarbledWeights, Manifest, Piece
from nereus_core.state import Box

CALL = "nereus-call:"
"""Load format of an update that carries no tensor; the path of a file with a `Call` follows, which
each rank opens for itself."""
DIGESTS = "nereus-digests:"
"""Name, with a path for outcomes, of the tensor after those of a group: int64, xxh3 of each."""
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
    if load_format is not None and load_format.startswith(CALL):
        path = Path(load_format.removeprefix(CALL))

        def do() -> object:
            call: Call = pickle.loads(path.read_bytes())
            return call.function(updater.get_model(), _rank(), call.argument)

        return _told(path, do)
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
        succeeded, message = original(updater, list(_with_head(updater.get_model(), tensors)))
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


def _told(path: Path, do: Callable[[], object]) -> tuple[bool, str]:
    """Do it, and tell the host; SGLang is told that all is well, so that it goes on."""
    try:
        found = Outcome(do())
    except Exception as error:
        problem = f"rank {_rank()}: {type(error).__name__}: {error}"
        found = Outcome(None, problem, isinstance(error, GarbledWeights))
    file = outcome_file(path, _rank())
    part = file.with_name(f"{file.name}.part")
    part.write_bytes(pickle.dumps(found))
    part.rename(file)
    return True, ""


def load(model: Any, rank: int, manifest: Manifest) -> None:
    """Read a rank's pieces of a manifest, check them, and give them to the model one by one.

    SGLang's loaders take whole tensors and cut their own part out. A whole tensor here is address
    space in which only this rank's cells are filled: the rest is never touched and costs no memory.
    """
    segments: dict[str, Segment] = {}
    try:
        model.load_weights(_with_head(model, _tensors(manifest, rank, segments)))
    finally:
        for segment in segments.values():
            segment.close()


def _with_head(
    model: Any, tensors: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Give the embedding as the head, too, where they are tied and SGLang does not know it."""
    for name, tensor in tensors:
        yield name, tensor
        if name == "model.embed_tokens.weight" and getattr(model.config, TIED, False):
            yield "lm_head.weight", tensor


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
                segments[piece.segment] = Segment(piece.segment)
            content = segments[piece.segment].view(piece.offset, piece.num_bytes)
            piece.check(content, manifest.version)
            box = piece.cell.box
            part = torch.frombuffer(content, dtype=dtype).view(box.shape)
            whole[box.within(origin)].copy_(part)
        yield name, whole
