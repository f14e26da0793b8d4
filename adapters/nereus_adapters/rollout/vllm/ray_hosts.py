"""RayHosts: the hosts of a job as Ray actors, one beside the seats of each of its nodes."""

from __future__ import annotations

import contextlib
import pickle
import secrets
import threading
import time
from collections.abc import Mapping
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, Protocol

import ray

from nereus_adapters.rollout.delivery import Delivery
from nereus_adapters.rollout.hosts import HostLost, Hosts
from nereus_adapters.rollout.vllm.host_actor import HostActor, HostSettings
from nereus_adapters.rollout.vllm.ray_host import RayHost, answer_of
from nereus_core.errors import SeatDead, WaitTimeout

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
        self._starting: dict[str, threading.Lock] = {}
        """Node -> held while its actor is started, so that others are not waited for."""
        self._closed = False
        self.delivery = Delivery(self, ray.util.get_node_ip_address(), wait_s=wait_s)
        self.weights: Hosts = self.delivery

    def of(self, node: str) -> RayHost:
        """Return a node's host; where it has gone and Ray has another node, one there.

        Raises:
            HostLost: Ray has no such node now, or all has been closed.
            WaitTimeout: its actor did not come up in time.
        """
        with self._lock:
            host = self._hosts.get(node)
            if host is not None and host.alive:
                return host
            starting = self._starting.setdefault(node, threading.Lock())
        with starting:
            with self._lock:
                before = self._hosts.get(node)
                if before is not None and before.alive:  # somebody else has started it
                    return before
            host = self._started(node)
            with self._lock:
                closed = self._closed
                if not closed:
                    self._hosts[node] = host
            if closed:
                host.close()
                raise HostLost(node, "start", "all hosts have been closed")
        if before is not None:
            before.close()  # were it only out of reach, it must not come back beside the other
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
        told = HostSettings(node, self._accelerator, self._env, self.secret, self._start_s)
        kind = ray.remote(concurrency_groups={**_GROUPS, "receive": self._receivers})(HostActor)
        actor = kind.options(**options).remote(pickle.dumps(told))
        host = RayHost(node, below, actor, self._start_s)
        greeted = answer_of(actor.hello.remote())
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
                host.close()
                raise HostLost(node, "start", str(error).splitlines()[0]) from error

    def close(self) -> None:
        """End all actors. Safe to call twice."""
        with self._lock:
            self._closed = True
            hosts, self._hosts = list(self._hosts.values()), {}
        with contextlib.ExitStack() as ending:  # each ends, whatever becomes of another
            ending.callback(self.delivery.close)
            for host in hosts:
                ending.callback(host.close)
