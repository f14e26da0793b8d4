"""Link: one end of a control channel between driver and seat, authenticated by the job's secret.

Both ends prove that they know the secret by answering each other's challenge; from then on every
frame carries a number and an HMAC-SHA256 over number, length and payload, under a key of this
connection and direction. A frame that is too long, changed, out of order or repeated ends the
connection, and nobody has looked at its payload.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import secrets
import socket
import struct
import threading
from typing import Self

from nereus_core.errors import NereusError

log = logging.getLogger("nereus.torch")

HANDSHAKE_S = 5.0
"""Longest that a seat waits for a peer's side of the handshake. Chosen, not measured."""
MAX_FRAME_BYTES = 2**31
"""Longest payload: far above any batch or peeked tensor of a seat. Chosen, not measured."""

_MAGIC = b"NEREUS01"
_NONCE = 32
_MAC = 32
_HEADER = struct.Struct("!QQ")
_CHUNK = 1 << 20


class Refused(NereusError):
    """A peer, or a frame, that is not what this job's driver or seat would send."""

    def __init__(self, what: str, problem: str) -> None:
        super().__init__(f"{what} was refused: {problem}.")


def new_secret() -> bytes:
    """Return the secret of a job."""
    return secrets.token_bytes(32)


def group_secret(secret: bytes) -> bytes:
    """Derive what the seats of a job prove to one another from what they prove to its driver."""
    return hmac.digest(secret, b"groups of seats", "sha256")


class Link:
    """An authenticated stream of frames over a connected socket; `as_driver` and `as_seat` make it.

    Several threads may send; one receives.
    """

    def __init__(self, peer: socket.socket, send_key: bytes, receive_key: bytes) -> None:
        self._socket, self._send_key, self._receive_key = peer, send_key, receive_key
        self._sent, self._received = 0, 0
        self._sending = threading.Lock()
        peer.settimeout(None)

    @classmethod
    def as_seat(cls, peer: socket.socket, secret: bytes) -> Self:
        """Take in a driver that has connected; raises Refused, EOFError or OSError."""
        peer.settimeout(HANDSHAKE_S)
        ours = secrets.token_bytes(_NONCE)
        peer.sendall(_MAGIC + ours)
        answer = _read(peer, _NONCE + _MAC)
        theirs, proof = answer[:_NONCE], answer[_NONCE:]
        if not hmac.compare_digest(proof, _mac(secret, b"driver", ours, theirs)):
            raise Refused("a peer", "it does not know the job's secret")
        peer.sendall(_mac(secret, b"seat", ours, theirs))
        return cls(
            peer, _mac(secret, b"from seat", ours, theirs), _mac(secret, b"to seat", ours, theirs)
        )

    @classmethod
    def as_driver(cls, peer: socket.socket, secret: bytes, timeout_s: float) -> Self:
        """Introduce ourselves to a seat; what it raises closes the socket.

        Raises:
            Refused, EOFError, OSError: it is no seat of this job, or lets nobody in now.
        """
        try:
            peer.settimeout(timeout_s)
            greeting = _read(peer, len(_MAGIC) + _NONCE)
            if greeting[: len(_MAGIC)] != _MAGIC:
                raise Refused("a peer", "it does not speak as a seat of this version does")
            theirs, ours = greeting[len(_MAGIC) :], secrets.token_bytes(_NONCE)
            peer.sendall(ours + _mac(secret, b"driver", theirs, ours))
            if not hmac.compare_digest(_read(peer, _MAC), _mac(secret, b"seat", theirs, ours)):
                raise Refused("a seat", "it does not know the job's secret")
        except BaseException:
            peer.close()
            raise
        return cls(
            peer, _mac(secret, b"to seat", theirs, ours), _mac(secret, b"from seat", theirs, ours)
        )

    def send(self, payload: bytes) -> None:
        """Write one frame; raises OSError when the other end is gone.

        Raises:
            Refused: it is too long.
        """
        if len(payload) > MAX_FRAME_BYTES:
            raise Refused("a frame", f"{len(payload)} bytes, at most {MAX_FRAME_BYTES} are sent")
        with self._sending:
            header = _HEADER.pack(self._sent, len(payload))
            self._sent += 1
            proof = _proof(self._send_key, header, payload)
            self._socket.sendall(header + proof)
            self._socket.sendall(payload)

    def receive(self) -> bytes:
        """Read one frame; raises EOFError when the other end is gone.

        Raises:
            Refused: it is too long, changed, or not the next one; close the link then.
        """
        head = _read(self._socket, _HEADER.size + _MAC)
        header, proof = head[: _HEADER.size], head[_HEADER.size :]
        number, length = _HEADER.unpack(header)
        if length > MAX_FRAME_BYTES:
            raise Refused("a frame", f"{length} bytes, at most {MAX_FRAME_BYTES} are read")
        if number != self._received:
            raise Refused("a frame", f"it has number {number}, expected {self._received}")
        payload = _read(self._socket, length)
        if not hmac.compare_digest(proof, _proof(self._receive_key, header, payload)):
            raise Refused("a frame", "its digest is not by the job's secret")
        self._received += 1
        return payload

    def close(self) -> None:
        """End the connection; a thread that receives gets EOFError."""
        with contextlib.suppress(OSError):  # the other end was faster
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def _mac(secret: bytes, role: bytes, first: bytes, second: bytes) -> bytes:
    return hmac.digest(secret, _MAGIC + role + first + second, "sha256")


def _proof(key: bytes, header: bytes, payload: bytes) -> bytes:
    found = hmac.new(key, header, "sha256")
    found.update(payload)
    return found.digest()


def _read(peer: socket.socket, count: int) -> bytes:
    """Read exactly so many bytes; memory grows with what arrives, not with what was announced."""
    parts: list[bytes] = []
    while count:
        part = peer.recv(min(count, _CHUNK))
        if not part:
            raise EOFError
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
