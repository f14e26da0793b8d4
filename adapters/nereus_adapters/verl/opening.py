"""opening: Ray and verl's transfer queue, started as ``main_ppo`` starts them; for the harness."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import ray


def composed(arguments: Sequence[str], changes: Sequence[str] = ()) -> Any:
    """Compose verl's configuration, as ``main_ppo`` does from a command line."""
    from hydra import compose, initialize_config_module

    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=[*arguments, *changes])


def open_ray(config: Any, num_gpus: int) -> None:
    """Start Ray with what a configuration says of it, and so many logical GPUs."""
    from omegaconf import OmegaConf
    from verl.trainer.constants_ppo import get_ppo_ray_runtime_env

    given = config.ray_kwargs.ray_init
    runtime_env = OmegaConf.merge(
        OmegaConf.create(get_ppo_ray_runtime_env(config)), given.get("runtime_env", {})
    )
    runtime_env.setdefault("env_vars", {})["TRANSFER_QUEUE_ENABLE"] = "1"
    asked: Any = OmegaConf.to_container(
        OmegaConf.create({**given, "runtime_env": runtime_env, "num_gpus": num_gpus}),
        resolve=True,
    )
    ray.init(**asked)


def open_transfers(config: Any) -> None:
    """Start verl's transfer queue in the Ray there is."""
    import transfer_queue
    from omegaconf import OmegaConf

    config.transfer_queue.enable = True
    OmegaConf.resolve(config)
    transfer_queue.init(config.transfer_queue)


def close_transfers() -> None:
    """End it; its actors go with Ray at the latest."""
    import transfer_queue

    with suppress(Exception):
        transfer_queue.close()
