"""LeasedExecutor: a vLLM executor whose ranks are seats that outlive the engine.

vLLM makes one when an engine starts, in the process that leads it (`additional_config` names the
seats that follow): a seat, with rank 0, or the core of a `front`, without a rank. One scheduler
drives the ranks, so nothing depends on their being deterministic. With pipeline stages, rank 0 has
begun the next batch while the others are still at the last one.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing.connection import Client
from typing import Any

from vllm.platforms import current_platform
from vllm.v1.executor.abstract import Executor

from nereus_adapters.rollout.vllm.lease import Peer, Rank, Ticket
from nereus_adapters.rollout.vllm.values import LEADER

secret = b""
"""Of the pool of seats; set by the seat, never part of a configuration that is printed."""


class _Later(Future[Any]):
    """The answer of a follower, read when somebody asks for it."""

    def __init__(self, ticket: Ticket, timeout_s: float) -> None:
        super().__init__()
        self._ticket, self._timeout_s = ticket, timeout_s

    def result(self, timeout: float | None = None) -> Any:
        """Wait for it."""
        return self._ticket.result(self._timeout_s if timeout is None else timeout)


class LeasedExecutor(Executor):
    """The seats that follow hold the last ranks; rank 0 is here where they are one too few."""

    supports_pp = True

    def _init_executor(self) -> None:
        parallel = self.parallel_config
        told: dict[str, Any] = self.vllm_config.additional_config["nereus"]
        followers: list[tuple[str, str]] = told["followers"]
        self._timeout_s: float = told["timeout_s"]
        size = parallel.world_size
        self._first = size - len(followers)
        """Rank of the first seat that follows."""
        assert self._first in (0, 1), (followers, size)
        meeting = f"tcp://{told['host']}:{told['port']}"
        kwargs = [
            {
                "vllm_config": self.vllm_config,
                "local_rank": told["local_ranks"][rank],
                "rank": rank,
                "distributed_init_method": meeting,
                "is_driver_worker": rank % parallel.tensor_parallel_size == 0,
            }
            for rank in range(size)
        ]
        self._peers: list[Peer] = []
        for name, address in followers:
            connection = Client(address, "AF_UNIX", authkey=secret)
            connection.send(LEADER)
            self._peers.append(Peer(name, connection))
        env: dict[str, str | None] = told["env"]
        tickets = [
            peer.call("init", (rank, kwargs, env))
            for rank, peer in enumerate(self._peers, self._first)
        ]
        self._rank: Rank | None = Rank(0, kwargs, env) if self._first else None
        for ticket in tickets:
            ticket.result(self._timeout_s)
        self.collective_rpc("init_device")
        self.collective_rpc("load_model")
        current_platform.update_block_size_for_backend(self.vllm_config)
        # The first rank of the last pipeline stage has the tokens.
        self._last = size - parallel.tensor_parallel_size * parallel.prefill_context_parallel_size

    def collective_rpc(
        self,
        method: str | Callable[..., object],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
    ) -> Any:
        """Run a method on all ranks; results by rank."""
        call = (method, tuple(args), kwargs or {})
        tickets = [peer.call("run", call) for peer in self._peers]
        mine = [] if self._rank is None else [self._rank.run(*call)]
        timeout_s = self._timeout_s if timeout is None else timeout
        found = [*mine, *(ticket.result(timeout_s) for ticket in tickets)]
        return _done(found) if non_block else found

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        """Run one batch; the tokens, or None when they come with `sample_tokens`."""
        return self._one("execute_model", scheduler_output, non_block)

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        """Draw the batch's tokens."""
        return self._one("sample_tokens", grammar_output, non_block)

    def _one(self, method: str, argument: object, non_block: bool) -> Any:
        """Run a method on all ranks and return what the last stage says."""
        call: tuple[str, tuple[object], dict[str, object]] = (method, (argument,), {})
        tickets = [
            peer.call("run", call, wanted=rank == self._last)
            for rank, peer in enumerate(self._peers, self._first)
        ]
        mine = None if self._rank is None else self._rank.run(*call)
        if self._last < self._first:
            # Errors of others would be seen here too: their part of this batch is due.
            for ticket in tickets:
                ticket.result(self._timeout_s)
            return _done(mine) if non_block else mine
        for rank, peer in enumerate(self._peers, self._first):
            if rank != self._last:
                peer.read_ready()
        later = _Later(tickets[self._last - self._first], self._timeout_s)
        return later if non_block else later.result()

    def check_health(self) -> None:
        """Nothing to ask: the pool watches all processes."""

    def shutdown(self) -> None:
        """Give the seats back; each has freed its rank when this returns."""
        peers, self._peers = getattr(self, "_peers", []), []
        tickets = []
        for peer in peers:
            try:
                tickets.append(peer.call("free", None))
            except OSError:  # it is gone, and its rank with it
                continue
        rank, self._rank = getattr(self, "_rank", None), None
        if rank is not None:
            rank.free()
        for ticket in tickets:
            try:
                ticket.result(self._timeout_s)
            except (EOFError, OSError, RuntimeError):
                continue
        for peer in peers:
            peer.close()


def _done(value: object) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future
