"""Turns: who may exchange weights now: whoever came first, and who shares no party with those."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from nereus_core.errors import WaitTimeout


@dataclass(eq=False, slots=True)
class _Turn:
    names: frozenset[str]
    longest_s: float


class Turns:
    """Thread-safe. A turn waits for those that came before it and share a party, for no other."""

    def __init__(self) -> None:
        self._moved = threading.Condition()
        self._come: list[_Turn] = []
        """Turns that are taken or waited for, in the order in which they came."""

    @contextmanager
    def take(self, names: Collection[str], longest_s: float) -> Iterator[None]:
        """Hold parties.

        Args:
            names: of the parties.
            longest_s: that they are held at most: how long others wait for them.

        Raises:
            WaitTimeout: those that came before took longer than they said.
        """
        mine = _Turn(frozenset(names), longest_s)
        with self._moved:
            before = sum(turn.longest_s for turn in self._come)  # were none side by side
            self._come.append(mine)
            try:
                self._wait(mine, before)
            except BaseException:
                self._leave(mine)
                raise
        try:
            yield
        finally:
            with self._moved:
                self._leave(mine)

    def _wait(self, mine: _Turn, longest_s: float) -> None:
        deadline_s = time.monotonic() + longest_s
        while ahead := self._ahead(mine):
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                shared = sorted(mine.names & frozenset().union(*(t.names for t in ahead)))
                awaited = f"the exchanges of weights before this one to leave {', '.join(shared)}"
                raise WaitTimeout(awaited, longest_s)
            self._moved.wait(left_s)

    def _ahead(self, mine: _Turn) -> list[_Turn]:
        earlier = self._come[: self._come.index(mine)]
        return [turn for turn in earlier if not turn.names.isdisjoint(mine.names)]

    def _leave(self, mine: _Turn) -> None:
        self._come.remove(mine)
        self._moved.notify_all()
