"""The stem: ``python -m nereus_adapters.rollout.vllm.stem``; it imports vLLM once and forks seats.

Imports take most of a seat's start (8-10 CPU seconds and 400 MB): they are paid once per host, and
a seat that is replaced is there at once. The stem has one thread and touches no device, so what it
forks is sound. The driver writes `Boot`, then one `Fork` a line on stdin (pickled); for each, the
id of the seat's process comes back on stdout. It ends when stdin does.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pickle
import shutil
import signal
import sys
from typing import BinaryIO

from nereus_adapters.rollout.vllm.values import Boot, Fork

_IMPORTS = (
    "torch",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.worker.gpu_worker",
    "vllm.v1.engine.async_llm",
    "nereus_adapters.rollout.vllm.extension",
    "nereus_adapters.rollout.vllm.front",
    "nereus_adapters.rollout.vllm.hosting",
)
_CPU_IMPORTS = ("vllm.v1.worker.cpu_worker", "vllm.v1.worker.cpu_model_runner")


def main() -> None:
    """Be the stem."""
    calls, answers = sys.stdin.buffer, _answers()
    boot: Boot = pickle.load(calls)
    for name in (*_IMPORTS, *(_CPU_IMPORTS if boot.accelerator == "cpu" else ())):
        importlib.import_module(name)
    from nereus_adapters.rollout.vllm import lease

    gc.collect()
    lease.freeze()
    signal.signal(signal.SIGCHLD, _reap)
    answers.write(b"ready\n")
    while True:
        try:
            fork: Fork = pickle.load(calls)
        except EOFError:
            shutil.rmtree(boot.folder, ignore_errors=True)
            return
        stem = os.getpid()
        child = os.fork()
        if child == 0:
            _be_a_seat(boot, fork, answers, stem)
        answers.write(b"%d\n" % child)


def _answers() -> BinaryIO:
    """Keep stdout for answers; what anything prints goes to stderr, the stem's log."""
    mine = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    return mine


def _be_a_seat(boot: Boot, fork: Fork, answers: BinaryIO, stem: int) -> None:
    from nereus_adapters.rollout.vllm import front, serve

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    answers.close()
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    log = os.open(fork.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    code = 1
    try:
        if fork.front:
            front.serve(boot, fork, stem)
        else:
            serve.serve(boot, fork)
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        # Threads of torch may hold sockets of peers that are gone: do not wait for them.
        sys.stderr.flush()
        os._exit(code)


def _reap(number: int, frame: object) -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


if __name__ == "__main__":
    main()
