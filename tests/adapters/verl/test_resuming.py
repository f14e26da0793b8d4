"""Which checkpoint is read, and what of it: on files that verl's own manager saved."""

import importlib
import json
import warnings
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf

from nereus_adapters.verl.resuming import fill_engine, load, saved_ranks, world_of
from nereus_core.config import NereusConfig
from nereus_core.errors import PrimitiveError
from nereus_plugins.verl_trainer import any_world

pytestmark = pytest.mark.real

ALL = ["model", "optimizer", "extra"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A process group of one, which verl's manager asks for its rank."""
    store = tmp_path_factory.mktemp("group") / "store"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of engines that are not installed
        importlib.import_module("verl.utils.checkpoint.fsdp_checkpoint_manager")
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


def engine_of(seed, contents, kind=torch.optim.AdamW):
    """What `resuming` reads of verl's engine, with verl's own checkpoint manager."""
    from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

    torch.manual_seed(seed)
    module = torch.nn.Linear(3, 2)
    optimizer = kind(module.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for _ in range(seed):
        module(torch.ones(3)).sum().backward()
        optimizer.step()
        schedule.step()
    manager = FSDPCheckpointManager(
        module, optimizer, schedule, checkpoint_config=OmegaConf.create({"load_contents": contents})
    )
    return SimpleNamespace(
        module=module,
        optimizer=optimizer,
        lr_scheduler=schedule,
        checkpoint_manager=manager,
        rank=0,
    )


def seen(engine):
    """State by kind; copies."""
    states = engine.optimizer.state_dict()["state"]
    return {
        "model": [p.tolist() for p in engine.module.parameters()],
        "optimizer": {i: {k: v.tolist() for k, v in s.items()} for i, s in states.items()},
        "schedule": engine.lr_scheduler.state_dict()["last_epoch"],
        "random": torch.get_rng_state().tolist(),
    }


def save(engine, folder):
    """Save what verl's manager saves of one rank."""
    torch.save(engine.module.state_dict(), folder / "model_world_size_1_rank_0.pt")
    torch.save(engine.optimizer.state_dict(), folder / "optim_world_size_1_rank_0.pt")
    extras = {
        "lr_scheduler": engine.lr_scheduler.state_dict(),
        "rng": engine.checkpoint_manager.get_rng_state(),
    }
    torch.save(extras, folder / "extra_state_world_size_1_rank_0.pt")


@pytest.mark.parametrize(
    "contents", [ALL, ["model"], ["model", "optimizer"], ["model", "extra"], ["extra"]]
)
def test_what_is_loaded_is_what_verl_itself_would_load(alone, tmp_path, contents):
    save(engine_of(3, ALL), tmp_path)
    for file, content in (("model", "model"), ("optim", "optimizer"), ("extra_state", "extra")):
        if content not in contents:  # what is not asked for is not opened
            (tmp_path / f"{file}_world_size_1_rank_0.pt").unlink()
    expected = engine_of(2, contents)
    expected.checkpoint_manager.load_checkpoint(str(tmp_path))
    found_of_verl = seen(expected)
    engine = engine_of(2, contents)
    fill_engine(engine, "actor", tmp_path, 1)
    assert seen(engine) == found_of_verl
    assert engine.optimizer.param_groups[0]["lr"] == expected.optimizer.param_groups[0]["lr"]


def test_an_optimizer_of_another_kind_is_refused_by_name(alone, tmp_path):
    save(engine_of(2, ALL, kind=torch.optim.Adagrad), tmp_path)
    fill_engine(engine_of(1, ALL, kind=torch.optim.Adagrad), "actor", tmp_path, 1)
    save(engine_of(2, ALL, kind=torch.optim.RMSprop), tmp_path)
    saved = torch.load(tmp_path / "optim_world_size_1_rank_0.pt")
    for state in saved["state"].values():
        state["rows"] = torch.zeros(2)
    torch.save(saved, tmp_path / "optim_world_size_1_rank_0.pt")
    with pytest.raises(PrimitiveError, match=r"optimizer state 'rows' of weight .* expected Adam"):
        fill_engine(engine_of(1, ALL), "actor", tmp_path, 1)
    for state in saved["state"].values():
        del state["rows"], state["step"]
    torch.save(saved, tmp_path / "optim_world_size_1_rank_0.pt")
    with pytest.raises(PrimitiveError, match="of weight has no step; expected Adam"):
        fill_engine(engine_of(1, ALL), "actor", tmp_path, 1)


def test_a_process_without_the_engine_says_so(tmp_path):
    with pytest.raises(PrimitiveError, match="no engine of the critic"):
        load(SimpleNamespace(worker_dict={}), "critic", str(tmp_path), 1)


def files(folder, *sizes, last=None):
    folder.mkdir(exist_ok=True)
    for size in sizes:
        torch.save({}, folder / f"model_world_size_{size}_rank_0.pt")
    if last is not None:
        (folder / "fsdp_config.json").write_text(
            json.dumps({"FSDP_version": 2, "world_size": last})
        )
    return folder


def test_the_last_save_counts(tmp_path):
    assert world_of(files(tmp_path / "none")) is None
    assert world_of(files(tmp_path / "one", 4)) == 4
    assert world_of(files(tmp_path / "last", 2, 4, last=2)) == 2
    assert world_of(files(tmp_path / "grown", 2, 4, last=4)) == 4
    with pytest.raises(PrimitiveError, match=r"files of \[2, 4\] ranks and no fsdp_config.json"):
        world_of(files(tmp_path / "unknown", 2, 4))
    with pytest.raises(PrimitiveError, match=r"says that 8 ranks saved it.* of \[2, 4\] only"):
        world_of(files(tmp_path / "other", 2, 4, last=8))


def trainer(strategy="fsdp2"):
    """What is read of a trainer of two ranks before any of them is asked."""
    actor = {"actor_rollout_ref": {"actor": {"strategy": strategy}}}
    workers = SimpleNamespace(workers=[object(), object()])
    return SimpleNamespace(config=OmegaConf.create(actor), actor_rollout_wg=workers)


def test_verl_loads_what_it_can_load_itself(tmp_path):
    assert saved_ranks(trainer(), "actor", files(tmp_path / "two", 2)) is None
    assert saved_ranks(trainer(), "actor", files(tmp_path / "four", 4)) == 4
    assert saved_ranks(trainer("megatron"), "actor", tmp_path / "four") is None
    assert saved_ranks(trainer(), "actor", tmp_path / "elsewhere") is None  # e.g. hdfs://


@pytest.mark.parametrize("mode", ["observe", "advise", "adapt"])
def test_a_resume_that_verl_can_do_is_not_lost_to_an_error_of_ours(tmp_path, capsys, mode):
    folder, loaded = files(tmp_path / "unknown", 2, 4), []
    group = SimpleNamespace(load_checkpoint=lambda local_path: loaded.append(local_path))
    once = group.load_checkpoint
    with any_world(trainer(), "actor", group, NereusConfig(mode=mode)):
        if mode == "adapt":
            with pytest.raises(PrimitiveError, match="files of"):
                group.load_checkpoint(local_path=str(folder))
            assert not loaded
        else:
            group.load_checkpoint(local_path=str(folder))
            assert loaded == [str(folder)]
            said = capsys.readouterr().err
            assert f"WARNING: actor: verl loads {folder} without Nereus. PrimitiveError" in said
    assert group.load_checkpoint is once
