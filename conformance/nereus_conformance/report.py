"""What a run of the suite found: header, ending table, JSON file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from nereus_core.capabilities import Feature, Level
from nereus_core.declaration import AdapterDeclaration
from nereus_core.harness import Tier
from nereus_core.primitives import Kind
from nereus_core.workload import Stage

if TYPE_CHECKING:
    import pytest

    from nereus_conformance.suite import Need, Suite


@dataclass(slots=True)
class Outcome:
    """One case as it went."""

    case: str
    needs: tuple[Need, ...]
    outcome: str = "not run"
    """passed, failed, skipped, expected (a strict xfail that failed), or not run."""
    seconds: float = 0.0
    reason: str = ""


class Report:
    """Collects outcomes."""

    def __init__(
        self,
        declaration: AdapterDeclaration,
        *,
        backend_version: str | None,
        origin: str,
        tier: Tier,
        seed: int,
        path: Path | None,
    ) -> None:
        self._declaration, self._backend_version = declaration, backend_version
        self._origin, self._tier, self._seed, self._path = origin, tier, seed, path
        self._outcomes: dict[str, Outcome] = {}
        self.launches = 0

    def header(self) -> str:
        """Return the line that says what is held to what."""
        backend = "none"
        if self._declaration.requirement is not None:
            backend = f"{self._declaration.requirement} ({self._backend_version or 'missing'})"
        return (
            f"nereus conformance {metadata.version('nereus')} · "
            f"adapter {self._declaration.name} ({self._origin}) · backend {backend} · "
            f"tier {self._tier} · seed {self._seed}"
        )

    def planned(self, node: str, case: str, needs: tuple[Need, ...]) -> None:
        """Note a case that was collected."""
        self._outcomes[node] = Outcome(case, needs)

    def seen(self, report: pytest.TestReport) -> None:
        """Note a phase of a case: setup, call or teardown."""
        outcome = self._outcomes[report.nodeid]
        outcome.seconds += report.duration
        expected = hasattr(report, "wasxfail") and report.skipped
        if report.failed:
            outcome.outcome, outcome.reason = "failed", _last_line(report.longreprtext)
        elif expected:
            outcome.outcome, outcome.reason = "expected", str(report.wasxfail)
        elif report.skipped:
            longrepr = report.longrepr
            reason = longrepr[2] if isinstance(longrepr, tuple) else str(longrepr)
            outcome.outcome, outcome.reason = "skipped", reason.removeprefix("Skipped: ")
        elif report.when == "call" and outcome.outcome == "not run":
            outcome.outcome = "passed"

    def _cell(self, suite: Suite, need: Need) -> str:
        support = suite.support(need)
        found = {o.outcome for o in self._outcomes.values() if need in o.needs}
        if support is None:
            return "undeclared"
        if support.level is Level.NOT_YET:
            return "FAILED" if "failed" in found else "not yet"
        if not support.at(self._backend_version):
            from nereus_conformance.suite import name_of

            case = f"test_undeclared_power_is_refused[{name_of(need)}]"
            tested = {o.outcome for n, o in self._outcomes.items() if n.endswith(f"::{case}")}
            if "failed" in tested:
                return "NOT REFUSED"
            return "refused" if "passed" in tested else "unsupported"
        if "failed" in found:
            return "FAILED"
        return "passed" if "passed" in found else "not run"

    def table(self, suite: Suite) -> Iterator[str]:
        """Yield the lines of the ending table."""
        name = self._declaration.name
        yield f"{name:<15}" + "".join(f"{s.value:<13}" for s in Stage)
        for kind in Kind:
            cells = "".join(f"{self._cell(suite, (kind, s)):<13}" for s in Stage)
            yield f"  {kind.value:<13}{cells}".rstrip()
        cells_by_word: dict[str, list[str]] = {}
        for feature in Feature:
            cells_by_word.setdefault(self._cell(suite, feature), []).append(feature.name)
        words = [
            f"{len(names)} {word}" + ("" if word == "passed" else f" ({', '.join(names)})")
            for word, names in cells_by_word.items()
        ]
        yield f"  {'features':<13}{' · '.join(words)}"

    def write(self, suite: Suite) -> None:
        """Write the JSON file, if one was asked for."""
        if self._path is None:
            return
        document = {
            "adapter": self._declaration.name,
            "origin": self._origin,
            "requirement": self._declaration.requirement,
            "backend_version": self._backend_version,
            "tier": self._tier.value,
            "seed": self._seed,
            "launches": self.launches,
            "primitives": {
                kind.value: {s.value: self._cell(suite, (kind, s)) for s in Stage} for kind in Kind
            },
            "features": {f.value: self._cell(suite, f) for f in Feature},
            "cases": [
                {
                    "id": node.rpartition("::")[2],
                    "outcome": o.outcome,
                    "seconds": round(o.seconds, 4),
                    "reason": o.reason,
                }
                for node, o in self._outcomes.items()
            ],
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _last_line(text: str) -> str:
    lines = [line.removeprefix("E").strip() for line in text.splitlines() if line.startswith("E")]
    return " ".join(lines) or text.strip().rpartition("\n")[2]
