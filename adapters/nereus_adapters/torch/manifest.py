"""Manifest: what a checkpoint folder holds, as JSON; written last, read and checked first."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from nereus_adapters.torch.engine import combine
from nereus_core.checkpoints import MANIFEST
from nereus_core.errors import CheckpointError, NereusError
from nereus_core.plan import Plan
from nereus_core.state import Box, Slot
from nereus_core.workload import ModelStage

FORMAT = 1
"""Of the folder; one that is newer is refused."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a logical tensor in a file, once per slot that its stage keeps."""

    tensor: str
    box: Box
    file: str
    digests: Mapping[Slot, str]

    def key(self, slot: Slot) -> str:
        """Return its name inside the file."""
        return key(slot, self.tensor, self.box)


def key(slot: Slot, tensor: str, box: Box) -> str:
    """Return the name of a box inside a safetensors file."""
    return f"{slot}/{tensor}@{','.join(map(str, box.offset))}"


@dataclass(frozen=True, slots=True)
class SavedStage:
    """The state of one train stage: disjoint pieces that cover every tensor of its model."""

    counters: Mapping[str, int | float]
    pieces: tuple[Piece, ...]

    def digests(self) -> dict[str, str]:
        """Return the digest of every whole tensor: those of its pieces add up."""
        return combine([{f"{s}/{p.tensor}": d for s, d in p.digests.items()} for p in self.pieces])


@dataclass(frozen=True, slots=True)
class Manifest:
    """A checkpoint. Position in the data and random numbers are functions of seed and step."""

    job: Mapping[str, Any]
    """What must be the same in the job that resumes, see `saving.facts`."""
    step: int
    """RL steps done."""
    plan: Plan
    stages: Mapping[ModelStage, SavedStage]
    origins: Mapping[ModelStage, str]
    """Frozen stages are not saved, they come from the model's folder again: their digests."""
    files: Mapping[str, int]
    """Bytes by name."""

    def write(self, folder: Path) -> None:
        """Write and fsync."""
        body = self._json()
        text = json.dumps({"sha256": _sha256(body), **body}, indent=1)
        with (folder / MANIFEST).open("x", encoding="utf-8") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read and check a manifest, and that its files are there in full.

        Raises:
            CheckpointError: says what is wrong with which file.
        """
        remedy = "resume from another checkpoint"
        try:
            values = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
            digest = values.pop("sha256")
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise CheckpointError(folder, f"{MANIFEST} cannot be read: {error}", remedy) from error
        if digest != _sha256(values):
            raise CheckpointError(folder, f"{MANIFEST} does not fit its own digest", remedy)
        if values["format"] != FORMAT:
            raise CheckpointError(
                folder, f"its format is {values['format']}, expected {FORMAT}",
                "use the version of Nereus that wrote it",
            )  # fmt: skip
        try:
            found = cls._of(values)
        except (KeyError, TypeError, ValueError, NereusError) as error:
            raise CheckpointError(folder, f"{MANIFEST} is malformed: {error}", remedy) from error
        for name, size in found.files.items():
            path = folder / name
            if not path.is_file():
                raise CheckpointError(folder, f"file {name} is missing", remedy)
            if (there := path.stat().st_size) != size:
                raise CheckpointError(
                    folder, f"file {name} has {there} bytes, the manifest says {size}", remedy
                )
        return found

    def require_same(self, facts: Mapping[str, Any], folder: Path) -> None:
        """Raise CheckpointError naming the first fact in which a job differs."""
        theirs, ours = _flat(self.job), _flat(facts)
        for name in sorted({*theirs, *ours}):
            if theirs.get(name) != ours.get(name):
                raise CheckpointError(
                    folder,
                    f"is of another job: {name} is {theirs.get(name)!r} there, "
                    f"{ours.get(name)!r} here",
                    "resume with the configuration that wrote it",
                )

    def _json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "job": dict(self.job),
            "step": self.step,
            "plan": self.plan.to_json(),
            "stages": {
                str(stage): {
                    "counters": dict(saved.counters),
                    "pieces": [
                        {
                            "tensor": p.tensor,
                            "offset": list(p.box.offset),
                            "shape": list(p.box.shape),
                            "file": p.file,
                            "digests": {str(s): d for s, d in p.digests.items()},
                        }
                        for p in saved.pieces
                    ],
                }
                for stage, saved in self.stages.items()
            },
            "origins": {str(stage): digest for stage, digest in self.origins.items()},
            "files": dict(self.files),
        }

    @classmethod
    def _of(cls, values: Mapping[str, Any]) -> Self:
        files: dict[str, int] = {str(n): int(s) for n, s in values["files"].items()}
        stages = {}
        for text, stage in values["stages"].items():
            pieces = tuple(
                Piece(
                    p["tensor"],
                    Box(tuple(p["offset"]), tuple(p["shape"])),
                    p["file"],
                    {Slot(s): str(d) for s, d in p["digests"].items()},
                )
                for p in stage["pieces"]
            )
            if strangers := {p.file for p in pieces} - set(files):
                raise ValueError(f"file {min(strangers)} is not listed")
            stages[ModelStage.parse(text)] = SavedStage(dict(stage["counters"]), pieces)
        for name in files:
            if Path(name).name != name:
                raise ValueError(f"{name!r} is no file of this folder")
        origins = {ModelStage.parse(s): str(d) for s, d in values["origins"].items()}
        return cls(
            values["job"],
            int(values["step"]),
            Plan.from_json(values["plan"]),
            stages,
            origins,
            files,
        )


def plain(value: Any) -> Any:
    """Return what JSON makes of a value, so that what was read compares equal."""
    return json.loads(json.dumps(asdict(value) if hasattr(value, "__slots__") else value))


def _sha256(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _flat(value: Any, at: str = "") -> dict[str, Any]:
    if not isinstance(value, Mapping):
        return {at: value}
    return {
        path: leaf
        for name, inner in value.items()
        for path, leaf in _flat(inner, f"{at}.{name}" if at else str(name)).items()
    }
