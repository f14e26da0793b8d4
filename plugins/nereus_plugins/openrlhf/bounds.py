"""bounds: what OpenRLHF cannot have whatever the configuration says, as constraints."""

from __future__ import annotations

from itertools import combinations
from types import SimpleNamespace

from nereus_core.config import NereusConfig
from nereus_core.errors import ConfigError

GROUPS = ("actor/train", "critic/train", "ref/infer", "reward/infer")
"""Stages that OpenRLHF runs in groups of ranks; engines run ``actor/generate``."""


def _apart(args: SimpleNamespace) -> list[tuple[str, str]]:
    """Stages that do not share devices because the job was not started so (``--train.colocate_*``).

    An engine takes its part of a device's memory at once and a rank cannot be put beside it, unless
    both were sized for that.
    """
    train, shared = args.train, set[frozenset[str]]()
    if train.colocate_all:
        engines = () if train.async_enable else ("actor/generate",)
        shared |= {frozenset(pair) for pair in combinations((*engines, *GROUPS), 2)}
    if train.colocate_actor_ref:
        shared.add(frozenset(("actor/train", "ref/infer")))
    if train.colocate_critic_reward:
        shared.add(frozenset(("critic/train", "reward/infer")))
    pairs = combinations(("actor/generate", *GROUPS), 2)
    return [pair for pair in pairs if frozenset(pair) not in shared]


def _together(args: SimpleNamespace) -> list[tuple[str, str]]:
    """Stages that share devices because CUDA IPC is how engines get their weights.

    Each GPU of an engine needs a rank of the actor (`ActorPPOTrainer.__init__`, openrlhf 0.11.2).
    """
    shared = args.train.colocate_all and not args.train.async_enable
    by_ipc = shared and getattr(args.vllm, "sync_backend", "nccl") == "nccl"
    return [("actor/generate", "actor/train")] if by_ipc else []


def bounded(config: NereusConfig, args: SimpleNamespace) -> NereusConfig:
    """Return the configuration with the bounds of OpenRLHF in it.

    Raises:
        ConfigError: it asks for pipeline parallelism.
    """
    constraints = config.constraints
    if (constraints.max_pp or 1) > 1:
        raise ConfigError("constraints.max_pp", "OpenRLHF has no pipeline parallelism")
    pin = dict(constraints.pin)
    if args.ds.zero_stage == 3:  # DeepSpeed's AutoTP does not go with ZeRO-3
        for stage in GROUPS:
            pin.setdefault(stage, "tp1pp1")
    apart = (*constraints.apart, *_apart(args))
    colocate = (*constraints.colocate, *_together(args))
    narrow = constraints.model_copy(
        update={"max_pp": 1, "pin": pin, "apart": apart, "colocate": colocate}
    )
    return config.model_copy(update={"constraints": narrow})
