"""What is done again after a node was lost draws the prompts that were drawn, and then goes on."""

import pytest

from nereus_plugins.openrlhf.surviving import Drawn


def test_what_was_drawn_comes_again_in_its_order_and_nothing_is_lost_or_drawn_twice():
    source = iter(range(6))
    drawn = Drawn(source)
    assert [next(drawn), next(drawn)] == [0, 1]
    drawn.rewind()
    assert [next(drawn) for _ in range(4)] == [0, 1, 2, 3]
    drawn.rewind()
    assert [next(drawn) for _ in range(4)] == [0, 1, 2, 3]
    drawn.used()
    assert next(source) == 4
    assert next(drawn) == 5
    drawn.rewind()
    drawn.used()
    assert next(drawn) == 5  # it was drawn, and not used
    with pytest.raises(StopIteration):
        next(drawn)
