"""From a configuration to the parts of a TorchJob: shapes, weights, cluster, task, plan."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from nereus_adapters.torch.config import BackendSection, JobSection, PlacementConfig, sections
from nereus_adapters.torch.engine import OptimizerSpec, export_model
from nereus_adapters.torch.engine_factories import factory as engines_of
from nereus_adapters.torch.job import TorchJob
from nereus_adapters.torch.manifest import Manifest
from nereus_adapters.torch.pools import leave_word, left_pool, open_pool
from nereus_adapters.torch.rl.tasks import Task, load_task
from nereus_adapters.torch.settings import RlSettings
from nereus_adapters.torch.values import ModelSource
from nereus_core.checkpoints import resolved
from nereus_core.cluster import Cluster, Device, DeviceSpec
from nereus_core.config import NereusConfig
from nereus_core.device_specs import DEVICE_SPECS, LINK_SPECS
from nereus_core.errors import ConfigError
from nereus_core.layout import Layout
from nereus_core.model import ModelSpec
from nereus_core.plan import Placement, Plan, check_plan, plan_problems
from nereus_core.workload import (
    ACTOR_GENERATE,
    ALGORITHMS,
    FLOAT32,
    FLOAT64,
    Job,
    ModelStage,
    Precision,
)

# As the engine keeps it: parameters and gradients in bf16, moments in float32, no master copy.
BFLOAT16 = Precision("bfloat16", 2, 2, 4)
PRECISIONS = {p.compute: p for p in (FLOAT64, FLOAT32, BFLOAT16)}

_PLACEMENT = re.compile(r"(tp\d+pp\d+)(?:dp(\d+))?")


def start(config: NereusConfig, plan: Plan | None = None) -> TorchJob:
    """Start the job that a configuration describes.

    Args:
        config: sections ``job`` and ``backend`` are validated here.
        plan: where to start; by default, that of the checkpoint to resume from where there is one
            (see `resumable`), else ``job.plan``, else `simplest`.

    Raises:
        ConfigError, ModelConfigError, PlanError: before any seat is started.
        CheckpointError: what is to be resumed is broken, or of another job.
        NereusError: the driver whose seats are taken over died inside a step that cannot be redone.
    """
    job_section, backend = sections(config)
    folder, hf_config = _model(job_section.model, config)
    job = _job(job_section, backend, ModelSpec.from_hf_config(hf_config, name="actor"))
    task = _task(job_section, config.seed, folder, job)
    settings = _settings(job_section, backend, config, hf_config)
    sources = _sources(job, job_section, hf_config, folder)
    engines = engines_of(backend, job, job.models["actor"], folder)
    if backend.reattach:
        return TorchJob(job, None, sources, task, settings, left_pool(config.run_dir, backend))
    resume = resolved(config.checkpoint.resume) if config.checkpoint.resume else None
    if plan is None and resume is not None:
        plan = resumable(Manifest.read(resume).plan, job)
    if plan is None:
        plan = planned(job, job_section.plan) if job_section.plan else simplest(job)
    check_plan(plan, job)
    pool = open_pool(backend, job.cluster)
    leave_word(pool, config.run_dir)
    try:
        made = engines(pool) if engines is not None else None
    except BaseException:
        pool.close()
        raise
    return TorchJob(job, plan, sources, task, settings, pool, resume=resume, engines=made)


def _job(section: JobSection, backend: BackendSection, spec: ModelSpec) -> Job:
    models = {"actor": spec, "ref": replace(spec, name="ref")}
    if section.algorithm == "ppo":
        models["critic"] = spec.as_critic("critic")
    engines = backend.rollout == "vllm"
    return Job(
        workload=ALGORITHMS[section.algorithm](),
        models=models,
        cluster=cluster(backend),
        global_batch=section.prompts_per_step * section.responses_per_prompt,
        max_prompt_tokens=section.max_prompt_tokens,
        max_response_tokens=section.max_response_tokens,
        precision=PRECISIONS[section.precision],
        micro_batch=section.micro_batch,
        num_steps=section.steps,
        # vLLM's seats lease one another on their own host.
        within_node=frozenset({ACTOR_GENERATE} if engines and backend.pool == "ray" else ()),
    )


def cluster(backend: BackendSection) -> Cluster:
    """Describe the seats as a cluster; raises ConfigError for an unknown device specification."""
    name = backend.device_spec or ("cpu-seat" if backend.device == "cpu" else "h200-sxm")
    if name not in DEVICE_SPECS:
        known = ", ".join(DEVICE_SPECS)
        raise ConfigError("backend.device_spec", f"{name!r} is unknown; known: {known}")
    if backend.seats % backend.nodes:
        raise ConfigError("backend.nodes", f"{backend.nodes} does not divide {backend.seats} seats")
    spec: DeviceSpec = DEVICE_SPECS[name]
    if backend.memory_bytes is not None:
        spec = replace(spec, memory_bytes=backend.memory_bytes)
    intra = LINK_SPECS["loopback" if backend.device == "cpu" else "nvlink4"]
    inter = LINK_SPECS["loopback" if backend.device == "cpu" else "ib-ndr"]
    return Cluster.homogeneous(backend.nodes, backend.seats // backend.nodes, spec, intra, inter)


def _sources(
    job: Job, section: JobSection, hf_config: Mapping[str, Any], folder: Path
) -> dict[str, ModelSource]:
    def optimizer(lr: float) -> OptimizerSpec:
        return OptimizerSpec(
            lr=lr,
            weight_decay=section.weight_decay,
            max_grad_norm=section.max_grad_norm,
            warmup_steps=section.warmup_steps,
            total_steps=section.steps,
            schedule=section.schedule,
        )

    rates = {"actor": section.learning_rate, "critic": section.critic_learning_rate}
    return {
        model: ModelSource(
            spec=spec,
            hf_config=hf_config,
            folder=str(folder),
            dtype=section.precision,
            optimizer=optimizer(rates[model]) if model in rates else None,
        )
        for model, spec in job.models.items()
    }


def _settings(
    section: JobSection, backend: BackendSection, config: NereusConfig, hf_config: Mapping[str, Any]
) -> RlSettings:
    eos = section.eos_id if section.eos_id is not None else hf_config.get("eos_token_id")
    return RlSettings(
        seed=config.seed,
        responses_per_prompt=section.responses_per_prompt,
        temperature=section.temperature,
        eos_id=eos[0] if isinstance(eos, list) else eos,
        clip=section.clip,
        value_clip=section.value_clip,
        kl_coef=section.kl_coef,
        entropy_coef=section.entropy_coef,
        gamma=section.gamma,
        gae_lambda=section.gae_lambda,
        bucket_bytes=backend.bucket_bytes,
        step_s=config.timeouts.step_s,
        transfer_s=config.timeouts.transfer_s,
        boundary_s=config.timeouts.boundary_s,
    )


def _task(section: JobSection, seed: int, folder: Path, job: Job) -> Task:
    tokenizer = None
    if section.task is not None and (folder / "tokenizer_config.json").exists():
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder)
    return load_task(
        section.task,
        section.task_args,
        tokenizer=tokenizer,
        vocab=job.models["actor"].vocab,
        seed=seed,
        prompts_per_step=section.prompts_per_step,
    )


# --- Model ------------------------------------------------------------------------------------


def _model(source: str | Mapping[str, Any], config: NereusConfig) -> tuple[Path, dict[str, Any]]:
    """Return a safetensors folder and the values of its config.json."""
    if isinstance(source, Mapping):
        key = hashlib.sha256(json.dumps([dict(source), config.seed], sort_keys=True).encode())
        target = config.run_dir / "models" / key.hexdigest()[:16]
        folder = export_model(source, target, seed=config.seed)
    else:
        path = _path(source)
        folder = path if path.is_dir() else export_model(path, _cache(path))
    return folder, json.loads((folder / "config.json").read_text(encoding="utf-8"))


def _path(source: str) -> Path:
    """Find a model on disk, or inside an installed package where it says ``package:file``."""
    package, separator, inside = source.partition(":")
    path = Path(source).expanduser()
    if separator and not path.exists():
        found = importlib.util.find_spec(package)
        if found is None or not found.submodule_search_locations:
            raise ConfigError("job.model", f"no package {package!r} is installed (in {source!r})")
        path = Path(found.submodule_search_locations[0]) / inside
    if not path.exists():
        raise ConfigError("job.model", f"{path} does not exist")
    if path.is_dir() and not (path / "config.json").exists():
        raise ConfigError("job.model", f"{path} holds no config.json")
    return path


def _cache(path: Path) -> Path:
    """Name the converted form of a model file, by its path, size and time of change."""
    status = path.stat()
    key = f"{path.resolve()}/{status.st_size}/{status.st_mtime_ns}"
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nereus" / "models"
    return root / f"{path.stem}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"


# --- Plan -------------------------------------------------------------------------------------


def planned(job: Job, wanted: Mapping[str, str | PlacementConfig]) -> Plan:
    """Read ``job.plan``; a stage it leaves out gets one unit on the first seat.

    Raises:
        ConfigError: an unknown stage, a malformed placement, or more devices than there are.
    """
    known = {str(stage) for stage in job.workload.stages}
    for stage in wanted:
        if stage not in known:
            raise ConfigError(f"job.plan.{stage}", f"is not one of {', '.join(sorted(known))}")
    return Plan({s: _placement(job, s, wanted.get(str(s))) for s in job.workload.stages})


def _placement(job: Job, stage: ModelStage, wanted: str | PlacementConfig | None) -> Placement:
    key = f"job.plan.{stage}"
    text = wanted.layout if isinstance(wanted, PlacementConfig) else wanted or "tp1pp1dp1"
    match = _PLACEMENT.fullmatch(text)
    if match is None:
        raise ConfigError(key, f"got {text!r}; expected e.g. 'tp2pp1dp2'")
    layout = Layout.parse(match[1])
    if isinstance(wanted, PlacementConfig):
        try:
            devices = tuple(Device.parse(d) for d in wanted.devices)
        except ValueError as error:
            raise ConfigError(f"{key}.devices", str(error)) from error
    else:
        count = layout.num_devices * int(match[2] or 1)
        devices = job.cluster.healthy[:count]
        if len(devices) < count:
            raise ConfigError(key, f"{text} takes {count} seats, there are {len(devices)}")
    return Placement.packed(layout, devices)


def resumable(saved: Plan, job: Job) -> Plan:
    """Return the plan of a checkpoint where this job can run it, else `simplest`.

    ``job.plan`` says where a run begins, on the seats it began with; these may be others.
    """
    return simplest(job) if plan_problems(saved, job) else saved


def simplest(job: Job) -> Plan:
    """Return the plan without model parallelism: as many units as divide the batch."""
    seats = job.cluster.healthy
    dp = next(n for n in range(len(seats), 0, -1) if job.global_batch % n == 0)
    return Plan({s: Placement.packed(Layout(1, 1), seats[:dp]) for s in job.workload.stages})
