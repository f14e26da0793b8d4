"""Hosts of weights: processes of this machine, each with memory of its own."""

import multiprocessing
import os
import signal
from concurrent.futures import Future, ProcessPoolExecutor

import numpy as np

from nereus_adapters.rollout.hosts import HostLost
from nereus_adapters.rollout.memory import HostMemory
from nereus_adapters.rollout.segment import held
from nereus_adapters.rollout.weights import publish

WAIT_S = 60.0


def begin(name):
    global memory
    memory = HostMemory(name, "127.0.0.1")


def run(method, args):
    if method == "write":
        name, cells = args
        return publish(name, cells, lambda tensor, box: np.ones(box.shape, np.float32))
    if method == "held":
        return held()
    return getattr(memory, method)(*args)


class Host:
    """A process that has a `HostMemory`."""

    def __init__(self, name):
        self.name, self.alive = name, True
        self._process = ProcessPoolExecutor(
            1, multiprocessing.get_context("spawn"), initializer=begin, initargs=(name,)
        )
        self.pid = self._process.submit(os.getpid).result(WAIT_S)

    def ask(self, method, /, *args):
        answer = Future()

        def settle(done):
            error = done.exception()
            if error is None:
                answer.set_result(done.result())
            elif self.alive:
                answer.set_exception(error)
            else:
                answer.set_exception(HostLost(self.name, method, "its process has ended"))

        try:
            self._process.submit(run, method, args).add_done_callback(settle)
        except RuntimeError:
            answer.set_exception(HostLost(self.name, method, "its process has ended"))
        return answer

    def kill(self):
        self.alive = False
        os.kill(self.pid, signal.SIGKILL)
        self._process.shutdown()

    def close(self):
        self._process.shutdown()
