"""What runs inside a seat: a real decoder under tensor, pipeline and data parallelism."""

from nereus_adapters.torch.engine.checkpoint import export_model
from nereus_adapters.torch.engine.digest import combine, digest_box
from nereus_adapters.torch.engine.group import Group, PeerLost
from nereus_adapters.torch.engine.groups import (
    UnitGroups,
    make_group,
    make_unit_groups,
    members,
)
from nereus_adapters.torch.engine.shard import UnitShard
from nereus_adapters.torch.engine.types import (
    Batch,
    Generated,
    LossSpec,
    OptimizerSpec,
    Storage,
    TrainMetrics,
    plain_storage,
)

__all__ = [
    "Batch",
    "Generated",
    "Group",
    "LossSpec",
    "OptimizerSpec",
    "PeerLost",
    "Storage",
    "TrainMetrics",
    "UnitGroups",
    "UnitShard",
    "combine",
    "digest_box",
    "export_model",
    "make_group",
    "make_unit_groups",
    "members",
    "plain_storage",
]
