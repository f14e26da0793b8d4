"""launch: OpenRLHF's own command with Nereus in it; everything that can be wrong is said first."""

from __future__ import annotations

import importlib
import runpy
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from nereus_core.backend_status import require_backend
from nereus_core.config import NereusConfig
from nereus_core.errors import NereusError
from nereus_core.registry import Registry
from nereus_core.seams import check_seam
from nereus_plugins.banner import say
from nereus_plugins.openrlhf.flags import split_flags
from nereus_plugins.openrlhf.watching import FRAMEWORK, watched
from nereus_plugins.settings import settings_of

CLI = "openrlhf.cli.train_ppo_ray"
TRAINERS = (
    ("openrlhf.trainer.ppo_trainer", "PPOTrainer"),
    ("openrlhf.trainer.ppo_trainer_async", "TrainingActor"),
)
"""Classes of Ray actors whose ``fit`` is wrapped: the only names of OpenRLHF that change."""


def main(argv: Sequence[str]) -> int:
    """Run `train_ppo_ray` with the flags that are not Nereus's; returns an exit code.

    Without ``--nereus.enable`` this is OpenRLHF and nothing else. A wrong flag, a missing seam or
    another version ends it before Ray starts.
    """
    try:
        keys, rest = split_flags(argv)
        config = settings_of(keys, adapter=FRAMEWORK)
        if config is not None:
            config = config.model_copy(update={"run_dir": Path(config.run_dir).absolute()})
            prepare(config)
    except NereusError as error:
        say(f"[nereus] {type(error).__name__}: {error}")
        return 2
    sys.argv = [CLI, *rest]
    runpy.run_module(CLI, run_name="__main__", alter_sys=True)
    return 0


def prepare(config: NereusConfig) -> None:
    """Check that OpenRLHF is the one Nereus knows, and wrap its trainers.

    Raises:
        AdapterError: OpenRLHF is missing, has another version, or a seam of it is gone.
    """
    declared = Registry.load().declaration(config.adapter)
    require_backend(declared)
    for seam in declared.seams:
        check_seam(seam)
    say(f"[nereus] {_version('nereus')} before OpenRLHF {_version('openrlhf')}: mode {config.mode}")
    for module, name in TRAINERS:
        _wrap(getattr(importlib.import_module(module), name), config)


def _wrap(actor_class: object, config: NereusConfig) -> None:
    """Wrap the loop of a Ray actor class.

    Ray copies methods onto a class of its own when it decorates, and that class is what travels to
    the actor by value; the one that was decorated never does.
    """
    travels = actor_class.__ray_metadata__.modified_class  # type: ignore[attr-defined]  # of Ray
    travels.fit = watched(travels.fit, config)


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "(not installed as a distribution)"
