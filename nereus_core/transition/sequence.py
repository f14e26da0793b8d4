"""One order that keeps every edge and every capacity; where none does, a Destroy goes first."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from itertools import islice

from nereus_core.errors import CycleError
from nereus_core.primitives import Kind, OpId
from nereus_core.transition import reasons
from nereus_core.transition.draft import Draft, Node
from nereus_core.transition.graph import EdgeKind
from nereus_core.transition.reasons import Reason
from nereus_core.transition.room import Room


class Dismantle(Exception):
    """A Split or Merge has no room, not even staged: its units have to be parked and extended."""

    def __init__(self, node: int) -> None:
        self.node = node


class Sequencer:
    """Takes nodes of a draft one by one, as soon as all that they wait for have been taken.

    Primitives that wait for one another in a circle always do so through a Destroy that waits until
    an Extend has read its unit. That Destroy goes first instead: as it is, when the Extend can read
    another unit (an executable Destroy); else parked, so that the Extend reads what host memory
    keeps.

    With a `Room`, a primitive whose new shards do not fit beside what its devices hold waits for
    those that do. When none does, in this order: a Destroy there that could go last goes now; a
    Split or Merge is staged in host memory; a Destroy there goes first, as above; a Split or Merge
    there is dismantled.
    """

    def __init__(self, draft: Draft, alive: Sequence[range], room: Room | None) -> None:
        self._draft, self._nodes, self._room = draft, draft.nodes, room
        destroy = Kind.DESTROY
        self._destroys = [node.kind is destroy for node in self._nodes]
        self._standing = [len(units) for units in alive]
        """By stage: units that are there whatever goes first."""
        self._anchored = [any(map(self._goes_on, units)) for units in alive]
        """By stage: whether a unit is there throughout, as it is or changed in place."""
        for node in self._nodes:
            self._standing[node.stage] -= node.park
        self._makers: list[dict[int, None]] = [{} for _ in alive]
        """By stage that is not anchored: nodes taken that have made a unit which stays."""
        self._freed: list[list[int]] = [[] for _ in alive]
        """By stage: Destroys that go first as they are."""
        self._open = {i: set(waits) for i, waits in draft.waits.items()}
        """By node: those it waits for that have not been taken."""
        self._wakes: defaultdict[int, set[int]] = defaultdict(set)
        """By node: those that wait for it."""
        for i, waits in self._open.items():
            for first in waits:
                self._wakes[first].add(i)
        ends = (i for i, is_destroy in enumerate(self._destroys) if is_destroy)
        self._late = dict.fromkeys(i for i in ends if i not in self._wakes)
        """Destroys that nothing waits for, in order."""
        self._taken = [False] * len(self._nodes)
        self._ready: list[int] = []
        """Ranks of nodes that wait for none."""
        self._lowest = 0
        """The node at which the last circle was sought: few before it wait."""
        self.squeezed: set[int] = set()
        """Nodes that had to wait for memory."""

    def sequence(self) -> list[int]:
        """Return the nodes in an order that keeps every edge, least rank first.

        A Destroy that nothing waits for comes after everything else.

        Raises:
            CycleError: a circle that no Destroy can open.
            Infeasible: a unit has no room, whatever goes first.
            Dismantle: there is room once this Split or Merge is one no more.
        """
        early = len(self._nodes) - len(self._late)
        free = (i for i in range(len(self._nodes)) if i not in self._open and i not in self._late)
        self._ready = sorted(map(self._rank, free))
        done: list[int] = []
        if self._room is None and not self._open:  # nothing waits: ranks are nodes, in order
            done, early = self._ready, 0
            for node in done:
                self._take(node)
        while early:
            node = self._next()
            early -= node not in self._late
            done.append(node)
            self._take(node)
            for woken in sorted(self._wakes.get(node, ())):
                if waits := self._open.get(woken):
                    waits.discard(node)
                if not waits and woken not in self._late:
                    heapq.heappush(self._ready, self._rank(woken))
        rest = [i for i in self._late if not self._taken[i]]
        for node in rest:
            self._take(node)
        return [*done, *rest]

    def _take(self, node: int) -> None:
        """Let a node be the next one."""
        self._taken[node] = True
        stage = self._nodes[node].stage
        if not self._anchored[stage]:
            if any(map(self._goes_on, self._nodes[node].made)):
                self._makers[stage][node] = None
            if self._destroys[node]:
                self._secure(node)
        if self._room:
            self._room.take(self._nodes[node])

    def _next(self) -> int:
        """Choose the node to be taken."""
        aside = []
        found = None
        while self._ready and found is None:
            rank = heapq.heappop(self._ready)
            i = rank % len(self._nodes)
            if self._taken[i] or self._open.get(i):
                continue  # it has been let go first, or waits for a unit that is to be parked
            if self._room is None or self._room.blocked(self._nodes[i]) is None:
                found = i
            else:
                aside.append(rank)
        for rank in aside:
            heapq.heappush(self._ready, rank)
        if found is not None:
            return found
        if aside:
            return self._squeeze([rank % len(self._nodes) for rank in aside])
        freed = self._choose(self._circle())
        self._let_go(freed)
        return freed

    def _rank(self, i: int) -> int:
        """Among nodes that may go next the least does: destroys last, else in order of stages."""
        return i + len(self._nodes) if self._destroys[i] else i

    # --- Last units -----------------------------------------------------------------------------

    def _goes_on(self, unit: int) -> bool:
        ender = self._draft.ender[unit]
        return ender is None or not self._destroys[ender]

    def _secure(self, destroy: int) -> None:
        """See to it that a Destroy does not end the last unit of a stage: it waits, or parks."""
        node = self._nodes[destroy]
        if node.park or destroy in self._freed[node.stage]:
            return
        makers = self._makers[node.stage]
        if makers:
            if not any(first in makers for first in self._draft.waits[destroy]):
                first = next(iter(makers))
                stands = self._nodes[first].made[0]
                self._draft.waits[destroy][first] = (EdgeKind.STATE, reasons.STANDS_FIRST, stands)
            return
        node.park = self._standing[node.stage] == 1
        self._standing[node.stage] -= 1
        self._settle(destroy)

    def _settle(self, destroy: int) -> None:
        """Put one that parks after those of its stage that rely on its unit."""
        node = self._nodes[destroy]
        unit = node.ended[0]
        if node.park:
            for other in self._freed[node.stage]:  # all of them have their place
                self._draft.waits[destroy][other] = (EdgeKind.STATE, reasons.STANDS_LAST, unit)
        else:
            self._freed[node.stage].append(destroy)

    # --- Circles --------------------------------------------------------------------------------

    def _circle(self) -> list[int]:
        """Follow open waits, the least first, until a node comes again; return the circle."""
        first = self._lowest
        for node in (*range(first, len(self._nodes)), *range(first)):
            if self._open.get(node) and not self._taken[node]:
                break
        else:
            raise AssertionError("primitives are left, of which none waits and none may go")
        self._lowest = node
        path: dict[int, None] = {}
        while node not in path:
            path[node] = None
            node = min(self._open[node])
        nodes = list(path)
        return nodes[nodes.index(node) :]

    def _choose(self, circle: list[int]) -> int:
        """Pick the Destroy that opens a circle: one that need not be parked, if there is one."""
        destroys = [i for i in circle if self._destroys[i]]
        if not destroys:
            named = [self._draft.primitive(i, OpId(f"#{i}")) for i in circle]
            raise CycleError([*named, named[0]])
        return min(destroys, key=lambda i: (self._standing[self._nodes[i].stage] == 1, i))

    def _let_go(self, freed: int) -> None:
        """Put a Destroy before the Extends it waits for: they read others, or what it parks."""
        node = self._nodes[freed]
        unit = node.ended[0]
        readers = sorted(self._open.get(freed, ()))
        last = self._standing[node.stage] == 1
        instead = None if last else self._instead(unit, readers)
        node.park = instead is None
        self._standing[node.stage] -= 1
        self._open.pop(freed, None)
        for reader in readers:
            del self._draft.waits[freed][reader]
            self._wakes[reader].discard(freed)
            if node.park:
                self._wait(reader, freed, (EdgeKind.STATE, reasons.READS_PARKED, unit))
                continue
            reads = [other for other in self._nodes[reader].reads if other != unit]
            if (other := (instead or {}).get(reader)) is not None:
                reads.append(other)
                self._read(reader, other)
            self._nodes[reader].reads = reads
        self._settle(freed)

    def _instead(self, gone: int, readers: list[int]) -> dict[int, int] | None:
        """Find another source for every reader of a unit that has no other; None: there is none."""
        found: dict[int, int] = {}
        lone = [i for i in readers if [*self._nodes[i].reads] == [gone]]
        if not lone:
            return found
        pool = self._draft.pool(self._nodes[lone[0]].stage)
        if not pool:
            return None
        start = lone[0] % len(pool)  # others than those that the readers before were given
        others = (u for u in (*pool[start:], *pool[:start]) if u != gone and self._stands(u))
        open_to = list(islice(others, len(lone)))
        if not open_to:
            return None
        for turn, reader in enumerate(lone):
            found[reader] = open_to[turn % len(open_to)]
        return found

    def _stands(self, unit: int) -> bool:
        """Whether a unit is there and can be read whatever goes next."""
        maker, ender = self._draft.maker[unit], self._draft.ender[unit]
        made = maker is None or self._taken[maker]
        return made and (ender is None or not (self._taken[ender] or self._nodes[ender].park))

    def _read(self, reader: int, unit: int) -> None:
        """Let an Extend read a unit that stands."""
        if (maker := self._draft.maker[unit]) is not None:
            self._draft.waits[reader][maker] = (EdgeKind.STATE, reasons.READS, unit)
        if (ender := self._draft.ender[unit]) is not None:
            self._draft.waits[ender][reader] = (EdgeKind.STATE, reasons.READ_BEFORE_END, unit)
            self._open.setdefault(ender, set()).add(reader)
            self._wakes[reader].add(ender)

    def _wait(self, node: int, first: int, reason: Reason) -> None:
        self._draft.waits[node].setdefault(first, reason)
        self._open.setdefault(node, set()).add(first)
        self._wakes[first].add(node)

    # --- Memory ---------------------------------------------------------------------------------

    def _squeeze(self, blocked: list[int]) -> int:
        """Choose a node when none of those that may go has room beside what is there."""
        assert self._room is not None
        self.squeezed.update(blocked)
        full = {i: self._room.blocked(self._nodes[i]) for i in blocked}
        devices = set(full.values())

        def there(node: Node) -> bool:
            return any(not devices.isdisjoint(self._draft.roster.places[u]) for u in node.ended)

        for i in self._late:
            if not self._taken[i] and not self._open.get(i) and there(self._nodes[i]):
                return i
        for i in blocked:
            node = self._nodes[i]
            if self._room.fits_staged(node):
                node.staging_bytes = self._room.left(node)
                return i
        for i, node in enumerate(self._nodes):
            if self._may_go(i) and there(node):
                self._let_go(i)
                return i
        for i, node in enumerate(self._nodes):
            if node.ended and not self._destroys[i] and not self._taken[i] and there(node):
                raise Dismantle(i)
        first = blocked[0]
        device = full[first]
        assert device is not None
        raise self._room.refuse(self._nodes[first], device, str(self._nodes[first].kind))

    def _may_go(self, destroy: int) -> bool:
        """Whether a node is a Destroy that waits for nothing but the readers of its unit."""
        node = self._nodes[destroy]
        if not self._destroys[destroy] or node.park or self._taken[destroy]:
            return False
        unit = node.ended[0]
        return all(unit in self._nodes[i].reads for i in self._open.get(destroy, ()))
