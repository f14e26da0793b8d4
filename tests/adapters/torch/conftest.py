"""Four warm seats, shared by the whole folder; and short ways to write primitives."""

import hashlib
import itertools
import os

import pytest
import torch

from nereus_adapters.torch.harness import TINY_CONFIG, TorchHarness
from nereus_adapters.torch.pool import LocalPool
from nereus_core.layout import Layout
from nereus_core.plan import Placement, Plan
from nereus_core.primitives import Destroy, Extend, Merge, Split
from nereus_core.units import Unit, UnitId
from nereus_core.workload import ACTOR_TRAIN

# Seats answer with what a hurried machine can do; a hang must still end the test.
WAIT_S = 60.0


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def pool():
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with torch.inference_mode(False):
        started = LocalPool("cpu")
        yield started
        started.close()


@pytest.fixture
def harness(pool):
    made = TorchHarness(pool=pool)
    yield made
    made.close()


_numbers = itertools.count()


class Hand:
    """Writes primitives against the units alive; op ids and serials are new each time."""

    def __init__(self, adapter):
        self.adapter = adapter
        self.devices = adapter.job().cluster.devices

    def unit(self, stage, layout, places):
        unit_id = UnitId(stage, 100 + next(_numbers))
        return Unit(unit_id, layout, tuple(self.devices[i] for i in places))

    def ids(self, stage):
        return tuple(u.id for u in self.adapter.units().of(stage))

    def op_id(self):
        return f"op{next(_numbers)}"

    def split(self, layout, *places, stage=ACTOR_TRAIN, parent=0):
        parent = self.ids(stage)[parent]
        into = tuple(self.unit(stage, layout, p) for p in places)
        return self.adapter.split(Split(self.op_id(), parent, into))

    def merge(self, layout, places, stage=ACTOR_TRAIN, parents=None):
        parents = parents or self.ids(stage)
        return self.adapter.merge(Merge(self.op_id(), parents, self.unit(stage, layout, places)))

    def extend(self, layout, places, stage=ACTOR_TRAIN, sources=None):
        sources = sources or self.ids(stage)
        return self.adapter.extend(Extend(self.op_id(), sources, self.unit(stage, layout, places)))

    def destroy(self, which, stage=ACTOR_TRAIN, park=False):
        return self.adapter.destroy(Destroy(self.op_id(), self.ids(stage)[which], park))


def packed(job, placements=None):
    """Return a plan; every stage is packed from the first device on."""
    devices = job.cluster.devices

    def place(stage):
        layout, dp = (placements or {}).get(stage, (Layout(1, 1), 1))
        return Placement.packed(layout, devices[: layout.num_devices * dp])

    return Plan({stage: place(stage) for stage in job.workload.stages})


def at_boundary(adapter):
    return adapter.boundary(adapter.job().workload.stages, timeout_s=WAIT_S)


def sha256(state):
    """Return a SHA-256 of logical state, tensor by tensor in order of names."""
    found = hashlib.sha256()
    for name in sorted(state):
        found.update(name.encode())
        found.update(state[name].tobytes())
    return found.hexdigest()


@pytest.fixture(scope="session")
def tools():
    """Names that tests need from here: import-mode importlib has no conftest to import."""

    class Tools:
        pass

    tools = Tools()
    tools.Hand, tools.packed, tools.at_boundary, tools.sha256 = Hand, packed, at_boundary, sha256
    tools.TINY_CONFIG, tools.TorchHarness = TINY_CONFIG, TorchHarness
    return tools
