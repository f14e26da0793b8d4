"""RayHosts: the hosts of a job as Ray actors, one beside the seats of each of its nodes.

Seats and weights of a host are its actor's (`host_actor`). An actor that Ray calls unavailable
counts as dead, with all seats of its host: nothing can be said of their state.
"""

from __future__ import annotations

import contextlib
import pickle
import secrets
import threading
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from typing import Any, Protocol

import ray

from nereus_adapters.rollout.delivery import Delivery
from nereus_adapters.rollout.hosts import HostLost, Hosts
from nereus_adapters.rollout.vllm.forking import END_S
from nereus_adapters.rollout.vllm.host_actor import Failed, HostActor, HostSettings
from nereus_adapters.rollout.vllm.seat_hosts import Opened
from nereus_adapters.rollout.weights import GarbledWeights
from nereus_core.cluster import Device
from nereus_core.errors import NereusError, SeatDead, WaitTimeout

_GROUPS = {"watch": 1, "send": 1, "weights": 4, "host": 16}
"""Threads of an actor by what they do: messages to seats keep their order."""
_FRONTS = 2
"""Processes that a device may have at once: its seat, and the front of an engine."""
_LOOK_S = 1.0
"""Between two looks whether a node is still there, while its actor starts. Chosen."""


class Places(Protocol):
    """Where Ray has put the nodes of a job."""

    def beside(self, node: str) -> Mapping[str, Any]:
        """Return Ray's options of an actor beside the seats of a node, which takes nothing.

        Raises:
            SeatDead: Ray has no such node now.
        """
        ...

    def ray_node(self, node: str) -> str | None:
        """Return the id of the Ray node under a node of the job, or None."""
        ...


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
        watched = _future(actor.watch.options(concurrency_group="watch").remote())
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
        with contextlib.suppress(HostLost):
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
        """End the actor, after its stem. Safe to call twice."""
        if self.alive:
            with contextlib.suppress(HostLost, WaitTimeout):
                self._host("close", wait_s=3 * END_S)
        with contextlib.suppress(ray.exceptions.RayError):
            ray.kill(self._actor, no_restart=True)
        self._gone.wait(END_S)

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
            error = done.exception()
            if isinstance(error, ray.exceptions.RayActorError):
                self._gone.set()
                answer.set_exception(HostLost(self.node, name, "its actor has ended"))
            elif error is not None:
                answer.set_exception(error)
            else:
                worked, value = pickle.loads(done.result())
                if worked:
                    answer.set_result(value)
                elif value.kind == GarbledWeights.__name__:
                    answer.set_exception(GarbledWeights.said(value.text))
                elif value.timed is not None:
                    answer.set_exception(WaitTimeout(*value.timed))
                else:
                    answer.set_exception(HostError(self.node, name, value))

        _future(run.remote(content)).add_done_callback(settle)
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

    def send(self, message: Any, /) -> None:
        content = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        self._actor.send.options(concurrency_group="send").remote(self._key, content)

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


class RayHosts:
    """Implements `SeatHosts`, and `WeightHosts` of the weights.

    Args:
        places: where Ray has put the nodes.
        seats: of the largest node.
        accelerator: ``cpu`` or ``cuda``.
        env: variables of every seat.
        start_s: longest wait for imports and for a seat to come up.
        wait_s: longest wait for a host, or for a message with weights.
    """

    apart = True

    def __init__(
        self,
        places: Places,
        seats: int,
        accelerator: str,
        env: Mapping[str, str],
        *,
        start_s: float = 600.0,
        wait_s: float = 60.0,
    ) -> None:
        self._places, self._accelerator, self._env = places, accelerator, dict(env)
        self._receivers = _FRONTS * seats + 2
        self._start_s = start_s
        self.secret = secrets.token_bytes(32)
        self._lock = threading.Lock()
        self._hosts: dict[str, RayHost] = {}
        self.delivery = Delivery(self, ray.util.get_node_ip_address(), wait_s=wait_s)
        self.weights: Hosts = self.delivery

    def of(self, node: str) -> RayHost:
        """Return a node's host; where it has gone and Ray has another node, one there."""
        with self._lock:
            host = self._hosts.get(node)
            if host is None or not host.alive:
                host = self._hosts[node] = self._started(node)
            return host

    def alive(self) -> dict[str, RayHost]:
        """Return hosts whose actors are there."""
        with self._lock:
            return {node: host for node, host in self._hosts.items() if host.alive}

    def _started(self, node: str) -> RayHost:
        try:
            options = dict(self._places.beside(node))
        except SeatDead as error:
            raise HostLost(node, "start", str(error)) from error
        below = self._places.ray_node(node) or ""
        told = HostSettings(node, "", self._accelerator, self._env, self.secret, self._start_s)
        kind = ray.remote(concurrency_groups={**_GROUPS, "receive": self._receivers})(HostActor)
        actor = kind.options(**options).remote(pickle.dumps(told))
        host = RayHost(node, below, actor, self._start_s)
        greeted = _future(actor.hello.remote())
        deadline_s = time.monotonic() + self._start_s
        while True:
            try:
                greeted.result(_LOOK_S)
                return host
            except FutureTimeout:
                if self._places.ray_node(node) != below:
                    host.close()
                    raise HostLost(node, "start", "Ray has lost its node") from None
                if time.monotonic() > deadline_s:
                    host.close()
                    raise WaitTimeout(f"the actor of host {node}", self._start_s) from None
            except ray.exceptions.RayError as error:
                raise HostLost(node, "start", str(error).splitlines()[0]) from error

    def close(self) -> None:
        """End all actors."""
        with self._lock:
            hosts, self._hosts = list(self._hosts.values()), {}
        for host in hosts:
            host.close()


def _future(ref: Any) -> Future[Any]:
    found: Future[Any] = ref.future()
    return found
