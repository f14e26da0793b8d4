"""Ranks: what a rank of a group does in its own process when its group changes.

The process is a seat: it stays, with its imports and its CUDA context, while the model, the
DeepSpeed engine and the process group in it come and go. Shipped there by `ray_calls.inside`.
"""

from __future__ import annotations

import gc
import importlib
import os
import socket
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Post:
    """A rank's place in a new group."""

    rank: int
    world: int
    address: str
    port: int


def rendezvous(actor: Any) -> tuple[str, int]:
    """Return an address and a free port of this process's node."""
    import ray

    with socket.socket() as bound:
        bound.bind(("", 0))
        return ray.util.get_node_ip_address().strip("[]"), bound.getsockname()[1]


def engine_of(actor: Any) -> Any:
    """Return the DeepSpeed engine in an OpenRLHF actor."""
    if hasattr(actor, "critic"):
        return actor.critic
    model = actor.actor if hasattr(actor, "actor") else actor.model
    return getattr(model, "model", model) if type(model).__name__ == "Actor" else model


def leave(actor: Any) -> int:
    """Give the model, its engine and the process group up; returns CUDA bytes still allocated.

    A second call does nothing more.
    """
    import torch
    import torch.distributed as dist

    if any(hasattr(actor, name) for name in ("actor", "critic", "model")):
        engine_of(actor).destroy()
    for name in ("actor", "critic", "model", "ema_model", "trainer", "actor_optim",
                 "actor_scheduler", "critic_optim", "critic_scheduler", "strategy"):  # fmt: skip
        if hasattr(actor, name):
            delattr(actor, name)
    _forget_zero3()
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
    _forget_groups()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        return int(torch.cuda.memory_allocated())
    return 0


def _forget_groups() -> None:
    """Let DeepSpeed build groups and mesh anew, of another tensor-parallel degree where asked.

    It keeps them in module globals, and what AutoTP was asked for first of all.
    """
    from deepspeed.comm import comm
    from deepspeed.module_inject import set_autotp_mode
    from deepspeed.runtime.tensor_parallel import init_utils
    from deepspeed.utils import groups

    comm.cdb = None
    importlib.reload(groups)
    init_utils._TP_MODEL_INIT_ARGS = None
    set_autotp_mode(training=False)  # as in a process that has not seen AutoTP yet


def _forget_zero3() -> None:
    """Let models be loaded as in a new process.

    transformers keeps the ZeRO-3 configuration of the engine that was. DeepSpeed numbers parameters
    and modules on through the life of a process (modules in a default argument), and ranks of a
    group must agree on the numbers: those that stayed have built more models than those that
    waited. Its stack of modules in forward keeps every model that there was.
    """
    from deepspeed.runtime.zero import parameter_offload
    from deepspeed.runtime.zero.partition_parameters import Init
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()
    if Init.param_id == 0:  # no model was built under ZeRO-3 here
        return
    Init.param_id = Init.num_persisted_parameters = Init.num_persisted_elements = 0
    Init.num_module_parameters = Init.num_module_elements = 0
    register: Any = parameter_offload.DeepSpeedZeRoOffload._register_deepspeed_module
    (numbered,) = register.__defaults__
    numbered[0] = 0
    parameter_offload.FWD_MODULE_STACK.clear()


def join(actor: Any, post: Post, strategy: Any, *init: Any) -> None:
    """Take a place in a new group and build the model there, as at the start of the job.

    Args:
        actor: OpenRLHF's actor; it must have left its group.
        post: The place.
        strategy: Of the new group; every rank gets its own copy.
        init: Further arguments of `init_model_from_pretrained`.
    """
    actor._rank, actor._world_size = post.rank, post.world
    actor._master_addr, actor._master_port = post.address, post.port
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(post.rank), str(post.world)
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = post.address, str(post.port)
    actor.init_model_from_pretrained(strategy, *init)


def idle(actor: Any) -> None:
    """Return when what was asked of this process before has ended, well or not."""


def tie(actor: Any, engines: list[Any], num_engines: int, tp: int) -> None:
    """Give a rank of the actor its engines; rank 0 builds the weight-sync group anew."""
    import torch.distributed as dist

    trainer = actor.trainer
    vllm = trainer.strategy.args.vllm
    vllm.num_engines, vllm.tensor_parallel_size = num_engines, tp
    actor.vllm_engines = trainer.vllm_engines = engines
    if not trainer.use_cuda_ipc and dist.get_rank() == 0:
        trainer._init_vllm_sync_group(getattr(vllm, "sync_backend", "nccl"))
