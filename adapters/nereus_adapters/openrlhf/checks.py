"""Checks: what of a job, or of a primitive, the adapter refuses before it touches anything."""

from __future__ import annotations

from typing import Any

from nereus_adapters.openrlhf import warm
from nereus_adapters.openrlhf.running import Running
from nereus_core.cluster import Device
from nereus_core.errors import Infeasible, JobError, Unsupported
from nereus_core.primitives import Primitive, created, model_stage_of
from nereus_core.units import Unit
from nereus_core.workload import ACTOR_GENERATE, ACTOR_TRAIN, Job, ModelStage, Stage


def refuse_adapting(args: Any) -> None:
    """Raise JobError for a job whose state Nereus cannot move; it can still observe and advise."""
    found = {
        "--ds.zero_stage 0 keeps optimizer state in a form of its own": args.ds.zero_stage == 0,
        "--train.enable_ema keeps a second model": args.train.enable_ema,
        "--ds.enable_sleep takes optimizer state off the device": args.ds.enable_sleep,
        "--actor.optim muon has other state than Adam": "muon"
        in (args.actor.optim, args.critic.optim),
        "--ds.deepcompile rewrites the engine": args.ds.deepcompile,
        "--ds.zpg partitions parameters twice": args.ds.zpg > 1,
        "--ds.param_dtype fp16 scales its loss": args.ds.param_dtype == "fp16",
        "--train.partial_rollout_enable generates without a lock": getattr(
            args.train, "partial_rollout_enable", False
        ),
    }
    if problems := [f"{why}; use mode observe or advise" for why, is_so in found.items() if is_so]:
        raise JobError(problems)


def refuse(op: Primitive, running: Running) -> None:
    """Raise unless OpenRLHF can have the units that a primitive makes.

    Raises:
        Unsupported: ZeRO-3 under tensor parallelism.
        Infeasible: a device has no room, or an engine would lie across nodes.
    """
    stage, args = model_stage_of(op), running.args
    for unit in created(op):
        if stage != ACTOR_GENERATE and unit.layout.tp > 1 and args.ds.zero_stage == 3:
            raise Unsupported(str(op), "DeepSpeed's AutoTP does not go with ZeRO-3", op)
        if stage == ACTOR_GENERATE:
            refuse_scattered(running, unit, op)
        for device in unit.devices:
            _refuse_full(op, running, stage, device)


def refuse_scattered(running: Running, unit: Unit, op: Primitive | None = None) -> None:
    """Raise Infeasible where no engine can be started on the devices of a unit."""
    if not (warm.together(running, unit) or warm.fits(running, unit)):
        raise Infeasible(
            f"{unit}: the workers of an engine must be in one placement group of Ray, or on one "
            "node, on devices of which Ray has told which GPU they are; these are not.",
            op,
        )


def _refuse_full(op: Primitive, running: Running, stage: ModelStage, device: Device) -> None:
    if (stage, device) in running.ranks:
        return
    for other in running.alive.on(device):
        if other.model_stage != stage and (other.model_stage, device) in running.whole:
            raise Infeasible(
                f"{op}: OpenRLHF gave {device} to {other.model_stage} alone; jobs started with "
                "--train.colocate_all let stages share devices.",
                op,
            )


def by_cuda_ipc(args: Any) -> bool:
    """Whether engines get weights from ranks on their own GPUs, and from no others.

    Source: `ActorPPOTrainer.__init__`, openrlhf 0.11.2.
    """
    shared = args.train.colocate_all and not args.train.async_enable
    return bool(shared and getattr(args.vllm, "sync_backend", "nccl") == "nccl")


def _refuse_unreached(running: Running) -> None:
    """Raise Infeasible where an engine is on a device without a rank to give it weights."""
    if not by_cuda_ipc(running.args):
        return
    reached = set(running.devices_of(ACTOR_TRAIN))
    for unit in running.alive.of(ACTOR_GENERATE):
        if not reached.issuperset(unit.devices):
            raise Infeasible(
                f"{unit}: under --train.colocate_all with --vllm.sync_backend nccl an engine gets "
                "its weights from the actor's ranks on its own GPUs; some of these have none."
            )


def refuse_unbuildable(running: Running, job: Job) -> None:
    """Raise Infeasible unless each stage has one layout, and batches divide among the units alive.

    Asked when a transition has made all its units, before any is built: on the way there, layouts
    may be mixed and numbers odd.
    """
    args = running.args
    _refuse_unreached(running)
    for stage in running.alive.stages():
        if len({unit.layout for unit in running.alive.of(stage)}) > 1:
            units = ", ".join(map(str, running.alive.of(stage)))
            raise Infeasible(
                f"{stage}: {units}: all ranks of a group, and all engines, have one layout in "
                "OpenRLHF; change every unit of the stage."
            )
    for stage in running.groups:
        dp, micro = len(running.alive.of(stage)), args.train.micro_batch_size
        if stage.stage is Stage.TRAIN and args.train.batch_size % (micro * dp):
            raise Infeasible(
                f"{stage}: --train.batch_size {args.train.batch_size} is no multiple of {micro} x "
                f"{dp}, so that the batch of an optimizer step would change."
            )
        forward = job.global_batch // args.rollout.micro_batch_size
        if forward < dp or (stage == ACTOR_TRAIN and forward % dp):
            raise Infeasible(
                f"{stage}: {forward} micro batches of a rollout cannot be shared out among {dp} "
                "units."
            )
