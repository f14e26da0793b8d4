"""The process of a seat: it lets one driver in, runs its calls, and waits a while for the next.

Started as ``python -m nereus_adapters.torch.serve BOOT LISTENER``: two inherited descriptors, a
pipe with its settings and the job's secret, and the Unix socket on which drivers come. The main
thread runs calls one after another, a second one lets drivers in and reads what they send. When the
driver is gone, calls that have not begun are forgotten; the seat keeps its units for a period of
grace, in which a driver may come that knows the secret; then it ends, whatever it is doing.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import select
import socket
import sys
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nereus_adapters.torch.answering import answer
from nereus_adapters.torch.folder import PoolFolder
from nereus_adapters.torch.link import Link, Refused, log
from nereus_adapters.torch.wire import Call, receive, send_value

_NOTICE_S = 2.0
"""Longest that the end of a connection takes to be noticed. Chosen, not measured."""

_Work = tuple[Link, Call | None]


@dataclass(frozen=True, slots=True)
class Boot:
    """What a seat is told by the process that starts it."""

    settings: Mapping[str, Any]
    """Fields of SeatSettings; that class comes with torch, and a driver is let in before."""
    secret: bytes
    socket: str
    """Path of its listener."""
    grace_s: float

    def to_bytes(self) -> bytes:
        """Write as JSON."""
        return json.dumps({**asdict(self), "secret": self.secret.hex()}).encode()

    @classmethod
    def of(cls, text: bytes) -> Boot:
        """Read what `to_bytes` wrote."""
        values: dict[str, Any] = json.loads(text)
        return cls(**{**values, "secret": bytes.fromhex(values["secret"])})


class Drivers:
    """Lets one driver in at a time and queues its calls; a refused peer is logged, and left."""

    def __init__(self, listener: socket.socket, secret: bytes, grace_s: float) -> None:
        self._listener, self._secret, self._grace_s = listener, secret, grace_s
        self._queue: queue.SimpleQueue[_Work] = queue.SimpleQueue()
        self._current: Link | None = None
        self._gone, self._tell_gone = os.pipe()

    def next(self) -> _Work:
        """Wait for the next call of the driver there is; None is its goodbye."""
        while True:
            link, call = self._queue.get()
            if link is self._current:  # else its driver is gone
                return link, call

    def serve(self) -> None:
        """Let drivers in; returns when none has come for the period of grace."""
        while True:
            patience_s = self._grace_s if self._current is None else None
            watched = [self._listener.fileno(), self._gone]
            ready, _, _ = select.select(watched, [], [], patience_s)
            if self._gone in ready:
                os.read(self._gone, 1)
                self._current = None
            elif ready:
                peer, _ = self._listener.accept()
                link = self._let_in(peer)
                if link is not None:
                    self._current = link
                    threading.Thread(target=self._read, args=(link,), daemon=True).start()
            else:
                return

    def _let_in(self, peer: socket.socket) -> Link | None:
        # A driver that was killed a moment ago may not have been seen to be gone yet.
        if self._current is not None and select.select([self._gone], [], [], _NOTICE_S)[0]:
            os.read(self._gone, 1)
            self._current = None
        try:
            if self._current is not None:
                raise Refused("a peer", "this seat has its driver")
            return Link.as_seat(peer, self._secret)
        except (Refused, EOFError, OSError) as error:
            log.warning("refused a connection: %s", str(error) or "it ended in the handshake")
            peer.close()
            return None

    def _read(self, link: Link) -> None:
        try:
            while True:
                call = receive(link)
                self._queue.put((link, call))
                if call is None:
                    return
        except (EOFError, OSError):
            log.warning("the driver is gone; another may come for %g s", self._grace_s)
        except Refused as error:
            log.warning("%s The connection is closed.", error)
        link.close()
        os.write(self._tell_gone, b"x")


def main(boot: int, listener: int) -> None:
    """Be a seat."""
    with os.fdopen(boot, "rb") as pipe:
        told = Boot.of(pipe.read())
    logging.basicConfig(format=f"nereus seat {os.getpid()}: %(message)s")
    drivers = Drivers(socket.socket(fileno=listener), told.secret, told.grace_s)

    def let_in() -> None:
        drivers.serve()
        log.warning("no driver came in %g s; the seat ends", told.grace_s)
        PoolFolder(Path(told.socket).parent).leave(Path(told.socket))
        os._exit(1)

    threading.Thread(target=let_in, daemon=True).start()
    from nereus_adapters.torch.seat import once
    from nereus_adapters.torch.values import SeatSettings

    seat = once(SeatSettings(**told.settings))
    while True:
        link, call = drivers.next()
        if call is None:
            Path(told.socket).unlink(missing_ok=True)
            # Threads of torch may still hold connections of peers that are gone: do not wait.
            os._exit(0)
        with contextlib.suppress(OSError):  # the driver is gone: its reader has seen it
            send_value(link, answer(seat, call))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
