"""Twenty transitions of engines on the same devices, and what is left of them."""

import statistics
from itertools import pairwise
from pathlib import Path

import psutil

from nereus_core.layout import Layout

CYCLE = (Layout(1, 1), Layout(2, 1), Layout(1, 2), Layout(1, 1))
WARM = len(CYCLE)
"""Transitions before memory is compared."""
SHARED_MEMORY = Path("/dev/shm")


def below(process=None):
    """Return the processes below one, this one by default."""
    return {child.pid for child in psutil.Process(process).children(recursive=True)}


def shared(pids):
    """Return the paths of shared memory that processes have mapped, removed or not."""
    found = set()
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):
            continue
        names = [line.split(maxsplit=5)[-1] for line in lines if f" {SHARED_MEMORY}/" in line]
        found |= {Path(name.removesuffix(" (deleted)")) for name in names}
    return found


def require_nothing_left(devices, begin, use, resident_bytes, growth_bytes):
    """Change engines twenty times; memory, processes and shared memory stay as they were, and the
    files and threads of this process.

    Args:
        devices: two.
        begin: makes an engine that serves, of a layout and devices.
        use: asks an engine for tokens, and compares them.
        resident_bytes: of the processes that stay, each, after their engines have ended.
        growth_bytes: most that any of them may grow per transition, once warm.
    """
    grown, seen, before, held = [], set(), set(), (0, 0)
    driver = psutil.Process()
    for index in range(20):
        layout = CYCLE[index % len(CYCLE)]
        groups = [devices] if layout.num_devices == 2 else [(d,) for d in devices]
        engines = [begin(layout, group) for group in groups]
        for engine in engines:
            use(engine)
        seen |= shared(below())
        for engine in engines:
            engine.close()
        grown.append(resident_bytes())
        if index + 1 == WARM:
            before, held = below(), (driver.num_fds(), driver.num_threads())
    for own in zip(*grown, strict=True):
        steps = [b - a for a, b in pairwise(own[WARM - 1 :])]
        assert statistics.mean(steps) < growth_bytes, [round(g / 2**20, 1) for g in own]
    assert below() <= before
    assert driver.num_fds() <= held[0]
    assert driver.num_threads() <= held[1]
    assert seen
    assert not [path for path in seen if path.exists()]
