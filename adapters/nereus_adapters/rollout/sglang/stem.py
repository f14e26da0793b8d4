"""Stem: a process that has imported sglang and forks engine processes on request.

Run as ``python -m nereus_adapters.rollout.sglang.stem FD FOLDER``, where FD is one end of a socket
pair; nobody else can reach it. It says ``ready``; then every message is a lease: JSON with the
engine's settings and, as file descriptor, the engine's end of its own socket pair. It answers each
with the process id. It ends, with all engines, when its driver does.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import shutil
import signal
import socket
import sys
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

from nereus_adapters.rollout.prctl import adopt_orphans, end_with_parent
from nereus_adapters.rollout.sglang.leftovers import end_group, members, signalled

MAX_MESSAGE_BYTES = 1 << 20
"""Far above the JSON of any engine's settings; chosen, not measured."""


def main(descriptor: int, folder: Path) -> None:
    """Serve leases until the driver is gone, then clear away, the pool's folder too."""
    control = socket.socket(fileno=descriptor)
    _import_engine()
    gc.freeze()  # pages of what is imported stay shared: no collection touches them in a child
    # Ranks whose engine process was killed become children of this one, which reaps them: a group
    # is empty as soon as its processes have ended, whatever process 1 does on this machine.
    adopt_orphans()
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    control.send(b'{"ready": true}')
    engines: dict[int, Path] = {}
    while True:
        found: list[int] = select.select([control.fileno(), woken], [], [])[0]
        if woken in found:
            os.read(woken, 4096)
            for pid in _reaped(os.WNOHANG):
                engines.pop(pid, None)
        if control.fileno() not in found:
            continue
        message, descriptors, _, _ = socket.recv_fds(control, MAX_MESSAGE_BYTES, 1)
        if not message:
            break
        lease = json.loads(message)
        stem = os.getpid()
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            control.close()
            os.close(woken)
            os.close(wake)
            _be_engine(descriptors[0], lease, stem)
        os.close(descriptors[0])
        engines[pid] = Path(lease["environment"]["TMPDIR"])
        control.send(json.dumps({"started": lease["name"], "pid": pid}).encode())
    ranks = {pid: members(pid) for pid in engines}
    for pid in engines:
        signalled(pid)
    list(_reaped(0))
    for pid, own in engines.items():
        end_group(pid, own, ranks[pid])
    shutil.rmtree(folder, ignore_errors=True)


def _reaped(options: int) -> Iterator[int]:
    """Process ids of children that have ended; with 0, of all, as they end."""
    with contextlib.suppress(ChildProcessError):
        while pid := os.waitpid(-1, options)[0]:
            yield pid


def _import_engine() -> None:
    """Import what engine, scheduler and models are made of."""
    import sglang.srt.entrypoints.engine
    import sglang.srt.models.registry  # noqa: F401  imports the files of all models

    import nereus_adapters.rollout.sglang.host
    import nereus_adapters.rollout.sglang.loading  # noqa: F401


def _be_engine(descriptor: int, lease: dict[str, object], stem: int) -> None:
    """Become the process of an engine; does not return."""
    code = 1
    try:
        os.setsid()  # its own process group: all of an engine can be ended by one id
        end_with_parent(stem)
        from nereus_adapters.rollout.sglang.host import serve

        serve(Connection(descriptor), lease)
        code = 0
    except BaseException:
        traceback.print_exc()  # into the pool's log
    finally:
        os._exit(code)  # not the stem's own way out


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
