"""Writer: messages to a process, in order, from a thread: nobody waits until they are read."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable


class Writer:
    """Thread-safe. Messages wait in memory while the process reads none.

    Args:
        put: sends one, and may block; raises OSError when the process is gone.
        name: of the thread.
    """

    def __init__(self, put: Callable[[bytes], None], name: str) -> None:
        self._put = put
        self._messages: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def write(self, message: bytes) -> None:
        """Send a message after those before it."""
        self._messages.put(message)

    def close(self) -> None:
        """End the thread, once what was to be sent has been. Safe to call twice."""
        self._messages.put(None)

    def _run(self) -> None:
        while (message := self._messages.get()) is not None:
            try:
                self._put(message)
            except OSError:  # whoever reads from the process sees its end
                return
