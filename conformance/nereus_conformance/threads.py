"""Runs primitives on threads, as a transition does, and never hangs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import pytest

from nereus_conformance.subject import THREAD_S


def together(calls: Sequence[Callable[[], object]]) -> list[object]:
    """Start calls at once, each on a thread; return what each returned or raised, in order."""
    results: list[object] = [None] * len(calls)
    start = threading.Barrier(len(calls))

    def run(index: int) -> None:
        start.wait(THREAD_S)
        try:
            results[index] = calls[index]()
        except Exception as error:
            results[index] = error

    threads = [
        threading.Thread(target=run, args=(i,), daemon=True, name=f"primitive {i}")
        for i in range(len(calls))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(THREAD_S)
    if hanging := [t.name for t in threads if t.is_alive()]:
        pytest.fail(f"I6 disjoint: {', '.join(hanging)} still ran after {THREAD_S:g} s (deadlock)")
    return results
