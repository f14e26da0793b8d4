"""Which rollout engines a configuration asks for, and what it asks that they cannot do."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from nereus_adapters.rollout.architectures import ARCHITECTURES
from nereus_adapters.rollout.ports import EngineFactory
from nereus_adapters.torch.config import BackendSection
from nereus_adapters.torch.fleet import Pool
from nereus_core.backend_status import require_backend
from nereus_core.errors import ConfigError
from nereus_core.model import ModelSpec
from nereus_core.workload import Job

if TYPE_CHECKING:
    from nereus_adapters.rollout.vllm.seat_hosts import SeatHosts

Opens = Callable[[Pool], EngineFactory]
"""Makes the engines of a job, once its seats' pool is there."""


def factory(backend: BackendSection, job: Job, spec: ModelSpec, folder: Path) -> Opens | None:
    """Return what makes the engines of a job; None where its seats generate themselves.

    Raises:
        ConfigError: the configuration asks for what the engines cannot do.
        BackendMissing: what it asks for is not installed.
    """
    if backend.rollout == "torch":
        return None
    if backend.reattach:
        what = f"engines end with their driver: not with {backend.rollout!r}"
        raise ConfigError("backend.reattach", what)
    if job.precision.compute == "float64":
        raise ConfigError("job.precision", "engines compute in float32 or bfloat16")
    if backend.rollout == "sglang":
        return _sglang(backend, job, spec, folder)
    return _vllm(backend, job, spec, folder)


def _vllm(backend: BackendSection, job: Job, spec: ModelSpec, folder: Path) -> Opens:
    from nereus_adapters.rollout.vllm import nereus_declare_adapter

    if backend.pool == "ray" and backend.device != "cpu":
        what = (
            "'vllm' on the Ray pool is for CPUs: which GPUs Ray gave to seats, engines do not know"
        )
        raise ConfigError("backend.rollout", what)
    require_backend(nereus_declare_adapter())
    from nereus_adapters.rollout.vllm.factory import VllmFactory
    from nereus_adapters.rollout.vllm.settings import VllmSettings

    section = backend.vllm
    settings = VllmSettings(
        folder,
        dtype=job.precision.compute,
        max_tokens=job.max_prompt_tokens + job.max_response_tokens,
        max_running=section.max_running,
        kv_cache_bytes=section.kv_cache_bytes,
        eager=section.eager,
        executor=section.executor,
        front=section.front,
    )

    def on(pool: Pool) -> EngineFactory:
        hosts = _ray_hosts(pool, job, backend) if backend.pool == "ray" else None
        return VllmFactory(
            settings,
            spec,
            job.cluster.devices,
            accelerator=backend.device,
            recycle_bytes=section.recycle_bytes,
            hosts=hosts,
        )

    return on


def _ray_hosts(pool: Pool, job: Job, backend: BackendSection) -> SeatHosts:
    from nereus_adapters.rollout.vllm.ray_hosts import RayHosts
    from nereus_adapters.rollout.vllm.settings import environment
    from nereus_adapters.torch.ray_pool.pool import RayPool

    assert isinstance(pool, RayPool)
    most = max(Counter(device.node for device in job.cluster.devices).values())
    kind = backend.device
    return RayHosts(pool, most, kind, environment(kind), start_s=backend.start_s)


def _sglang(backend: BackendSection, job: Job, spec: ModelSpec, folder: Path) -> Opens:
    from nereus_adapters.rollout.sglang import nereus_declare_adapter

    if backend.pool == "ray":
        what = (
            "'sglang' forks its engines on the driver's own host: take pool = 'local', or 'vllm', "
            "which has engines on every host of the Ray pool"
        )
        raise ConfigError("backend.rollout", what)
    if backend.device != "cpu":
        what = (
            "'sglang' beside training seats is for CPUs: on a GPU it would take the memory that "
            "training needs; take 'vllm', or SGLang's own adapter with a trainer of your own"
        )
        raise ConfigError("backend.rollout", what)
    require_backend(nereus_declare_adapter())
    from nereus_adapters.rollout.sglang.factory import SglangEngines

    hf_config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    hf_config.setdefault("architectures", [ARCHITECTURES[spec.family]])

    def on(pool: Pool) -> EngineFactory:
        return SglangEngines(
            hf_config,
            job.cluster.devices,
            device=backend.device,
            dtype=job.precision.compute,
            max_tokens=backend.sglang.cache_tokens,
            max_running=backend.sglang.max_running,
            start_s=backend.start_s,
        )

    return on
