"""The fault matrix: what becomes of a transition whose first primitive is struck, as a table."""

from __future__ import annotations

from collections.abc import Mapping

from nereus_conformance.points import FAULTS, OF_CONTROLLER, POINTS, Point
from nereus_conformance.trial import Result, Trial, Trials
from nereus_core.layout import Layout
from nereus_core.phases import Phase
from nereus_core.plan import Placement, Plan
from nereus_core.workload import ACTOR_GENERATE, ACTOR_TRAIN, REF_INFER, Job


def cells(job: Job) -> dict[str, dict[Point, Trial]]:
    """Every fault in every phase and moment, with a second copy of the state and without; by title.

    What strikes a device strikes in a phase; only a controller can be struck between them.
    """
    d = job.cluster.healthy
    one, two = Layout(1, 1), Layout(2, 1)
    rest = {
        ACTOR_GENERATE: Placement(one, ((d[2],), (d[3],))),
        REF_INFER: Placement(one, ((d[2],), (d[3],))),
    }
    arrangements = {
        "two copies, merged": (Placement(one, ((d[0],), (d[1],))), Placement(two, (d[:2],))),
        "one copy, split": (Placement(two, (d[:2],)), Placement(one, ((d[0],), (d[1],)))),
    }
    return {
        f"{fault}, {title}": {
            point: Trial(
                Plan({ACTOR_TRAIN: before, **rest}),
                Plan({ACTOR_TRAIN: after, **rest}),
                fault,
                point,
                0,
            )
            for point in POINTS
            if fault in OF_CONTROLLER or isinstance(point, Phase)
        }
        for fault in FAULTS
        for title, (before, after) in arrangements.items()
    }


def matrix(trials: Trials, job: Job) -> dict[str, dict[Point, str]]:
    """Run them all."""
    return {
        title: {point: cell(trials.run(trial)) for point, trial in row.items()}
        for title, row in cells(job).items()
    }


def cell(result: Result) -> str:
    """Write what became of a trial."""
    return result.outcome if result.problem is None else f"WRONG: {result.problem}"


def table(found: Mapping[str, Mapping[Point, str]]) -> str:
    """Write a matrix as a table in Markdown."""
    head = ["fault", *POINTS]
    rows = [[title, *(row.get(point, "") for point in POINTS)] for title, row in found.items()]
    lines = ["| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows]]
    return "\n".join(lines)


def read(text: str, adapter: str, tier: str) -> dict[str, dict[Point, str]]:
    """Read the matrix that a README has, as `table` wrote it."""
    begin, end = marks(adapter, tier)
    lines = text.partition(begin)[2].partition(end)[0].strip().splitlines()[2:]
    rows = [[part.strip() for part in line.strip("|").split("|")] for line in lines]
    return {
        title: {point: what for point, what in zip(POINTS, found, strict=True) if what}
        for title, *found in rows
    }


def marks(adapter: str, tier: str) -> tuple[str, str]:
    """Return the lines between which the README has the matrix of an adapter."""
    return f"<!-- matrix {adapter} {tier} -->", f"<!-- end {adapter} {tier} -->"


def replaced(text: str, adapter: str, tier: str, rows: str) -> str:
    """Put a matrix between its marks; raises ValueError where the text has none."""
    begin, end = marks(adapter, tier)
    head, _, rest = text.partition(begin)
    _, found, tail = rest.partition(end)
    if not found:
        raise ValueError(f"no line {begin!r} followed by {end!r}")
    return f"{head}{begin}\n{rows}\n{end}{tail}"
