"""Seconds of generating responses: monotone in everything that makes it harder or easier."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus_core.cluster import Cluster
from nereus_core.cost import CostModel, Lengths
from nereus_core.cost.shapes import Options
from nereus_core.device_specs import A100_SXM_80, H100_SXM, INFINIBAND_NDR, NVLINK4
from nereus_core.sim.models import LLAMA_3_1_8B
from nereus_core.workload import ACTOR_GENERATE, Job, grpo

TOLERANCE = 1.01
"""Time is cut into cells and parts of the batch: figures are exact to about a percent."""


def job(batch: int = 256, spec=H100_SXM) -> Job:
    cluster = Cluster.homogeneous(2, 8, spec, NVLINK4, INFINIBAND_NDR)
    models = dict.fromkeys(("actor", "ref"), LLAMA_3_1_8B)
    return Job(grpo(), models, cluster, batch, 8192, 8192)


def options(tp: int, dp: int) -> Options:
    return Options.within_node(*(np.array([n]) for n in (tp, 1, dp)))


def seconds(lengths: Lengths, *, batch=256, spec=H100_SXM, tp=2, dp=4) -> np.ndarray:
    """By number of waves, ascending."""
    return CostModel(job(batch, spec)).table(ACTOR_GENERATE, options(tp, dp), lengths).seconds


def made(figure) -> Lengths:
    prompt, mean, more, longest = figure
    return Lengths(prompt, mean, mean * more, mean * more * longest)


lengths = st.tuples(st.floats(1, 4000), st.floats(1, 4000), st.floats(1, 4), st.floats(1, 4)).map(
    made
)
spec = st.sampled_from([H100_SXM, A100_SXM_80])


@settings(max_examples=30, deadline=None)
@given(lengths, spec, st.sampled_from([64, 256, 1024]))
def test_more_cache_is_never_slower(some, device, batch):
    by_waves = seconds(some, batch=batch, spec=device)
    assert (by_waves[1:] * TOLERANCE >= by_waves[:-1]).all()


@settings(max_examples=30, deadline=None)
@given(lengths, spec, st.sampled_from([64, 256]))
def test_a_larger_batch_takes_longer(some, device, batch):
    one, two = (seconds(some, batch=b, spec=device)[0] for b in (batch, 2 * batch))
    assert two * TOLERANCE >= one


@settings(max_examples=30, deadline=None)
@given(lengths, spec, st.floats(1, 4))
def test_longer_prompts_and_responses_take_longer(some, device, factor):
    base = seconds(some, spec=device)[0]
    prompts = replace(some, prompt_mean=some.prompt_mean * factor)
    responses = Lengths(
        some.prompt_mean, *(factor * getattr(some, f"response_{x}") for x in ("mean", "p95", "max"))
    )
    assert seconds(prompts, spec=device)[0] * TOLERANCE >= base
    assert seconds(responses, spec=device)[0] * TOLERANCE >= base


@settings(max_examples=30, deadline=None)
@given(lengths, st.floats(1, 4))
def test_faster_devices_are_never_slower(some, factor):
    base = seconds(some)[0]
    for name in ("memory_bytes_per_s", "peak_flops_per_s"):
        faster = replace(H100_SXM, **{name: getattr(H100_SXM, name) * factor})
        assert seconds(some, spec=faster)[0] <= base * (1 + 1e-9)


def test_the_long_tail_decides():
    even = Lengths(512, 1000, 1000, 1000)
    uneven = Lengths(512, 1000, 3000, 8000)
    assert seconds(uneven, batch=64)[0] > 2 * seconds(even, batch=64)[0]


def test_an_h100_reads_a_token_for_a_small_batch_in_about_the_time_of_its_weights():
    steps = 1000
    alone = seconds(Lengths(8, steps, steps, steps), batch=8, tp=1, dp=8)[0]
    reading = steps * LLAMA_3_1_8B.num_params * 4 / H100_SXM.memory_bytes_per_s
    assert reading < alone < 2 * reading


def test_quantiles_say_more_than_mean_and_p95():
    plain = Lengths(512, 1000, 3000, 4000)
    twofold = replace(plain, response_quantiles=(10, 10, 10, 10, 10, 2000, 2600, 3000, 3900, 4000))
    assert seconds(twofold)[0] != pytest.approx(seconds(plain)[0], rel=1e-3)
