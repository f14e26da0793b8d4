"""RayHost: one host of a job as the driver sees it: a Ray actor (`host_actor`) and its seats.

An actor that Ray calls unavailable counts as dead, with all seats of its host: nothing can be said
of their state.
"""

from __future__ import annotations

import contextlib
import pickle
import threading
from collections import deque
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from typing import Any

import ray

from nereus_adapters.rollout.hosts import HostLost
from nereus_adapters.rollout.vllm.forking import END_S
from nereus_adapters.rollout.vllm.host_actor import Failed
from nereus_adapters.rollout.vllm.seat_hosts import Opened
from nereus_adapters.rollout.weights import GarbledWeights
from nereus_core.cluster import Device
from nereus_core.errors import NereusError, SeatDead, WaitTimeout


class HostError(NereusError):
    """A call failed on a host; its traceback is a note."""

    def __init__(self, node: str, method: str, failed: Failed) -> None:
        super().__init__(f"{method} on host {node}: {failed.kind}: {failed.text}")
        self.add_note(failed.trace)


class RayHost:
    """One host. Implements `SeatHost` of the seats and `WeightHost` of the weights.

    Args:
        node: of the job.
        ray_node: id of the node under it.
        actor: its actor.
        start_s: longest wait for a seat.
    """

    def __init__(self, node: str, ray_node: str, actor: Any, start_s: float) -> None:
        self.node, self.ray_node, self._actor = node, ray_node, actor
        self._start_s = start_s
        self._gone = threading.Event()
        watched = answer_of(actor.watch.options(concurrency_group="watch").remote())
        watched.add_done_callback(lambda done: self._gone.set())

    @property
    def alive(self) -> bool:
        """Whether its actor is there."""
        return not self._gone.is_set()

    def pid(self) -> int:
        """Return the process id of its actor, on its node."""
        return int(self._host("pid"))

    # --- Weights ----------------------------------------------------------------------------------

    def ask(self, method: str, /, *args: object) -> Future[Any]:
        """Run a method of the host's memory."""
        return self._call("memory", "weights", method, args)

    # --- Seats ------------------------------------------------------------------------------------

    def open(self, device: Device, *, front: bool) -> Opened:
        """Start a seat."""
        doing = f"its start on host {self.node}"
        try:
            key, pid, address = self._host("open", device, front, wait_s=3 * self._start_s)
        except (HostError, HostLost) as error:
            dead = SeatDead(device, None, f"{doing}: {error}")
            dead.add_note("\n".join(getattr(error, "__notes__", [])))
            raise dead from error
        return Opened(_RemoteProcess(self, key, pid), _RemoteLine(self._actor, key), address)

    def folder_of(self, model: Path) -> str:
        """Copy the configuration of a model there; its weights come another way."""
        files = {path.name: path.read_bytes() for path in sorted(model.glob("*.json"))}
        return str(self._host("put", files))

    def free_port(self) -> int:
        """Return a free port of the host."""
        return int(self._host("free_port"))

    def sweep(self, port: int) -> None:
        """Remove an engine's shared memory; a host that is gone has none."""
        with contextlib.suppress(NereusError):  # what is left of it is a few small files
            self._host("sweep", port)

    def wait_ended(self, key: int, timeout_s: float) -> bool:
        """Wait for the end of a seat's process; it has ended where its host has."""
        try:
            return bool(self._host("ended", key, timeout_s, wait_s=timeout_s + self._start_s))
        except HostLost:
            return True

    def tell(self, method: str, key: int) -> None:
        """Let the host do something with a seat, and do not wait for it."""
        self._call("host", "host", f"do_{method}", (key,))

    def close(self) -> None:
        """End the actor, after its stem; kill it when that fails. Safe to call twice."""
        try:
            if self.alive:
                with contextlib.suppress(NereusError):
                    self._host("close", wait_s=3 * END_S)
        finally:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.kill(self._actor, no_restart=True)
            self._gone.wait(END_S)
            self._gone.set()

    def _host(self, method: str, /, *args: object, wait_s: float | None = None) -> Any:
        wait_s = self._start_s if wait_s is None else wait_s
        try:
            return self._call("host", "host", f"do_{method}", args).result(wait_s)
        except FutureTimeout:
            raise WaitTimeout(f"host {self.node} to {method}", wait_s) from None

    def _call(self, target: str, group: str, method: str, args: tuple[object, ...]) -> Future[Any]:
        content = pickle.dumps((method, args), protocol=pickle.HIGHEST_PROTOCOL)
        run = getattr(self._actor, target).options(concurrency_group=group)
        answer: Future[Any] = Future()
        name = method.removeprefix("do_")

        def settle(done: Future[bytes]) -> None:
            if isinstance(done.exception(), ray.exceptions.RayActorError):
                self._gone.set()
                answer.set_exception(HostLost(self.node, name, "its actor has ended"))
                return
            try:
                worked, value = pickle.loads(done.result())
            except Exception as error:  # of Ray, or an answer that cannot be read here
                answer.set_exception(HostError(self.node, name, Failed.of(error)))
                return
            if worked:
                answer.set_result(value)
            elif value.kind == GarbledWeights.__name__:
                answer.set_exception(GarbledWeights.said(value.text))
            elif value.timed is not None:
                answer.set_exception(WaitTimeout(*value.timed))
            else:
                answer.set_exception(HostError(self.node, name, value))

        answer_of(run.remote(content)).add_done_callback(settle)
        return answer


class _RemoteProcess:
    """A seat's process on another host."""

    def __init__(self, host: RayHost, key: int, pid: int) -> None:
        self.pid = pid
        self._host, self._key = host, key

    def kill(self) -> None:
        self._host.tell("kill", self._key)

    def ended(self, timeout_s: float) -> bool:
        return self._host.wait_ended(self._key, timeout_s)

    def close(self) -> None:
        self._host.tell("forget", self._key)


class _RemoteLine:
    """Messages to and from a seat on another host."""

    def __init__(self, actor: Any, key: int) -> None:
        self._actor, self._key = actor, key
        self._come: deque[bytes] = deque()

    def send_bytes(self, message: bytes, /) -> None:
        self._actor.send.options(concurrency_group="send").remote(self._key, message)

    def recv(self) -> Any:
        if not self._come:
            coming = self._actor.receive.options(concurrency_group="receive").remote(self._key)
            try:
                found = ray.get(coming)
            except ray.exceptions.RayError as error:
                raise EOFError(str(error)) from error
            if found is None:
                raise EOFError("the seat has ended")
            self._come += found
        return pickle.loads(self._come.popleft())

    def close(self) -> None:
        """Nothing to do: the host lets go of it with its process."""


def answer_of(ref: Any) -> Future[Any]:
    """Return the future of what a Ray reference stands for."""
    found: Future[Any] = ref.future()
    return found
