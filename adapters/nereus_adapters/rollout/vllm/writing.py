"""Writer: messages to a process, in order, from a thread: nobody waits until they are read."""

from __future__ import annotations

import queue
import threading
from typing import Protocol


class Line(Protocol):
    """Where messages go."""

    def send_bytes(self, message: bytes, /) -> None:
        """Send one; may block; raises OSError when the process is gone."""
        ...

    def close(self) -> None:
        """Let go of it."""
        ...


class Writer:
    """Thread-safe. Messages wait in memory while the process reads none.

    The line is the writer's to close: closed by another thread under a write, it would have no
    file any more, or one that was opened since.

    Args:
        line: to the process.
        name: of the thread.
    """

    def __init__(self, line: Line, name: str) -> None:
        self._line = line
        self._messages: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._gone = threading.Event()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def write(self, message: bytes) -> None:
        """Send a message after those before it; dropped once the process is gone."""
        self._messages.put(message)

    def close(self) -> None:
        """Close the line, once a message that is under way has gone or failed; drop the others.

        Does not wait. Safe to call twice.
        """
        self._gone.set()
        self._messages.put(None)

    def _run(self) -> None:
        while (message := self._messages.get()) is not None:
            if not self._gone.is_set():
                try:
                    self._line.send_bytes(message)
                except OSError:  # whoever reads from the process sees its end
                    self._gone.set()
        self._line.close()
