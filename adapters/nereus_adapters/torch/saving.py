"""Saving and resuming: the driver's side of a checkpoint.

Train stages are saved, by boxes, each box once, spread over the seats of all intact units. Stages
that follow one take its weights at the next step; frozen ones come from their model's folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nereus_adapters.torch.engine import combine
from nereus_adapters.torch.fleet import Fleet
from nereus_adapters.torch.manifest import Manifest, Piece, SavedStage, plain
from nereus_adapters.torch.settings import RlSettings
from nereus_adapters.torch.values import ModelSource, Region
from nereus_core.cluster import Device
from nereus_core.errors import CheckpointError
from nereus_core.model import ModelSpec
from nereus_core.plan import Plan
from nereus_core.state import unit_shards
from nereus_core.units import Unit, UnitMap
from nereus_core.workload import Job, ModelStage, Stage


def facts(job: Job, sources: Mapping[str, ModelSource], settings: RlSettings) -> dict[str, Any]:
    """Return what a resumed job must share with the one that was saved: all that fixes its steps.

    Rates and coefficients are left out: whoever resumes may change them, knowingly.
    """
    return {
        "algorithm": job.workload.algorithm,
        "seed": settings.seed,
        "global_batch": job.global_batch,
        "responses_per_prompt": settings.responses_per_prompt,
        "max_prompt_tokens": job.max_prompt_tokens,
        "max_response_tokens": job.max_response_tokens,
        "precision": job.precision.compute,
        "models": {
            name: {"shapes": plain(spec), "config": plain(dict(sources[name].hf_config))}
            for name, spec in job.models.items()
        },
    }


def frozen(job: Job) -> tuple[ModelStage, ...]:
    """Stages whose weights never change."""
    return tuple(
        n.model_stage
        for n in job.workload.nodes
        if n.weights_from is None and n.model_stage.stage is not Stage.TRAIN
    )


def origin(fleet: Fleet, unit: Unit) -> str:
    """Return one digest of a frozen unit's weights."""
    text = json.dumps(_digests(fleet, unit), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def save(
    fleet: Fleet,
    job: Job,
    folder: Path,
    *,
    plan: Plan,
    about: Mapping[str, Any],
    step: int,
    origins: Mapping[ModelStage, str],
    timeout_s: float,
) -> None:
    """Write a checkpoint; ``folder`` appears once all of it is on disk; replaces an older one.

    Seats write into the folder themselves: those of other hosts must see it under the same path.

    Raises:
        CheckpointError: something cannot be written.
        Exception: what `Fleet.settle` raises when a seat fails.
    """
    units = fleet.units
    beside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))  # mode 0700
    try:
        trains = [s for s in job.workload.stages if s.stage is Stage.TRAIN]
        stages = {s: _saved(fleet, s, units, job.model(s), beside, timeout_s) for s in trains}
        files = {
            p.file: (beside / p.file).stat().st_size for s in stages.values() for p in s.pieces
        }
        Manifest(about, step, plan, stages, origins, files).write(beside)
        _sync(beside)
        if folder.exists():
            os.rename(folder, old := Path(f"{beside}-old"))
            os.rename(beside, folder)
            shutil.rmtree(old)
        else:
            os.rename(beside, folder)
        _sync(folder.parent)
    except OSError as error:
        raise CheckpointError(
            folder, f"cannot be written: {error}", "make room, or set checkpoint.folder"
        ) from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def restore(
    fleet: Fleet, units: tuple[Unit, ...], saved: SavedStage, folder: Path, timeout_s: float
) -> None:
    """Build the units of a train stage from a checkpoint, in whatever layout they have.

    Raises:
        CheckpointError: a file is broken, or other values arrived than were saved.
    """
    pending = [
        p
        for unit in units
        for p in fleet.pool.send(
            {
                device: (
                    "restore",
                    {
                        "unit": unit.id,
                        "spec": fleet.spec(unit, rank),
                        "folder": str(folder),
                        "pieces": saved.pieces,
                        "counters": saved.counters,
                    },
                )
                for rank, device in enumerate(unit.devices)
            }
        )
    ]
    fleet.settle(pending, timeout_s)
    fleet.replace((), units)
    expected = saved.digests()
    for unit in units:
        for tensor, digest in _digests(fleet, unit).items():
            if expected.get(tensor) != digest:
                files = sorted({p.file for p in saved.pieces if tensor.endswith(f"/{p.tensor}")})
                raise CheckpointError(
                    folder,
                    f"{tensor} ({', '.join(files)}) has digest {digest}, "
                    f"the manifest says {expected.get(tensor)}",
                    "resume from another checkpoint",
                )


def require_origin(fleet: Fleet, stage: ModelStage, expected: str, folder: Path) -> None:
    """Raise CheckpointError unless a frozen stage has the weights it had when it was saved."""
    found = origin(fleet, fleet.units.of(stage)[0])
    if found != expected:
        raise CheckpointError(
            folder,
            f"{stage} had other weights (digest {expected[:16]}) than job.model has now "
            f"({found[:16]})",
            "resume with the model that the run began with",
        )


def _saved(
    fleet: Fleet,
    stage: ModelStage,
    units: UnitMap,
    model: ModelSpec,
    folder: Path,
    timeout_s: float,
) -> SavedStage:
    members = units.of(stage)
    calls = {
        device: (
            "save",
            {
                "unit": unit.id,
                "path": str(folder / f"{stage.model}-{stage.stage}-{number:04d}.safetensors"),
                "regions": tuple(regions),
            },
        )
        for number, (device, (unit, regions)) in enumerate(sorted(_shares(members, model).items()))
    }
    answers = fleet.settle(fleet.pool.send(calls), timeout_s)
    pieces: list[Piece] = [piece for answer in answers for piece in answer.value]
    return SavedStage(fleet.counters(members[0]), tuple(pieces))


def _shares(members: tuple[Unit, ...], model: ModelSpec) -> dict[Device, tuple[Unit, list[Region]]]:
    """Give every box to one of the seats that hold it, always to the one with least so far."""
    layout = members[0].layout
    holders: dict[Region, list[tuple[Device, Unit]]] = defaultdict(list)
    for unit in members:
        for device, shard in zip(unit.devices, unit_shards(model, layout), strict=True):
            for region in shard.items():
                holders[region].append((device, unit))
    written: dict[Device, int] = defaultdict(int)
    found: dict[Device, tuple[Unit, list[Region]]] = {}
    for region, able in holders.items():
        device, unit = min(able, key=lambda pair: (written[pair[0]], pair[0]))
        written[device] += region[1].num_elements
        found.setdefault(device, (unit, []))[1].append(region)
    return found


def _digests(fleet: Fleet, unit: Unit) -> dict[str, str]:
    answers = fleet.settle(fleet.send({unit.id: {}}, "digests"), fleet.timeout_s)
    return combine([a.value for a in answers])


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
