"""The private folder of a pool: its secret, its store, and a socket per seat.

It lies where temporary files do, since a socket's path may not be long; its mode is 0700. A driver
that takes over the seats of one that died finds here all it needs.
"""

from __future__ import annotations

import os
import shutil
import socket
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from nereus_adapters.torch.link import new_secret
from nereus_core.cluster import Device
from nereus_core.errors import NereusError

_SECRET, _STORE, _SUFFIX = "secret", "store", ".sock"


@dataclass(frozen=True, slots=True)
class PoolFolder:
    """Paths inside it."""

    path: Path

    @classmethod
    def made(cls) -> Self:
        """Make a folder with a new secret."""
        found = cls(Path(tempfile.mkdtemp(prefix="nereus-")))
        descriptor = os.open(found.path / _SECRET, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(new_secret())
        return found

    @property
    def secret(self) -> bytes:
        """Read the secret.

        Raises:
            NereusError: the folder is gone, or is not only ours.
        """
        try:
            seen = self.path.stat()
            if seen.st_uid != os.getuid() or stat.S_IMODE(seen.st_mode) & 0o077:
                raise NereusError(
                    f"{self.path} belongs to user {seen.st_uid} with mode "
                    f"{stat.S_IMODE(seen.st_mode):o}; expected our own with mode 700."
                )
            return (self.path / _SECRET).read_bytes()
        except OSError as error:
            raise NereusError(
                f"{self.path} holds no seats: {error.strerror}; they have ended, start anew."
            ) from error

    @property
    def store(self) -> Path:
        """Of the file in which seats find one another."""
        return self.path / _STORE

    def address(self, device: Device) -> Path:
        """Of a seat."""
        return self.path / f"{device.node}:{device.index}{_SUFFIX}"

    def listening(self, device: Device) -> socket.socket:
        """Listen where a seat is reached; the socket is for the seat to inherit."""
        path = self.address(device)
        path.unlink(missing_ok=True)  # of a seat before it
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        listener.listen()
        return listener

    def devices(self) -> tuple[Device, ...]:
        """Devices that have, or had, a seat."""
        names = (p.name.removesuffix(_SUFFIX) for p in self.path.glob(f"*{_SUFFIX}"))
        return tuple(sorted(map(Device.parse, names)))

    def connected(self, device: Device, timeout_s: float) -> socket.socket:
        """Connect to a seat; raises OSError when nobody listens."""
        peer = socket.socket(socket.AF_UNIX)
        peer.settimeout(timeout_s)
        try:
            peer.connect(str(self.address(device)))
        except OSError:
            peer.close()
            raise
        return peer

    def leave(self, own: Path) -> None:
        """Remove a seat's socket; the last one to go removes the folder."""
        own.unlink(missing_ok=True)
        if not self.devices():
            self.remove()

    def remove(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.path, ignore_errors=True)
