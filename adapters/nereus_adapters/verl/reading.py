"""reading: a verl job's configuration and its workers' own words as a core Job and its units."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from nereus_adapters.verl.facts import WorkerFacts
from nereus_adapters.verl.settings import VerlSettings
from nereus_adapters.verl.sleeping import asleep_bytes
from nereus_adapters.verl.standing import ROLES
from nereus_adapters.verl.tensor_parallel import VENDOR, VENDOR_KEY
from nereus_adapters.verl.ulysses import Ulysses, budgets, passes_of, shared_out
from nereus_core.cluster import Cluster, Device, DeviceSpec, LinkSpec
from nereus_core.device_specs import CPU_SEAT, DEVICE_SPECS, LINK_SPECS
from nereus_core.errors import ConfigError
from nereus_core.model import ModelSpec
from nereus_core.workload import (
    ACTOR_GENERATE,
    ACTOR_TRAIN,
    BFLOAT16_MIXED,
    CRITIC_TRAIN,
    FLOAT32,
    REF_INFER,
    Algorithm,
    Job,
    ModelStage,
    Node,
    Precision,
    Stage,
    Workload,
)

_ALGORITHMS: Mapping[str, Algorithm] = {"gae": "ppo", "remax": "remax"}
"""By verl's advantage estimator; all others score groups of responses without a critic, as GRPO."""
_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def job_of(
    trainer: Any,
    facts: WorkerFacts,
    devices: Sequence[Device],
    settings: VerlSettings,
    ulysses: Ulysses,
    *,
    hybrid: bool,
    sleepers: int = 0,
) -> Job:
    """Read a Job; touches no device.

    Args:
        trainer: verl's PPOTrainer after ``init()``.
        facts: Of the first worker of the actor.
        devices: All that the job may use.
        settings: ``nereus.backend``.
        ulysses: Ranks that share each sequence.
        hybrid: Whether rollouts share the trainers' processes.
        sleepers: Replicas that may sleep beside a device, out of service.
    """
    config = trainer.config
    rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
    engines = {engine.role: engine for engine in facts.engines}
    shards = str(actor.strategy).startswith("fsdp")
    prompt, response = int(rollout.prompt_length), int(rollout.response_length)
    models = {"actor": ModelSpec.from_hf_config(engines["actor"].hf_config, name="actor")}
    if trainer.use_critic:
        critic = ModelSpec.from_hf_config(engines["critic"].hf_config, name="critic")
        models["critic"] = critic.as_critic("critic")
    if _has_reference(trainer):
        models["ref"] = ModelSpec.from_hf_config(engines["ref"].hf_config, name="ref")
    workload = _workload(trainer)
    stages = workload.stages
    precision = _precision(engines["actor"].params_dtype, actor) if shards else BFLOAT16_MIXED
    weights_bytes = precision.kept_bytes(Stage.GENERATE) * models["actor"].num_params
    return Job(
        workload=workload,
        models=models,
        cluster=cluster_of(facts, devices, settings, sleepers, weights_bytes),
        global_batch=int(config.data.train_batch_size) * int(rollout.n),
        max_prompt_tokens=prompt,
        max_response_tokens=response,
        precision=precision,
        micro_batch=_micro_batch(actor, prompt + response),
        num_steps=int(trainer.total_training_steps),
        recompute="full"
        if config.actor_rollout_ref.model.get("enable_gradient_checkpointing", False)
        else "none",
        sharded_optimizer=not shards,  # Megatron's distributed optimizer
        together=(frozenset(s for s in stages if hybrid or s.stage is not Stage.GENERATE),),
        within_node=frozenset() if hybrid else frozenset({ACTOR_GENERATE}),
        **(_sharing(trainer, facts, stages, ulysses, settings) if shards else _megatron(actor)),
    )


def _sharing(
    trainer: Any,
    facts: WorkerFacts,
    stages: Collection[ModelStage],
    ulysses: Ulysses,
    settings: VerlSettings,
) -> dict[str, Any]:
    """Say how a batch and a model are shared out among ranks of an FSDP2 engine, for a Job."""
    config, roles = trainer.config, {r: s for r, s in ROLES.items() if s in stages}
    passes = tuple(
        passes_of(config, critic=bool(trainer.use_critic), reference=_has_reference(trainer))
    )
    shared = shared_out(passes, int(config.actor_rollout_ref.rollout.n), ulysses)
    tokens = {ROLES[role]: budget for role, budget in budgets(passes).items()}
    own = frozenset(roles.values())
    rollout = config.actor_rollout_ref.rollout
    most = {ACTOR_GENERATE: int(rollout.get("pipeline_model_parallel_size", 1) or 1)}
    if settings.engine == "tp":  # its degrees of Ulysses are 1
        most |= {ROLES[e.role]: 1 if e.unpipelined else settings.most_stages for e in facts.engines}
        cut = {"kv_heads_cut": own, "logits_whole": own, "most_stages": most}
        return {**cut, "unit_batch": shared, "micro_tokens": tokens}
    how = {"row_cut": own, "micro_tokens": tokens, "most_stages": most}
    if ulysses.follows:
        return {**how, "unit_batch": shared, "sequence_parallel": True}
    ranks = {stage: ulysses.now.get(role, 1) for role, stage in roles.items()}
    return {**how, "device_batch": shared, "sequence_ranks": ranks}


def _megatron(actor: Any) -> dict[str, Any]:
    """Say how ranks of a Megatron unit share activations, as fields of a Job."""
    return {"sequence_parallel": bool(actor.megatron.get("sequence_parallel", True))}


def require_engine(facts: WorkerFacts, settings: VerlSettings) -> None:
    """Raise ConfigError unless the processes train with the engine that settings name."""
    for engine in facts.engines:
        if engine.tensor_parallel != (settings.engine == "tp"):
            runs = "tp" if engine.tensor_parallel else "verl"
            raise ConfigError(
                "backend.engine",
                f"it is {settings.engine!r}, and the {engine.role} trains with {runs!r}; the tp "
                "engine is one of strategy=fsdp2, and Ray has to be started by verl's own command, "
                f"with {VENDOR_KEY} in ray_kwargs.ray_init.runtime_env unset, or {VENDOR}",
            )


def require_stages(facts: WorkerFacts, settings: VerlSettings) -> None:
    """Raise ConfigError where pipeline stages are not those asked for, or none can have any."""
    if settings.most_stages == 1 or not facts.engines:
        return
    for engine in facts.engines:
        asked = settings.stages_at_start.get(engine.role, 1)  # type: ignore[call-overload]
        if engine.layout.pp != asked:
            raise ConfigError(
                "backend.pipeline_stages",
                f"it is {asked} for the {engine.role}, which started with {engine.layout.pp}; a "
                "job of one rank has no stages, and others' processes have to be started by "
                "verl's own command",
            )
    reasons = [f"the {e.role}'s: {e.unpipelined}" for e in facts.engines if e.unpipelined]
    if len(reasons) == len(facts.engines):
        why = f"it is {settings.most_stages}, and no engine can have stages; {'; '.join(reasons)}"
        raise ConfigError("backend.max_pipeline_stages", why)


def _has_reference(trainer: Any) -> bool:
    """Whether a reference model of its own runs (with LoRA it is the actor without its adapter)."""
    return bool(trainer.use_reference_policy) and not trainer.ref_in_actor


def _workload(trainer: Any) -> Workload:
    estimator = str(trainer.config.algorithm.adv_estimator)
    algorithm = "ppo" if trainer.use_critic else _ALGORITHMS.get(estimator, "grpo")
    return workload_of(
        algorithm,
        reference=_has_reference(trainer),
        asynchronous=trainer.trainer_mode != "sync",
    )


def workload_of(algorithm: Algorithm, *, reference: bool, asynchronous: bool = False) -> Workload:
    """Return what verl runs in a step, and in what order."""
    passes = 2 if algorithm == "remax" else 1
    nodes = [Node(ACTOR_GENERATE, passes=passes, weights_from=ACTOR_TRAIN)]
    needs = [ACTOR_GENERATE]
    if reference:
        nodes.append(Node(REF_INFER, (ACTOR_GENERATE,), origin=False))
        needs.append(REF_INFER)
    if algorithm == "ppo":
        nodes.append(Node(CRITIC_TRAIN, tuple(needs)))
    nodes.append(Node(ACTOR_TRAIN, tuple(needs)))
    return Workload(algorithm, tuple(nodes), asynchronous=asynchronous)


def _micro_batch(actor: Any, longest: int) -> int:
    """Sequences that one rank holds in a forward/backward."""
    if actor.use_dynamic_bsz:
        return max(1, int(actor.ppo_max_token_len_per_gpu) // longest)
    return int(actor.ppo_micro_batch_size_per_gpu or 1)


def _precision(params_dtype: str, actor: Any) -> Precision:
    """Verl's FSDP keeps parameters, gradients and moments in one type, and computes in another."""
    each = _BYTES.get(params_dtype, 4)
    mixed = actor.get("fsdp_config", {}).get("mixed_precision") or {}
    computes = str(mixed.get("param_dtype", "bf16"))
    if params_dtype == "float32" and computes in ("fp32", "float32"):
        return FLOAT32
    return Precision("bfloat16", each, each, each)


def cluster_of(
    facts: WorkerFacts,
    devices: Sequence[Device],
    settings: VerlSettings,
    sleepers: int,
    weights_bytes: int,
) -> Cluster:
    """Return the devices of a job, with the memory that plans may count on.

    Args:
        facts: Of one worker.
        devices: All of them.
        settings: ``nereus.backend``.
        sleepers: Replicas that may sleep beside a device, out of service.
        weights_bytes: Of the model that they serve.

    Raises:
        ConfigError: nothing would be left beside the sleepers.
    """
    spec = device_spec(facts, settings.device_spec)
    on_cpu = spec is CPU_SEAT
    memory_bytes = settings.device_memory_bytes or spec.memory_bytes
    aside = sleepers * asleep_bytes(settings.sleeping_bytes, weights_bytes, on_cpu=on_cpu)
    if aside >= memory_bytes:
        raise ConfigError(
            "backend.sleeping_replicas",
            f"{sleepers} beside a device keep {aside:,} of its {memory_bytes:,} bytes; set 0",
        )
    spec = replace(spec, memory_bytes=memory_bytes - aside)
    return Cluster(
        tuple(devices),
        spec,
        _link(settings.intra_node, "loopback" if on_cpu else "nvlink4"),
        _link(settings.inter_node, "loopback" if on_cpu else "ib-ndr"),
    )


def device_spec(facts: WorkerFacts, named: str | None) -> DeviceSpec:
    """Return the spec that is configured, or the one whose name the device bears.

    Raises:
        ConfigError: nothing is known of the device; names the key to set.
    """
    if named is not None:
        if named not in DEVICE_SPECS:
            known = ", ".join(sorted(DEVICE_SPECS))
            raise ConfigError("backend.device_spec", f"got {named!r}; known: {known}")
        return DEVICE_SPECS[named]
    if facts.device_bytes is None:
        return CPU_SEAT
    for spec in DEVICE_SPECS.values():
        kind = spec.name.split("-")[0].upper()
        if kind in facts.device_name.upper() and spec.memory_bytes < facts.device_bytes * 1.1:
            return spec
    raise ConfigError(
        "backend.device_spec",
        f"nothing is known of {facts.device_name!r}; known: {', '.join(sorted(DEVICE_SPECS))}",
    )


def _link(named: str | None, otherwise: str) -> LinkSpec:
    name = named or otherwise
    if name not in LINK_SPECS:
        raise ConfigError("backend", f"link {name!r} is unknown; known: {', '.join(LINK_SPECS)}")
    return LINK_SPECS[name]
