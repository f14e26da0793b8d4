"""Stem and Forked: the driver's ends of the process that forks seats, and of one that it forked."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import nereus_adapters
import nereus_core
from nereus_adapters.rollout.vllm.values import Boot, Fork
from nereus_core.errors import NereusError, WaitTimeout

END_S = 10.0
"""A process that was told to end takes less; then it is killed. Chosen, not measured."""


class Forked:
    """A process that the stem forked: not our child, its end is seen and its exit code is not."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._lock = threading.Lock()
        self._descriptor = os.pidfd_open(pid)

    def kill(self) -> None:
        """End it at once; nothing once it was let go of."""
        with self._lock:
            if self._descriptor >= 0:
                with contextlib.suppress(ProcessLookupError):  # it has ended by itself
                    signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)

    def ended(self, timeout_s: float) -> bool:
        """Wait for its end; returns whether it came: whoever lets go of it has seen it."""
        descriptor = self._descriptor
        return descriptor < 0 or bool(select.select([descriptor], [], [], timeout_s)[0])

    def close(self) -> None:
        """Let go of it. Safe to repeat."""
        with self._lock:
            descriptor, self._descriptor = self._descriptor, -1
            if descriptor >= 0:
                os.close(descriptor)


class Stem:
    """The process that forks seats; started with the first one, and again should it have ended."""

    def __init__(self, boot: Boot, env: Mapping[str, str], log: Path, start_s: float) -> None:
        self._boot, self._env, self._log, self._start_s = boot, env, log, start_s
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def fork(self, fork: Fork) -> Forked:
        """Fork a seat.

        Raises:
            NereusError: the stem ended in its imports; its output is a note.
            WaitTimeout: it took too long.
        """
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._process = self._started()
            stem = self._process
            assert stem.stdin is not None
            stem.stdin.write(pickle.dumps(fork))
            stem.stdin.flush()
            return Forked(int(self._line(stem)))

    def _started(self) -> subprocess.Popen[bytes]:
        paths = [str(Path(m.__path__[0]).parent) for m in (nereus_core, nereus_adapters)]
        env = {**os.environ, **self._env}
        env["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [env.get("PYTHONPATH", "")])])
        with self._log.open("ab") as output:
            stem = subprocess.Popen(
                [sys.executable, "-m", "nereus_adapters.rollout.vllm.stem"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env=env,
                # What ends the driver's process group leaves seats to clear away and to end.
                start_new_session=True,
            )
        assert stem.stdin is not None
        stem.stdin.write(pickle.dumps(self._boot))
        stem.stdin.flush()
        self._line(stem)
        return stem

    def _line(self, stem: subprocess.Popen[bytes]) -> bytes:
        assert stem.stdout is not None
        if not select.select([stem.stdout], [], [], self._start_s)[0]:
            stem.kill()
            stem.wait(END_S)
            raise WaitTimeout("the stem of the vLLM seats to finish its imports", self._start_s)
        line = stem.stdout.readline()
        if not line:
            error = NereusError(f"the stem of the vLLM seats ended (exit code {stem.wait(END_S)}).")
            error.add_note(self._log.read_text(encoding="utf-8", errors="replace")[-4000:])
            raise error
        return line

    def close(self) -> None:
        """End it."""
        with self._lock:
            stem, self._process = self._process, None
        if stem is not None:
            assert stem.stdin is not None
            assert stem.stdout is not None
            with contextlib.suppress(OSError):
                stem.stdin.close()
            try:
                stem.wait(END_S)
            except subprocess.TimeoutExpired:
                stem.kill()
                stem.wait(END_S)
            stem.stdout.close()
