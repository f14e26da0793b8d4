"""bounds: what OpenRLHF cannot have whatever the configuration says, as constraints."""

from __future__ import annotations

from types import SimpleNamespace

from nereus_core.config import NereusConfig
from nereus_core.errors import ConfigError


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
        for stage in ("actor/train", "critic/train", "ref/infer", "reward/infer"):
            pin.setdefault(stage, "tp1pp1")
    narrow = constraints.model_copy(update={"max_pp": 1, "pin": pin})
    return config.model_copy(update={"constraints": narrow})
