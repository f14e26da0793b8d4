"""Assertions that say which invariant broke, in what, where."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import pytest

from nereus_conformance.subject import Subject
from nereus_core.cluster import Device
from nereus_core.errors import NereusError
from nereus_core.harness import Array
from nereus_core.units import UnitMap

TOLERANCE = {"float64": 1e-9, "float32": 1e-5, "bfloat16": 2e-2}
"""Relative, of losses, by compute precision: sums over a batch are taken in another order. float64
and float32 are the project's stated bounds; bfloat16 keeps 8 bits, so two ulps."""


def require(holds: bool, invariant: str, problem: str) -> None:
    """Fail with ``I2 state: problem`` unless something holds."""
    if not holds:
        pytest.fail(f"{invariant}: {problem}", pytrace=False)


def nothing_left(
    before: Mapping[Device, int], after: Mapping[Device, int], doing: str, devices: Iterable[Device]
) -> None:
    """Require that devices hold no more than they held before (I7)."""
    for device in devices:
        require(
            after[device] <= before[device],
            "I7 released",
            f"{doing} left {after[device]} bytes on {device}, it had {before[device]}",
        )


def same_state(
    before: Mapping[str, Array],
    after: Mapping[str, Array],
    doing: str,
    *,
    slots: tuple[str, ...] = ("param", "exp_avg", "exp_avg_sq"),
) -> None:
    """Require bit-identical logical state in the named slots (I2)."""
    names = [k for k in before if k.partition("/")[0] in slots]
    gone = sorted(set(names) - set(after))
    require(not gone, "I2 state", f"{doing} lost {', '.join(gone[:3])} ({len(gone)} tensors)")
    for name in names:
        old, new = before[name], after[name]
        require(
            old.shape == new.shape and old.dtype == new.dtype,
            "I2 state",
            f"{doing} made {name} {new.dtype}{list(new.shape)}, "
            f"it was {old.dtype}{list(old.shape)}",
        )
        if old.tobytes() != new.tobytes():
            pytest.fail(f"I2 state: {doing} changed {_where(name, old, new)}", pytrace=False)


def _where(name: str, old: Array, new: Array) -> str:
    slot, _, tensor = name.partition("/")
    index = np.argwhere(~((old == new) | (np.isnan(old) & np.isnan(new))))
    text = f"{slot} of {tensor} {list(old.shape)}"
    if not len(index):  # bits differ in signs of zero or payloads of NaN
        return f"{text} in the sign of a zero or the payload of a NaN"
    low, high = index.min(axis=0), index.max(axis=0) + 1
    region = ", ".join(f"{a}:{b}" for a, b in zip(low, high, strict=True))
    first = tuple(index[0])
    return (
        f"{text}\n  in [{region}]: {len(index)} of {old.size} elements differ; "
        f"at {list(map(int, first))} it holds {new[first]!r}, but should hold {old[first]!r}"
    )


def close(found: float, wanted: float, tolerance: float) -> bool:
    """Whether two figures agree relatively."""
    return abs(found - wanted) <= tolerance * max(abs(wanted), abs(found), 1e-300)


@contextmanager
def refused(
    subject: Subject, error: type[NereusError] | tuple[type[NereusError], ...], doing: str
) -> Iterator[None]:
    """Require that something raises one of the errors and leaves units, memory and state alone.

    Looks at them before and after, so it is entered at the boundary that the act needs (I4).
    """
    before, memory = subject.units, subject.memory()
    states = {u: subject.state(u) for u in before}
    kinds = error if isinstance(error, tuple) else (error,)
    names = " or ".join(kind.__name__ for kind in kinds)
    caught: Exception | None = None
    try:
        yield
    except Exception as error_raised:
        caught = error_raised
    require(caught is not None, "I4 strong", f"{doing} was accepted, but should raise {names}")
    require(
        isinstance(caught, kinds),
        "I4 strong",
        f"{doing} raised {type(caught).__name__} ({caught}), but should raise {names}",
    )
    same_units(before, subject.units, f"{doing}, which was refused,")
    after = subject.memory()
    require(
        memory == after, "I4 strong", f"{doing} was refused and left memory {after}, not {memory}"
    )
    for unit, state in states.items():
        same_state(state, subject.state(unit), f"{doing}, which was refused,")


def same_units(wanted: UnitMap, found: UnitMap, doing: str) -> None:
    """Require that the units alive are exactly these."""
    require(
        found == wanted,
        "I4 strong",
        f"after {doing} units() is {found!r},\n  but should be {wanted!r}",
    )


def partitioned(units: UnitMap, subject: Subject) -> None:
    """Require that each device of a stage belongs to one of its units (I1)."""
    for stage in units.stages():
        held = [d for unit in units.of(stage) for d in unit.devices]
        twice = sorted({d for d in held if held.count(d) > 1})
        require(
            not twice,
            "I1 devices",
            f"{', '.join(map(str, twice))} belong to two units of {stage}",
        )
        strangers = sorted(set(held) - set(subject.job.cluster.devices))
        require(not strangers, "I1 devices", f"{stage} is on unknown {strangers}")


def uniform(units: UnitMap) -> None:
    """Require one layout per stage (I3)."""
    for stage in units.stages():
        found = sorted({u.layout for u in units.of(stage)})
        require(
            len(found) == 1, "I3 uniform", f"units of {stage} have {', '.join(map(str, found))}"
        )
