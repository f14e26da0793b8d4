"""NereusConfig: the one configuration, frozen; an unknown key names the nearest known one."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from nereus_core.errors import ConfigError

Mode = Literal["observe", "advise", "adapt"]
Admission = Literal["payback", "history-discount", "saving>0", "dp-scaling-only", "never"]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class PolicyConfig(_Section):
    """When to think, and when to act."""

    admission: Admission = "payback"
    """Which rule judges opportunistic transitions."""
    tokens_change: float = Field(0.25, gt=0)
    """Relative change of response tokens (mean, 95th percentile) that wakes the planner."""
    clip_change: float = Field(0.1, gt=0)
    """Change of the part of responses at the length limit that wakes it."""
    efficiency_change: float = Field(0.3, gt=0)
    """Relative gap between predicted and measured step latency that wakes it."""
    balance_change: float = Field(0.15, gt=0)
    """Part of a step that has to move from some stages to others to wake it."""
    memory_headroom: float = Field(0.1, ge=0, lt=1)
    """Part of a device's memory that no plan may use."""
    delta: float = Field(0.02, ge=0)
    """The current plan stays without a search while it is within this of the best possible."""
    min_saving: float = Field(0.005, ge=0)
    """Relative saving that an opportunistic transition must at least be able to have."""
    cooldown_steps: int = Field(2, ge=0)
    """Steps after a transition in which only urgent ones are admitted, and those that cost less
    than it would to wait."""
    max_horizon_steps: int = Field(200, ge=1)
    """Longest payback horizon assumed when no crossing is in sight."""
    confidence: float = Field(0.9, gt=0, lt=1)
    """Of the bounds compared by admission."""


class ConstraintsConfig(_Section):
    """What the planner may not do."""

    degrees: Literal["powers_of_two", "divisors"] = "powers_of_two"
    max_tp: int | None = Field(None, ge=1)
    max_pp: int | None = Field(None, ge=1)
    colocate: tuple[tuple[str, ...], ...] = ()
    """Groups of model-stages that must share their devices, e.g. [["actor/train", "ref/infer"]]."""
    apart: tuple[tuple[str, ...], ...] = ()
    """Groups of model-stages no two of which may share a device."""
    pin: Mapping[str, str] = Field(default_factory=dict)
    """Model-stage -> layout that must not change, e.g. {"ref/infer": "tp1pp1"}."""
    min_dp: Mapping[str, int] = Field(default_factory=dict)
    """Model-stage -> least number of units; two of a train stage survive a lost device."""
    exclude: tuple[str, ...] = ()
    """Devices that no plan uses."""


class TimeoutsConfig(_Section):
    """Every wait has one; seconds."""

    boundary_s: float = Field(600, gt=0)
    primitive_s: float = Field(300, gt=0)
    transfer_s: float = Field(120, gt=0)
    step_s: float = Field(3600, gt=0)


class CheckpointConfig(_Section):
    """What is kept on disk, for the case that the last copy of a state is lost."""

    folder: Path | None = None
    """Of the checkpoints; ``checkpoints`` in the run's folder by default."""
    every_steps: int = Field(0, ge=0)
    """RL steps from one checkpoint to the next; 0 writes none."""
    keep: int = Field(2, ge=1)
    """Newest checkpoints that are kept."""
    resume: Path | None = None
    """A checkpoint, or a folder of them, to start from instead of step 0."""


class NereusConfig(_Section):
    """The whole of ``nereus.toml``; ``job`` and ``backend`` are read by the adapter named."""

    enabled: bool = True
    mode: Mode = "adapt"
    """observe: record only. advise: also say what would be done. adapt: do it."""
    adapter: str = "torch"
    run_dir: Path = Path("runs/latest")
    seed: int = 0
    verify: Literal["off", "fingerprint"] = "fingerprint"
    """Whether transitions compare digests of state before and after."""
    policy: PolicyConfig = PolicyConfig()
    constraints: ConstraintsConfig = ConstraintsConfig()
    timeouts: TimeoutsConfig = TimeoutsConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    job: Mapping[str, Any] = Field(default_factory=dict)
    """What to run: model, algorithm, batch ...; validated by the adapter."""
    backend: Mapping[str, Any] = Field(default_factory=dict)
    """How to run it: seats, device kind ...; validated by the adapter."""

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a TOML file; raises ConfigError naming key, value and the nearest known key."""
        try:
            values = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(str(path), f"cannot be read: {error.strerror}") from error
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(str(path), f"is not TOML: {error}") from error
        return cls.of(values)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Validate plain values; raises ConfigError as `load` does."""
        return validated(cls, values)


_M = TypeVar("_M", bound=BaseModel)


def validated(model: type[_M], values: Mapping[str, Any], *, at: str = "") -> _M:
    """Build a pydantic model; raises ConfigError for the first thing that does not fit.

    Adapters use it for their own sections, so that all configuration errors read alike.
    """
    try:
        return model.model_validate(dict(values))
    except ValidationError as error:
        first = error.errors()[0]
        path = [str(part) for part in first["loc"]]
        key = ".".join([*([at] if at else []), *path])
        if first["type"] == "extra_forbidden":
            near = difflib.get_close_matches(path[-1], _keys(model, path[:-1]), n=1, cutoff=0.5)
            raise ConfigError(key, "unknown key", near[0] if near else None) from error
        raise ConfigError(key, f"got {first['input']!r}; {first['msg']}", _meant(first)) from error


def _meant(error: ErrorDetails) -> str | None:
    """The nearest of the values allowed, where a misspelt word was given for one of them."""
    if error["type"] != "literal_error" or not isinstance(error["input"], str):
        return None
    allowed = re.findall(r"'([^']+)'", error["ctx"]["expected"])
    return next(iter(difflib.get_close_matches(error["input"], allowed, n=1, cutoff=0.5)), None)


def _keys(model: type[BaseModel], path: list[str]) -> list[str]:
    """Field names of the section that a path leads to."""
    for part in path:
        field = model.model_fields.get(part)
        kinds = () if field is None else (field.annotation, *get_args(field.annotation))
        inner = [k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)]
        if not inner:
            return []
        model = inner[0]
    return list(model.model_fields)
