"""Plans in verl's own words: overrides that verl's configuration takes, for FSDP and Megatron."""

import shlex
import warnings
from pathlib import Path

import pytest
import verl
from hydra import compose, initialize_config_dir
from hypothesis import given
from hypothesis import strategies as st
from verl.workers.config import McoreEngineConfig

from nereus_adapters.verl.megatron import engine_config, uneven
from nereus_adapters.verl.overrides import Engine, overrides
from nereus_adapters.verl.settings import VerlSettings
from nereus_core.cluster import Device
from nereus_core.layout import Layout
from nereus_core.plan import Placement, Plan
from nereus_core.workload import ACTOR_GENERATE, ACTOR_TRAIN, CRITIC_TRAIN, REF_INFER

pytestmark = pytest.mark.real

DEVICES = tuple(Device("node0", i) for i in range(8))
FSDP = {role: Engine("fsdp2", 32) for role in ("actor", "ref", "critic")}
MEGATRON = {role: Engine("megatron", 30) for role in ("actor", "ref", "critic")}


def plan(generate, actor, ref, critic, devices=DEVICES):
    layouts = zip(
        (ACTOR_GENERATE, ACTOR_TRAIN, REF_INFER, CRITIC_TRAIN),
        (generate, actor, ref, critic),
        strict=True,
    )
    return Plan({stage: Placement.packed(Layout(*degrees), devices) for stage, degrees in layouts})


def composed(name, *words):
    """Let verl's own command line take the words; returns its configuration."""
    folder = Path(verl.__file__).parent / "trainer" / "config"
    with initialize_config_dir(config_dir=str(folder), version_base=None):
        return compose(config_name=name, overrides=list(words))


def test_shard_groups_and_replicas_are_spelled_and_nothing_that_stays():
    current = plan((1, 1), (8, 1), (8, 1), (8, 1))
    wanted = plan((2, 1), (4, 1), (8, 1), (2, 1))
    assert overrides(current, current, FSDP, follows=False) == ()
    assert overrides(current, wanted, FSDP, follows=False) == (
        "actor_rollout_ref.actor.fsdp_config.fsdp_size=4",
        "critic.fsdp.fsdp_size=2",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
    )
    words = overrides(current, wanted, FSDP, follows=True)
    assert "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=4" in words
    found = composed("ppo_trainer", *words)
    assert found.critic.fsdp.ulysses_sequence_parallel_size == 2
    assert found.actor_rollout_ref.actor.fsdp_config.fsdp_size == 4
    assert found.actor_rollout_ref.rollout.tensor_model_parallel_size == 2


def test_pools_are_spelled_where_they_change():
    current = plan((1, 1), (4, 1), (4, 1), (4, 1), DEVICES[:4])
    wide = plan((1, 1), (4, 1), (4, 1), (4, 1))
    assert overrides(current, wide, FSDP, follows=False) == ("trainer.n_gpus_per_node=8",)
    apart = Plan({**current, ACTOR_GENERATE: Placement.packed(Layout(2, 1), DEVICES[4:])})
    assert set(overrides(current, apart, FSDP, follows=False)) == {
        "actor_rollout_ref.rollout.nnodes=1",
        "actor_rollout_ref.rollout.n_gpus_per_node=4",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
    }
    lopsided = (*DEVICES[:3], Device("node1", 0))
    with pytest.raises(ValueError, match="nodes of 1, 3 devices"):
        overrides(current, plan((1, 1), (4, 1), (4, 1), (4, 1), lopsided), FSDP, follows=False)


@pytest.mark.parametrize("told", ["1", "{actor:4}"])
def test_stages_of_nereus_own_engine_are_spelled_by_role(told):
    """Whatever the command line said of them before."""
    current, wanted = plan((1, 1), (1, 1), (1, 1), (1, 1)), plan((1, 1), (2, 2), (1, 2), (2, 1))
    words = overrides(current, wanted, FSDP, follows=False, own=True)
    assert "actor_rollout_ref.actor.fsdp_config.fsdp_size=4" in words
    (stages,) = (word for word in words if "pipeline_stages" in word)
    (unquoted,) = shlex.split(stages)
    found = composed("ppo_trainer", f"+nereus.backend.pipeline_stages={told}", unquoted)
    settings = VerlSettings.of({"engine": "tp", **found.nereus.backend})
    asked = {"actor": wanted[ACTOR_TRAIN], "ref": wanted[REF_INFER], "critic": wanted[CRITIC_TRAIN]}
    assert settings.stages_at_start == {r: p.layout.pp for r, p in asked.items()}
    assert not any("nereus" in word for word in overrides(current, wanted, FSDP, follows=False))


def test_megatron_words_are_taken_by_verls_own_command_line():
    current = plan((1, 1), (8, 1), (8, 1), (8, 1))
    wanted = plan((4, 1), (2, 4), (1, 2), (4, 1))
    words = overrides(current, wanted, MEGATRON, follows=False)
    assert "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2" in words
    found = composed("ppo_megatron_trainer", *words)
    actor, ref = found.actor_rollout_ref.actor.megatron, found.actor_rollout_ref.ref.megatron
    assert (actor.tensor_model_parallel_size, actor.pipeline_model_parallel_size) == (2, 4)
    assert actor.override_transformer_config.num_layers_in_first_pipeline_stage == 7
    assert (ref.tensor_model_parallel_size, ref.sequence_parallel) == (1, False)
    assert found.critic.megatron.tensor_model_parallel_size == 4
    key = "actor_rollout_ref.actor.megatron.override_transformer_config"
    own = f"+{key}.num_layers_in_first_pipeline_stage=8"  # a user's
    found = composed("ppo_megatron_trainer", own, *words).actor_rollout_ref.actor.megatron
    assert found.override_transformer_config.num_layers_in_first_pipeline_stage == 7
    # And back: what was there for uneven stages alone is taken back.
    back = composed(
        "ppo_megatron_trainer", *words, *overrides(wanted, current, MEGATRON, follows=False)
    )
    actor = back.actor_rollout_ref.actor.megatron
    assert (actor.tensor_model_parallel_size, actor.pipeline_model_parallel_size) == (8, 1)
    assert actor.override_transformer_config.num_layers_in_first_pipeline_stage is None


@pytest.mark.parametrize("layout", [Layout(1, 1), Layout(1, 2), Layout(4, 1), Layout(2, 4)])
def test_a_layout_is_what_verls_engine_config_takes(layout):
    keys = engine_config(layout, 30)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # verl says that it turns sequence parallelism off at tp 1
        found = McoreEngineConfig(**keys)
    assert {name: getattr(found, name) for name in keys} == keys  # nothing is corrected by verl
    assert found.tensor_model_parallel_size == layout.tp
    assert found.pipeline_model_parallel_size == layout.pp
    assert found.sequence_parallel == (layout.tp > 1)
    assert found.use_distributed_optimizer


@given(num_layers=st.integers(1, 100), pp=st.integers(1, 32))
def test_uneven_stages_hold_all_layers_and_none_is_longer_than_plans_count_on(num_layers, pp):
    """First and last of sizes of their own; what is left is shared evenly among the others."""
    most = -(-num_layers // pp)

    def shared(amid):
        others = pp - 2
        if others < 1:
            return others == amid == 0
        return amid % others == 0 and 1 <= amid // others <= most

    sizes = range(1, most + 1)
    ways = [(f, last) for f in sizes for last in sizes if shared(num_layers - f - last)]
    try:
        ends = uneven(num_layers, pp)
    except ValueError:
        assert pp > num_layers or not ways
        return
    if not ends:
        assert num_layers % pp == 0
        return
    assert tuple(ends.values()) in ways
