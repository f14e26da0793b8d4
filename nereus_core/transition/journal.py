"""Journal: what a transition is about to do, on disk before it does it.

One record a line: a CRC-32 of the rest of the line in hexadecimal, a space, and a JSON object whose
``n`` counts lines and whose first line names the version. Records are written before what they
announce happens; those that say which way is open after a crash (begun, commit, switching, ended)
reach the disk before that. A last line cut short is left out, as nothing it announces has happened;
damage anywhere else is an error, as nobody can tell what it announced.
"""

from __future__ import annotations

import json
import os
import threading
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, Self

from nereus_core.errors import NereusError
from nereus_core.phases import Phase
from nereus_core.plan import Plan
from nereus_core.primitives import OpId
from nereus_core.transition.graph import TransitionGraph
from nereus_core.transition.recorded import (
    baseline_from_json,
    baseline_to_json,
    graph_from_json,
    graph_to_json,
)
from nereus_core.transition.verify import Baseline
from nereus_core.workload import ModelStage

VERSION = 1


class JournalCorrupt(NereusError):
    """A line of a journal, not the last, is not what was written."""

    def __init__(self, path: Path, line: int, problem: str) -> None:
        self.path, self.line = path, line
        super().__init__(
            f"journal {path} line {line}: {problem}. What it announced cannot be known; move the "
            "file away and start the job from a checkpoint."
        )


@dataclass(frozen=True, slots=True)
class Pending:
    """A transition that was begun and has not ended."""

    graph: TransitionGraph
    baseline: Baseline | None = None
    """Fingerprints from before it."""
    undoes: bool = False
    """Whether it leads back to the plan before."""
    phases: Mapping[OpId, Phase] = field(default_factory=dict)
    """Last phase that each primitive entered."""
    done: frozenset[OpId] = frozenset()
    switched_to: Plan | None = None
    """The plan, when the epoch switch was announced: from then on there is only forward."""


class Journal:
    """Appends records and knows what they amount to. Thread-safe."""

    def __init__(self, path: Path | None = None) -> None:
        """Open or start a journal; without a path, keep it in memory.

        Raises:
            JournalCorrupt: a line before the last is damaged.
            NereusError: another version wrote it.
        """
        self._lock, self._lines = threading.Lock(), 0
        self._file: BinaryIO | None = None
        self._pending: Pending | None = None
        self._epoch = self._num_begun = 0
        self._serials: dict[ModelStage, int] = {}
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        records, sound_bytes = _read(path) if path.exists() else ([], 0)
        for record in records[1:]:
            self._take(record)
        self._lines = len(records)
        # Only the user may read what their job does.
        self._file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b")
        self._file.truncate(sound_bytes)
        self._file.seek(sound_bytes)
        if not records:
            self._write({"kind": "journal", "version": VERSION}, durable=True)

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open or start the journal of a run."""
        return cls(path)

    @classmethod
    def left_pending(cls, path: Path) -> Pending | None:
        """Return what the journal of another process says has not ended; the file stays as it is.

        Raises:
            JournalCorrupt, NereusError: as opening it does.
        """
        records, _ = _read(path) if path.exists() else ([], 0)
        found = cls()
        for record in records[1:]:
            found._take(record)
        return found.pending()

    def pending(self) -> Pending | None:
        """Return the transition that has not ended, if there is one."""
        with self._lock:
            return self._pending

    @property
    def epoch(self) -> int:
        """Transitions committed so far: what the job steps on has changed so many times."""
        return self._epoch

    @property
    def num_begun(self) -> int:
        """Transitions begun so far: numbers those that follow."""
        return self._num_begun

    @property
    def serials(self) -> Mapping[ModelStage, int]:
        """By model-stage, the least serial that no unit has had."""
        return dict(self._serials)

    # --- Writing --------------------------------------------------------------------------------

    def begin(
        self, graph: TransitionGraph, baseline: Baseline | None, *, undoes: bool = False
    ) -> None:
        """Announce a transition."""
        self._append(
            {
                "kind": "begun",
                "graph": graph_to_json(graph),
                "baseline": None if baseline is None else baseline_to_json(baseline),
                "undoes": undoes,
            }
        )

    def enter(self, op_id: OpId, phase: Phase) -> None:
        """Announce a phase of a primitive."""
        record = {"kind": "phase", "op": op_id, "phase": str(phase)}
        self._append(record, durable=phase is Phase.COMMIT)

    def done(self, op_id: OpId) -> None:
        """Record that a primitive has its receipt."""
        self._append({"kind": "done", "op": op_id}, durable=False)

    def switching(self, plan: Plan) -> int:
        """Announce the epoch switch; returns the epoch it leads to."""
        epoch = self._epoch + 1
        self._append({"kind": "switching", "epoch": epoch, "plan": plan.to_json()})
        return epoch

    def end(self, outcome: str) -> None:
        """Record how the transition ended; harmless where none is pending."""
        if self._pending is not None:
            self._append({"kind": "ended", "outcome": outcome})

    def close(self) -> None:
        """Close the file. What is appended afterwards raises."""
        with self._lock:
            if self._file is not None:
                self._file.close()

    def _append(self, record: Mapping[str, Any], *, durable: bool = True) -> None:
        with self._lock:
            if self._file is not None:
                self._write(record, durable=durable)
            self._take(record)

    def _write(self, record: Mapping[str, Any], *, durable: bool) -> None:
        assert self._file is not None
        body = json.dumps({"n": self._lines, **record}, separators=(",", ":")).encode()
        self._file.write(b"%08x %s\n" % (zlib.crc32(body), body))
        self._file.flush()
        if durable:
            os.fsync(self._file.fileno())
        self._lines += 1

    def _take(self, record: Mapping[str, Any]) -> None:
        """Take a record into account."""
        now = self._pending
        match record["kind"]:
            case "begun":
                graph, baseline = graph_from_json(record["graph"]), record["baseline"]
                before = None if baseline is None else baseline_from_json(baseline)
                self._pending = Pending(graph, before, record["undoes"])
                self._num_begun += not record["undoes"]
                self._serials |= graph.next_serials()
            case "phase" if now is not None:
                phases = {**now.phases, OpId(record["op"]): Phase(record["phase"])}
                self._pending = replace(now, phases=phases)
            case "done" if now is not None:
                self._pending = replace(now, done=now.done | {OpId(record["op"])})
            case "switching" if now is not None:
                self._epoch = record["epoch"]
                self._pending = replace(now, switched_to=Plan.from_json(record["plan"]))
            case "ended":
                back = record["outcome"] == "rolled back" and now is not None and not now.undoes
                if back and now is not None and now.switched_to is not None:
                    self._epoch -= 1  # the adapter took its switch back
                self._pending = None


def _read(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the records of a journal, and the bytes they take; a torn last line is left out."""
    lines = path.read_bytes().split(b"\n")
    records: list[dict[str, Any]] = []
    sound_bytes = 0
    last = len(lines) - (2 if lines[-1] == b"" else 1)
    for number, line in enumerate(lines[: last + 1]):
        problem = _problem(line, number) if number < len(lines) - 1 else "is cut short"
        if problem and number == last:
            break
        if problem:
            raise JournalCorrupt(path, number + 1, problem)
        records.append(json.loads(line[9:]))
        sound_bytes += len(line) + 1
    if records and records[0].get("version") != VERSION:
        raise NereusError(
            f"journal {path} was written in version {records[0].get('version')}, this Nereus reads "
            f"version {VERSION}: start the job again with a folder of its own."
        )
    return records, sound_bytes


def _problem(line: bytes, number: int) -> str | None:
    """Say what is wrong with a line, None if nothing is."""
    head, separator, body = line.partition(b" ")
    if not separator or head != b"%08x" % zlib.crc32(body):
        return "its checksum does not match"
    found = json.loads(body).get("n")
    return None if found == number else f"it is numbered {found}, so lines are missing"
