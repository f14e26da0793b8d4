"""The ``job`` and ``backend`` sections of ``nereus.toml`` as the torch backend reads them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from nereus_core.config import NereusConfig, validated


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class PlacementConfig(_Section):
    """Where a model-stage starts, with its devices spelled out."""

    layout: str
    """E.g. ``tp2pp1dp1``."""
    devices: tuple[str, ...]


class JobSection(_Section):
    """What to run."""

    algorithm: Literal["ppo", "grpo", "remax"] = "grpo"
    model: str | Mapping[str, Any]
    """A Hugging Face folder, a GGUF file (also ``package:file`` where an installed package ships
    it), or the fields of a config.json (random weights from the seed)."""
    precision: Literal["float64", "float32", "bfloat16"] = "float32"
    steps: int = Field(10, ge=1)
    """RL steps to run."""
    prompts_per_step: int = Field(8, ge=1)
    responses_per_prompt: int = Field(1, ge=1)
    max_prompt_tokens: int = Field(64, ge=1)
    max_response_tokens: int = Field(32, ge=1)
    """Upper bound; a task may ask for less at a step."""
    micro_batch: int = Field(4, ge=1)
    """Sequences a unit holds in one forward and backward."""
    task: str | None = None
    """``module:factory``, called with the tokenizer (or None) and ``task_args``; see `rl.tasks`."""
    task_args: Mapping[str, Any] = Field(default_factory=dict)
    plan: Mapping[str, str | PlacementConfig] | None = None
    """Start-up plan: model-stage -> ``tp2pp1dp1`` (packed from the first seat on)."""
    temperature: float = Field(1.0, gt=0)
    eos_id: int | None = Field(None, ge=0)
    """Token that ends a response; the model's own by default."""
    learning_rate: float = Field(1e-6, gt=0)
    critic_learning_rate: float = Field(1e-5, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    max_grad_norm: float = Field(1.0, gt=0)
    warmup_steps: int = Field(0, ge=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    clip: float = Field(0.2, gt=0)
    value_clip: float = Field(0.2, gt=0)
    kl_coef: float = Field(0.01, ge=0)
    """grpo: weight of the KL term of the loss; ppo and remax: of the penalty in the rewards."""
    entropy_coef: float = Field(0.0, ge=0)
    gamma: float = Field(1.0, gt=0, le=1)
    gae_lambda: float = Field(0.95, ge=0, le=1)


class DeviceEvent(_Section):
    """Something that happens to devices after a step, for demonstrations and tests."""

    step: int = Field(ge=0)
    """Index (from 0) of the RL step after which it happens."""
    take: tuple[str, ...] = ()
    """Announced to leave: drained, then gone."""
    kill: tuple[str, ...] = ()
    """Gone without notice."""
    give: tuple[str, ...] = ()
    """Back, with new seats."""


class RolloutConfig(_Section):
    """How the engines of ``rollout = "vllm"`` are started."""

    kv_cache_bytes: int | None = Field(None, gt=0)
    """Per device; what vLLM is allowed to take by default."""
    max_running: int = Field(64, ge=1)
    """Most responses an engine draws at once."""
    eager: bool = False
    """Compile nothing: starts faster, generates slower."""
    executor: Literal["seats", "uni", "mp", "ray"] = "seats"
    """Seats that stay when engines change, or vLLM's own workers, started with each engine."""
    front: Literal["step", "async"] = "step"
    """Who steps an engine's scheduler: the seat that leads, or vLLM's AsyncLLM beside the seats."""
    recycle_bytes: int | None = Field(256 * 2**20, gt=0)
    """A seat of an engine that has grown by more is replaced. Chosen."""


class SglangConfig(_Section):
    """How the engines of ``rollout = "sglang"`` are started."""

    cache_tokens: int | None = Field(None, gt=0)
    """Tokens whose keys and values fit in an engine's memory; what SGLang chooses by default."""
    max_running: int = Field(64, ge=1)
    """Most responses an engine draws at once."""


class BackendSection(_Section):
    """How to run it."""

    pool: Literal["local", "ray"] = "local"
    """Where seats come from: processes on this machine, or actors on a Ray cluster."""
    device: Literal["cpu", "cuda"] = "cpu"
    rollout: Literal["torch", "vllm", "sglang"] = "torch"
    """What generates: the backend itself, or engines on the same devices."""
    vllm: RolloutConfig = Field(default_factory=RolloutConfig)
    """Of ``rollout = "vllm"``."""
    sglang: SglangConfig = Field(default_factory=SglangConfig)
    """Of ``rollout = "sglang"``."""
    seats: int = Field(4, ge=1)
    """Over all nodes."""
    nodes: int = Field(1, ge=1)
    """Nodes to spread the seats over; only names in the local pool, Ray nodes in the Ray pool."""
    address: str | None = None
    """Of the Ray cluster; by default that of RAY_ADDRESS or this machine's, else a new one, as for
    ``local``."""
    resources: Mapping[str, float] = Field(default_factory=dict)
    """Ray resources of one seat; one GPU, or one CPU, by default."""
    threads: int = Field(1, ge=1)
    """Of torch in each seat."""
    memory_bytes: int | None = Field(None, gt=0)
    """Of one seat; the device specification's by default."""
    device_spec: str | None = None
    """Name of a device specification; cpu-seat or h200-sxm by default."""
    port: int = Field(0, ge=0, le=65535)
    """Of the store on which the seats of the Ray pool find one another; 0 picks a free one."""
    start_s: float = Field(120.0, gt=0)
    """Longest wait for a seat to come up."""
    grace_s: float = Field(60.0, gt=0)
    """Seconds that seats wait for another driver when theirs has died."""
    reattach: bool = False
    """Take over the seats that a driver with the same run_dir left behind when it was killed."""
    bucket_bytes: int = Field(16 * 2**20, ge=8)
    """Largest message of a transfer."""
    events: tuple[DeviceEvent, ...] = ()


def sections(config: NereusConfig) -> tuple[JobSection, BackendSection]:
    """Validate both sections; raises ConfigError naming key, value and the nearest known key."""
    return (
        validated(JobSection, config.job, at="job"),
        validated(BackendSection, config.backend, at="backend"),
    )
