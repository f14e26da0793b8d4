"""The deadlock race, on real seats: a transition graph against migration stage by stage.

Three types of transition of a GRPO job on four CPU seats, every stage on seats of its own, the
seats drawn anew before and after: training gains a seat, training gives one up, training changes
its layout. Primitives are launched after random delays. Both sides run the same trials.
"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from nereus_adapters.torch.adapter import TorchAdapter
from nereus_adapters.torch.harness import TorchHarness
from nereus_core.adapter import Receipt
from nereus_core.errors import NereusError
from nereus_core.events import EventLog
from nereus_core.layout import Layout
from nereus_core.plan import Placement, Plan
from nereus_core.primitives import Destroy, Extend, Merge, Split
from nereus_core.transition import EdgeKind, compile_transition, execute
from nereus_core.workload import ACTOR_GENERATE, ACTOR_TRAIN, FLOAT32, REF_INFER, Job
from transitions.stagewise import migrate

ONE, TP2, PP2 = Layout(1, 1), Layout(2, 1), Layout(1, 2)
TYPES = {
    "scale_out": ((ONE, 1), (ONE, 2)),
    "scale_in": ((ONE, 2), (ONE, 1)),
    "relayout": ((TP2, 1), (PP2, 1)),
}
"""Layout and units of training, before and after."""
WAIT_S = 60.0


@dataclass(frozen=True)
class Late:
    """An adapter whose primitives begin after a random delay."""

    adapter: TorchAdapter
    rng: random.Random

    def __getattr__(self, name: str) -> Any:
        return getattr(self.adapter, name)

    def _late(self) -> TorchAdapter:
        time.sleep(self.rng.uniform(0, 0.005))
        return self.adapter

    def split(self, op: Split) -> Receipt:
        return self._late().split(op)

    def merge(self, op: Merge) -> Receipt:
        return self._late().merge(op)

    def extend(self, op: Extend) -> Receipt:
        return self._late().extend(op)

    def destroy(self, op: Destroy) -> Receipt:
        return self._late().destroy(op)


def drawn(rng: random.Random, job: Job, train: tuple[Layout, int]) -> Plan:
    """Put every stage on seats of its own, drawn at random."""
    devices = rng.sample(job.cluster.devices, len(job.cluster.devices))
    layout, count = train
    cut = layout.num_devices * count
    return Plan(
        {
            ACTOR_TRAIN: Placement.packed(layout, tuple(devices[:cut])),
            ACTOR_GENERATE: Placement.packed(ONE, (devices[cut],)),
            REF_INFER: Placement.packed(ONE, (devices[cut + 1],)),
        }
    )


def raced(*, quick: bool) -> dict[str, Any]:
    """Run the trials of all types."""
    trials = 10 if quick else 100
    harness = TorchHarness()
    try:
        job = replace(harness.job(), precision=FLOAT32)
        rng = random.Random(0)
        adapter = harness.launch(job, drawn(rng, job, (ONE, 1)))
        found = {}
        for name in TYPES:
            found[name] = _trials(adapter, job, name, trials, rng)
            print(name, found[name], file=sys.stderr)
        harness.step()  # the job goes on after all of it
    finally:
        harness.close()
    return {"trials_of_each": trials, **found}


def _trials(
    adapter: TorchAdapter, job: Job, name: str, trials: int, rng: random.Random
) -> dict[str, Any]:
    arrived = deadlocks = 0
    releases: Counter[int] = Counter()
    seconds = []
    for number in range(trials):
        before, after = (drawn(rng, job, train) for train in TYPES[name])
        seed = rng.randrange(2**32)
        with adapter.boundary(job.workload.stages, timeout_s=WAIT_S):
            _transition(adapter, job, before, f"{name}-{number}-set", None)
            if not migrate(adapter, job, after, random.Random(seed), f"{name}-{number}-base"):
                deadlocks += 1
            _transition(adapter, job, before, f"{name}-{number}-reset", None)
            begin_s = time.perf_counter()
            edges = _transition(adapter, job, after, f"{name}-{number}", random.Random(seed))
            seconds.append(time.perf_counter() - begin_s)
        if edges is not None:
            arrived += 1
            releases[edges] += 1
    return {
        "nereus_success": arrived / trials,
        "stagewise_deadlocks": deadlocks / trials,
        "release_edges": dict(sorted(releases.items())),
        "mean_s": round(sum(seconds) / len(seconds), 4),
    }


def _transition(
    adapter: TorchAdapter, job: Job, target: Plan, name: str, rng: random.Random | None
) -> int | None:
    """Bring the job to a plan; returns the resource edges, None when it does not arrive."""
    graph = compile_transition(adapter.units(), target, job, prefix=name)
    acting = adapter if rng is None else Late(adapter, rng)
    try:
        with EventLog(None, time.monotonic) as log:
            execute(graph, acting, log=log, timeout_s=WAIT_S)  # type: ignore[arg-type]  # a proxy
            if rng is not None:
                adapter.relink(target)
    except NereusError:
        if rng is None:
            raise
        return None
    return sum(edge.kind is EdgeKind.RELEASE for edge in graph.edges)
