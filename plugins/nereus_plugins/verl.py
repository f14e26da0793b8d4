"""verl: ``+nereus.enable=true`` in an unchanged ``python -m verl.trainer.main_ppo ...``.

verl imports this module in every process that imports verl (entry-point group ``verl.plugins``), so
it imports nothing but the standard library and changes nothing but one thing: once verl's v1
trainers have been defined, each registered class is replaced in place by one of the same name that
looks at ``config.nereus`` when a trainer is built. Without ``enable`` verl's own class is built.

With ``nereus.backend.engine=tp``, the environment that the driver gives to the job's processes
names Nereus as the vendor of engines, and each of them makes Nereus's own known to verl.

The registry keeps its keys: verl picks the replay buffer by the name of the trainer mode.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from nereus_plugins.post_import import after_import

FRAMEWORK = "verl"
VENDOR_KEY, VENDOR = "VERL_ENGINE_VENDOR", "nereus"
"""How verl picks an engine: verl.workers.engine.base.EngineRegistry.get_engine_cls."""
_SWITCHED_ON = ("nereus.enable=true", "nereus.enable=1", "nereus.enable=yes", "nereus.enable=on")


def _asked_for() -> bool:
    """Whether this process's own command line asks for Nereus (the driver's; not an actor's)."""
    return any(word.lstrip("+").lower() in _SWITCHED_ON for word in sys.argv)


def _warn(error: BaseException) -> None:
    from nereus_plugins.banner import refusal, say

    say(refusal(FRAMEWORK, error))


def _wrap(module: ModuleType) -> None:
    """Replace the registered trainers in place; says loudly why not, where it was asked for."""
    try:
        registry: dict[str, type] = sys.modules[f"{module.__name__}.trainer_base"].TRAINER_REGISTRY
        for name, trainer in list(registry.items()):
            registry[name] = _switched(trainer)
    except Exception as error:  # this verl is not the one that is known; it must be able to go on
        _warn(error)


def _switched(trainer: Any) -> type:
    """Return a class that builds ``trainer``, with Nereus around it where its config asks."""

    def build(cls: type, config: Any, *args: Any, **kwargs: Any) -> object:
        keys = config.get("nereus")
        if keys is None:
            return trainer(config, *args, **kwargs)
        from nereus_plugins.verl_trainer import built

        return built(trainer, config, *args, **kwargs)

    body = {"__new__": build, "__module__": trainer.__module__, "__doc__": trainer.__doc__}
    return type(trainer.__name__, (trainer,), body)


def _legacy(module: ModuleType) -> None:
    if _asked_for():
        _warn(RuntimeError("trainer.use_v1=False: only the v1 trainers can be adapted"))


def _checked() -> None:
    """In the driver, compare what Nereus stands on with the installed verl before Ray starts."""
    try:
        from nereus_core.errors import AdapterError
        from nereus_core.registry import Registry
        from nereus_core.seams import check_seam
    except ImportError as error:
        _warn(error)
        return
    try:
        for seam in Registry.load().declaration(FRAMEWORK).seams:
            check_seam(seam)
    except AdapterError as error:
        _warn(error)


def _vendor(module: Any) -> None:
    """Let the driver name the vendor of engines in the environment of the job's processes."""
    once = module.get_ppo_ray_runtime_env

    @functools.wraps(once)
    def environment(config: Any = None) -> Any:
        found = once(config)
        backend = _own_engine(config)
        if backend is not None:
            _require_no_other(found["env_vars"].get(VENDOR_KEY) or os.environ.get(VENDOR_KEY))
            needed = _registry().ask(FRAMEWORK, "nereus_environment", backend=backend)
            found["env_vars"].update(needed)
        return found

    module.get_ppo_ray_runtime_env = environment


def _require_no_other(vendor: str | None) -> None:
    """Raise ConfigError where the job's engines are to be of another vendor, all of them."""
    if vendor not in (None, "", VENDOR):
        from nereus_core.errors import ConfigError

        raise ConfigError(
            "backend.engine",
            f"it is 'tp', of vendor {VENDOR!r}, and {VENDOR_KEY}={vendor!r} asks for another; "
            "unset one of them",
        )


def _own_engine(config: Any) -> Mapping[str, Any] | None:
    """Return `backend` of a job that asks for Nereus's own engine; raises ConfigError."""
    keys = config.get("nereus") if config is not None else None
    if keys is None:
        return None
    from nereus_plugins.verl_trainer import asked

    settings = asked(config)
    if settings is None or settings.backend.get("engine") != "tp":
        return None
    if str(config.trainer.v1.trainer_mode) == "separate_async":
        from nereus_core.errors import ConfigError

        # verl.utils.fsdp_utils.fsdp2_sharded_load_from_cpu, from one mini-batch to the next
        raise ConfigError(
            "backend.engine",
            "it is 'tp'; separate_async keeps weights aside that are all cut alike",
        )
    return settings.backend


def _register(module: ModuleType) -> None:
    """Make Nereus's engine known where it is the one asked for.

    Raises what goes wrong: verl would train with its own instead.
    """
    if os.environ.get(VENDOR_KEY) != VENDOR:
        return
    _registry().ask(FRAMEWORK, "nereus_register_engine")


def _registry() -> Any:
    """Return the registry, with the hooks of this room."""
    from nereus_core.registry import Registry
    from nereus_plugins import hookspecs

    registry = Registry.load()
    registry.add_hookspecs(hookspecs)
    return registry


after_import("verl.trainer.constants_ppo", _vendor)
after_import("verl.workers.engine.fsdp.transformer_impl", _register)
after_import("verl.trainer.ppo.v1", _wrap)
after_import("verl.trainer.main_ppo_v0", _legacy)
if _asked_for():
    _checked()
