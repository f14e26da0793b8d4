"""Twenty transitions on the same devices: what is left of them in memory, processes and files."""

import itertools

import cycles
import psutil
import pytest

from nereus_adapters.rollout.ports import Prompt, Sampling

pytestmark = pytest.mark.real

GROWTH_BYTES = 2 * 2**20
"""Most that the stem may grow per transition once warm. Engine processes end with their engines; a
stem that kept anything of one would grow by its 20 MB and more. The driver's memory is that of the
tests and the model beside them: its files and threads are compared."""


def test_twenty_transitions_leave_nothing_behind(engines, start, llama):
    published, numbers = llama.publish(), itertools.count()
    devices = tuple(sorted(engines.healthy))[:2]
    prompts = [Prompt(f"p{i}", (7 + i, 8, 9), Sampling(12, temperature=0.0)) for i in range(2)]
    wanted = [llama.greedy(p.tokens, 12) for p in prompts]
    stem = engines.pool.pid

    def begin(layout, devices):
        engine = start(f"cycle{next(numbers)}", layout, devices=devices)
        engine.update_weights(published.version, published.manifest(layout))
        return engine

    def use(engine):
        found = [future.result(60) for future in [engine.submit(p) for p in prompts]]
        assert [f.tokens for f in found] == wanted

    def resident_bytes():
        return [psutil.Process(engines.pool.pid).memory_info().rss]

    cycles.require_nothing_left(devices, begin, use, resident_bytes, GROWTH_BYTES)
    assert engines.pool.pid == stem
