"""Twenty transitions on the same seats: what is left of them in memory, processes and files."""

import cycles
import pytest
from vllm_cases import DEVICES, ONE, TP2, prompts, respond

from nereus_adapters.rollout.vllm.harness import CpuFactory, settings

pytestmark = pytest.mark.real

GROWTH_BYTES = 8 * 2**20
"""Most that a seat may grow per transition once warm: the leak that engines had before what vLLM
keeps of reloaded layers was cleared was 5-25 MB."""


def test_twenty_transitions_leave_nothing_behind(factory, start, weights):
    published = weights.publish(1)
    wanted = [weights.greedy(p.tokens, 12)[0] for p in prompts(2, 12)]
    seats = {d: factory.pool.seat(d).pid for d in DEVICES}

    def use(engine):
        assert [f.tokens for f in respond(engine, prompts(2, 12))] == wanted

    def resident_bytes():
        found = [factory.pool.seat(d).call("memory", 60) for d in DEVICES]
        assert [held for _, held in found] == [0, 0]
        return [resident for resident, _ in found]

    def begin(layout, devices):
        return start(layout, devices, published)

    cycles.require_nothing_left(DEVICES, begin, use, resident_bytes, GROWTH_BYTES)
    assert {d: factory.pool.seat(d).pid for d in DEVICES} == seats


def test_a_seat_that_has_grown_is_replaced_between_engines(factory, folder, spec, start, weights):
    published = weights.publish(1)
    wanted = weights.greedy(prompts(1)[0].tokens, 24)[0]
    tight = CpuFactory(settings(folder), spec, DEVICES, pool=factory.pool, recycle_bytes=-(2**30))
    before = factory.pool.seat(DEVICES[0]).pid
    for _ in range(2):
        engine = start(published=published, using=tight)
        assert respond(engine, prompts(1))[0].tokens == wanted
        engine.close()
    assert tight.recycled == 2
    assert factory.pool.seat(DEVICES[0]).pid != before


@pytest.mark.parametrize("layout", [ONE, TP2], ids=str)
def test_stock_executors_are_a_fallback(factory, folder, spec, start, weights, layout):
    stock = CpuFactory(
        settings(folder, executor="mp" if layout == TP2 else "uni"),
        spec,
        DEVICES,
        pool=factory.pool,
    )
    engine = start(layout, published=weights.publish(1), using=stock)
    found = respond(engine, prompts(2))
    assert [f.tokens for f in found] == [weights.greedy(p.tokens, 24)[0] for p in prompts(2)]
