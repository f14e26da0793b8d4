"""Seats: which device each rank and engine of a job is on.

A device is the bundle of a placement group that an actor sits in; it is called by the node and the
GPU index that Ray gave the actor. vLLM does not tell which bundles the workers of an engine of
several devices have: those get, in order, the indices of their node that nobody else reports.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nereus_adapters.openrlhf.inside import Whereabouts, whereabouts
from nereus_adapters.ray_calls import ask
from nereus_core.cluster import Device


@dataclass(frozen=True, slots=True)
class Bundle:
    """A place for actors: a bundle of a placement group."""

    pg: Any
    """None for an actor that Ray placed without a group."""
    index: int
    gpu: int | None = None
    """Which GPU of its node it is; None where nobody told."""


@dataclass(frozen=True, slots=True)
class Seating:
    """Devices of ranks and engines as they were found, and the bundle behind each device."""

    ranks: tuple[tuple[Device, ...], ...]
    """By group as given, then by rank."""
    engines: tuple[tuple[Device, ...], ...]
    """By engine, then by tensor-parallel rank."""
    bundles: dict[Device, Bundle]
    shares: tuple[float, ...]
    """Of its device that each rank holds, then each engine, in the order given."""


def seating(
    groups: Sequence[Sequence[Any]], engines: Sequence[Any], engine_tp: int, timeout_s: float
) -> Seating:
    """Ask every actor where it is.

    Args:
        groups: Handles of each group, by rank.
        engines: Handles of engines.
        engine_tp: Devices of one engine.
        timeout_s: Longest wait.

    Raises:
        WaitTimeout, SeatDead: an actor does not answer.
    """
    flat = [handle for handles in groups for handle in handles]
    asked = ask([*flat, *engines], whereabouts, awaited="where ranks and engines are",
                timeout_s=timeout_s)  # fmt: skip
    found: list[Whereabouts] = list(asked)
    bundles: dict[Device, Bundle] = {}
    taken = {Device(w.node, w.gpu) for w in found if w.gpu is not None}
    by_group = []
    start = 0
    for handles in groups:
        mine = found[start : start + len(handles)]
        start += len(handles)
        devices = tuple(_named(w) for w in mine)
        for rank, (device, where) in enumerate(zip(devices, mine, strict=True)):
            index = rank if where.pg is not None else 0
            bundles.setdefault(device, Bundle(where.pg, index, where.gpu))
        by_group.append(devices)
    by_engine: list[tuple[Device, ...]] = []
    for number, where in enumerate(found[start:]):
        if engine_tp == 1:
            device = _named(where)
            bundles.setdefault(device, Bundle(where.pg, number, where.gpu))
            by_engine.append((device,))
            continue
        indices = where.bundles or tuple(range(number * engine_tp, (number + 1) * engine_tp))
        nodes = _nodes_of(where, indices)
        devices = tuple(_free(node, taken) for node in nodes)  # a guess: their GPU is not known
        bundles |= {d: Bundle(where.pg, i) for d, i in zip(devices, indices, strict=True)}
        by_engine.append(devices)
    shares = tuple(where.share or 1.0 for where in found)
    return Seating(tuple(by_group), tuple(by_engine), bundles, shares)


def _named(where: Whereabouts) -> Device:
    return Device(where.node, where.gpu if where.gpu is not None else 0)


def _nodes_of(where: Whereabouts, indices: Sequence[int]) -> list[str]:
    """Addresses of the nodes of bundles."""
    import ray
    from ray.util import placement_group_table

    address = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    placed = placement_group_table(where.pg)["bundles_to_node_id"]
    return [address.get(placed[i], where.node) for i in indices]


def _free(node: str, taken: set[Device]) -> Device:
    index = next(i for i in range(len(taken) + 1) if Device(node, i) not in taken)
    device = Device(node, index)
    taken.add(device)
    return device
