"""Supply: which devices of a job are to be left, and which are gone.

A device is *leaving* when somebody has written its name into the file ``leaving`` of the run's
folder, one ``node:index`` a line, or when Ray was told to drain its node (``ray drain-node``, a
spot notice). No plan uses it, and its units go elsewhere at the next boundary; taken out of the
file, it is used again. A device is *gone* when Ray says that its node is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from pathlib import Path

from nereus_core.cluster import Device

FILE = "leaving"
"""In the folder of the run."""
_log = logging.getLogger("nereus")


class Supply:
    """Looks at the file and at Ray's nodes whenever it is asked; starts and ends nothing.

    Args:
        devices: Returns all that the job holds or may hold.
        file: May be absent: then nobody has asked for a device.
    """

    def __init__(self, devices: Callable[[], Collection[Device]], file: Path) -> None:
        self._devices, self._file = devices, file
        self._said: set[str] = set()
        self._read: frozenset[Device] = frozenset()

    def leaving(self) -> frozenset[Device]:
        """Return the devices announced to leave."""
        nodes = self.draining_nodes()
        return self.asked_back() | {d for d in self._devices() if d.node in nodes}

    def gone(self) -> frozenset[Device]:
        """Return the devices whose node Ray has lost."""
        import ray

        alive = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
        return frozenset(d for d in self._devices() if d.node not in alive)

    def asked_back(self) -> frozenset[Device]:
        """Return the devices that somebody has named in the file."""
        try:
            lines = self._file.read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            self._read = frozenset()
            return self._read
        except (OSError, UnicodeDecodeError) as error:  # half written, or another's: look again
            self._warn("%s cannot be read (%s); what it said before counts", self._file, error)
            return self._read
        found: set[Device] = set()
        devices = frozenset(self._devices())
        for line in filter(None, map(str.strip, lines)):
            try:
                device = Device.parse(line)
            except ValueError:
                device = None
            if device in devices:
                found.add(device)
            else:  # a slip of the pen does not end a job
                known = ", ".join(map(str, sorted(devices)))
                self._warn("%s names %r, which is no device of this job: %s",
                           self._file, line, known)  # fmt: skip
        self._read = frozenset(found)
        return self._read

    def draining_nodes(self) -> frozenset[str]:
        """Return addresses of nodes that Ray was told to drain.

        Source: ray._private.state.GlobalState.get_draining_nodes, ray 2.55.
        """
        import ray
        from ray._private.state import state

        ids = frozenset(state.get_draining_nodes())
        if not ids:
            return frozenset()
        return frozenset(n["NodeManagerAddress"] for n in ray.nodes() if n["NodeID"] in ids)

    def _warn(self, message: str, *values: object) -> None:
        """Warn once of each thing."""
        if (said := message % values) not in self._said:
            self._said.add(said)
            _log.warning("%s", said)
