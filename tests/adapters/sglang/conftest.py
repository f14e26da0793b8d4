"""One stem for all tests of a run: engines come and go, imports are paid once."""

import pytest
from tiny_llama import TinyLlama

from nereus_adapters.rollout.sglang.factory import SglangEngines
from nereus_core.cluster import Device
from nereus_core.layout import Layout

DEVICES = tuple(Device("here", index) for index in range(4))


@pytest.fixture(scope="session")
def llama():
    made = TinyLlama()
    yield made
    made.close()


@pytest.fixture(scope="session")
def engines(llama):
    made = SglangEngines(llama.config, DEVICES, max_tokens=2048, max_running=8)
    made.pool.start()
    yield made
    made.close()


@pytest.fixture
def start(engines):
    """Start engines: ``start("a", Layout(2, 1))``; they are closed after the test."""
    started = []

    def begin(name, layout=Layout(1, 1), first=0, factory=engines, devices=None):  # noqa: B008
        where = devices or DEVICES[first : first + layout.num_devices]
        engine = factory.create(name, layout, where)
        started.append(engine)
        return engine

    yield begin
    for engine in started:
        engine.close()
