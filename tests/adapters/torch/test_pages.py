"""Pages of ended state stay with the seat, are used again, and are never used twice at once."""

import gc
import itertools
import random

import pytest

torch = pytest.importorskip("torch")

from nereus_adapters.torch.pages import HUGE_PAGE_BYTES, Pages  # noqa: E402
from nereus_core.layout import Layout  # noqa: E402
from nereus_core.workload import ACTOR_TRAIN  # noqa: E402

pytestmark = pytest.mark.real


@pytest.mark.parametrize("seed", range(5))
def test_tensors_never_share_a_byte(seed):
    """400 random tensors come and go; each keeps what was written into it."""
    pages, rng = Pages(), random.Random(seed)
    alive: dict[int, torch.Tensor] = {}
    for number in range(400):
        if alive and rng.random() < 0.45:
            alive.pop(rng.choice(sorted(alive)))
        shape = tuple(rng.randint(1, 40) for _ in range(rng.randint(1, 3)))
        alive[number] = pages.empty(shape, rng.choice([torch.float32, torch.bfloat16, torch.int8]))
        alive[number].fill_(number % 100)
        if rng.random() < 0.1:
            pages.rest()
    for number, tensor in alive.items():
        assert tensor.data_ptr() % 64 == 0
        assert bool((tensor == number % 100).all())
    spans = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in alive.values())
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


def test_what_is_gone_is_used_again_and_lies_in_memory_until_then():
    pages = Pages()
    size = 4 * HUGE_PAGE_BYTES
    first = pages.empty((size,), torch.uint8).fill_(1)
    assert pages.warm_bytes() == 0
    address, view = first.data_ptr(), first[3:5]
    del first
    gc.collect()
    assert pages.warm_bytes() == 0, "a view holds all of it"
    del view
    gc.collect()
    pages.rest()
    assert pages.warm_bytes() == size
    again = pages.empty((size // 4,), torch.float32).fill_(2)
    assert again.data_ptr() == address
    assert pages.warm_bytes() == 0


def test_free_pages_are_the_kernels_to_take():
    """Marked as it counts them itself (LazyFree), so that it takes them before anything else."""
    pages = Pages()
    before = _lazy_free()
    tensors = [pages.empty((HUGE_PAGE_BYTES + 100,), torch.uint8).fill_(1) for _ in range(8)]
    kept = tensors[3]
    del tensors
    gc.collect()
    pages.rest()
    assert _lazy_free() - before >= 5 * HUGE_PAGE_BYTES
    assert bool((kept == 1).all())


def test_what_is_mapped_is_bounded():
    """Each larger than all before, so that no gap fits: mappings that hold nothing are unmapped."""
    pages = Pages()
    for megabytes in range(300, 1000, 100):
        pages.empty((megabytes * 2**20,), torch.uint8)
        gc.collect()
    assert pages.free_bytes <= 2 * 900 * 2**20


def _lazy_free():
    with open("/proc/self/smaps_rollup", encoding="ascii") as lines:
        return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("LazyFree"))


def test_a_seat_keeps_the_pages_of_a_unit_that_ended(harness, tools):
    """I7: they hold no state; the next unit lands on them, and none is left over then."""
    job = harness.job()
    adapter = harness.launch(job, tools.packed(job))
    hand = tools.Hand(adapter)
    other = hand.devices[3]

    def warm():
        return harness.pool.call(other, "warm_bytes").wait(60).value

    with tools.at_boundary(adapter):
        made = hand.extend(Layout(1, 1), [3])
        held, empty = harness.memory_bytes(other), warm()
        before = tools.sha256(harness.peek(made.created[0].id))
        hand.destroy(1)
        assert harness.memory_bytes(other) == 0
        assert warm() > empty
        again = hand.extend(Layout(1, 1), [3])
        assert harness.memory_bytes(other) == held
        assert warm() == empty
        assert tools.sha256(harness.peek(again.created[0].id)) == before
    assert len(adapter.units().of(ACTOR_TRAIN)) == 2


def test_a_shell_is_as_good_as_a_new_shard(harness, tools):
    """Modules of ended units serve the next of their kind; nothing of the old one is in them."""
    job = harness.job()
    adapter = harness.launch(job, tools.packed(job))
    hand = tools.Hand(adapter)
    losses = {}
    for turn in range(2):
        with tools.at_boundary(adapter):
            hand.extend(Layout(2, 1), [1, 2])
            hand.destroy(0)
            hand.extend(Layout(1, 1), [0])
            hand.destroy(0)
        losses[turn] = harness.step().losses
    harness.launch(job, tools.packed(job))  # seats let go of everything, shells included
    assert losses == {turn: pytest.approx(harness.step().losses, rel=1e-9) for turn in range(2)}
