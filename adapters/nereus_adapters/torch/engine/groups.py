"""Communication groups made by their members only.

A `Group` is a raw process group over a prefix of a store: there is no default group and no world,
so one unit's groups come and go (a *generation*, named by its prefix) without anybody else taking
part, also after a member has died. The code is the same for gloo on CPU and NCCL on CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, Self

import torch
import torch.distributed as dist

from nereus_core.errors import NereusError, WaitTimeout
from nereus_core.layout import Layout
from nereus_core.model import ModelSpec

ReduceOp = Literal["sum", "max"]
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


class PeerLost(NereusError):
    """A collective failed because a member of its group is gone; build a new generation."""

    def __init__(self, group: str, doing: str, cause: str) -> None:
        self.group = group
        super().__init__(f"group {group} broke during {doing}: {cause}")


class Group:
    """Some ranks that communicate; with one member every operation returns at once.

    All operations block until done (on CUDA: until enqueued on the current stream).

    Raises:
        WaitTimeout: a member did not take part in time; names operation and group.
        PeerLost: a member is gone.
    """

    def __init__(self, backend: Any, name: str, rank: int, size: int, timeout_s: float) -> None:
        self.name, self.rank, self.size, self.timeout_s = name, rank, size, timeout_s
        self._backend = backend  # Any: torch's process groups are untyped

    @classmethod
    def single(cls) -> Self:
        """Return a group of one member."""
        return cls(None, "single", 0, 1, 0.0)

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> torch.Tensor:
        """Reduce in place over all members, bit-identical on each; returns the tensor."""
        if self.size > 1:
            options = dist.AllreduceOptions()
            options.reduceOp = _OPS[op]
            dense = tensor.contiguous()
            self._wait("all_reduce", lambda pg: pg.allreduce([dense], options))
            if dense is not tensor:
                tensor.copy_(dense)
        return tensor

    def all_gather_uneven(
        self, tensor: torch.Tensor, dim: int, sizes: Sequence[int]
    ) -> torch.Tensor:
        """Concatenate the members' parts along ``dim``; member r's part has ``sizes[r]`` there."""
        if self.size == 1:
            return tensor
        widest = max(sizes)
        part = tensor.movedim(dim, 0)
        padded = part.new_zeros((widest, *part.shape[1:]))
        padded[: part.shape[0]] = part
        parts = [torch.empty_like(padded) for _ in sizes]
        self._wait("all_gather", lambda pg: pg.allgather([parts], [padded]))
        kept = [p[:n] for p, n in zip(parts, sizes, strict=True)]
        return torch.cat(kept).movedim(0, dim).contiguous()

    def send(self, tensor: torch.Tensor, dst: int) -> None:
        """Send to a member; blocks until it has received."""
        dense = tensor.contiguous()
        self._wait(f"send to rank {dst}", lambda pg: pg.send([dense], dst, 0))

    def recv(self, tensor: torch.Tensor, src: int) -> torch.Tensor:
        """Receive from a member into a contiguous tensor; returns it."""
        self._wait(f"receive from rank {src}", lambda pg: pg.recv([tensor], src, 0))
        return tensor

    def isend(self, tensor: torch.Tensor, dst: int) -> Callable[[], None]:
        """Begin to send a contiguous tensor; call the result to wait until it has gone."""
        return self._start(f"send to rank {dst}", lambda pg: pg.send([tensor], dst, 0))

    def irecv(self, tensor: torch.Tensor, src: int) -> Callable[[], None]:
        """Begin to receive into a contiguous tensor; call the result to wait until it is there."""
        return self._start(f"receive from rank {src}", lambda pg: pg.recv([tensor], src, 0))

    def broadcast(self, tensor: torch.Tensor, src: int) -> torch.Tensor:
        """Copy a contiguous tensor of ``src`` into every member's, in place; returns it."""
        if self.size > 1:
            options = dist.BroadcastOptions()
            options.rootRank, options.rootTensor = src, 0
            self._wait(f"broadcast from rank {src}", lambda pg: pg.broadcast([tensor], options))
        return tensor

    def barrier(self) -> None:
        """Wait until every member is here."""
        if self.size > 1:
            self._wait("barrier", lambda pg: pg.barrier())

    def close(self) -> None:
        """Give up connections; operations of other members that wait for this one fail at once.

        To be called by the thread that communicates: gloo does not interrupt an operation that
        another thread of this process waits for.
        """
        backend, self._backend = self._backend, None
        if backend is not None:
            backend.abort()

    def _wait(self, doing: str, start: Callable[[Any], Any]) -> None:
        self._start(doing, start)()

    def _start(self, doing: str, start: Callable[[Any], Any]) -> Callable[[], None]:
        if self._backend is None:
            raise NereusError(f"{doing} in group {self.name}, which has no peers or is closed.")
        try:
            work = start(self._backend)
        except RuntimeError as error:
            raise self._named(doing, error) from error

        def wait() -> None:
            try:
                work.wait()
            except RuntimeError as error:
                raise self._named(doing, error) from error

        return wait

    def _named(self, doing: str, error: RuntimeError) -> NereusError:
        first = str(error).splitlines()[0]
        if "timed out" in first.lower() or "timeout" in first.lower():
            return WaitTimeout(
                f"{doing} in group {self.name} ({self.size} members)", self.timeout_s
            )
        return PeerLost(self.name, doing, first)


def make_group(
    store: dist.Store | None,
    name: str,
    rank: int,
    size: int,
    device: torch.device,
    timeout_s: float,
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

    Raises:
        WaitTimeout: a member did not come.
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
    return Group(backend, name, rank, size, timeout_s)


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
    """

    def inside(kind: str) -> Group | None:
        ranks = inner.get(kind)
        if ranks is None:
            return None
        name = f"{prefix}/{kind}/{unit}/{ranks[0]}"
        return make_group(store, name, ranks.index(local_rank), len(ranks), device, timeout_s)

    inner = members(model, layout, local_rank)
    dp = make_group(store, f"{prefix}/dp/{local_rank}", unit, num_units, device, timeout_s)
    tp, pp, whole = inside("tp"), inside("pp"), inside("unit")
    assert tp is not None
    assert pp is not None
    assert whole is not None
    return UnitGroups(tp, pp, dp, whole, inside("kv"), inside("ends"))
