"""VerlSettings: ``[backend]`` of nereus.toml, or ``nereus.backend.*``, for a verl job."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, model_validator

from nereus_core.config import validated

Role = Literal["actor", "ref", "critic"]
_ROLES: tuple[Role, ...] = get_args(Role)


class VerlSettings(BaseModel):
    """How Nereus treats a verl job."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    engine: Literal["verl", "tp"] = "verl"
    """Whose fsdp2 engines train: verl's own, or Nereus's with tensor parallelism
    (`tensor_parallel`). The plugin reads it before the job's processes start."""
    pipeline_stages: PositiveInt | dict[Role, PositiveInt] = 1
    """Of each unit of the ``tp`` engine as the job starts, out of the ranks that ``fsdp_size``
    says: of all roles, or by role (``{actor: 2, ref: 1}``; 1 where one is not named)."""
    max_pipeline_stages: int | None = Field(None, ge=1)
    """Most that plans give a unit of the ``tp`` engine; those it starts with by default."""
    device_spec: str | None = None
    """A name of `nereus_core.device_specs.DEVICE_SPECS`; by the device's own name by default."""
    intra_node: str | None = None
    """Link inside a node, of `LINK_SPECS`; nvlink4 by default, loopback on CPUs."""
    inter_node: str | None = None
    """Link between nodes; ib-ndr by default, loopback on CPUs."""
    device_memory_bytes: int | None = Field(None, gt=0)
    """Memory of a device that plans may count on, where that is not all it has."""
    max_devices: int | None = Field(None, ge=1)
    """Devices that the job may grow to, out of what Ray has free; its own by default."""

    ulysses: Literal["keep", "follow"] = "keep"
    """What becomes of verl's ``ulysses_sequence_parallel_size`` when shard groups change: it stays
    as configured, or every shard group shares its sequences."""

    sleeping_replicas: int = Field(1, ge=0)
    """Rollout replicas beside each device that may sleep out of service, to be woken when their
    layout comes back: one is what two layouts need that take turns. Where replicas keep their
    memory in their sleep (``rollout.free_cache_engine=false``), none does. Chosen, not measured."""
    sleeping_bytes: int | None = Field(None, ge=0)
    """What each is counted to keep of a device; 1 GiB by default (its weights on CPUs)."""

    @model_validator(mode="after")
    def _own_engine(self) -> Self:
        if self.engine != "tp" and self.most_stages > 1:
            raise ValueError("pipeline stages are those of engine=tp; set it, or leave them out")
        if self.most_stages < (first := max(self.stages_at_start.values())):
            raise ValueError(
                f"max_pipeline_stages={self.most_stages} is less than "
                f"pipeline_stages={first}, with which the job starts"
            )
        return self

    @property
    def most_stages(self) -> int:
        """Pipeline stages that a unit may have."""
        return self.max_pipeline_stages or max(self.stages_at_start.values())

    @property
    def stages_at_start(self) -> Mapping[Role, int]:
        """``pipeline_stages`` of every role."""
        told = self.pipeline_stages
        return {role: told if isinstance(told, int) else told.get(role, 1) for role in _ROLES}

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Validate; raises ConfigError with the nearest key."""
        return validated(cls, values, at="backend")
