"""What rollout engines and their weights leave when something fails; no engine is needed for it."""

import os
import signal
import subprocess
import sys

import pytest
from rollout_fakes import DEVICE, ONE, Fake, published

from nereus_adapters.rollout.fleet import Fleet
from nereus_adapters.rollout.hosts import ThisHost
from nereus_adapters.rollout.ports import Completion, EngineError, Finish, Prompt, Sampling
from nereus_adapters.rollout.rebuilding import Rebuilds
from nereus_adapters.rollout.segment import Segment, held
from nereus_adapters.rollout.supply import Supply
from nereus_adapters.rollout.vllm.forking import Forked
from nereus_core.errors import WaitTimeout
from nereus_core.units import Unit, UnitId
from nereus_core.workload import ACTOR_GENERATE

pytestmark = pytest.mark.real

FIRST, SECOND = UnitId(ACTOR_GENERATE, 0), UnitId(ACTOR_GENERATE, 1)


def test_nothing_is_held_of_weights_that_could_not_be_published():
    before = held()

    def fail(device, tensor, box):
        raise RuntimeError("the device is gone")

    with pytest.raises(RuntimeError, match="the device is gone"):
        published(1, fail)
    assert held() == before


class Publishing:
    """A trainer."""

    version = 1

    def publish(self, store):
        store.add(published(1))


@pytest.fixture
def supply():
    made = Supply(Publishing(), ThisHost())
    made.ensure(1)
    yield made
    made.store.close()


def test_an_engine_whose_weights_were_published_again_meanwhile_gets_the_new_ones(supply):
    def read(manifest):
        if len(engine.given) == 1:
            supply.store.add(published(1))  # another engine found them garbled
            name = manifest.ranks[0][0].segment
            try:
                Segment(name)
            except FileNotFoundError as error:
                raise EngineError("e", "check weights version 1", str(error)) from error

    engine = Fake("e", updating=read)
    supply.load(engine, 1)
    assert len(engine.given) == 2


def test_an_engine_that_fails_at_weights_that_are_there_is_not_asked_again(supply):
    def fail(manifest):
        raise EngineError("e", "load weights version 1", "told to")

    engine = Fake("e", updating=fail)
    with pytest.raises(EngineError, match="told to"):
        supply.load(engine, 1)
    assert len(engine.given) == 1


@pytest.mark.parametrize(
    "error", [WaitTimeout("seat to interrupt", 1.0), EngineError("bad", "interrupt", "told to")]
)
def test_an_engine_that_cannot_be_interrupted_can_be_removed(error):
    fleet, bad, good = Fleet(), Fake("bad", interrupting=error), Fake("good")
    fleet.add(FIRST, bad)
    fleet.add(SECOND, good)
    fleet.route([FIRST, SECOND])
    fleet.serve_version(1)
    futures = [fleet.submit(Prompt(f"p{i}", (1, 2), Sampling(4))) for i in range(2)]
    with pytest.raises(type(error)):
        fleet.interrupt()
    assert not good._open  # it was interrupted all the same
    assert [fleet.remove(unit) for unit in (FIRST, SECOND)] == [bad, good]
    assert not fleet.engines()
    assert not any(f.done() for f in futures)  # they wait for an engine


def test_a_prompt_goes_on_whatever_a_rebuild_raises():
    fleet, first, second = Fleet(), Fake("first"), Fake("second")
    fleet.add(FIRST, first)
    fleet.route([FIRST])
    fleet.serve_version(1)
    fleet.submit(Prompt("p", (1, 2), Sampling(4)))
    fleet.add(SECOND, second)
    fleet.route([FIRST, SECOND])
    told = []

    def lost(unit):
        told.append(unit)
        raise KeyError(unit)

    fleet.on_lost = lost
    [(_, future)] = first._open
    first._open.clear()
    first.alive = False
    future.set_result(Completion("p", (), (), (), Finish.INTERRUPTED))
    assert told == [FIRST]
    assert [prompt.id for prompt, _ in second._open] == ["p"]


def rebuilds(fleet, start, units):
    def load(engine, version):
        raise EngineError(engine.name, "load", "told to")

    return Rebuilds(fleet, units.get, start, load, lambda unit: None, 10.0)


def test_a_unit_that_goes_while_its_engine_is_rebuilt_leaves_no_engine_behind():
    fleet, unit, fresh = Fleet(), Unit(FIRST, ONE, (DEVICE,)), Fake("fresh")
    fleet.add(FIRST, Fake("failed"))

    def start(unit, version):
        fleet.remove(FIRST)
        return fresh

    with pytest.raises(KeyError):
        rebuilds(fleet, start, {FIRST: unit}).bring([unit], 2)
    assert fresh.closed == 1


def test_an_engine_that_has_been_removed_is_not_rebuilt():
    found = rebuilds(Fleet(), None, {FIRST: Unit(FIRST, ONE, (DEVICE,))})
    found.soon(FIRST)
    assert not found.under_way


def test_a_forked_process_that_was_let_go_of_is_not_killed():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    forked = Forked(child.pid)
    forked.close()
    forked.close()
    forked.kill()
    assert forked.ended(0.0)
    child.communicate(timeout=30)
    assert child.returncode != -signal.SIGKILL


@pytest.mark.parametrize("gone", [False, True])
def test_a_process_whose_parent_has_gone_already_ends_at_once(gone):
    script = "import sys; from nereus_adapters.rollout.prctl import end_with_parent as end\n"
    script += "end(int(sys.argv[1])); print('here')"
    parent = 1 if gone else os.getpid()
    found = subprocess.run([sys.executable, "-c", script, str(parent)], capture_output=True)
    assert found.returncode == (-signal.SIGKILL if gone else 0)
    assert found.stdout == (b"" if gone else b"here\n")
