"""Graphs and fingerprints as plain values, for the journal, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from nereus_core.adapter import Fingerprint
from nereus_core.errors import NereusError
from nereus_core.primitives import Destroy, Extend, Kind, Merge, Primitive, Split, kind_of
from nereus_core.transition.graph import Edge, Listed, TransitionGraph
from nereus_core.transition.verify import Baseline
from nereus_core.units import Unit, UnitMap
from nereus_core.workload import ModelStage

Json = dict[str, Any]
_T = TypeVar("_T")

_OPS: Mapping[Kind, TypeAdapter[Any]] = {
    Kind.SPLIT: TypeAdapter(Split),
    Kind.MERGE: TypeAdapter(Merge),
    Kind.EXTEND: TypeAdapter(Extend),
    Kind.DESTROY: TypeAdapter(Destroy),
}
_EDGES, _UNITS = TypeAdapter(tuple[Edge, ...]), TypeAdapter(tuple[Unit, ...])
_BASELINE = TypeAdapter(tuple[tuple[ModelStage, Fingerprint], ...])


def graph_to_json(graph: TransitionGraph) -> Json:
    """Return all of a graph as plain values."""
    return {
        "name": graph.name,
        "ops": [
            {"kind": str(kind_of(op)), **_OPS[kind_of(op)].dump_python(op, mode="json")}
            for op in graph.ops
        ],
        "edges": _EDGES.dump_python(graph.edges, mode="json"),
        "units_before": units_to_json(graph.units_before.values()),
        "parked_before": units_to_json(graph.parked_before.values()),
    }


def graph_from_json(value: Mapping[str, Any]) -> TransitionGraph:
    """Read what `graph_to_json` wrote; raises NereusError naming what does not fit."""

    def read() -> TransitionGraph:
        return TransitionGraph(
            value["name"],
            units_from_json(value["units_before"]),
            Listed(tuple(map(_op, value["ops"])), _EDGES.validate_python(value["edges"])),
            units_from_json(value["parked_before"]),
        )

    return _read("transition graph", read)


def _op(value: Mapping[str, Any]) -> Primitive:
    fields = {name: field for name, field in value.items() if name != "kind"}
    found: Primitive = _OPS[Kind(value["kind"])].validate_python(fields)
    return found


def units_to_json(units: Iterable[Unit]) -> list[Json]:
    """Return units as plain values."""
    found: list[Json] = _UNITS.dump_python(tuple(units), mode="json")
    return found


def units_from_json(value: Iterable[Mapping[str, Any]]) -> UnitMap:
    """Read what `units_to_json` wrote."""
    return UnitMap(_UNITS.validate_python(tuple(value)))


def baseline_to_json(baseline: Baseline) -> list[Any]:
    """Return fingerprints as plain values."""
    found: list[Any] = _BASELINE.dump_python(tuple(baseline.of_stage.items()), mode="json")
    return found


def baseline_from_json(value: Iterable[Any]) -> Baseline:
    """Read what `baseline_to_json` wrote; raises NereusError naming what does not fit."""
    return _read("fingerprints", lambda: Baseline(dict(_BASELINE.validate_python(tuple(value)))))


def _read(what: str, read: Callable[[], _T]) -> _T:
    try:
        return read()
    except (KeyError, TypeError, ValueError, ValidationError) as error:
        raise NereusError(f"the journal holds no {what} that can be read: {error}.") from error
