"""Slices, seeds and tasks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")
from nereus_adapters.torch.rl.rollout import sequence_seed, slices
from nereus_adapters.torch.rl.tasks import CopyTask, load_task
from nereus_core.errors import ConfigError

pytestmark = pytest.mark.real


@given(st.integers(1, 100), st.integers(1, 12))
def test_slices_cover_in_order_and_differ_by_one(total, count):
    found = slices(total, count)
    assert [i for s in found for i in range(total)[s]] == list(range(total))
    sizes = [s.stop - s.start for s in found]
    assert max(sizes) - min(sizes) <= 1


def test_seeds_differ_by_seed_step_index_and_kind():
    numbers = [
        (a, b, c, d) for a in range(3) for b in range(5) for c in range(20) for d in range(2)
    ]
    seeds = {sequence_seed(*n) for n in numbers}
    assert len(seeds) == len(numbers)
    assert all(0 <= s < 2**63 for s in seeds)


def test_a_copy_task_repeats_itself_and_pays_for_copies():
    one, other = CopyTask(50, 3, 4), CopyTask(50, 3, 4)
    assert one.prompts(2) == other.prompts(2)
    assert [i for i, _ in one.prompts(2)] == [8, 9, 10, 11]
    last = one.prompts(2)[0][1][-1]
    assert one.score(8, [last, last]) == 1.0
    assert one.score(8, [last, last + 1]) < 1.0


def test_a_copy_task_may_grow():
    task = CopyTask(50, 3, 4, response_tokens=8, growth=4, growth_step=5)
    assert [task.max_response_tokens(s) for s in (4, 5)] == [8, 12]


def test_a_task_that_cannot_be_had_is_named():
    def load(name, **args):
        return load_task(name, args, tokenizer=None, vocab=9, seed=0, prompts_per_step=1)

    with pytest.raises(ConfigError, match=r"job\.task: got 'nobody'; expected 'module:factory'"):
        load("nobody")
    with pytest.raises(ConfigError, match=r"job\.task: 'no_such:thing' cannot be imported"):
        load("no_such:thing")
    with pytest.raises(ConfigError, match=r"job\.task_args"):
        load(None, colour="red")
