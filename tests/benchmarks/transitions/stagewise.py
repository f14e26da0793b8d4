"""The baseline: every model-stage migrates by itself, acquiring its new devices before it releases
its old ones. Devices are owned, by lock; who waits for whom is known, so a deadlock is seen as a
circle the moment it closes.
"""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass, field

from nereus_core.adapter import Adapter
from nereus_core.cluster import Device
from nereus_core.plan import Plan
from nereus_core.primitives import Destroy, Extend, Merge, Split
from nereus_core.transition import compile_transition
from nereus_core.workload import Job, ModelStage

WAIT_S = 30.0
"""Until a wait that is no deadlock fails; far above a migration here."""


@dataclass
class Ownership:
    """Who has which device, and who waits for which."""

    owner: dict[Device, ModelStage]
    waiting: dict[ModelStage, Device] = field(default_factory=dict)
    circle: tuple[ModelStage, ...] = ()
    changed: threading.Condition = field(default_factory=threading.Condition)

    def acquire(self, stage: ModelStage, device: Device) -> bool:
        """Wait for a device; False when a deadlock was found, here or elsewhere."""
        with self.changed:
            self.waiting[stage] = device
            deadline_s = time.monotonic() + WAIT_S
            while self.owner.get(device, stage) != stage:
                self.circle = self.circle or self._circle(stage)
                if self.circle:
                    self.changed.notify_all()
                    return False
                if not self.changed.wait(deadline_s - time.monotonic()):
                    raise TimeoutError(f"{stage} waited {WAIT_S:g} s for {device}")
            del self.waiting[stage]
            self.owner[device] = stage
            return not self.circle

    def release(self, stage: ModelStage, devices: frozenset[Device]) -> None:
        """Give devices up."""
        with self.changed:
            for device in devices:
                if self.owner.get(device) == stage:
                    del self.owner[device]
            self.changed.notify_all()

    def _circle(self, stage: ModelStage) -> tuple[ModelStage, ...]:
        path = [stage]
        while (device := self.waiting.get(path[-1])) is not None:
            holder = self.owner.get(device)
            if holder is None or holder == path[-1]:
                return ()
            if holder in path:
                return tuple(path[path.index(holder) :])
            path.append(holder)
        return ()


def migrate(adapter: Adapter, job: Job, target: Plan, rng: random.Random, name: str) -> bool:
    """Let every stage migrate on a thread of its own; True when all arrive."""
    units = adapter.units()
    before = Plan.of_units(units)
    held = Ownership({d: stage for stage, p in before.items() for d in p.devices})
    graphs = {
        stage: compile_transition(
            units, Plan({**before, stage: target[stage]}), job, prefix=f"{name}-{stage}"
        )
        for stage in before
        if before[stage] != target[stage]
    }
    delays_s = {stage: rng.uniform(0, 0.005) for stage in graphs}
    wanted = {stage: sorted(target[stage].devices - before[stage].devices) for stage in graphs}
    for devices in wanted.values():
        rng.shuffle(devices)
    errors: list[BaseException] = []

    def work(stage: ModelStage) -> None:
        try:
            time.sleep(delays_s[stage])
            if not all(held.acquire(stage, device) for device in wanted[stage]):
                return
            for op in graphs[stage].topological():
                match op:
                    case Split():
                        adapter.split(op)
                    case Merge():
                        adapter.merge(op)
                    case Extend():
                        adapter.extend(op)
                    case Destroy():
                        adapter.destroy(op)
            held.release(stage, before[stage].devices - target[stage].devices)
        except BaseException as error:  # raised below, on the thread that waits
            errors.append(error)

    threads = [threading.Thread(target=work, args=(stage,), daemon=True) for stage in graphs]
    rng.shuffle(threads)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * WAIT_S)
    if errors:
        raise errors[0]
    return not held.circle
