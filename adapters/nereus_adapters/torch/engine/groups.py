"""Communication groups made by their members only.

A `Group` is a raw process group over a prefix of a store: there is no default group and no world,
so one unit's groups come and go (a *generation*, named by its prefix) without anybody else taking
part, also after a member has died. The code is the same for gloo on CPU and NCCL on CUDA.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist

from nereus_adapters.torch.engine.group import Group
from nereus_adapters.torch.engine.proof import prove
from nereus_core.errors import NereusError, WaitTimeout
from nereus_core.layout import Layout
from nereus_core.model import ModelSpec


def make_group(
    store: dist.Store | None,
    name: str,
    rank: int,
    size: int,
    device: torch.device,
    timeout_s: float,
    secret: bytes | None = None,
) -> Group:
    """Build a group; every member calls this, nobody else needs to.

    Args:
        store: shared by the members; a group of one needs none.
        name: unique among all groups ever made on this store (unit, generation, purpose).
        rank: of the caller, 0 to size - 1.
        size: number of members.
        device: decides the backend: NCCL for ``cuda``, gloo otherwise. Gloo listens on the
            interface named by GLOO_SOCKET_IFNAME, if set.
        timeout_s: of the rendezvous and of every operation.
        secret: of the job, which members of a gloo group prove to one another that they know.

    Raises:
        WaitTimeout: a member did not come.
        PeerLost: somebody else came in its place.
    """
    if size == 1:
        return Group(None, name, 0, 1, timeout_s)
    if store is None:
        raise NereusError(f"group {name} has {size} members and no store to meet on.")
    meeting, timeout = dist.PrefixStore(name, store), timedelta(seconds=timeout_s)
    try:
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            backend: Any = dist.ProcessGroupNCCL(meeting, rank, size, options)
        else:
            backend = dist.ProcessGroupGloo(meeting, rank, size, timeout)
    except RuntimeError as error:
        raise WaitTimeout(f"{size} members of group {name} to meet ({error})", timeout_s) from error
    group = Group(backend, name, rank, size, timeout_s)
    if secret is not None and device.type != "cuda":
        prove(group, secret)
    return group


@dataclass(frozen=True, slots=True)
class UnitGroups:
    """The groups of one rank of a unit."""

    tp: Group
    """Ranks of one pipeline stage, in order of tp rank."""
    pp: Group
    """Ranks of one tp rank, in order of the stages."""
    dp: Group
    """The same local rank of every unit of the model-stage."""
    unit: Group
    """All ranks of the unit, in order of local rank."""
    kv: Group | None = None
    """Ranks of one stage that hold the same kv head; None where none is shared."""
    ends: Group | None = None
    """First and last stage of one tp rank, where embeddings are tied; None elsewhere."""

    @classmethod
    def single(cls) -> Self:
        """Return the groups of a unit of one rank without replicas."""
        return cls(Group.single(), Group.single(), Group.single(), Group.single())

    def close(self) -> None:
        """Close every group."""
        for group in (self.tp, self.pp, self.dp, self.unit, self.kv, self.ends):
            if group is not None:
                group.close()


def members(model: ModelSpec, layout: Layout, local_rank: int) -> Mapping[str, tuple[int, ...]]:
    """Return the local ranks of every group inside the unit that a local rank belongs to.

    Keys: tp, pp, unit, and kv and ends where they exist. A member's rank in a group is its
    position in the tuple.
    """
    tp, pp = layout.tp, layout.pp
    stage, tp_rank = divmod(local_rank, tp)
    found = {
        "tp": tuple(stage * tp + r for r in range(tp)),
        "pp": tuple(s * tp + tp_rank for s in range(pp)),
        "unit": tuple(range(tp * pp)),
    }
    sharing = tp // model.num_kv_heads
    if sharing > 1:
        first = tp_rank // sharing * sharing
        found["kv"] = tuple(stage * tp + first + r for r in range(sharing))
    if model.tied_embeddings and model.head == "lm" and pp > 1 and stage in (0, pp - 1):
        found["ends"] = (tp_rank, (pp - 1) * tp + tp_rank)
    return found


def make_unit_groups(
    store: dist.Store | None,
    prefix: str,
    model: ModelSpec,
    layout: Layout,
    local_rank: int,
    *,
    unit: int,
    num_units: int,
    device: torch.device,
    timeout_s: float,
    secret: bytes | None = None,
) -> UnitGroups:
    """Build all groups of one rank; every rank of every unit of the model-stage calls this.

    Args:
        store: shared by all ranks of all units.
        prefix: names the generation; new for every relink.
        model: shapes of the model.
        layout: of every unit.
        local_rank: of the caller.
        unit: position of the caller's unit among ``num_units``.
        num_units: data-parallel degree.
        device: of the caller's tensors.
        timeout_s: of the rendezvous and of every later operation.
        secret: as of `make_group`.
    """

    def made(name: str, rank: int, size: int) -> Group:
        return make_group(store, name, rank, size, device, timeout_s, secret)

    def inside(kind: str) -> Group | None:
        ranks = inner.get(kind)
        if ranks is None:
            return None
        name = f"{prefix}/{kind}/{unit}/{ranks[0]}"
        return made(name, ranks.index(local_rank), len(ranks))

    inner = members(model, layout, local_rank)
    dp = made(f"{prefix}/dp/{local_rank}", unit, num_units)
    tp, pp, whole = inside("tp"), inside("pp"), inside("unit")
    assert tp is not None
    assert pp is not None
    assert whole is not None
    return UnitGroups(tp, pp, dp, whole, inside("kv"), inside("ends"))
