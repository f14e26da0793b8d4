"""What an OpenRLHF job that cannot go on is told: the newest checkpoint, where there is one."""

import pickle
import time
from types import SimpleNamespace

from nereus_core.errors import StateLost
from nereus_plugins.openrlhf.ending import Ending, StepLost


def test_lost_state_is_told_with_the_newest_checkpoint_where_there_is_one(tmp_path):
    lost = StateLost("actor/train", None)
    args = SimpleNamespace(ckpt=SimpleNamespace(path=str(tmp_path), load_enable=False))
    trainer = SimpleNamespace(args=args)
    assert Ending(trainer, 0.0).explained(lost) is lost
    (tmp_path / "_actor").mkdir()
    (tmp_path / "_actor" / "latest").write_text("global_step7\n")
    assert Ending(trainer, time.time() + 60).explained(lost) is lost  # of an earlier job
    told = str(Ending(trainer, 0.0).explained(lost))
    assert f"the newest checkpoint is {tmp_path / '_actor' / 'global_step7'}" in told
    assert told.endswith("Resume with: the same command and --ckpt.load_enable")


def test_a_job_without_a_checkpoint_is_told_how_to_have_one():
    error = StepLost("GenerateSamplesActor died (pid 7 on 10.0.0.1)", 3, None)
    assert str(error) == (
        "step 3 was not ended: GenerateSamplesActor died (pid 7 on 10.0.0.1); "
        "no checkpoint was kept: set --ckpt.save_steps."
    )


def test_an_error_goes_from_one_process_to_another_as_it_is():
    """Its parameters are not its message: unpickled by Python's own way it would raise another."""
    error = StepLost("it died", 3, "ckpt/global_step2")
    error.__notes__ = ["seen on CPU"]
    there = pickle.loads(pickle.dumps(error))
    assert type(there) is StepLost
    assert str(there) == str(error)
    assert (there.what, there.step, there.checkpoint) == ("it died", 3, "ckpt/global_step2")
    assert there.__notes__ == ["seen on CPU"]
