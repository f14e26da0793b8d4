"""The process of a seat, forked from the stem with its imports done.

One thread does everything that touches vLLM: it takes the driver's calls between the steps of the
engine that this seat leads, or a leader's calls while it follows. A second thread lets peers in
that know the pool's secret, a third ends the process when its driver's is gone.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import select
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from typing import Any

from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

from nereus_adapters.rollout.resident import resident_bytes
from nereus_adapters.rollout.vllm import executor, hosting, lease
from nereus_adapters.rollout.vllm.shared import allow_unlinked, unlink_mapped
from nereus_adapters.rollout.vllm.values import BROKEN, DRIVER, Boot, Call, Fork, Reply

_HELLO_S = 10.0
"""Longest that a peer takes to say who it is. Chosen, not measured."""


class Door:
    """Lets peers in on a thread of its own."""

    def __init__(self, address: str, secret: bytes) -> None:
        self._listener = Listener(address, "AF_UNIX", authkey=secret)
        self._peers: queue.SimpleQueue[tuple[str, Connection]] = queue.SimpleQueue()
        self.bell, self._ring = os.pipe()
        threading.Thread(target=self._serve, daemon=True).start()

    def next(self) -> tuple[str, Connection]:
        """Return who came in; call it once the bell is readable."""
        os.read(self.bell, 1)
        return self._peers.get()

    def _serve(self) -> None:
        while True:
            try:
                peer = self._listener.accept()
                if not peer.poll(_HELLO_S):
                    peer.close()
                    continue
                self._peers.put((str(peer.recv()), peer))
            except (AuthenticationError, EOFError, OSError) as error:
                print(f"refused a connection: {error}", file=sys.stderr)
                continue
            os.write(self._ring, b"x")


class Seat:
    """Idle, leading an engine, or following one."""

    def __init__(self, door: Door) -> None:
        self._door = door
        self._driver: Connection | None = None
        self._hosted: hosting.Hosted | None = None
        self._follower: lease.Follower | None = None

    def run(self) -> None:
        """Serve until the driver says goodbye."""
        while True:
            if self._hosted is not None and self._hosted.busy:
                ready = wait(self._watched(), 0)
            else:
                ready = wait(self._watched())
            if self._door.bell in ready:
                self._let_in(*self._door.next())
            if self._follower is not None and self._follower.leader in ready:
                self._follow(self._follower)
            if self._driver is not None and self._driver in ready:
                call: Call | None = self._driver.recv()
                if call is None:
                    self._stop()
                    return
                self._answer(call)
            if self._hosted is not None and self._hosted.busy:
                self._step()

    def _watched(self) -> list[Any]:
        peers = [self._driver, self._follower.leader if self._follower is not None else None]
        return [self._door.bell, *(peer for peer in peers if peer is not None)]

    def _let_in(self, who: str, peer: Connection) -> None:
        if who == DRIVER:
            self._driver = peer
            peer.send(Reply(-1, os.getpid()))
            return
        if self._hosted is not None:  # a process holds one rank: whoever leads has made a mistake
            print("refused a lease: this seat leads an engine", file=sys.stderr)
            peer.close()
            return
        if self._follower is not None:  # its leader is gone: a seat has one lease at a time
            self._follower.end()
        self._follower = lease.Follower(peer)

    def _follow(self, follower: lease.Follower) -> None:
        if not follower.serve_one():
            self._follower = None

    def _answer(self, call: Call) -> None:
        assert self._driver is not None
        try:
            value = getattr(self, f"do_{call.method}")(**call.kwargs)
            reply = Reply(call.id, value)
            pickle.dumps(reply)
        except BaseException as error:
            reply = Reply(call.id, None, _last_line(error), traceback.format_exc())
        self._driver.send(reply)

    def _step(self) -> None:
        assert self._driver is not None
        try:
            drawn = self._engine.step()
        except BaseException as error:
            self._driver.send(Reply(BROKEN, None, _last_line(error), traceback.format_exc()))
            self._stop()
            return
        if drawn:
            self._driver.send(drawn)

    def _stop(self) -> None:
        hosted, self._hosted = self._hosted, None
        if hosted is not None:
            with contextlib.suppress(Exception):  # what broke it may break its end too
                hosted.close()

    @property
    def _engine(self) -> hosting.Hosted:
        if self._hosted is None:
            raise RuntimeError("this seat leads no engine")
        return self._hosted

    # --- Calls of the driver ----------------------------------------------------------------------

    def do_start(self, args: dict[str, Any], env: dict[str, str | None], secret: bytes) -> None:
        """Start the engine that this seat leads."""
        self._stop()
        executor.secret = secret
        lease.set_environment(env)
        try:
            self._hosted = hosting.Hosted(args)
        except BaseException:
            cleanup_dist_env_and_memory()
            raise

    def do_stop(self) -> None:
        """End it."""
        hosted, self._hosted = self._hosted, None
        if hosted is not None:
            hosted.close()

    def do_released(self) -> None:
        """Return once this seat follows nobody: its leader has ended."""
        while self._follower is not None:
            self._follow(self._follower)

    def do_submit(self, requests: list[dict[str, Any]]) -> dict[str, str]:
        """Begin responses; returns those refused, with the reason."""
        refused = {}
        for request in requests:
            try:
                self._engine.submit(**request)
            except ValueError as error:
                refused[request["id"]] = str(error)
        return refused

    def do_interrupt(self, ids: list[str]) -> None:
        """Drop requests; what was drawn of them has been sent."""
        self._engine.interrupt(ids)

    def do_check(self, manifest: Any) -> None:
        """Check weights before they are loaded."""
        self._engine.check(manifest)

    def do_update(self, manifest: Any) -> None:
        """Load weights."""
        self._engine.update(manifest)

    def do_signals(self) -> Any:
        """Return the engine's figures."""
        return self._engine.signals()

    def do_rpc(self, method: str, kwargs: dict[str, Any]) -> list[Any]:
        """Run a method on every rank of the engine."""
        found: list[Any] = self._engine.rpc(method, kwargs)
        return found

    def do_memory(self) -> tuple[int, int]:
        """Return resident bytes of this process, and those of model parameters in it."""
        return resident_bytes(), lease.measured_bytes()


def _last_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _end_with(parent: int, cleanup: Callable[[], None]) -> None:
    """End this process when another one has ended, whatever its main thread is doing."""
    descriptor = os.pidfd_open(parent)

    def watch() -> None:
        select.select([descriptor], [], [])
        cleanup()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def serve(boot: Boot, fork: Fork) -> None:
    """Be a seat."""
    address = Path(fork.address)

    def cleanup() -> None:
        address.unlink(missing_ok=True)
        unlink_mapped()  # of an engine that was about to start

    allow_unlinked()
    lease.base_bytes = resident_bytes()
    _end_with(boot.driver, cleanup)
    Seat(Door(fork.address, bytes.fromhex(boot.secret))).run()
    address.unlink(missing_ok=True)
