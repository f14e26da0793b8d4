"""Planning problems: those that the benchmark times, and small random ones for tests."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from nereus_core.cluster import Cluster, Device, DeviceSpec
from nereus_core.cost import CostModel, Lengths
from nereus_core.device_specs import (
    CPU_SEAT,
    H100_SXM,
    INFINIBAND_HDR,
    INFINIBAND_NDR,
    LOOPBACK,
    NVLINK4,
)
from nereus_core.model import ModelSpec
from nereus_core.sim.models import LLAMA_3_1_8B, TINY
from nereus_core.workload import ALGORITHMS, BFLOAT16_MIXED, Algorithm, Job, Workload, grpo, ppo

LLAMA_3_1_70B = ModelSpec("llama-3.1-70b", "llama", 80, 8192, 28672, 64, 8, 128, 128256)
"""Source: config.json of meta-llama/Llama-3.1-70B."""


@dataclass(frozen=True, slots=True)
class Case:
    """A job as far as it does not depend on the number of devices."""

    workload: Callable[[], Workload]
    actor: ModelSpec
    memory_bytes: int = H100_SXM.memory_bytes

    def job(self, num_devices: int) -> Job:
        """Put the job on nodes of eight devices with the rates of an H100."""
        spec = replace(H100_SXM, memory_bytes=self.memory_bytes)
        cluster = Cluster.homogeneous(num_devices // 8, 8, spec, NVLINK4, INFINIBAND_NDR)
        critic = LLAMA_3_1_8B.as_critic("critic")
        models = {"actor": self.actor, "ref": self.actor, "critic": critic}
        return Job(self.workload(), models, cluster, 1024, 1024, 8192, BFLOAT16_MIXED)


CASES: Mapping[str, Case] = {
    "8B PPO": Case(ppo, LLAMA_3_1_8B),
    "70B PPO": Case(ppo, LLAMA_3_1_70B),
    "8B GRPO": Case(grpo, LLAMA_3_1_8B),
    # Chosen so that on 32 devices hardly any plan fits, and memory still decides on 1,024.
    "memory-tight": Case(ppo, LLAMA_3_1_8B, 24 * 2**30),
}
LENGTHS = Lengths(512, 512, 1024, 1024)
"""Prompt mean, response mean, p95 and maximum: what 70B PPO still fits on 32 devices."""


def small_problem(seed: int) -> tuple[CostModel, Lengths]:
    """A random job on at most six devices, some failed, with memory from tight to ample."""
    draw = random.Random(seed)
    algorithm = draw.choice(["grpo", "grpo", "remax", "ppo"])
    counts = draw.choice(
        [[3], [1, 2], [4], [2, 2]]
        if algorithm == "ppo"
        else [[6], [3, 3], [4, 1], [1, 2], [5], [2, 2, 1]]
    )
    return _problem(draw, algorithm, counts)


def middle_problem(seed: int) -> tuple[CostModel, Lengths]:
    """The same on seven to sixteen devices."""
    draw = random.Random(seed)
    counts = draw.choice([[8], [4, 4], [7], [4, 3], [8, 4], [6, 6], [5, 4], [8, 8], [6, 5, 4]])
    return _problem(draw, draw.choice(["grpo", "remax"]), counts)


def _problem(
    draw: random.Random, algorithm: Algorithm, counts: list[int]
) -> tuple[CostModel, Lengths]:
    devices = tuple(Device(f"node{n}", i) for n, c in enumerate(counts) for i in range(c))
    memory = draw.choice([4, 8, 16, 1000]) * 2**18
    spec = DeviceSpec(
        "small", CPU_SEAT.peak_flops_per_s, memory, 12e9, 5e-6, 12e9, "chosen for a test"
    )
    failed = frozenset(draw.sample(devices, draw.choice([0, 0, 1])))
    cluster = Cluster(devices, spec, LOOPBACK, INFINIBAND_HDR, failed)
    job = Job(
        ALGORITHMS[algorithm](asynchronous=draw.random() < 0.3),
        {"actor": TINY, "ref": TINY, "critic": TINY.as_critic("critic")},
        cluster,
        global_batch=draw.choice([4, 6, 8, 12]),
        max_prompt_tokens=32,
        max_response_tokens=128,
        micro_batch=draw.choice([1, 2]),
    )
    mean = draw.uniform(8, 100)
    return CostModel(job), Lengths(draw.uniform(4, 32), mean, mean * 1.5, mean * 2)
