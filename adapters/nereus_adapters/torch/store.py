"""The store on which seats find one another, and its address as seats are told it."""

from __future__ import annotations

import hmac
import socket
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from nereus_core.errors import ConfigError, NereusError

_WAIT_S = 60.0
"""Of the hosting side; seats bring their own. Chosen, not measured."""
_SEAL_BYTES = 32
"""HMAC-SHA256."""


def file_address(path: Path) -> str:
    """Return the address of a store in a file: as private as the folder it lies in."""
    return f"file://{path}"


def tcp_address(host: str, port: int) -> str:
    """Return the address of a store that somebody hosts."""
    return f"tcp://{host}:{port}"


class Tampered(NereusError):
    """A value in the store was not written by a process of the job."""

    def __init__(self, key: str) -> None:
        self.key = key
        super().__init__(
            f"{key} in the store of the job does not bear the job's seal: somebody else has "
            "written to it. Give the job a private network (backend.port is open to whoever "
            "reaches it)."
        )


class SealedStore(dist.Store):
    """A store whose values bear a seal: what somebody without the job's secret writes is refused.

    Args:
        store: where the values lie; anybody who reaches it may read, write and delete there.
        secret: of the job.
    """

    def __init__(self, store: dist.Store, secret: bytes) -> None:
        super().__init__()
        self._store, self._secret = store, secret

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value with its seal."""
        plain = value.encode() if isinstance(value, str) else bytes(value)
        self._store.set(key, self._seal(key, plain) + plain)

    def get(self, key: str) -> bytes:
        """Wait for a value; raises Tampered when it bears no seal of its key."""
        found = bytes(self._store.get(key))
        seal, plain = found[:_SEAL_BYTES], found[_SEAL_BYTES:]
        if not hmac.compare_digest(seal, self._seal(key, plain)):
            raise Tampered(key)
        return plain

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until keys are there."""
        if timeout is None:
            self._store.wait(keys)
        else:
            self._store.wait(keys, timeout)

    def check(self, keys: list[str]) -> bool:
        """Say whether keys are there."""
        return bool(self._store.check(keys))

    def delete_key(self, key: str) -> bool:
        """Remove a key."""
        return bool(self._store.delete_key(key))

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the longest wait."""
        self._store.set_timeout(timeout)

    def _seal(self, key: str, plain: bytes) -> bytes:
        return hmac.digest(self._secret, key.encode() + b"\0" + plain, "sha256")


def open_store(address: str, timeout_s: float, secret: bytes) -> dist.Store:
    """Open a store by its address; one in a file is as private as that, others are sealed."""
    kind, _, where = address.partition("://")
    timeout = timedelta(seconds=timeout_s)
    if kind == "file":
        store = dist.FileStore(where, -1)
        store.set_timeout(timeout)
        return store
    host, _, port = where.rpartition(":")
    store = dist.TCPStore(host, int(port), is_master=False, timeout=timeout)
    return SealedStore(store, secret)


def listening_store(port: int, host: str) -> dist.TCPStore:
    """Host a store on one interface only (by itself it would listen on all).

    Whoever can reach the interface can write to it, but not what seats take for theirs.

    Raises:
        ConfigError: the port is in use.
    """
    listener = socket.socket()
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            "backend.port", f"{port} on {host} cannot be used: {error.strerror}"
        ) from error
    listener.listen()
    return dist.TCPStore(
        host,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=_WAIT_S),
        master_listen_fd=listener.detach(),
    )
