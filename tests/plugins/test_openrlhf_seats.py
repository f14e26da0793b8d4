"""Seats that wait for engines of an OpenRLHF job: how many, where, and for which units."""

from collections import namedtuple
from dataclasses import dataclass, field

import pytest

from nereus_adapters.openrlhf import warm
from nereus_core.cluster import Device
from nereus_core.layout import Layout
from nereus_core.units import Unit, UnitId, UnitMap
from nereus_core.workload import ACTOR_GENERATE


def engine(serial, *devices):
    return Unit(UnitId(ACTOR_GENERATE, serial), Layout(len(devices)), devices)


Bundle = namedtuple("Bundle", "pg index gpu", defaults=[None])
"""As in `nereus_adapters.openrlhf.seats`, which needs Ray."""
A, B = (Device("a", 0), Device("a", 1)), (Device("b", 0), Device("b", 1))


@dataclass
class Standing:
    """What of a job seats depend on."""

    alive: UnitMap = field(default_factory=lambda: UnitMap([engine(0, A[0]), engine(1, B[0])]))
    waiting: list = field(default_factory=list)
    bundles: dict = field(
        default_factory=lambda: {d: Bundle("of the job", n, d.index) for n, d in enumerate(A + B)}
    )
    leaving: frozenset = frozenset()


@pytest.fixture
def processes(monkeypatch):
    """Handles of the processes that run; Ray is not there to start them."""
    running = []

    def start(standing, device):
        running.append(f"{device}/{len(running)}")
        return warm.Seat(running[-1], device.node)

    monkeypatch.setattr(warm, "_start", start)
    monkeypatch.setattr(warm, "_end", lambda seat: running.remove(seat.handle))
    return running


def test_so_many_seats_wait_on_the_nodes_of_engines_in_turn(processes):
    standing = Standing()
    warm.replenish(standing, 3)
    assert [seat.node for seat in standing.waiting] == ["a", "b", "a"]
    warm.replenish(standing, 3)
    assert len(processes) == 3


def test_seats_that_engines_left_beyond_that_number_end(processes):
    standing = Standing()
    warm.replenish(standing, 2)
    standing.waiting += [warm._start(standing, A[1]), warm._start(standing, B[1])]
    warm.replenish(standing, 2)
    assert [seat.handle for seat in standing.waiting] == processes == ["a:0/0", "b:0/1"]
    warm.replenish(standing, 0)
    assert not standing.waiting
    assert not processes


def test_no_seat_waits_on_a_node_that_is_to_be_left(processes):
    standing = Standing()
    warm.replenish(standing, 2)
    standing.leaving = frozenset({B[0]})
    warm.replenish(standing, 2)
    assert [seat.node for seat in standing.waiting] == ["a", "a"]
    assert len(processes) == 2
    standing.leaving = frozenset({A[0], B[0]})  # no engine is to stay: nowhere to wait
    warm.replenish(standing, 2)
    assert not standing.waiting


def test_a_seat_is_taken_on_the_units_node_and_started_where_none_waits(processes):
    standing = Standing()
    warm.replenish(standing, 2)
    assert warm.take(standing, engine(2, B[1])).handle == processes[1]
    assert [seat.node for seat in standing.waiting] == ["a"]
    assert warm.take(standing, engine(3, B[0])).handle == processes[2]
    assert [seat.node for seat in standing.waiting] == ["a"]


def test_a_unit_fits_on_one_node_and_on_devices_whose_index_is_known():
    assert warm.fits(Standing(), engine(2, *A))
    assert not warm.fits(Standing(), engine(2, A[0], B[0]))
    untold = Standing().bundles | {A[1]: Bundle("of the job", 1)}
    assert not warm.fits(Standing(bundles=untold), engine(2, *A))
    alone = Standing().bundles | {A[1]: Bundle(None, 0, 1)}
    assert not warm.fits(Standing(bundles=alone), engine(2, *A))


def test_an_engine_sees_the_gpus_that_ray_gave_it_whatever_they_are_called():
    moved = Standing().bundles | {A[1]: Bundle("another", 0, 5)}
    assert warm.visible(Standing(bundles=moved), engine(2, *A)) == "0,5"


def test_no_seat_waits_on_a_node_of_which_the_job_holds_no_device(processes):
    standing = Standing()
    warm.replenish(standing, 2)
    standing.alive = UnitMap([engine(0, A[0])])
    standing.bundles = {d: b for d, b in standing.bundles.items() if d in A}
    warm.replenish(standing, 2)
    assert [seat.node for seat in standing.waiting] == ["a", "a"]
