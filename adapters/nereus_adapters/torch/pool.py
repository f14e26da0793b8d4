"""LocalPool: seats on this machine, reached by Unix sockets in a private folder."""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Self

import torch

import nereus_adapters
import nereus_core
from nereus_adapters.torch.accountant import HUGE_PAGES
from nereus_adapters.torch.channel import Channel
from nereus_adapters.torch.folder import PoolFolder
from nereus_adapters.torch.line import CLOSE_S, SeatLine
from nereus_adapters.torch.link import Link, Refused, group_secret, log
from nereus_adapters.torch.process import Adopted
from nereus_adapters.torch.serve import Boot
from nereus_adapters.torch.store import file_address
from nereus_adapters.torch.values import SeatSettings
from nereus_adapters.torch.wire import Call, Reply, receive, send_value
from nereus_core.cluster import Device
from nereus_core.errors import DevicesMissing, SeatDead

GRACE_S = 60.0
"""Seconds that seats wait for another driver when theirs has died: time to notice and to start one
(imports take 10 s). Chosen, not measured."""


class LocalPool(SeatLine[Channel]):
    """Seat processes, one per device, and their private folder. Both outlive a driver that is
    killed, for a period of grace; `attach` takes them over.

    Thread-safe. `send` puts the calls of several seats in line at once: two collective calls
    reach all their seats in the same order, so they cannot wait for each other.
    """  # noqa: D205  (one sentence, too long for a line)

    def __init__(
        self,
        device_kind: str,
        *,
        threads: int = 1,
        start_s: float = 120.0,
        grace_s: float = GRACE_S,
        folder: PoolFolder | None = None,
    ) -> None:
        self._kind, self._threads = device_kind, threads
        self._start_s, self._grace_s = start_s, grace_s
        self.folder = folder or PoolFolder.made()
        self._secret = self.folder.secret
        super().__init__()
        atexit.register(self.close)

    @classmethod
    def attach(
        cls,
        folder: Path,
        device_kind: str,
        *,
        threads: int = 1,
        start_s: float = 120.0,
        grace_s: float = GRACE_S,
    ) -> Self:
        """Take over the seats of a driver that has died; those that have ended too are left out.

        Raises:
            NereusError: the folder is gone: so are the seats.
        """
        pool = cls(
            device_kind,
            threads=threads,
            start_s=start_s,
            grace_s=grace_s,
            folder=PoolFolder(folder),
        )
        for device in pool.folder.devices():
            try:
                pool._channels[device] = pool._adopt(device)
            except (Refused, EOFError, OSError) as error:
                log.warning("seat %s cannot be taken over: %s", device, error)
        return pool

    def _adopt(self, device: Device) -> Channel:
        link = Link.as_driver(
            self.folder.connected(device, self._start_s), self._secret, self._start_s
        )
        # What the seat was doing for the other driver it does to its end first.
        send_value(link, Call(-1, "hello", {}))
        reply: Reply = receive(link)
        return Channel(device, Adopted(int(reply.value)), link)

    @property
    def draining(self) -> frozenset[Device]:
        """Devices announced to leave: none, this machine gives no notice."""
        return frozenset()

    @property
    def returned(self) -> frozenset[Device]:
        """Lost devices with a new seat: none, nobody but the job starts one here."""
        return frozenset()

    def require(self, need: int) -> None:
        """Raise DevicesMissing unless this machine has as many devices of the pool's kind."""
        if self._kind == "cuda" and (found := torch.cuda.device_count()) < need:
            raise DevicesMissing("CUDA", need, found)

    def start(self, devices: Iterable[Device]) -> None:
        """Start seats, all at once, and wait until they are up; a live seat is left alone.

        Raises:
            SeatDead: a seat ended while it started.
            WaitTimeout: a seat did not come up in time.
            DevicesMissing: there are more seats than devices; none was started.
        """
        wanted = [d for d in devices if d not in self.alive]
        self.require(1 + max((d.index for d in wanted), default=-1))
        for device in wanted:
            old = self._channels.pop(device, None)
            if old is not None:
                old.close(CLOSE_S)
        processes = {device: self._spawn(device) for device in wanted}
        for device, process in processes.items():
            self._channels[device] = Channel(device, process, self._linked(device, process))
        for pending in self.send({device: ("hello", {}) for device in wanted}):
            pending.wait(self._start_s)

    def pid(self, device: Device) -> int:
        """Return the process id of a seat."""
        return self._channel(device, "pid").process.pid

    def close(self) -> None:
        """End all seats. Safe to call twice."""
        atexit.unregister(self.close)
        channels = list(self._channels.values())
        for channel in channels:
            channel.say_goodbye()
        for channel in channels:
            channel.close(CLOSE_S)
        self.folder.remove()

    def _spawn(self, device: Device) -> subprocess.Popen[bytes]:
        index = f":{device.index}" if self._kind == "cuda" else ""
        settings = SeatSettings(
            f"{self._kind}{index}",
            self._threads,
            file_address(self.folder.store),
            group_secret(self._secret).hex(),
            self._start_s,
        )
        boot = Boot(asdict(settings), self._secret, str(self.folder.address(device)), self._grace_s)
        told, tell = os.pipe()
        with self.folder.listening(device) as listener:
            descriptors = [told, listener.fileno()]
            # Not multiprocessing's spawn: that would import the user's main module in every seat.
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "nereus_adapters.torch.serve", *map(str, descriptors)],
                pass_fds=descriptors,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # gloo greets there
                env=_environment(),
                start_new_session=True,  # a terminal that is closed does not take the seats along
            )
        os.close(told)
        with os.fdopen(tell, "wb") as pipe:
            pipe.write(boot.to_bytes())
        return process

    def _linked(self, device: Device, process: subprocess.Popen[bytes]) -> Link:
        peer = self.folder.connected(device, self._start_s)
        try:
            return Link.as_driver(peer, self._secret, self._start_s)
        except (EOFError, OSError) as error:
            process.kill()
            raise SeatDead(device, process.wait(CLOSE_S), "start") from error


def _environment() -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(_own_paths()),
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        "NCCL_SOCKET_IFNAME": os.environ.get("NCCL_SOCKET_IFNAME", "lo"),
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "FATAL"),
        "TOKENIZERS_PARALLELISM": "false",
        **HUGE_PAGES,
    }


def _own_paths() -> list[str]:
    """Return where this code was imported from, for seats to import the same.

    Not all of sys.path: a file beside the driver's script may bear the name of a package that
    torch or transformers look for.
    """
    packages = [Path(str(module.__file__)) for module in (nereus_core, nereus_adapters)]
    own = dict.fromkeys(str(file.resolve().parents[1]) for file in packages)
    return [*own, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
