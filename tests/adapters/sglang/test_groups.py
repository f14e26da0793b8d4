import threading

import pytest

from nereus_adapters.rollout.ports import EngineError, Prompt, Sampling
from nereus_adapters.rollout.sglang.groups import WeightGroups
from nereus_adapters.rollout.sglang.sending import Sender
from nereus_core.errors import WaitTimeout
from nereus_core.layout import Layout

pytestmark = pytest.mark.real


def stages(llama):
    """Two pipeline stages of a trainer: each holds the tensors of its layers."""
    late = ("model.layers.2.", "model.layers.3.", "model.norm.", "lm_head.")
    tensors = llama.tensors
    return (
        Sender("stage0", {n: t for n, t in tensors.items() if not n.startswith(late)}),
        Sender("stage1", {n: t for n, t in tensors.items() if n.startswith(late)}),
    )


def greedy(engine, tokens=(5, 6, 7)):
    return engine.submit(Prompt("p", tokens, Sampling(10, temperature=0.0))).result(60).tokens


def test_engines_receive_from_every_pipeline_stage_again_and_again(start, llama):
    engines = [start("one"), start("two", Layout(2, 1), first=1)]
    groups = WeightGroups(timeout_s=60)
    formed = groups.form(stages(llama), engines)
    for _ in range(2):
        llama.train()
        groups.update(formed, llama.version)
        for engine in engines:
            assert engine.version == llama.version
            assert greedy(engine) == llama.greedy((5, 6, 7), 10)
    groups.dissolve(formed)


def test_groups_asked_for_in_opposite_orders_do_not_wait_in_a_circle(start, llama):
    one, two = start("one"), start("two", first=1)
    first, second = stages(llama)
    groups = WeightGroups(timeout_s=60)
    gate = threading.Barrier(2)
    formed, errors = {}, []

    def ask(source, engines):
        gate.wait(10)
        try:
            formed[source.name] = groups.form([source], engines)[0]
        except Exception as error:
            errors.append(error)

    threads = [
        threading.Thread(target=ask, args=(first, (one, two))),
        threading.Thread(target=ask, args=(second, (two, one))),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    assert not errors
    assert set(formed) == {"stage0", "stage1"}
    llama.train()
    groups.update([formed["stage1"], formed["stage0"]], llama.version)
    assert greedy(one) == greedy(two) == llama.greedy((5, 6, 7), 10)


class Absent(Sender):
    """A source whose process is not there."""

    def join(self, address, port, group, size, timeout_s):
        threading.Event().wait(timeout_s)
        raise ConnectionError("nobody here")


def test_a_member_that_does_not_come_is_named(start, llama):
    engine = start("waits")
    groups = WeightGroups(timeout_s=3)
    with pytest.raises(WaitTimeout, match=r"engine waits.* to join weight group"):
        groups.form([Absent("away", llama.tensors)], [engine])


def test_a_call_that_holds_a_member_is_named(start, llama):
    engine = start("held")
    groups = WeightGroups(timeout_s=1)
    with (
        groups.holding(["held"]),
        pytest.raises(WaitTimeout, match="held, which a call for held holds"),
    ):
        groups.form(stages(llama), [engine])


class Garbling(Sender):
    """A source whose first tensor changes on its way."""

    def broadcast(self, tensors, timeout_s):
        spoiled = tensors[0].clone()
        spoiled.view(-1)[0] += 1
        super().broadcast([spoiled, *tensors[1:]], timeout_s)


def test_weights_that_change_on_their_way_are_refused(start, llama):
    engine = start("garbled", Layout(2, 1))
    groups = WeightGroups(timeout_s=60)
    formed = groups.form([Garbling("trainer", llama.tensors)], [engine])
    with pytest.raises(EngineError, match="digest"):
        groups.update(formed, llama.version)
    assert engine.version is None


def test_nothing_is_sent_to_an_engine_that_is_not_ready(start, llama):
    ready, busy = start("ready"), start("unready", first=1)
    groups = WeightGroups(timeout_s=30)
    sender = Sender("trainer", llama.tensors)
    formed = groups.form([sender], [ready, busy])
    busy.begin_receiving()  # somebody else's update is open
    sent = []
    sender.send = lambda timeout_s: sent.append(timeout_s)
    with pytest.raises(EngineError, match="already open"):
        groups.update(formed, llama.version)
    assert not sent
