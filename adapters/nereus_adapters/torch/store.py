"""The store on which seats find one another, and its address as seats are told it."""

from __future__ import annotations

import socket
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from nereus_core.errors import ConfigError

_WAIT_S = 60.0
"""Of the hosting side; seats bring their own. Chosen, not measured."""


def file_address(path: Path) -> str:
    """Return the address of a store in a file: as private as the folder it lies in."""
    return f"file://{path}"


def tcp_address(host: str, port: int) -> str:
    """Return the address of a store that somebody hosts."""
    return f"tcp://{host}:{port}"


def open_store(address: str, timeout_s: float) -> dist.Store:
    """Open a store by its address."""
    kind, _, where = address.partition("://")
    timeout = timedelta(seconds=timeout_s)
    if kind == "file":
        store = dist.FileStore(where, -1)
        store.set_timeout(timeout)
        return store
    host, _, port = where.rpartition(":")
    return dist.TCPStore(host, int(port), is_master=False, timeout=timeout)


def listening_store(port: int, host: str) -> dist.TCPStore:
    """Host a store on one interface only (by itself it would listen on all).

    Whoever can reach the interface can write to it: it is for hosts of one private network.

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
