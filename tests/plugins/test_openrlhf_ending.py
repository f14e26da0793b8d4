"""What an OpenRLHF job that cannot go on is told: which checkpoint is whole, and how to go on."""

import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest

from nereus_core.errors import StateLost
from nereus_plugins.openrlhf.checkpoints import Checkpoints
from nereus_plugins.openrlhf.ending import Ending, StepLost


@pytest.fixture
def trainer(tmp_path):
    sized = {"num_nodes": 1, "num_gpus_per_node": 2}
    args = SimpleNamespace(
        ckpt=SimpleNamespace(path=str(tmp_path), load_enable=False, save_steps=2, disable_ds=False),
        train=SimpleNamespace(
            colocate_actor_ref=True, colocate_all=False, colocate_critic_reward=False
        ),
        actor=SimpleNamespace(**sized),
        critic=SimpleNamespace(**sized),
        ds=SimpleNamespace(tensor_parallel_size=1),
    )
    return SimpleNamespace(args=args, critic_model_group=SimpleNamespace(duplicate_actors=1))


def save(trainer, step):
    folder = Path(trainer.args.ckpt.path) / "_actor" / f"global_step{step}"
    folder.mkdir(parents=True)
    (folder.parent / "latest").write_text(folder.name)
    return folder


def test_a_checkpoint_counts_when_its_saving_has_ended(trainer):
    kept = Checkpoints(trainer)
    assert kept.newest is None
    two = save(trainer, 2)
    assert kept.newest is None  # `latest` names it already
    kept.saved(2)
    assert kept.newest.folder == two
    save(trainer, 4)
    kept.saved(3)  # none was due
    assert kept.newest.folder == two
    kept.saved(4)
    assert kept.newest.step == 4
    (two.parent / "global_step4").rmdir()  # OpenRLHF removes old ones before it saves
    assert kept.newest.folder == two


def test_a_checkpoint_is_resumed_with_the_flags_of_the_layout_that_saved_it(trainer):
    kept, args = Checkpoints(trainer), trainer.args
    save(trainer, 2)
    kept.saved(2)
    assert kept.newest.resume == "the same command and --ckpt.load_enable"
    args.actor.num_gpus_per_node, args.ds.tensor_parallel_size = 4, 2
    trainer.critic_model_group.duplicate_actors = 2
    save(trainer, 4)
    kept.saved(4)
    assert kept.newest.resume == (
        "the same command and --actor.num_gpus_per_node 4 --ref.num_gpus_per_node 4 "
        "--ds.tensor_parallel_size 2 --ckpt.load_enable"
    )
    trainer.critic_model_group.duplicate_actors = 1  # no flags say that
    save(trainer, 6)
    kept.saved(6)
    assert "--ds.use_universal_ckpt" in kept.newest.resume


def test_a_job_that_was_resumed_begins_in_the_step_after_its_checkpoint(trainer):
    folder = save(trainer, 7)
    assert Checkpoints(trainer).newest is None  # another job's
    trainer.args.ckpt.load_enable = True
    told = Ending(trainer).explained(StateLost("actor/train", None))
    assert str(told) == (
        f"no intact copy of actor/train is left; the newest checkpoint is {folder}. "
        "Resume with: the same command and --ckpt.load_enable"
    )
    assert Ending(trainer).explained(told) is told
    error = StepLost("it died", 8, Checkpoints(trainer))
    assert str(error).startswith("step 8 was not ended: it died; the newest checkpoint is")


@pytest.mark.parametrize(
    ("flag", "value", "says"),
    [
        ("save_steps", float("inf"), "no checkpoint was kept: set --ckpt.save_steps"),
        ("save_steps", 5, "no checkpoint was kept in .* yet: one is due every 5 steps"),
        ("disable_ds", True, "no checkpoint was kept: leave --ckpt.disable_ds out"),
    ],
)
def test_a_job_without_a_checkpoint_is_told_why(trainer, flag, value, says):
    setattr(trainer.args.ckpt, flag, value)
    kept = Checkpoints(trainer)
    kept.saved(2)
    with pytest.raises(StepLost, match=f"step 3 was not ended: it died; {says}"):
        raise StepLost("it died", 3, kept)


def test_an_error_goes_from_one_process_to_another_as_it_is(trainer):
    """Its parameters are not its message: unpickled by Python's own way it would raise another."""
    error = StepLost("it died", 3, Checkpoints(trainer))
    error.__notes__ = ["seen on CPU"]
    there = pickle.loads(pickle.dumps(error))
    assert type(there) is StepLost
    assert str(there) == str(error)
    assert (there.what, there.step, there.checkpoint) == ("it died", 3, None)
    assert there.__notes__ == ["seen on CPU"]
