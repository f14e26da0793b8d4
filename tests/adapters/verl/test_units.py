"""Units, boxes and digests: what can be said without a job."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from nereus_adapters.verl.bundles import Bundle, runs
from nereus_adapters.verl.cuts import ROWS, Cut, rank_boxes
from nereus_adapters.verl.driven import consumed
from nereus_adapters.verl.facts import EngineFacts, WorkerFacts
from nereus_adapters.verl.harness import VerlHarness
from nereus_adapters.verl.meshes import forget_meshes
from nereus_adapters.verl.peaks import device_peaks
from nereus_adapters.verl.reading import device_spec
from nereus_adapters.verl.recorder import Recorder
from nereus_adapters.verl.refusals import refusals
from nereus_adapters.verl.relinking import assembly
from nereus_adapters.verl.resuming import Piece, fill
from nereus_adapters.verl.settings import VerlSettings
from nereus_adapters.verl.shards import digest, of_engine
from nereus_adapters.verl.standing import Ranks, rank_order, train_units
from nereus_adapters.verl.ulysses import Ulysses, budgets, passes_of, shared_out
from nereus_adapters.verl.waiting import until
from nereus_core.cluster import Device
from nereus_core.device_specs import CPU_SEAT, H100_SXM
from nereus_core.errors import ConfigError, PlanError, PrimitiveError, WaitTimeout
from nereus_core.layout import Layout
from nereus_core.state import Box
from nereus_core.units import Unit, UnitId, UnitMap
from nereus_core.workload import ACTOR_GENERATE, ACTOR_TRAIN, FLOAT32, REF_INFER, TokenBudget

pytestmark = pytest.mark.real

DEVICES = tuple(Device("node0", i) for i in range(8))


def facts(*engines: EngineFacts, name: str = "cpu", memory: int | None = None) -> WorkerFacts:
    return WorkerFacts("node0", 0, name, memory, engines)


def engine(role: str, tp: int, pp: int = 1, **more) -> EngineFacts:
    return EngineFacts(role, Layout(tp, pp), {}, "float32", **more)


def keeps(**degrees: int) -> Ulysses:
    return Ulysses(degrees)


def test_shard_groups_are_consecutive_ranks_of_every_role():
    own = facts(engine("ref", 4), engine("actor", 2))
    ranks = Ranks(DEVICES[:4], (None,) * 4, (own,) * 4)
    assert [(str(u.id), u.devices) for u in train_units(ranks)] == [
        ("actor/train#0", DEVICES[:2]),
        ("actor/train#1", DEVICES[2:4]),
        ("ref/infer#0", DEVICES[:4]),
    ]


def test_megatron_ranks_run_over_tp_then_units_then_stages():
    ranks = Ranks(DEVICES, (None,) * 8, (facts(engine("actor", 2, 2)),) * 8)
    places = [[d.index for d in unit.devices] for unit in train_units(ranks)]
    assert places == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_ranks_of_nereus_own_engine_run_over_tp_then_stages_then_units():
    ranks = Ranks(DEVICES, (None,) * 8, (facts(engine("actor", 2, 2, tensor_parallel=True)),) * 8)
    places = [[d.index for d in unit.devices] for unit in train_units(ranks)]
    assert places == [[0, 1, 2, 3], [4, 5, 6, 7]]


@settings(deadline=None)
@given(num_layers=st.integers(1, 9), data=st.data())
def test_every_element_lies_in_one_stage_on_one_rank_of_it_or_on_all(num_layers, data):
    pp, tp = data.draw(st.integers(1, num_layers)), data.draw(st.integers(1, 3))
    cuts = {
        f"{layer}.{dim}": Cut(dim, uneven=dim == 0, layer=layer)
        for layer in range(num_layers)
        for dim in (0, 1, None)
    }
    shape = data.draw(st.tuples(st.integers(1, 7), st.integers(1, 7)))
    found = rank_boxes(dict.fromkeys(cuts, shape), cuts, num_layers, Layout(tp, pp))
    assert len(found) == tp * pp
    for name in cuts:
        holders = [index for index, boxes in enumerate(found) if name in boxes]
        assert holders == [holders[0] // tp * tp + rank for rank in range(tp)]  # of one stage
        boxes = [found[index][name] for index in holders]
        copies = 1 if any(box.shape != shape for box in boxes) else tp
        assert sum(box.num_elements for box in boxes) == copies * shape[0] * shape[1]
    stages = [
        next(i for i, boxes in enumerate(found) if f"{n}.0" in boxes) // tp
        for n in range(num_layers)
    ]
    assert stages == sorted(stages)
    assert set(stages) == set(range(pp))


@settings(deadline=None)
@given(rows=st.integers(1, 17), ranks=st.integers(1, 8))
def test_boxes_are_cut_as_torch_cuts(rows, ranks):
    found = rank_boxes({"w": (rows, 3)}, {"w": ROWS}, 1, Layout(ranks, 1))
    boxes = [boxes["w"] for boxes in found]
    chunks = torch.arange(rows * 3).reshape(rows, 3).chunk(ranks)
    assert [box.shape[0] for box in boxes if box.num_elements] == [len(c) for c in chunks]
    assert [box.offset[0] for box in boxes[: len(chunks)]] == [int(c[0, 0]) // 3 for c in chunks]


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_digests_of_parts_add_up_whatever_the_cut(data):
    shape = data.draw(st.tuples(st.integers(1, 6), st.integers(1, 6)))
    kind = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
    seed = data.draw(st.integers(0, 99))
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(kind)
    expected = digest(whole, Box((0, 0), shape), shape)
    row, column = (data.draw(st.integers(0, n)) for n in shape)
    total = 0
    for top, height in ((0, row), (row, shape[0] - row)):
        for left, width in ((0, column), (column, shape[1] - column)):
            part = whole[top : top + height, left : left + width]
            total += int(digest(part, Box((top, left), (height, width)), shape), 16)
    assert f"{total % 2**64:016x}" == expected
    changed = whole.clone()
    changed[0, 0] += 1
    assert digest(changed, Box((0, 0), shape), shape) != expected
    if shape[0] > 1 and not torch.equal(whole[0], whole[1]):
        swapped = whole.clone()
        swapped[[0, 1]] = whole[[1, 0]]
        assert digest(swapped, Box((0, 0), shape), shape) != expected


def test_all_roles_need_the_same_ranks():
    actor = Unit(UnitId(ACTOR_TRAIN, 0), Layout(4, 1), DEVICES[:4])
    ref = Unit(UnitId(REF_INFER, 0), Layout(2, 1), DEVICES[:2])
    with pytest.raises(PlanError, match="must hold the same devices"):
        assembly(UnitMap([actor, ref]), DEVICES, keeps())
    both = UnitMap([actor, ref, Unit(UnitId(REF_INFER, 1), Layout(2, 1), DEVICES[2:4])])
    seats = assembly(both, DEVICES, keeps(actor=2))
    assert list(seats) == list(DEVICES[:4])
    assert [(s.role, s.shard_size, s.unit, s.sequence_ranks) for s in seats[DEVICES[3]]] == [
        ("ref", 2, "ref/infer#1", 1),
        ("actor", 4, "actor/train#0", 2),
    ]
    follow = assembly(both, DEVICES, Ulysses({"actor": 1, "ref": 1}, follows=True))
    assert [s.sequence_ranks for s in follow[DEVICES[3]]] == [2, 4]


def test_a_degree_that_follows_shard_groups_has_to_be_theirs_from_the_start():
    follow = VerlSettings(ulysses="follow")
    own = facts(engine("actor", 2, sequence_ranks=2), engine("ref", 1))
    found = Ulysses.of(own, follow)
    assert (found.degree("actor", 4), found.degree("ref", 1)) == (4, 1)
    assert Ulysses.of(own, VerlSettings()).degree("actor", 4) == 2
    with pytest.raises(ConfigError, match=r"2 ranks, of which 1 .*fsdp_config\.fsdp_size=1"):
        Ulysses.of(facts(engine("actor", 2)), follow)
    with pytest.raises(ConfigError, match=r"critic\.model\.use_remove_padding=true"):
        Ulysses.of(facts(engine("critic", 1, packs=False)), follow)


def test_ranks_follow_devices_unless_the_job_numbers_its_own_otherwise():
    first, second, third = DEVICES[:3]
    assert rank_order([second], [first, third]) == (first, second, third)
    assert rank_order([first, second], []) == (first, second)
    assert rank_order([second, first], [third]) == (second, first, third)
    assert rank_order([third, second], [first]) == (third, second, first)


def test_what_is_computed_after_ranks_have_parted_lies_on_the_mesh_that_they_made_then():
    for _ in range(2):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("fsdp",))
            whole = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
            assert whole.to(torch.float64).device_mesh is mesh
        finally:
            dist.destroy_process_group()
        forget_meshes(None)


def test_bundles_are_cut_where_neighbors_end():
    one, other = SimpleNamespace(id="a"), SimpleNamespace(id="b")
    places = [(one, 0), (one, 1), (one, 3), (other, 4), (other, 3)]
    held = {d: Bundle(*place) for d, place in zip(DEVICES, places, strict=False)}
    cut = [[DEVICES.index(d) for d in run] for run in runs(held)]
    assert cut == [[0, 1], [2], [3], [4]]


def test_a_device_is_known_by_its_name_or_by_the_key():
    h100 = facts(name="NVIDIA H100 80GB HBM3", memory=80 * 2**30)
    assert device_spec(h100, None) is H100_SXM
    assert device_spec(facts(), None) is CPU_SEAT
    assert device_spec(facts(name="NVIDIA L4", memory=24 * 2**30), "h100-sxm") is H100_SXM
    with pytest.raises(ConfigError, match=r"backend\.device_spec.*NVIDIA L4"):
        device_spec(facts(name="NVIDIA L4", memory=24 * 2**30), None)
    with pytest.raises(ConfigError, match="h100"):
        device_spec(facts(), "h100")


def config(*, micro=8, dynamic=False, critic_mini=8):
    actor = {
        "ppo_mini_batch_size": 8,
        "use_dynamic_bsz": dynamic,
        "ppo_micro_batch_size_per_gpu": micro,
    }
    critic = {
        "ppo_mini_batch_size": critic_mini,
        "use_dynamic_bsz": dynamic,
        "ppo_micro_batch_size_per_gpu": 2,
    }
    rollout = {"n": 4, "log_prob_micro_batch_size_per_gpu": 4}
    parts = {"actor": actor, "rollout": rollout, "ref": {"log_prob_micro_batch_size_per_gpu": 2}}
    return OmegaConf.create(
        {"data": {"train_batch_size": 16}, "actor_rollout_ref": parts, "critic": critic}
    )


@pytest.mark.parametrize(
    ("given", "critic", "degrees", "expected"),
    [
        (config(), False, {}, 4),  # 8 prompts x 4 responses, 8 at a time: at most 4 ranks
        (config(micro=16), False, {}, 2),
        (config(dynamic=True), False, {}, 32),  # the reference's micro-batches are fixed all along
        (config(critic_mini=6), True, {}, 4),
        (config(), False, {"actor": 2}, 8),  # pairs of ranks get a part each
        (config(critic_mini=2), True, {}, 4),  # 2 prompts x 4 responses, 2 at a time
        (config(micro=2, critic_mini=2), True, {"critic": 2}, 8),
    ],
)
def test_ranks_fill_whole_micro_batches_of_every_engine(given, critic, degrees, expected):
    passes = tuple(passes_of(given, critic=critic, reference=True))
    found = shared_out(passes, 4, keeps(**degrees))
    assert [n for n in (1, 2, 4, 8, 16, 32) if found % n == 0][-1] == expected


def test_token_budgets_are_each_roles_own():
    given = config(dynamic=True)
    OmegaConf.update(given, "actor_rollout_ref.actor.ppo_max_token_len_per_gpu", 4096)
    OmegaConf.update(given, "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu", 8192)
    OmegaConf.update(given, "critic.ppo_max_token_len_per_gpu", 32768)
    found = budgets(passes_of(given, critic=True, reference=True))
    assert found == {"actor": TokenBudget(4096, 8192), "critic": TokenBudget(32768, 32768)}
    fixed = passes_of(config(), critic=True, reference=True)
    assert budgets(fixed) == {}


def trainer(**changes):
    actor = {"strategy": "fsdp2", "ulysses_sequence_parallel_size": 1} | changes.pop("actor", {})
    parts = {"actor": actor, "model": changes.pop("model", {"lora_rank": 0})}
    usual = {"pipeline_model_parallel_size": 1, "checkpoint_engine": {"backend": "nccl"}}
    parts["rollout"] = usual | changes.pop("rollout", {})
    found = {
        "actor_rollout_ref": parts,
        "critic": {"strategy": "fsdp2"} | changes.pop("critic", {}),
    }
    return SimpleNamespace(
        config=OmegaConf.create(found),
        use_critic=changes.pop("use_critic", True),
        standalone_server_manager=changes.pop("standalone", None),
        _enable_hybrid_replicas=changes.pop("hybrid_engine", False),
    )


DELTA = "delta_sharded"
OTHER_GROUP = {
    "rollout": {
        "checkpoint_engine": {
            "backend": "nccl",
            "engine_kwargs": {"nccl": {"rebuild_group": True}},
        }
    }
}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"standalone": object(), "hybrid_engine": True} | OTHER_GROUP,
            "actor_rollout_ref.hybrid_engine=false",
        ),
        ({"standalone": object()}, "engine_kwargs.nccl.rebuild_group=true"),
        (
            {
                "standalone": object(),
                "rollout": {"checkpoint_engine": {"backend": "delta_sharded"}},
            },
            "the delta_sharded checkpoint engine cannot take up new replicas",
        ),
        ({"actor": {"strategy": "fsdp"}}, "the actor's engine is fsdp;"),
        ({"actor": {"strategy": "megatron"}}, "the actor's engine is megatron: tensors"),
        ({"critic": {"strategy": "megatron"}}, "the critic's engine is megatron: tensors"),
        ({"model": {"lora_rank": 8}}, "the actor's LoRA"),
        ({"critic": {"model": {"lora_rank": 8}}}, "the critic's LoRA"),
        ({"rollout": {"data_parallel_size": 2}}, "data_parallel_size=2"),
        ({"rollout": {"disaggregation": {"enabled": True}}}, "rollout.disaggregation"),
    ],
)
def test_what_mode_adapt_cannot_change_is_refused_by_name(given, said):
    (reason,) = refusals(trainer(**given))
    assert said in reason


def test_what_it_can_change_is_not_refused():
    assert refusals(trainer()) == ()
    assert refusals(trainer(actor={"ulysses_sequence_parallel_size": 2})) == ()
    assert refusals(trainer(standalone=object(), **OTHER_GROUP)) == ()
    assert refusals(trainer(use_critic=False, critic={"strategy": "megatron"})) == ()


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 9),
    saved_by=st.integers(1, 4),
    copies=st.integers(1, 2),
    read_by=st.integers(1, 4),
)
def test_a_rank_reads_its_rows_out_of_whatever_files(rows, saved_by, copies, read_by):
    whole = torch.arange(rows * 3, dtype=torch.float32).reshape(rows, 3)
    cut = [piece_of(whole, saved_by, rank) for rank in range(saved_by)] * copies  # HSDP copies
    for rank in range(read_by):
        box = piece_of(whole, read_by, rank).box
        room = torch.full(box.shape, -1.0)
        fill(room, box, cut, "w")
        assert torch.equal(room, whole[box.within(Box((0, 0), (rows, 3)))])


def test_a_part_that_is_in_no_file_is_named():
    whole = torch.zeros(4, 3)
    with pytest.raises(PrimitiveError, match="w: 6 elements"):
        fill(torch.zeros(4, 3), Box((0, 0), (4, 3)), [piece_of(whole, 2, 0)], "w")


def piece_of(whole, ranks, rank):
    box = rank_boxes({"w": tuple(whole.shape)}, {"w": ROWS}, 1, Layout(ranks, 1))[rank]["w"]
    return Piece(box, whole[box.within(Box((0, 0), tuple(whole.shape)))])


def verl_job(step, mode="sync", waited_s=0.0):
    return SimpleNamespace(
        step=lambda metrics, timing: step,
        timing_raw={"gen": waited_s, "update_actor": 1.5},
        global_steps=1,
        trainer_mode=mode,
        parameter_sync_step=2,
        replay_buffer=SimpleNamespace(poll_interval=2.0),
    )


@pytest.mark.parametrize("waited_s", [3.0, 5.0])
def test_separate_replicas_were_busy_for_as_long_as_trainers_waited_for_them(waited_s):
    """verl looks every two seconds, for each of two mini-batches: less is no sign of a wait."""
    step = SimpleNamespace(tags=[{"prompt_len": 2, "response_len": 3}])
    job = verl_job(step, "separate_async", waited_s)
    recorder = Recorder(job, 8)
    job.step({}, {})
    seen = recorder.drained()
    assert seen.stage_s[ACTOR_TRAIN] == 1.5
    assert (ACTOR_GENERATE in seen.stage_s) == (waited_s > 4)
    assert seen.stage_s.get(ACTOR_GENERATE, seen.step_s) == seen.step_s


def test_the_first_peak_of_each_role_is_left_out():
    step = SimpleNamespace(tags=[{"prompt_len": 2, "response_len": 3}])
    job = verl_job(step)
    recorder, peaks = Recorder(job, 8), []
    warming = {"critic/perf/max_memory_allocated_gb": 1.0}
    both = {**warming, "actor/perf/max_memory_allocated_gb": 2.0}
    for metrics in (warming, warming, both, both):  # verl's trainer.critic_warmup
        job.step(metrics, {})
        peaks.append(recorder.drained().peak_bytes)
    critic, actor = 2**30, 2**31
    assert peaks == [{}, {"critic": critic}, {"critic": critic}, {"critic": critic, "actor": actor}]


@pytest.mark.parametrize(("resident", "weights"), [(True, 4 * 1000 // 2), (False, 0)])
def test_a_replicas_weights_count_only_while_they_are_on_the_device(resident, weights):
    job = SimpleNamespace(precision=FLOAT32, model=lambda _: SimpleNamespace(num_params=1000))
    trained = Unit(UnitId(ACTOR_TRAIN, 0), Layout(2, 1), DEVICES[:2])
    replica = Unit(UnitId(ACTOR_GENERATE, 0), Layout(2, 1), DEVICES[:2])
    found = device_peaks({"actor": 7000}, UnitMap([trained, replica]), job, resident)
    assert found == dict.fromkeys(DEVICES[:2], 7000 + weights)


def test_a_peak_of_the_last_stage_alone_says_nothing_of_the_first():
    job = SimpleNamespace(precision=FLOAT32, model=lambda _: SimpleNamespace(num_params=1000))
    staged = Unit(UnitId(ACTOR_TRAIN, 0), Layout(1, 2), DEVICES[:2])
    assert device_peaks({"actor": 7000}, UnitMap([staged]), job, resident=False) == {}


def test_an_optimizer_without_steps_is_refused_by_name():
    module = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    engine = SimpleNamespace(module=module, optimizer=optimizer)
    module(torch.ones(2)).sum().backward()
    optimizer.step()
    with pytest.raises(PrimitiveError, match="of weight has no step; expected Adam"):
        of_engine("actor", engine)


def trained_on(*keys, padding=0):
    tags = [{"is_padding": i >= len(keys) - padding} for i in range(len(keys))]
    return SimpleNamespace(keys=list(keys), tags=tags)


def test_samples_are_those_of_the_batch_that_was_trained_on():
    submitted = {"b": 7, "a": 3}
    whole = trained_on("a_1_0", "b_0_0", "a_0_0", "b_1_0", "a_0_0", padding=1)
    assert consumed(whole, submitted, 2) == (14, 15, 6, 7)
    assert consumed(trained_on("a_1_0", "b_0_0"), submitted, 2) == (14, 7)  # two are missing
    assert consumed(trained_on("a_1_0", "a_1_0"), submitted, 2) == (7, 7)  # one is there twice
    with pytest.raises(KeyError, match="c"):
        consumed(trained_on("c_0_0"), submitted, 2)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stand": "nowhere", "pool": "ray"},
        {"stands": "nowhere"},
        {"trainer": "colocate_async"},
        {"stand": "nowhere", "trainer": "separate_async"},
    ],
)
def test_options_that_the_harness_does_not_know_are_refused(options):
    with pytest.raises(ConfigError, match="expected stand=MODULE"):
        VerlHarness.of(options)


def test_a_wait_ends_with_its_condition_or_names_it():
    looks = iter([0, 0, 3])
    until(lambda: next(looks), "a third look", 30.0)
    assert list(looks) == []
    with pytest.raises(WaitTimeout, match="what never comes"):
        until(lambda: False, "what never comes", 0.0)
