"""What is done again after a node was lost draws the prompts that were drawn, and then goes on."""

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
    assert next(source) == 4
    assert next(drawn) == 5
    with pytest.raises(StopIteration):
        next(drawn)


def test_lost_state_is_told_with_the_newest_checkpoint_where_there_is_one(tmp_path):
    lost = StateLost("actor/train", None)
    args = SimpleNamespace(ckpt=SimpleNamespace(path=str(tmp_path)))
    assert resumable(lost, args) is lost
    (tmp_path / "_actor").mkdir()
    (tmp_path / "_actor" / "latest").write_text("global_step7\n")
    told = str(resumable(lost, args))
    assert f"the newest checkpoint is {tmp_path / '_actor' / 'global_step7'}" in told
    assert told.endswith("Resume with: the same command and --ckpt.load_enable")
