"""RayPool: seats on the nodes of a Ray cluster."""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import wait

import ray
import torch.distributed as dist

from nereus_adapters.torch.accountant import HUGE_PAGES
from nereus_adapters.torch.channel import Pending
from nereus_adapters.torch.line import CLOSE_S, SeatLine
from nereus_adapters.torch.link import new_secret
from nereus_adapters.torch.ray_pool.actor import SeatActor
from nereus_adapters.torch.ray_pool.channel import ActorChannel
from nereus_adapters.torch.ray_pool.nodes import SeatNodes, draining
from nereus_adapters.torch.ray_pool.session import SESSION
from nereus_adapters.torch.store import listening_store, tcp_address
from nereus_adapters.torch.values import SeatSettings
from nereus_core.cluster import Device
from nereus_core.errors import NereusError, SeatDead, WaitTimeout

LOOK_S = 1.0
"""Between two looks at the cluster's nodes. Chosen: a drain notice comes 30 s ahead or more."""
_PASSED_ON = ("HF_HUB_OFFLINE", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_DEBUG")
"""Of the driver's environment, what seats on other machines get too."""


class RayPool(SeatLine[ActorChannel]):
    """Seats as Ray actors, one per device; the job's node names stand for Ray nodes.

    Does what `LocalPool` does (see there), and watches the cluster: a node that is about to leave
    shows in `draining`; where a lost node has been replaced, new seats are started beside the
    running job and show in `returned` when they are up.

    Args:
        device_kind: ``cpu`` or ``cuda``.
        seats: how many seats each node of the job has.
        address: of the cluster, as `Session.join` takes it.
        resources: Ray resources of one seat; one GPU or one CPU by default.
        threads: of torch in each seat.
        port: of the store on which seats find one another; 0 picks a free one.
        start_s: longest wait for seats to come up.

    Raises:
        ConfigError: no cluster at that address, or the port is in use.
        DevicesMissing, WaitTimeout: as `SeatNodes` does.
    """

    def __init__(
        self,
        device_kind: str,
        seats: Mapping[str, int],
        *,
        address: str | None = None,
        resources: Mapping[str, float] | None = None,
        threads: int = 1,
        port: int = 0,
        start_s: float = 120.0,
    ) -> None:
        self._kind, self._threads, self._start_s = device_kind, threads, start_s
        self._secret = new_secret()
        SESSION.join(address, sum(seats.values()))
        try:
            one = {"GPU": 1.0} if device_kind == "cuda" else {"CPU": 1.0}
            self._host = ray.util.get_node_ip_address()
            self._store: dist.TCPStore = listening_store(port, self._host)
            self._nodes = SeatNodes(seats, resources or one, start_s)
        except BaseException:
            SESSION.leave()
            raise
        super().__init__()
        self._spares: dict[Device, ActorChannel] = {}
        self._draining: frozenset[str] = frozenset()
        self._closing = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="ray nodes", daemon=True)
        self._watcher.start()

    @property
    def port(self) -> int:
        """Of the store, on the address by which the driver's node is known to Ray."""
        return int(self._store.port)

    @property
    def draining(self) -> frozenset[Device]:
        """Devices with a seat on a node that is announced to leave."""
        leaving = self._draining
        return frozenset(
            d for d, c in list(self._channels.items()) if c.alive and c.node_id in leaving
        )

    @property
    def returned(self) -> frozenset[Device]:
        """Devices that have been lost and whose new seat is up: `start` takes it in."""
        return frozenset(d for d, c in list(self._spares.items()) if c.alive)

    def require(self, need: int) -> None:
        """Do nothing: the placement group holds what was asked for."""

    def start(self, devices: Iterable[Device]) -> None:
        """Start seats, all at once, and wait until they are up; a live seat is left alone.

        Raises:
            SeatDead: a seat ended while it started, or its node is gone.
            WaitTimeout: a seat did not come up in time.
        """
        wanted = [d for d in devices if d not in self.alive]
        with self._order:
            for device in wanted:
                spare = self._spares.pop(device, None)
                usable = spare is not None and spare.alive
                self._channels[device] = spare if spare and usable else self._spawn(device)
        for pending in self.send({device: ("hello", {}) for device in wanted}):
            self._await_start(pending)

    def pid(self, device: Device) -> int:
        """Return the process id of a seat, on its node."""
        found: int = self.call(device, "hello").wait(self._start_s).value
        return found

    def node_id(self, device: Device) -> str:
        """Return the id of the Ray node that a seat is on."""
        return self._channel(device, "node_id").node_id

    def beside(self, node: str) -> dict[str, object]:
        """Return the Ray options of an actor beside the seats of a node, which takes nothing.

        Raises:
            SeatDead: Ray has no such node now.
        """
        if self.ray_node(node) is None:
            raise SeatDead(f"beside {node}", None, f"start: Ray has no node for {node} now")
        env = {"env_vars": _environment()}
        return {**self._nodes.beside(node), "max_restarts": 0, "runtime_env": env}

    def ray_node(self, node: str) -> str | None:
        """Return the id of the Ray node under a node of the job, or None where it is lost."""
        return self._nodes.placed().get(node)

    def close(self) -> None:
        """End all seats and give the resources back. Safe to call twice."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._watcher.join(CLOSE_S)
        channels = [*self._channels.values(), *self._spares.values()]
        for channel in channels:
            channel.say_goodbye()
        for channel in channels:
            channel.close(CLOSE_S)
        self._nodes.remove()
        SESSION.leave()

    def _await_start(self, pending: Pending) -> None:
        """Wait for a seat to come up, as long as its node is there."""
        device, deadline_s = pending.device, time.monotonic() + self._start_s
        channel = self._channels[device]
        while (left_s := deadline_s - time.monotonic()) > 0:
            if wait([pending.future], min(LOOK_S, left_s)).done:
                break
            if self._nodes.placed().get(device.node) != channel.node_id:
                channel.kill()
                raise SeatDead(device, None, f"start: Ray has lost the node of {device.node}")
        if not pending.future.done():
            channel.kill()
            awaited = (
                f"seat {device} to come up on Ray node {channel.node_id}: a worker of Ray imports "
                "torch there, perhaps behind other processes (RAY_worker_niceness); the limit is "
                "backend.start_s"
            )
            raise WaitTimeout(awaited, self._start_s)
        try:
            pending.wait(0.0)
        except SeatDead as error:  # on a node that is gone and that Ray has not missed yet, too
            raise SeatDead(device, None, f"start on Ray node {channel.node_id}") from error

    def _spawn(self, device: Device) -> ActorChannel:
        node_id = self._nodes.placed().get(device.node)
        if node_id is None:
            raise SeatDead(device, None, f"start: Ray has no node for {device.node} now")
        settings = SeatSettings(
            "cuda:0" if self._kind == "cuda" else "cpu",  # Ray shows each actor its own GPU
            self._threads,
            tcp_address(self._host, self.port),
            self._secret.hex(),
            self._start_s,
        )
        kind = ray.remote(concurrency_groups={"watch": 2})(SeatActor)
        actor = kind.options(
            **self._nodes.options(device.node),
            max_restarts=0,
            runtime_env={"env_vars": _environment()},
        ).remote(pickle.dumps(settings))
        return ActorChannel(device, node_id, actor)

    # --- The cluster ---------------------------------------------------------------------------

    def _watch(self) -> None:
        """Look at the cluster until the pool closes."""
        while not self._closing.wait(LOOK_S):
            try:
                self._draining = draining()
                self._replace()
            except (ray.exceptions.RayError, NereusError, RuntimeError, TimeoutError):
                continue  # the head node is busy or away: look again

    def _replace(self) -> None:
        """Start seats beside the job where a lost node has been replaced by another."""
        placed = self._nodes.placed()
        for device, channel in sorted(self._channels.items()):
            here = placed.get(device.node)
            moved = here is not None and here != channel.node_id and here not in self._draining
            if moved and not channel.alive and not self._has_spare(device):
                spare = self._spawn(device)
                spare.call("hello").wait(self._start_s)
                self._spares[device] = spare

    def _has_spare(self, device: Device) -> bool:
        return device in self._spares and self._spares[device].alive


def _environment() -> dict[str, str]:
    return {
        **{name: os.environ[name] for name in _PASSED_ON if name in os.environ},
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "FATAL"),
        "TOKENIZERS_PARALLELISM": "false",
        **HUGE_PAGES,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
