"""Facts: what OpenRLHF's arguments and a model's config say about a job, in the core's words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from nereus_core.cluster import Cluster, Device, DeviceSpec, LinkSpec
from nereus_core.config import NereusConfig, validated
from nereus_core.device_specs import CPU_SEAT, DEVICE_SPECS, LINK_SPECS, LOOPBACK
from nereus_core.errors import ConfigError, JobError
from nereus_core.model import ModelSpec
from nereus_core.workload import (
    ACTOR_GENERATE,
    ACTOR_TRAIN,
    BFLOAT16_MIXED,
    CRITIC_TRAIN,
    REF_INFER,
    Job,
    ModelStage,
    Node,
    Stage,
    Workload,
)

REWARD_INFER = ModelStage("reward", Stage.INFER)
_BY_WORD = {"H200": "h200-sxm", "H100": "h100-sxm", "A100": "a100-sxm-80gb"}
"""Word in the name that CUDA reports -> device specification of the core."""


class BackendSection(BaseModel):
    """The ``backend`` section of the configuration of an OpenRLHF job."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    device_spec: str | None = None
    """Name of a device specification; from what CUDA reports by default."""
    intra_node: str | None = None
    """Name of the link between devices of a node; NVLink of the device's generation by default."""
    inter_node: str | None = None
    """Name of the link between nodes; InfiniBand by default."""
    memory_bytes: int | None = Field(default=None, gt=0)
    """Memory of a device that the job may use, where that is not all of it."""
    max_devices: int | None = Field(default=None, ge=1)
    """Devices that the job may hold, out of what Ray has free; by default none joins it."""
    call_s: float = 120.0
    """Longest wait for one call into an actor of the job; chosen, not measured."""
    start_s: float = 600.0
    """Longest wait for an actor or engine to start; chosen, not measured."""
    warm_engines: int | None = Field(default=None, ge=0)
    """Processes with vLLM in them that wait for engines to come, in mode adapt; by default as many
    as the job began with engines. Each takes host memory for vLLM twice, and no device."""


def backend_section(config: NereusConfig) -> BackendSection:
    """Read ``backend``; refuse a ``job`` section, for OpenRLHF's own flags describe the job."""
    if config.job:
        raise ConfigError(
            f"job.{next(iter(config.job))}", "an OpenRLHF job is described by its own flags"
        )
    return validated(BackendSection, config.backend, at="backend")


def refuse_unreadable(args: SimpleNamespace) -> None:
    """Raise JobError for a job whose parallelism the core has no words for."""
    problems = []
    if args.ds.ring_attn_size > 1:
        problems.append(
            f"ring attention over {args.ds.ring_attn_size} ranks is not a layout that Nereus knows"
        )
    if not args.vllm.num_engines:
        problems.append("it has no vLLM engine")
    if args.data.max_images_per_prompt:
        problems.append("models of images and text have shapes that Nereus does not know")
    if problems:
        raise JobError(problems)


def workload(*, critic: bool, ref: bool, reward: bool, asynchronous: bool) -> Workload:
    """Return the graph of a job.

    OpenRLHF computes values and log-probabilities of the old policy in the groups that train, so
    there is no critic/infer: its seconds count to critic/train, as those of the actor's do.
    """
    nodes = [Node(ACTOR_GENERATE, weights_from=ACTOR_TRAIN)]
    before = [ACTOR_GENERATE]
    for stage, there in ((REF_INFER, ref), (REWARD_INFER, reward)):
        if there:
            nodes.append(Node(stage, (ACTOR_GENERATE,), origin=True))
            before.append(stage)
    if critic:
        nodes.append(Node(CRITIC_TRAIN, tuple(before)))
    nodes.append(Node(ACTOR_TRAIN, tuple(before)))
    return Workload("ppo" if critic else "grpo", tuple(nodes), asynchronous)


def models(workload_: Workload, configs: Mapping[str, Mapping[str, Any]]) -> dict[str, ModelSpec]:
    """Return shapes by model.

    Args:
        workload_: Which models there are.
        configs: Hugging Face config by model; ``ref`` is the actor's.
    """
    found: dict[str, ModelSpec] = {}
    for name in {stage.model for stage in workload_.stages}:
        spec = ModelSpec.from_hf_config(configs["actor" if name == "ref" else name], name=name)
        found[name] = spec.as_critic(name) if name in ("critic", "reward") else spec
    return found


def cluster(devices: Sequence[Device], kind: str, section: BackendSection) -> Cluster:
    """Describe the devices of a job.

    Args:
        devices: All that the job holds.
        kind: What CUDA calls them; ``cpu`` where there are none.
        section: What the configuration says instead.

    Raises:
        ConfigError: the device or link is unknown; lists those that are known.
    """
    name = section.device_spec or next(
        (spec for word, spec in _BY_WORD.items() if word in kind),
        "cpu-seat" if kind == "cpu" else "",
    )
    if name not in DEVICE_SPECS:
        raise ConfigError(
            "backend.device_spec",
            f"{name or kind!r} is unknown; name the nearest of {', '.join(DEVICE_SPECS)}",
        )
    spec: DeviceSpec = DEVICE_SPECS[name]
    on_cpu = spec is CPU_SEAT
    if section.memory_bytes is not None:
        spec = replace(spec, memory_bytes=section.memory_bytes)
    near = "nvlink3" if name.startswith("a100") else "nvlink4"
    far = "ib-hdr" if name.startswith("a100") else "ib-ndr"
    return Cluster(
        tuple(sorted(devices)),
        spec,
        _link("intra_node", section.intra_node, LOOPBACK if on_cpu else LINK_SPECS[near]),
        _link("inter_node", section.inter_node, LOOPBACK if on_cpu else LINK_SPECS[far]),
    )


def _link(key: str, name: str | None, default: LinkSpec) -> LinkSpec:
    if name is None:
        return default
    if name not in LINK_SPECS:
        raise ConfigError(f"backend.{key}", f"{name!r} is unknown; known: {', '.join(LINK_SPECS)}")
    return LINK_SPECS[name]


def job_of(
    args: SimpleNamespace,
    workload_: Workload,
    specs: Mapping[str, ModelSpec],
    cluster_: Cluster,
    num_steps: int | None,
) -> Job:
    """Read a job from the arguments of `train_ppo_ray`."""
    longest = args.data.max_len
    response = min(args.rollout.max_new_tokens or longest - 1, longest - 1)
    precision = replace(BFLOAT16_MIXED, grad_bytes=4 if args.ds.grad_accum_dtype == "fp32" else 2)
    return Job(
        workload=workload_,
        models=dict(specs),
        cluster=cluster_,
        global_batch=args.rollout.batch_size * args.rollout.n_samples_per_prompt,
        max_prompt_tokens=max(1, longest - response),
        max_response_tokens=response,
        precision=precision,
        micro_batch=args.train.micro_batch_size,
        num_steps=num_steps,
        recompute="full" if args.actor.gradient_checkpointing_enable else "none",
        sharded_optimizer=args.ds.zero_stage >= 1,
    )
