"""The OpenRLHF launcher, as far as it goes without OpenRLHF."""

from importlib.metadata import PackageNotFoundError, entry_points, version
from types import SimpleNamespace

import pytest

from nereus_core.config import NereusConfig
from nereus_core.errors import ConfigError
from nereus_plugins.openrlhf.bounds import bounded
from nereus_plugins.openrlhf.directory import Directory
from nereus_plugins.openrlhf.flags import split_flags
from nereus_plugins.openrlhf.launch import main


def absent():
    try:
        version("openrlhf")
    except PackageNotFoundError:
        return True
    return False


declared = pytest.mark.skipif(
    not [p for p in entry_points(group="nereus") if p.name == "openrlhf"],
    reason="adapters are found by their entry points: install the project",
)


def test_flags_of_openrlhf_pass_through_in_their_order():
    words = ["--actor.adam.betas", "0.9", "0.95", "--ds.zero_stage=3", "--vllm.enforce_eager"]
    mixed = ["--nereus.enable", *words[:4], "--nereus.mode", "advise", words[4]]
    assert split_flags(mixed) == ({"enable": True, "mode": "advise"}, words)


@pytest.mark.parametrize(
    ("words", "values"),
    [
        (["--nereus.enable"], {"enable": True}),
        (["--nereus.enable=false"], {"enable": False}),
        (["--nereus.policy.delta", "0.1"], {"policy": {"delta": 0.1}}),
        (["--nereus.seed=3", "--nereus.run_dir", "runs/a"], {"seed": 3, "run_dir": "runs/a"}),
        (['--nereus.constraints.exclude=["a:0"]'], {"constraints": {"exclude": ["a:0"]}}),
    ],
)
def test_values_are_toml_where_they_are(words, values):
    assert split_flags(words) == (values, [])


@pytest.mark.parametrize("word", ["--nereus.", "--nereus.policy."])
def test_a_flag_without_a_key_is_named(word):
    with pytest.raises(ConfigError, match="names no key"):
        split_flags([word, "1"])


def test_a_value_and_a_section_of_one_name_are_refused():
    with pytest.raises(ConfigError, match="'policy' was given a value before"):
        split_flags(["--nereus.policy=1", "--nereus.policy.delta=0.1"])


def test_a_misspelt_key_ends_it_before_anything_starts(capsys):
    assert main(["--nereus.enable", "--nereus.mod", "advise"]) == 2
    assert "Did you mean 'mode'?" in capsys.readouterr().err


@declared
@pytest.mark.skipif(not absent(), reason="OpenRLHF is installed")
def test_without_openrlhf_the_line_that_installs_it_is_named(capsys):
    assert main(["--nereus.enable"]) == 2
    assert "pip install 'nereus[openrlhf]'" in capsys.readouterr().err


def arguments(zero_stage, sync_backend="nccl", **colocated):
    names = ("colocate_all", "colocate_actor_ref", "colocate_critic_reward", "async_enable")
    train = SimpleNamespace(**(dict.fromkeys(names, False) | colocated))
    vllm = SimpleNamespace(sync_backend=sync_backend)
    return SimpleNamespace(ds=SimpleNamespace(zero_stage=zero_stage), train=train, vllm=vllm)


def test_pipelines_are_never_planned_and_asking_for_them_is_an_error():
    assert bounded(NereusConfig(), arguments(2)).constraints.max_pp == 1
    with pytest.raises(ConfigError, match="no pipeline parallelism"):
        bounded(NereusConfig.of({"constraints": {"max_pp": 2}}), arguments(2))


def test_under_zero3_ranks_keep_whole_layers_and_engines_may_be_cut():
    pin = bounded(NereusConfig(), arguments(3)).constraints.pin
    assert pin["actor/train"] == pin["ref/infer"] == "tp1pp1"
    assert "actor/generate" not in pin


@pytest.mark.parametrize(
    ("colocated", "together", "apart"),
    [
        ({}, [], [("actor/generate", "actor/train"), ("actor/train", "ref/infer")]),
        (
            {"colocate_actor_ref": True},
            [("actor/train", "ref/infer")],
            [("actor/generate", "ref/infer"), ("critic/train", "reward/infer")],
        ),
        ({"colocate_all": True}, [("actor/generate", "critic/train")], []),
        (
            {"colocate_all": True, "async_enable": True},
            [("actor/train", "critic/train")],
            [("actor/generate", "actor/train")],
        ),
    ],
)
def test_stages_share_devices_where_the_job_was_started_so(colocated, together, apart):
    found = bounded(NereusConfig(), arguments(2, **colocated)).constraints.apart
    assert not set(together) & set(found)
    assert set(apart) <= set(found)


@pytest.mark.parametrize(
    ("sync_backend", "colocated", "tied"),
    [
        ("nccl", {"colocate_all": True}, True),
        ("gloo", {"colocate_all": True}, False),
        ("nccl", {"colocate_all": True, "async_enable": True}, False),
        ("nccl", {}, False),
    ],
)
def test_engines_stay_with_the_ranks_that_alone_can_give_them_weights(
    sync_backend, colocated, tied
):
    found = bounded(NereusConfig(), arguments(2, sync_backend, **colocated)).constraints.colocate
    assert (("actor/generate", "actor/train") in found) == tied


def test_a_directory_tells_news_once():
    directory = Directory()
    assert directory.engines_since(0) is None
    assert directory.group("first") is None
    directory.publish(["engine"], {"first": ["rank 0", "rank 1"]})
    version_, engines = directory.engines_since(0)
    assert engines == ["engine"]
    assert directory.engines_since(version_) is None
    assert directory.group("first") == ["rank 0", "rank 1"]
