"""Which of the orders that keep every edge ends soonest: list scheduling by predicted seconds.

Seconds are ideal ones (`cost.transition.primitive_work`), the same for primitives alike; only their
ratios matter here. Graham 1966: with any priorities the schedule is at most twice the optimum on
one kind of resource; several priorities are tried and the best schedule is kept.
"""

from __future__ import annotations

import heapq
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import chain

from nereus_core.cost.transition import primitive_work
from nereus_core.primitives import Kind, OpId
from nereus_core.transition.draft import Draft
from nereus_core.transition.room import Room
from nereus_core.units import UnitMap
from nereus_core.workload import Job

_MOST = 64
"""Primitives up to which orders are searched; beyond, primitives are many and alike, and the order
they were found in is kept. Chosen, not measured."""
_STEPS = 4000
"""Primitives placed at most while the best schedule is above the lower bound: as many priorities
are tried as that allows. Chosen, not measured: tens of milliseconds."""
_PATIENCE = 80
"""Priorities tried in vain before the search ends. Chosen, not measured."""
_NEAR = 1.005
"""A schedule this near to the bound is not improved further. Chosen, not measured."""


def soonest(
    draft: Draft,
    sequence: list[int],
    standing: Sequence[range],
    job: Job,
    room: Room | None,
) -> list[int]:
    """Return the order of starts in the best schedule found, never worse than the order given.

    With a room, on no device are capacities exceeded on the way.
    """
    nodes = draft.nodes
    if not 2 < len(nodes) <= _MOST:
        return sequence
    seconds = _seconds(draft, standing, job)
    masks = draft.touches()
    waits = _with_surplus_last(draft, sequence)

    def fresh() -> Callable[[int], bool]:
        if room is None:
            return lambda i: True
        left = room.copy()
        return lambda i: left.taken(nodes[i])

    return _search(sequence, waits, masks, seconds, fresh)


def _with_surplus_last(draft: Draft, sequence: list[int]) -> list[tuple[int, ...]]:
    """What each primitive waits for; a Destroy that nothing awaits, for its stage to stand too.

    A surplus unit is a copy of the stage's state: it goes when the others are what they shall be,
    unless the order given lets it go before, to make room.
    """
    awaited = {first for waits in draft.waits.values() for first in waits}
    found = [tuple(draft.waits.get(i, ())) for i in range(len(draft.nodes))]
    before: defaultdict[int, list[int]] = defaultdict(list)
    for i in sequence:
        node = draft.nodes[i]
        if node.kind is not Kind.DESTROY:
            before[node.stage].append(i)
        elif i not in awaited:
            found[i] = tuple(dict.fromkeys((*found[i], *before[node.stage])))
    return found


def _search(
    sequence: list[int],
    waits: Sequence[tuple[int, ...]],
    masks: Sequence[int],
    seconds: Sequence[float],
    fresh: Callable[[], Callable[[int], bool]],
) -> list[int]:
    tails, heads = list(seconds), [0.0] * len(seconds)
    for i in reversed(sequence):
        for first in waits[i]:
            tails[first] = max(tails[first], seconds[first] + tails[i])
    for i in sequence:
        heads[i] = max((heads[j] + seconds[j] for j in waits[i]), default=0.0)
    loads: dict[int, float] = {}
    for mask, own_s in zip(masks, seconds, strict=True):
        rest = mask
        while rest:
            bit = rest & -rest
            loads[bit] = loads.get(bit, 0.0) + own_s
            rest ^= bit
    bound_s = max(max(loads.values()), max(h + t for h, t in zip(heads, tails, strict=True)))
    place = {node: float(-i) for i, node in enumerate(sequence)}
    busiest = [max(loads[1 << b] for b in _positions(mask)) for mask in masks]
    rules = [
        [place[i] for i in range(len(seconds))],
        tails,
        [t + load for t, load in zip(tails, busiest, strict=True)],
    ]
    best_s, best, leading, won = float("inf"), sequence, tails, 0
    rng = random.Random(0)
    for turn in range(max(len(rules), _STEPS // len(seconds))):
        if turn < len(rules):
            priority = rules[turn]
        else:
            spread = rng.choice((0.1, 0.3, 0.9))
            priority = [p * (1 + rng.uniform(-spread, spread)) for p in leading]
        place_all = _appended if turn > len(rules) and turn % 2 else _simulated
        end_s, order = place_all(waits, masks, seconds, priority, fresh())
        if end_s < best_s:
            best_s, best, won = end_s, order, turn
            leading = priority if turn else tails
        if best_s <= _NEAR * bound_s or turn - won > _PATIENCE:
            break
    return best


def _simulated(
    waits: Sequence[tuple[int, ...]],
    masks: Sequence[int],
    seconds: Sequence[float],
    priority: Sequence[float],
    fits: Callable[[int], bool],
) -> tuple[float, list[int]]:
    """Start whatever is ready, has its devices free and fits, the highest priority first.

    What cannot go on ends at infinity: priorities that fill a device with the wrong unit.
    """
    open_waits = [len(w) for w in waits]
    wakes: list[list[int]] = [[] for _ in waits]
    for i, w in enumerate(waits):
        for first in w:
            wakes[first].append(i)
    ready = sorted((i for i, n in enumerate(open_waits) if not n), key=lambda i: (-priority[i], i))
    running: list[tuple[float, int]] = []
    now_s, busy, order = 0.0, 0, []
    while ready or running:
        left = []
        for i in ready:
            if masks[i] & busy or not fits(i):
                left.append(i)
            else:
                busy |= masks[i]
                order.append(i)
                heapq.heappush(running, (now_s + seconds[i], i))
        ready = left
        if not running:
            return float("inf"), order
        now_s, done = heapq.heappop(running)
        finished = [done]
        while running and running[0][0] <= now_s:
            finished.append(heapq.heappop(running)[1])
        for i in finished:
            busy &= ~masks[i]
            for woken in wakes[i]:
                open_waits[woken] -= 1
                if not open_waits[woken]:
                    ready.append(woken)
        ready.sort(key=lambda i: (-priority[i], i))
    return now_s, order


def _appended(
    waits: Sequence[tuple[int, ...]],
    masks: Sequence[int],
    seconds: Sequence[float],
    priority: Sequence[float],
    fits: Callable[[int], bool],
) -> tuple[float, list[int]]:
    """Append whatever is ready, the highest priority first, even if its devices idle until then.

    An optimum may need that, and no schedule of `_simulated` has it.
    """
    open_waits = [len(w) for w in waits]
    wakes: list[list[int]] = [[] for _ in waits]
    for i, w in enumerate(waits):
        for first in w:
            wakes[first].append(i)
    ready = [(-priority[i], i) for i, n in enumerate(open_waits) if not n]
    heapq.heapify(ready)
    finish = [0.0] * len(seconds)
    free: dict[int, float] = {}
    order: list[int] = []
    while ready:
        _, i = heapq.heappop(ready)
        if not fits(i):
            return float("inf"), order
        places = _positions(masks[i])
        start_s = max(
            max((finish[j] for j in waits[i]), default=0.0),
            max((free.get(p, 0.0) for p in places), default=0.0),
        )
        finish[i] = start_s + seconds[i]
        free.update(dict.fromkeys(places, finish[i]))
        order.append(i)
        for woken in wakes[i]:
            open_waits[woken] -= 1
            if not open_waits[woken]:
                heapq.heappush(ready, (-priority[woken], woken))
    return max(finish), order


def _seconds(draft: Draft, standing: Sequence[range], job: Job) -> list[float]:
    """Ideal seconds of every primitive; computed once for those alike."""
    known: dict[object, float] = {}
    roster = draft.roster
    parked = {unit for node in draft.nodes if node.park for unit in node.ended}
    alive = set(chain.from_iterable(standing))
    read = {unit for node in draft.nodes for unit in node.reads}
    parked |= {u for u in read - alive if draft.maker[u] is None}  # by an earlier transition
    found = []
    for i, node in enumerate(draft.nodes):
        named = dict.fromkeys((*node.ended, *node.made, *node.reads))
        key = (
            node.kind,
            node.stage,
            node.park,
            tuple(roster.layouts[unit] for unit in node.ended),
            tuple(roster.layouts[unit] for unit in node.made),
            tuple((roster.layouts[unit], unit in parked) for unit in node.reads),
            len({d.node for unit in named for d in roster.places[unit]}) > 1,
        )
        if node.kind in ("split", "merge") or key not in known:
            units = UnitMap(map(roster.unit, named))
            away = {roster.id(unit) for unit in named if unit in parked}
            known[key] = float(primitive_work(job, draft.primitive(i, OpId("")), units, away).sum())
        found.append(known[key])
    return found


def _positions(mask: int) -> list[int]:
    found = []
    while mask:
        bit = mask & -mask
        found.append(bit.bit_length() - 1)
        mask ^= bit
    return found
