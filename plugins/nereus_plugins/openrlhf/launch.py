"""launch: OpenRLHF's own command with Nereus in it; everything that can be wrong is said first."""

from __future__ import annotations

import importlib
import runpy
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from nereus_core.backend_status import require_backend
from nereus_core.config import NereusConfig
from nereus_core.errors import NereusError, SeamBroken
from nereus_core.registry import Registry
from nereus_core.seams import check_seam
from nereus_plugins.banner import say
from nereus_plugins.openrlhf import FRAMEWORK
from nereus_plugins.openrlhf.directory import following, saving_current
from nereus_plugins.openrlhf.ending import named
from nereus_plugins.openrlhf.flags import split_flags
from nereus_plugins.openrlhf.watching import watched
from nereus_plugins.settings import merged, settings_of

CLI = "openrlhf.cli.train_ppo_ray"
_TRAINER = "openrlhf.trainer.ppo_trainer"
_ASYNC = "openrlhf.trainer.ppo_trainer_async"
_LAUNCHER = "openrlhf.trainer.ray.launcher"


def main(argv: Sequence[str]) -> int:
    """Run `train_ppo_ray` with the flags that are not Nereus's; returns an exit code.

    Without ``--nereus.enable`` this is OpenRLHF and nothing else. A wrong flag, a missing seam or
    another version ends it before Ray starts.
    """
    return launched({}, argv)


def launched(keys: Mapping[str, Any], argv: Sequence[str]) -> int:
    """Run `train_ppo_ray` with keys of the configuration; ``--nereus.*`` flags win over them."""
    try:
        flags, rest = split_flags(argv)
        config = settings_of(merged(keys, flags), adapter=FRAMEWORK)
        if config is not None:
            prepare(config.model_copy(update={"run_dir": Path(config.run_dir).absolute()}))
    except NereusError as error:
        say(f"[nereus] {type(error).__name__}: {error}")
        return 2
    sys.argv = [CLI, *rest]
    runpy.run_module(CLI, run_name="__main__", alter_sys=True)
    return 0


def prepare(config: NereusConfig) -> None:
    """Check that OpenRLHF is the one Nereus knows, and wrap its trainers' loops.

    In modes observe and advise ``fit`` of the trainer is all that is wrapped. Mode adapt adds two
    names whose processes hold handles of their own - the asynchronous generator's ``fit``, and the
    driver's ``async_save_model`` - and ``fit`` of an asynchronous job's controller, for its end.

    Raises:
        AdapterError: OpenRLHF is missing, has another version, or a seam of it is gone.
    """
    declared = Registry.load().declaration(config.adapter)
    require_backend(declared)
    adapts = config.enabled and config.mode == "adapt"
    for seam in declared.seams:
        try:
            check_seam(seam)
        except SeamBroken as error:
            if adapts or not seam.to_change:
                raise
            say(f"[nereus] mode adapt is not to be had here: {error}")
    say(f"[nereus] {version('nereus')} before OpenRLHF {version('openrlhf')}: mode {config.mode}")
    name = f"nereus-{uuid.uuid4().hex}" if adapts else None
    for module, actor in ((_TRAINER, "PPOTrainer"), (_ASYNC, "TrainingActor")):
        _wrap(_travelling(module, actor), "fit", lambda fit: watched(fit, config, name))
    if name is not None:
        _wrap(_travelling(_ASYNC, "GenerateSamplesActor"), "fit", lambda fit: following(fit, name))
        step_s = config.timeouts.step_s
        _wrap(_travelling(_ASYNC, "PPOTrainerAsync"), "fit", lambda fit: named(fit, name, step_s))
        group = importlib.import_module(_LAUNCHER).RayActorGroup
        _wrap(group, "async_save_model", lambda save: saving_current(save, name))


def _wrap(owner: Any, name: str, around: Callable[[Any], Any]) -> None:
    setattr(owner, name, around(getattr(owner, name)))


def _travelling(module: str, name: str) -> Any:
    """Return the class behind a class of Ray actors that is sent to their processes.

    Ray copies methods onto a class of its own when it decorates, and that one travels, by value; a
    change of the class that was decorated would never arrive.
    """
    return getattr(importlib.import_module(module), name).__ray_metadata__.modified_class
