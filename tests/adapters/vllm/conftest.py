"""Engines on two seats that stay for the session."""

import json

import pytest
from rollout_job import harness as harness
from vllm_cases import DEVICES, ONE, Weights

from nereus_adapters.rollout.segment import held
from nereus_adapters.rollout.vllm.harness import TINY, CpuFactory, new_harness, settings
from nereus_core.model import ModelSpec


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A folder with the config.json of the tiny model; there are no weights on disk."""
    path = tmp_path_factory.mktemp("model")
    (path / "config.json").write_text(json.dumps(TINY))
    return path


@pytest.fixture(scope="session")
def spec(folder):
    return ModelSpec.from_hf_config(folder, name="actor")


@pytest.fixture(scope="session")
def factory(folder, spec):
    """Engines on two seats."""
    made = CpuFactory(settings(folder), spec, DEVICES)
    made.pool.start(DEVICES)
    yield made
    made.close()
    assert not held()


@pytest.fixture(scope="session")
def fronts(factory, folder, spec):
    """Engines on the same seats: stepped by the seat that leads, or by an AsyncLLM."""
    other = CpuFactory(settings(folder, front="async"), spec, DEVICES, pool=factory.pool)
    return {"step": factory, "async": other}


@pytest.fixture(scope="session")
def launcher(factory):
    """Launches jobs with a trainer on the session's seats, and two more."""
    made = new_harness(factory.pool)
    yield made
    made.close()


@pytest.fixture
def weights(folder, spec):
    """Fresh weights of the tiny model."""
    made = Weights(folder, spec, seed=3)
    yield made
    made.close()


@pytest.fixture
def start(factory):
    """Start engines that end with the test."""
    started = []

    def begin(layout=ONE, devices=None, published=None, using=factory):
        where = devices or DEVICES[: layout.num_devices]
        engine = using.create(f"engine {len(started)}", layout, where)
        started.append(engine)
        if published is not None:
            engine.update_weights(published.version, published.manifest(layout))
        return engine

    yield begin
    for engine in started:
        engine.close()
