"""What is done again after a node was lost draws the prompts that were drawn, and then goes on."""

import time
from types import SimpleNamespace

import pytest

from nereus_core.errors import StateLost
from nereus_plugins.openrlhf.surviving import Drawn, resumable


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


def test_lost_state_is_told_with_the_newest_checkpoint_where_there_is_one(tmp_path):
    lost = StateLost("actor/train", None)
    args = SimpleNamespace(ckpt=SimpleNamespace(path=str(tmp_path), load_enable=False))
    assert resumable(lost, args, 0.0) is lost
    (tmp_path / "_actor").mkdir()
    (tmp_path / "_actor" / "latest").write_text("global_step7\n")
    assert resumable(lost, args, time.time() + 60) is lost  # of an earlier job
    told = str(resumable(lost, args, 0.0))
    assert f"the newest checkpoint is {tmp_path / '_actor' / 'global_step7'}" in told
    assert told.endswith("Resume with: the same command and --ckpt.load_enable")
