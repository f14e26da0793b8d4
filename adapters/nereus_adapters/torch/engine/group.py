"""A group: some ranks that communicate, and that nobody else takes part in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, Self

import torch
import torch.distributed as dist

from nereus_core.errors import NereusError, WaitTimeout

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
