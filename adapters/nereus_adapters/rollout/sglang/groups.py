"""Weight groups: process groups in which sources of weights send to the ranks of engines.

An engine that joins a group does nothing else until all members are there. When two groups have
engines in common and one engine joins the first while another joins the second, both wait for ever
(reported as THUDM/slime#2331). Two rules make that impossible, whatever order groups are asked for:

- Groups of one call are formed one after another, in the order of their sources' names.
- A call holds all its members while it forms groups, and takes them in one order, that of their
  names; another call that needs one of them waits before it holds any that comes later.

Every wait has an end, and says who did not come or who holds what is waited for.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Protocol

from nereus_adapters.rollout.port import free_port
from nereus_adapters.rollout.sglang.engine import SglangEngine
from nereus_core.errors import NereusError, WaitTimeout


class Source(Protocol):
    """One holder of weights: a pipeline stage of the trainer, or all of it."""

    name: str

    @property
    def listing(self) -> Sequence[tuple[str, str, tuple[int, ...]]]:
        """Name, type and shape of what it sends, in order."""
        ...

    def join(self, address: str, port: int, group: str, size: int, timeout_s: float) -> None:
        """Be rank 0 of a group; returns when all members are there."""
        ...

    def send(self, timeout_s: float) -> None:
        """Broadcast what `listing` lists."""
        ...

    def leave(self) -> None:
        """Leave the group."""
        ...


@dataclass(frozen=True, slots=True)
class WeightGroup:
    """A source and the engines that receive from it."""

    name: str
    source: Source
    engines: tuple[SglangEngine, ...]


class WeightGroups:
    """Forms groups and sends through them; one for a process. Thread-safe.

    Args:
        address: of this host, as members reach it.
        timeout_s: longest wait for members, and for one group's weights.
    """

    def __init__(self, address: str = "127.0.0.1", *, timeout_s: float = 60.0) -> None:
        self._address, self._timeout_s = address, timeout_s
        self._serials = itertools.count()
        self._members: dict[str, tuple[threading.Lock, list[str]]] = {}
        self._lock = threading.Lock()

    def form(
        self, sources: Sequence[Source], engines: Sequence[SglangEngine]
    ) -> tuple[WeightGroup, ...]:
        """Form one group for each source, with all ranks of all engines.

        Raises:
            WaitTimeout: a member did not come, or another call held it; names them. Engines that
                wait for somebody who did not come cannot be called back: rebuild them.
        """
        chosen = tuple(sorted(engines, key=lambda e: e.name))
        ordered = sorted(sources, key=lambda s: s.name)
        with self.holding([*(s.name for s in ordered), *(e.name for e in chosen)]):
            return tuple(self._form(source, chosen) for source in ordered)

    def update(self, groups: Sequence[WeightGroup], version: int) -> None:
        """Bring all engines of groups to a version of the weights.

        Raises:
            NereusError: an engine is not ready, before anything is sent; or what it received was
                not what was sent. It has no version then, and must be rebuilt.
            WaitTimeout: a member did not finish; names it.
        """
        engines = {e.name: e for group in groups for e in group.engines}
        ordered = sorted(groups, key=lambda g: g.source.name)
        names = [*(g.source.name for g in ordered), *engines]
        with self.holding(names), ThreadPoolExecutor(len(names)) as threads:
            # A source that sends to an engine which is not ready would wait for ever: ask first.
            asked = {n: threads.submit(e.begin_receiving) for n, e in engines.items()}
            self._all(asked, "be ready for weights")
            for group in ordered:
                self._send(group, threads)
            done = {n: threads.submit(e.end_receiving, version) for n, e in engines.items()}
            self._all(done, "take up what it received")

    def dissolve(self, groups: Sequence[WeightGroup]) -> None:
        """End groups; engines that are gone have left already."""
        for group in sorted(groups, key=lambda g: g.source.name):
            for engine in group.engines:
                with contextlib.suppress(NereusError):
                    engine.call("leave", name=group.name)
            group.source.leave()

    def _form(self, source: Source, engines: tuple[SglangEngine, ...]) -> WeightGroup:
        size = 1 + sum(e.layout.num_devices for e in engines)
        name, port = f"nereus-{source.name}-{next(self._serials)}", free_port(self._address)
        place = (self._address, port, name)
        waited: dict[str, Future[Any]] = {}
        with ThreadPoolExecutor(1) as threads:
            waited[f"source {source.name}"] = threads.submit(
                source.join, *place, size, self._timeout_s
            )
            offset = 1
            for engine in engines:
                waited[f"engine {engine.name}"] = engine.begin(
                    "join", address=self._address, port=port, name=name, offset=offset, size=size
                )
                offset += engine.layout.num_devices
            self._all(waited, f"join weight group {name}")
        return WeightGroup(name, source, engines)

    def _send(self, group: WeightGroup, threads: ThreadPoolExecutor) -> None:
        names, dtypes, shapes = (list(column) for column in zip(*group.source.listing, strict=True))
        waited: dict[str, Future[Any]] = {
            f"engine {e.name}": e.begin(
                "receive",
                group=group.name,
                names=names,
                dtypes=dtypes,
                shapes=shapes,
                timeout_s=self._timeout_s,
            )
            for e in group.engines
        }
        waited[f"source {group.source.name}"] = threads.submit(group.source.send, self._timeout_s)
        self._all(waited, f"finish weight group {group.name}")

    def _all(self, waited: Mapping[str, Future[Any]], to: str) -> None:
        """Wait for all; raise the first error, or WaitTimeout with the names of those missing."""
        left = wait(waited.values(), self._timeout_s).not_done
        if late := sorted(name for name, future in waited.items() if future in left):
            raise WaitTimeout(f"{', '.join(late)} to {to}", self._timeout_s)
        for future in waited.values():
            future.result()

    @contextlib.contextmanager
    def holding(self, members: Sequence[str]) -> Iterator[None]:
        """Hold members, taken in the order of their names."""
        deadline_s = time.monotonic() + self._timeout_s
        with contextlib.ExitStack() as held:
            for member in sorted(set(members)):
                with self._lock:
                    lock, holder = self._members.setdefault(member, (threading.Lock(), []))
                if not lock.acquire(timeout=max(0.0, deadline_s - time.monotonic())):
                    awaited = f"{member}, which {holder[0] if holder else 'another call'} holds"
                    raise WaitTimeout(f"{awaited}, to be free for a weight group", self._timeout_s)
                held.callback(lock.release)
                held.callback(holder.clear)
                holder.append(f"a call for {', '.join(sorted(set(members)))}")
            yield
