"""Drivers that take seats over (the first starts two), step, and kill themselves in a phase.

Each is a fork of this process, which has imported what they need and touched nothing else.
"""

import hashlib
import json
import os
import signal
import sys
from pathlib import Path

from nereus_adapters.torch.harness import TorchHarness
from nereus_adapters.torch.pool import LocalPool
from nereus_core.layout import Layout
from nereus_core.phases import Phase
from nereus_core.plan import Placement, Plan
from nereus_core.primitives import Merge, Split
from nereus_core.units import Unit, UnitId
from nereus_core.workload import ACTOR_TRAIN, REF_INFER


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def state(harness, adapter):
    units = [u for u in adapter.units() if u.model_stage == ACTOR_TRAIN]
    found = {hashlib.sha256(b"".join(
        name.encode() + values.tobytes() for name, values in sorted(harness.peek(u).items())
    )).hexdigest() for u in units}  # fmt: skip
    return sorted(found)


def drive(folder, phase, told):
    new = folder == "new"
    pool = LocalPool("cpu") if new else LocalPool.attach(Path(folder), "cpu")
    harness = TorchHarness(pool=pool)
    job = harness.job()
    devices = job.cluster.devices[:2]
    if new:
        one = Placement.packed(Layout(1, 1), devices[:1])
        plan = Plan(
            dict.fromkeys(job.workload.stages, one)
            | {ACTOR_TRAIN: Placement.packed(Layout(1, 1), devices)}
        )
        adapter = harness.launch(job.on(job.cluster.without(job.cluster.devices[2:])), plan)
    else:
        adapter = harness.take_over()
    harness._folder.cleanup()  # nobody does when we are dead; seats have read it
    said = {
        "folder": str(pool.folder.path),
        "before": [f"{u.id} {u.layout}" for u in adapter.units().of(ACTOR_TRAIN)],
        "found": state(harness, adapter),
        "loss": harness.step().losses["actor"],
        "state": state(harness, adapter),
    }
    os.write(told, json.dumps(said).encode())

    if phase == "step":
        with harness.running(REF_INFER):
            die()

    def hook(op, entered):
        if entered != phase:
            return
        if entered is Phase.COMMIT:
            # One of the seats is told, then there is nobody to tell the other.
            transfer = next(iter(pool.call(devices[0], "inventory").wait(60).value.transfers))
            pool.call(devices[0], "commit", op=transfer).wait(60)
        die()

    adapter.watch(hook)
    with adapter.boundary(job.workload.stages, timeout_s=60):
        units = adapter.units().of(ACTOR_TRAIN)
        if len(units) == 2:
            into = Unit(UnitId(ACTOR_TRAIN, 2), Layout(2, 1), devices)
            adapter.merge(Merge("merge", tuple(u.id for u in units), into))
        else:
            children = tuple(
                Unit(UnitId(ACTOR_TRAIN, 3 + i), Layout(1, 1), (device,))
                for i, device in enumerate(devices)
            )
            adapter.split(Split("split", units[0].id, children))
    raise SystemExit("was to be killed")


def main(*phases):
    folder = "new"
    for phase in phases:
        tell, told = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                drive(folder, phase, told)
            finally:
                os._exit(1)
        os.close(told)
        with os.fdopen(tell, "rb") as pipe:
            text = pipe.read()
        _, status = os.waitpid(child, 0)
        if os.waitstatus_to_exitcode(status) != -signal.SIGKILL:
            raise SystemExit(f"the driver that was to die in {phase}: {status}, {text!r}")
        print(text.decode(), flush=True)
        folder = json.loads(text)["folder"]


main(*sys.argv[1:])
