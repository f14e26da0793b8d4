"""The OpenRLHF adapter, as far as it goes without OpenRLHF."""

from math import prod
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus_adapters.openrlhf import CAPABILITIES, facts
from nereus_adapters.openrlhf.extents import Extent, overlap
from nereus_core.cluster import Device
from nereus_core.config import NereusConfig
from nereus_core.errors import ConfigError, JobError
from nereus_core.workload import ACTOR_TRAIN, CRITIC_TRAIN, REF_INFER


def extents(shape, dim, tp, dp, pad):
    """Ranks of a group as DeepSpeed makes them: cut by AutoTP, then by ZeRO, with padding."""
    for tp_rank in range(tp):
        size = shape[dim] // tp if dim is not None else 1
        local = prod(shape) // (tp if dim is not None else 1)
        width = -(-local // dp) + pad
        for dp_rank in range(dp):
            start, stop = min(dp_rank * width, local), min((dp_rank + 1) * width, local)
            offset = tp_rank * size if dim is not None else 0
            yield Extent("w", shape, dim, offset, size, start, stop)


def held(whole, extent):
    """The elements of an extent, cut with numpy's own means."""
    part = whole
    if extent.dim is not None:
        part = np.take(whole, range(extent.offset, extent.offset + extent.size), extent.dim)
    return part.reshape(-1)[extent.start : extent.stop]


degrees = st.sampled_from([1, 2, 4])


@settings(deadline=None)  # of a machine that may be busy
@given(
    shape=st.lists(st.sampled_from([4, 8, 12]), min_size=1, max_size=3),
    dims=st.tuples(st.booleans(), st.integers(0, 2)),
    before=st.tuples(degrees, st.integers(1, 5)),
    after=st.tuples(degrees, st.integers(1, 5)),
    pad=st.integers(0, 3),
)
def test_every_element_finds_its_new_place(shape, dims, before, after, pad):
    shape = tuple(shape)
    dim = min(dims[1], len(shape) - 1) if dims[0] else None
    whole = np.arange(prod(shape)).reshape(shape)
    for target in extents(shape, dim, *after, pad):
        found = np.full(len(target), -1)
        for source in extents(shape, dim, *before, pad):
            values, shared = held(whole, source), overlap(source, target)
            for at, to, length in zip(shared.source, shared.target, shared.length, strict=True):
                found[to : to + length] = values[at : at + length]
        assert np.array_equal(found, held(whole, target))


@settings(deadline=None)
@given(tp=degrees, dp=st.integers(1, 6), dim=st.sampled_from([None, 0, 1]))
def test_replicas_apart_no_byte_is_sent_twice(tp, dp, dim):
    shape = (8, 12)
    mine = list(extents(shape, dim, tp, dp, 0))
    for target in extents(shape, dim, 1, 3, 0):
        common = sum(overlap(source, target).num_elements for source in mine)
        assert common == len(target) * (tp if dim is None else 1)


def test_runs_say_where_an_interval_lies_in_the_whole():
    second_half_of_columns = Extent("w", (3, 4), 1, 2, 2, 1, 5)
    starts, lengths = second_half_of_columns.runs()
    assert (starts.tolist(), lengths.tolist()) == ([3, 6, 10], [1, 2, 1])


def test_capabilities_answer_every_question():
    assert list(CAPABILITIES.missing()) == []


def test_values_are_computed_by_the_critic_that_trains():
    graph = facts.workload(critic=True, ref=True, reward=True, asynchronous=False)
    assert graph.stages[-2:] == (CRITIC_TRAIN, ACTOR_TRAIN)
    assert facts.REWARD_INFER in graph.node(CRITIC_TRAIN).after
    assert graph.algorithm == "ppo"
    assert (
        REF_INFER
        not in facts.workload(critic=False, ref=False, reward=False, asynchronous=True).stages
    )


def arguments(**changes):
    values = {"ring": 1, "engines": 2, "images": 0} | changes
    return SimpleNamespace(
        ds=SimpleNamespace(ring_attn_size=values["ring"]),
        vllm=SimpleNamespace(num_engines=values["engines"]),
        data=SimpleNamespace(max_images_per_prompt=values["images"]),
    )


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"ring": 2}, "ring attention"),
        ({"engines": 0}, "no vLLM engine"),
        ({"images": 1}, "images"),
    ],
)
def test_a_job_that_nereus_has_no_words_for_is_named(change, named):
    with pytest.raises(JobError, match=named):
        facts.refuse_unreadable(arguments(**change))
    facts.refuse_unreadable(arguments())


def test_an_unknown_gpu_asks_for_the_nearest_specification():
    devices, section = [Device("n", 0)], facts.BackendSection()
    assert facts.cluster(devices, "NVIDIA H100 80GB HBM3", section).device_spec.name == "h100-sxm"
    assert facts.cluster(devices, "cpu", section).device_spec.name == "cpu-seat"
    with pytest.raises(ConfigError, match=r"backend\.device_spec.*'NVIDIA L4'"):
        facts.cluster(devices, "NVIDIA L4", section)
    with pytest.raises(ConfigError, match=r"backend\.inter_node"):
        facts.cluster(devices, "cpu", facts.BackendSection(inter_node="wet string"))


def test_openrlhf_flags_describe_the_job_and_nothing_else_does():
    with pytest.raises(ConfigError, match=r"job\.model"):
        facts.backend_section(NereusConfig.of({"job": {"model": "x"}}))
    with pytest.raises(ConfigError, match=r"backend\.device_spce.*'device_spec'"):
        facts.backend_section(NereusConfig.of({"backend": {"device_spce": "x"}}))
