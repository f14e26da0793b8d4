"""StemPool: the stem process, and what becomes of the engine processes it forks."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Collection, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import nereus_adapters
import nereus_core
from nereus_adapters.rollout.ports import EngineError
from nereus_adapters.rollout.sglang.leftovers import end_group
from nereus_adapters.rollout.sglang.stem import MAX_MESSAGE_BYTES
from nereus_core.errors import WaitTimeout

_STEM = (sys.executable, "-P", "-m", f"{__package__}.stem")
_CLOSE_S = 10.0
"""A killed process is gone in far less; chosen, not measured."""
_NOT_WORDS = re.compile(r"[^A-Za-z0-9]+")
"""What the name of a folder has none of."""
_LOG_CHARS = 4000
"""Of a log's end that an error quotes; chosen, not measured."""


@dataclass(frozen=True, slots=True)
class Leased:
    """A forked engine process as the driver sees it."""

    name: str
    pid: int
    connection: Connection
    """Closed by whoever reads it."""
    folder: Path
    """Its temporary files; removed when it has ended."""


class StemPool:
    """Starts the stem with the first lease, and again when it has died. Thread-safe.

    Args:
        environment: variables of all its processes, beside the driver's own.
        start_s: longest wait for the stem's imports.
    """

    def __init__(self, environment: Mapping[str, str], *, start_s: float = 180.0) -> None:
        self._environment, self._start_s = dict(environment), start_s
        self._lock = threading.RLock()
        self._stem: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self.folder = Path(tempfile.mkdtemp(prefix="nereus-sglang-"))
        """Removed with the stem, should the driver not have done it."""
        self._starting: dict[str, Future[int]] = {}
        self._leased: dict[int, Leased] = {}
        self._ready: Future[None] = Future()

    @property
    def pid(self) -> int | None:
        """Of the stem, where one runs."""
        return None if self._stem is None else self._stem.pid

    def start(self) -> None:
        """Start the stem and wait until it has imported what engines are made of.

        Raises:
            EngineError: it ended; quotes its log.
            WaitTimeout: it took too long.
        """
        with self._lock:
            if self._stem is None or self._stem.poll() is not None:
                self._spawn()
            ready = self._ready
        try:
            ready.result(self._start_s)
        except FutureTimeout:
            raise WaitTimeout("the SGLang stem to import sglang", self._start_s) from None

    def lease(
        self, name: str, arguments: Mapping[str, Any], environment: Mapping[str, str]
    ) -> Leased:
        """Fork an engine process; it says ``ready`` on its connection once it serves."""
        self.start()
        words = _NOT_WORDS.sub("-", name)
        folder = Path(tempfile.mkdtemp(prefix=f"{words}-", dir=self.folder))
        message = json.dumps(
            {
                "name": folder.name,
                "arguments": dict(arguments),
                "environment": {**environment, "TMPDIR": str(folder)},
            }
        ).encode()
        started: Future[int] = Future()
        ours, theirs = socket.socketpair()
        try:
            with theirs, self._lock:
                if self._control is None:
                    raise EngineError(name, "start", "its pool is closed")
                self._starting[folder.name] = started
                socket.send_fds(self._control, [message], [theirs.fileno()])
            pid = started.result(self._start_s)
        except FutureTimeout:
            ours.close()
            raise WaitTimeout(f"the stem to fork engine {name}", self._start_s) from None
        except OSError as error:
            ours.close()
            raise EngineError(name, "start", f"the stem is gone: {self.log_end()}") from error
        except BaseException:
            ours.close()
            raise
        with self._lock:
            leased = Leased(name, pid, Connection(ours.detach()), folder)
            self._leased[pid] = leased
            return leased

    def end(self, leased: Leased, ranks: Collection[int] = ()) -> None:
        """End an engine process and its ranks; their devices are free when this returns.

        Args:
            leased: the process.
            ranks: process ids of its ranks, where they are known.

        Raises:
            WaitTimeout: it is still there; names it.
        """
        end_group(leased.pid, leased.folder, ranks)
        with self._lock:
            self._leased.pop(leased.pid, None)

    def close(self) -> None:
        """End all engine processes and the stem. Safe to call twice."""
        with self._lock:
            left, stem, control = list(self._leased.values()), self._stem, self._control
            self._stem = self._control = None
        for leased in left:
            self.end(leased)
        if stem is not None and control is not None:
            with contextlib.suppress(OSError):
                control.shutdown(socket.SHUT_RDWR)
            try:
                stem.wait(_CLOSE_S)
            except subprocess.TimeoutExpired:
                stem.kill()
                stem.wait(_CLOSE_S)
        shutil.rmtree(self.folder, ignore_errors=True)

    # --- The stem -------------------------------------------------------------------------------

    def _spawn(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, (self.folder / "log").open("ab") as log:
            self._stem = subprocess.Popen(
                [*_STEM, str(theirs.fileno()), str(self.folder)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(_paths()), **self._environment},
                start_new_session=True,  # a terminal that is closed does not take engines along
            )
        self._control, self._ready = ours, Future()
        arguments = (ours, self._ready, self._stem)
        threading.Thread(target=self._read, args=arguments, daemon=True, name="sglang stem").start()

    def _read(
        self, control: socket.socket, ready: Future[None], stem: subprocess.Popen[bytes]
    ) -> None:
        while True:
            try:
                content = control.recv(MAX_MESSAGE_BYTES)
            except OSError:
                break
            if not content:
                break
            message = json.loads(content)
            if "ready" in message:
                ready.set_result(None)
            elif "started" in message:
                self._starting.pop(message["started"]).set_result(message["pid"])
        control.close()
        stem.wait()
        self._bury(ready)

    def _bury(self, ready: Future[None]) -> None:
        """The stem is gone: so are the engine processes, by the kernel's hand."""
        gone = EngineError("all", "go on", f"the stem is gone: {self.log_end()}")
        with self._lock:
            starting = list(self._starting.values())
            self._starting.clear()
        for started in starting:
            if not started.done():
                started.set_exception(gone)
        if not ready.done():
            ready.set_exception(gone)

    def log_end(self) -> str:
        """Return the end of what the processes have written."""
        try:
            return (self.folder / "log").read_text(errors="replace")[-_LOG_CHARS:]
        except OSError:
            return "its log is gone"


def _paths() -> list[str]:
    """Return where this code was imported from, for the stem to import the same."""
    packages = [Path(str(module.__file__)) for module in (nereus_core, nereus_adapters)]
    own = dict.fromkeys(str(file.resolve().parents[1]) for file in packages)
    return [*own, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
