"""One order that keeps every edge; where none does, a Destroy is let go first."""

from __future__ import annotations

import heapq
from dataclasses import replace

from nereus_core.errors import CycleError
from nereus_core.primitives import Destroy
from nereus_core.transition.draft import Draft
from nereus_core.transition.graph import EdgeKind
from nereus_core.workload import ModelStage


class Sequencer:
    """Takes nodes of a draft one by one, as soon as all that they wait for have been taken.

    Primitives that wait for one another in a circle always do so through a Destroy that waits until
    an Extend has read its unit. That Destroy goes first instead: as it is, when the stage has
    another unit to read (an executable Destroy); else parked, so that the Extend reads what host
    memory keeps.
    """

    def __init__(self, draft: Draft, num_alive: dict[ModelStage, int]) -> None:
        self.nodes = draft.nodes
        self.standing = dict(num_alive)
        """Units of a stage that are there whatever goes first."""
        self.freed: dict[ModelStage, list[int]] = {stage: [] for stage in num_alive}
        """Destroys of a stage that go first as they are."""
        self.open_waits = [set(node.waits) for node in self.nodes]
        self.wakes: list[set[int]] = [set() for _ in self.nodes]
        for i, waits in enumerate(self.open_waits):
            for first in waits:
                self.wakes[first].add(i)

    def sequence(self) -> list[int]:
        """Return the nodes in an order that keeps every edge, least rank first.

        A Destroy that nothing waits for comes after everything else.

        Raises:
            CycleError: a circle that no Destroy can open.
        """
        last = [i for i, node in enumerate(self.nodes) if node.destroys and not self.wakes[i]]
        early = set(range(len(self.nodes))) - set(last)
        ready = [(self.nodes[i].rank, i) for i in early if not self.open_waits[i]]
        heapq.heapify(ready)
        done: list[int] = []
        while len(done) < len(early):
            if not ready:
                freed = self._choose(_circle(self.open_waits))
                self._let_go(freed)
                ready.append((self.nodes[freed].rank, freed))
            node = heapq.heappop(ready)[1]
            done.append(node)
            for woken in sorted(self.wakes[node]):
                self.open_waits[woken].discard(node)
                if not self.open_waits[woken] and woken in early:
                    heapq.heappush(ready, (self.nodes[woken].rank, woken))
        return [*done, *sorted(last, key=lambda i: self.nodes[i].rank)]

    def _choose(self, circle: list[int]) -> int:
        """Pick the Destroy that opens a circle: one that need not be parked, if there is one."""
        destroys = [i for i in circle if self.nodes[i].destroys]
        if not destroys:
            raise CycleError([self.nodes[i].op for i in [*circle, circle[0]]])
        return min(destroys, key=lambda i: (self.standing[self.nodes[i].stage] == 1, i))

    def _let_go(self, freed: int) -> None:
        """Put a Destroy before the Extends it waits for: they read others, or what it parks."""
        node = self.nodes[freed]
        assert isinstance(node.op, Destroy)
        park = self.standing[node.stage] == 1
        self.standing[node.stage] -= 1
        node.op = replace(node.op, park=park)
        for reader in sorted(self.open_waits[freed]):
            del node.waits[reader]
            self.wakes[reader].discard(freed)
            if park:
                text = f"reads {node.op.unit}, parked in host memory"
                self.nodes[reader].waits.setdefault(freed, (EdgeKind.STATE, text))
                self.open_waits[reader].add(freed)
                self.wakes[freed].add(reader)
            else:
                del self.nodes[reader].reads[node.op.unit]
        for other in self.freed[node.stage] if park else ():  # all of them have their place
            node.waits[other] = (
                EdgeKind.STATE,
                f"{node.op.unit} stands until the others have gone",
            )
        if not park:
            self.freed[node.stage].append(freed)
        self.open_waits[freed].clear()


def _circle(open_waits: list[set[int]]) -> list[int]:
    """Follow open waits, the least first, until a node comes again; return the circle."""
    path: dict[int, None] = {}
    node = next(i for i, waits in enumerate(open_waits) if waits)
    while node not in path:
        path[node] = None
        node = min(open_waits[node])
    nodes = list(path)
    return nodes[nodes.index(node) :]
