"""Forking: vLLM's processes as forks of one that has imported vLLM, in an actor of Ray.

vLLM spawns its engine core from a Ray actor, for an actor has threads that do not survive a fork,
and each spawned process imports vLLM anew. Python's fork server is what goes with threads: a
process of its own, with one thread and no device, that has made the imports and forks when it is
asked to. What it forks is no actor any more, and forks its workers itself, as vLLM does by default.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
from collections.abc import Mapping
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
_IMPORTS = (
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "openrlhf.trainer.ray.vllm_worker_wrap",
)
_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of linux/prctl.h


class _Forked(ForkServerProcess):
    """A process that is forked, in the environment that its parent has when it starts it."""

    _environment: Mapping[str, str]

    def start(self) -> None:
        """Start; vLLM names an engine's devices in the environment around this call."""
        self._environment = {k: v for k, v in os.environ.items() if k != _METHOD}
        super().start()

    def run(self) -> None:
        """Run in the fork; ends with the fork server, and that with the process it serves."""
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        _let_fork_server_end()
        os.environ.clear()
        os.environ.update(self._environment)
        if threads := os.environ.get("OMP_NUM_THREADS"):  # read by torch when it was imported
            import torch

            torch.set_num_threads(int(threads))
        super().run()


def _let_fork_server_end() -> None:
    """Close what a fork is given of the pipe by which its fork server knows whom it serves.

    Held here, it would keep the server, and so this process, alive when that one is killed.
    """
    server: Any = forkserver._forkserver
    if server._forkserver_alive_fd is not None:
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = None


class _Forks(ForkServerContext):
    """The context in which vLLM starts its engine core."""

    Process = _Forked


def install() -> None:
    """Start the fork server, and let vLLM's engines of this process be forked by it.

    Does nothing where the job has set VLLM_WORKER_MULTIPROC_METHOD.
    """
    from vllm.platforms import current_platform
    from vllm.v1.engine import utils

    if os.environ.get(_METHOD):
        return
    worker = "cpu_worker" if current_platform.is_cpu() else "gpu_worker"
    multiprocessing.set_forkserver_preload([*_IMPORTS, f"vllm.v1.worker.{worker}"])
    forkserver.ensure_running()
    context = _Forks()
    utils.get_mp_context = lambda: context
