"""A device's memory on CPU: a limit that the kernel keeps while a rank's engine computes.

With ``VERL_CPU_MEMORY=BYTES``, a rank may hold that much of parameters, gradients, optimizer state
and activations. While its engine trains or infers, RLIMIT_DATA is what the process has, less what
the engine holds, plus the budget: an allocation over it is refused by the kernel, and torch raises
its own out-of-memory error. Between those calls there is no limit: what a transition stages lies in
host memory on a machine with accelerators.

Blocks of 256 KiB and more are mapped one by one and given back at once (glibc's M_MMAP_THRESHOLD),
so that what the kernel counts is what lives.
"""

import ctypes
import os
import resource
import threading
from contextlib import contextmanager

from nereus_plugins.post_import import after_import

LIMIT_BYTES = int(os.environ.get("VERL_CPU_MEMORY", "0"))
_MALLOPT = {-3: 262144, -1: 262144, -4: 1_000_000, -8: 1}
"""M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX (malloc.h); values chosen, not
measured."""
_SAMPLE_S = 0.002
"""Chosen, not measured: a peak between two samples is missed in the figure, not by the limit."""
_peak = 0


def peak_bytes():
    """Return the most that this rank's engines held at once, as sampled while they computed."""
    return _peak


def _data_bytes():
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith("VmData:"):
                return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmData")


def _held_bytes(engine):
    """Bytes of the engine's own tensors in this process."""
    states = engine.optimizer.state if engine.optimizer is not None else {}
    total = 0
    for parameter in engine.module.parameters():
        for tensor in (parameter, parameter.grad, *states.get(parameter, {}).values()):
            if tensor is not None and hasattr(tensor, "untyped_storage"):
                local = tensor.detach()
                local = local.to_local() if hasattr(local, "to_local") else local
                total += local.numel() * local.element_size()
    return total


@contextmanager
def limited(engine):
    """Keep the budget in a block in which an engine computes."""
    most, hard = resource.getrlimit(resource.RLIMIT_DATA)
    begun, done = threading.Event(), threading.Event()
    aside = 0

    def watch():
        global _peak
        begun.wait()
        while not done.wait(_SAMPLE_S):
            _peak = max(_peak, _data_bytes() - aside)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()  # first: its stack is not the engine's
    aside = _data_bytes() - _held_bytes(engine)
    begun.set()
    resource.setrlimit(resource.RLIMIT_DATA, (aside + LIMIT_BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (most, hard))
        done.set()
        watcher.join()


def _limit(module):
    if not LIMIT_BYTES:
        return
    libc = ctypes.CDLL(None)
    for parameter, value in _MALLOPT.items():
        libc.mallopt(parameter, value)
    engine = module.FSDPEngine
    for name in ("train_batch", "infer_batch"):
        setattr(engine, name, _within(getattr(engine, name)))


def _within(once):
    def call(self, *args, **kwargs):
        with limited(self):
            return once(self, *args, **kwargs)

    return call


after_import("verl.workers.engine.fsdp.transformer_impl", _limit)
