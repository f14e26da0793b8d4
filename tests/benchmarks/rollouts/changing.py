"""Seconds from TP1 to TP2: seats leased anew against a stock engine restarted."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from nereus_adapters.rollout.ports import Prompt, Sampling
from nereus_adapters.rollout.vllm.engine import VllmEngine
from nereus_adapters.rollout.vllm.factory import VllmFactory
from nereus_adapters.rollout.vllm.settings import CPU_ENV
from nereus_adapters.rollout.weights import Published
from nereus_core.cluster import Device
from nereus_core.layout import Layout

_WAIT_S = 600
ONE, TWO = Layout(1, 1), Layout(2, 1)


def leased(
    factory: VllmFactory, devices: tuple[Device, ...], published: Published, *, rounds: int
) -> list[float]:
    """Change 2 x TP1 to TP2 in place: end, start, weights and the first token."""
    found = []
    for _ in range(rounds):
        engines = [_serving(factory, ONE, (d,), published) for d in devices]
        begin_s = time.perf_counter()
        for engine in engines:
            engine.close()
        engine = _serving(factory, TWO, devices, published)
        found.append(time.perf_counter() - begin_s)
        engine.close()
    return found


def _serving(
    factory: VllmFactory, layout: Layout, devices: tuple[Device, ...], published: Published
) -> VllmEngine:
    engine = factory.create("bench", layout, devices)
    engine.update_weights(published.version, published.manifest(layout))
    engine.submit(Prompt("first", (1, 5, 9), Sampling(1))).result(_WAIT_S)
    return engine


def restarted(model: Path, *, rounds: int) -> list[float]:
    """Change TP1 to TP2 by ending a stock engine and starting another, without its weights."""
    found = []
    for _ in range(rounds):
        engine = _started(model, 1)
        begin_s = time.perf_counter()
        _ended(engine)
        engine = _started(model, 2)
        found.append(time.perf_counter() - begin_s)
        _ended(engine)
    return found


def _started(model: Path, tp: int) -> tuple[subprocess.Popen[bytes], int]:
    mine, theirs = os.pipe()
    process = subprocess.Popen(
        [sys.executable, str(_STOCK), str(model), str(tp), str(theirs)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=(theirs,),
        env={**os.environ, **CPU_ENV, "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"},
    )
    os.close(theirs)
    if os.read(mine, 6) != b"ready\n":
        raise RuntimeError(f"the stock engine did not start (exit code {process.wait(_WAIT_S)})")
    return process, mine


def _ended(engine: tuple[subprocess.Popen[bytes], int]) -> None:
    process, mine = engine
    assert process.stdin is not None
    process.stdin.close()
    process.wait(_WAIT_S)
    os.close(mine)


_STOCK = Path(__file__).with_name("stock.py")


def summary(found: list[float]) -> dict[str, Any]:
    """Return the median of some seconds, and all of them."""
    return {"median_s": sorted(found)[len(found) // 2], "all_s": [round(s, 2) for s in found]}
