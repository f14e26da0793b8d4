import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus_core.cluster import Cluster, Device
from nereus_core.device_specs import CPU_SEAT, LOOPBACK
from nereus_core.errors import OutOfDeviceMemory, SeatDead
from nereus_core.layout import layouts
from nereus_core.sim.clock import VirtualClock
from nereus_core.sim.models import TINY
from nereus_core.sim.world import Store, World
from nereus_core.state import TRAIN_SLOTS, Slot, needed_elements, placed, routes

CLUSTER = Cluster.homogeneous(1, 8, CPU_SEAT, LOOPBACK, LOOPBACK)
DEVICES = CLUSTER.devices
LAYOUTS = layouts(TINY, 4, "divisors")


@pytest.fixture
def world():
    return World(CLUSTER, VirtualClock())


def stores_of(layout, devices, *, slots=TRAIN_SLOTS, fill=False):
    stores = {
        device: Store.empty(device, shard, slots, "float32")
        for device, shard in placed(TINY, layout, devices)
    }
    if fill:
        for store in stores.values():
            for (slot, name), array in store.arrays.items():
                array[...] = content(slot, name, store.shard[name])
    return stores


def content(slot, name, box):
    """A value for each element that depends on its place in the logical tensor alone."""
    grids = np.meshgrid(
        *(np.arange(o, o + n) for o, n in zip(box.offset, box.shape, strict=True)), indexing="ij"
    )
    value = sum(grid * 1000.0**i for i, grid in enumerate(grids))
    return value + len(name) + list(Slot).index(slot) / 8


@settings(max_examples=60, deadline=None)
@given(
    old=st.sampled_from(LAYOUTS), new=st.sampled_from(LAYOUTS), order=st.permutations(DEVICES[:6])
)
def test_carried_state_is_the_logical_state_in_the_new_layout(old, new, order):
    world = World(CLUSTER, VirtualClock())
    before = stores_of(old, tuple(order[: old.num_devices]), fill=True)
    after = stores_of(new, tuple(order[-new.num_devices :]))
    held = [(s.device, s.shard) for s in before.values()]
    wanted = [(s.device, s.shard) for s in after.values()]

    carried = world.carry(routes(held, wanted), TRAIN_SLOTS, before, after)

    for store in after.values():
        assert not store.holes()
        for (slot, name), array in store.arrays.items():
            expected = content(slot, name, store.shard[name]).astype(np.float32)
            np.testing.assert_array_equal(array, expected)
    total = sum(store.num_bytes for store in after.values())
    assert carried.moved_bytes == needed_elements(held, wanted) * 4 * len(TRAIN_SLOTS)
    assert carried.moved_bytes + carried.kept_bytes == total


def test_a_part_that_no_route_covers_is_named():
    (store,) = stores_of(LAYOUTS[0], DEVICES[:1]).values()

    assert "param/model.norm.weight" in store.holes()


def test_time_is_that_of_the_busiest_device(world):
    before = stores_of(LAYOUTS[0], DEVICES[:1], slots=(Slot.PARAM,), fill=True)
    after = stores_of(LAYOUTS[0], DEVICES[1:2], slots=(Slot.PARAM,))
    found = routes(
        [(s.device, s.shard) for s in before.values()],
        [(s.device, s.shard) for s in after.values()],
    )

    carried = world.carry(found, (Slot.PARAM,), before, after)

    expected_s = carried.moved_bytes / LOOPBACK.bytes_per_s + len(found) * LOOPBACK.latency_s
    assert carried.seconds == pytest.approx(expected_s)
    assert world.clock.now_s() == pytest.approx(expected_s)


def test_memory_is_taken_on_all_devices_or_on_none(world):
    first, second = DEVICES[:2]
    world.reserve("one", {second: CPU_SEAT.memory_bytes}, "one")

    with pytest.raises(OutOfDeviceMemory, match=r"two needs 0\.00 GiB on node0:1, which has 0\.00"):
        world.reserve("two", {first: 1, second: 1}, "two")

    assert world.used_bytes(first) == 0
    world.release("one")
    assert world.used_bytes(second) == 0


def test_a_peak_is_reported_once(world):
    device = DEVICES[0]
    world.reserve("short", {device: 100}, "short")
    world.release("short")
    world.reserve("long", {device: 30}, "long")

    assert world.take_peaks({})[device] == 100
    assert world.take_peaks({device: 5})[device] == 35


def test_a_failed_device_carries_nothing_and_holds_nothing(world):
    before = stores_of(LAYOUTS[0], DEVICES[:1], fill=True)
    after = stores_of(LAYOUTS[0], DEVICES[1:2])
    found = routes(
        [(s.device, s.shard) for s in before.values()],
        [(s.device, s.shard) for s in after.values()],
    )
    world.reserve("unit", {DEVICES[1]: 10}, "unit")
    world.fail(DEVICES[1])

    assert world.used_bytes(DEVICES[1]) == 0
    with pytest.raises(SeatDead, match="node0:1"):
        world.carry(found, TRAIN_SLOTS, before, after)


def test_a_device_comes_back_empty_and_not_draining(world):
    world.drain([DEVICES[0]])
    assert world.draining == {DEVICES[0]}

    world.fail(DEVICES[0])
    world.give_back(DEVICES[0])

    assert DEVICES[0] in world.cluster.healthy
    assert not world.draining


def test_a_fault_strikes_once_at_its_moment(world):
    struck = []
    world.inject(lambda name: name.startswith("split"), lambda: struck.append("split"))

    for name in ("merge a", "split b", "split c"):
        world.moment(name)

    assert struck == ["split"]


def test_unknown_devices_are_not_invented(world):
    world.fail(Device("elsewhere", 0))

    assert world.cluster.healthy == DEVICES
