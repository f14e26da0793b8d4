"""What crosses the link between driver and seat: calls, replies, and errors as plain values.

They are pickled; a link hands out only what somebody who knows the job's secret has sent.
"""

from __future__ import annotations

import importlib
import pickle
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nereus_adapters.torch.link import Link
from nereus_core.errors import NereusError

# Exceptions whose class may be rebuilt on the driver; others arrive as SeatError.
_REBUILT = ("nereus_core.", "nereus_adapters.")


class SeatError(NereusError):
    """A seat's method raised something that is not an error of Nereus."""


@dataclass(frozen=True, slots=True)
class Call:
    """A method to run on a seat, in the order of arrival."""

    id: int
    method: str
    kwargs: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception, taken apart: pickling one calls its constructor with the wrong arguments."""

    module: str
    kind: str
    message: str
    state: Mapping[str, object]
    trace: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Take an exception apart; attributes that do not pickle are left out."""
        state = {k: v for k, v in vars(error).items() if _pickles(v)}
        trace = "".join(traceback.format_exception(error))
        return cls(type(error).__module__, type(error).__name__, str(error), state, trace)

    def rebuilt(self, device: object, method: str) -> Exception:
        """Put the exception together again, with the seat's traceback as a note."""
        error: Exception
        if self.module.startswith(_REBUILT):
            kind: type[Exception] = getattr(importlib.import_module(self.module), self.kind)
            error = kind.__new__(kind)
            error.args = (self.message,)
            vars(error).update(self.state)
        else:
            error = SeatError(f"{method} on seat {device}: {self.kind}: {self.message}")
        error.add_note(f"raised by {method} on seat {device}:\n{self.trace}")
        return error


@dataclass(frozen=True, slots=True)
class Reply:
    """The end of a call."""

    id: int
    value: Any
    failure: Failure | None
    elapsed_s: float
    """Seconds the seat spent on it, waiting for other seats included."""


def send_value(link: Link, value: object) -> None:
    """Write one value."""
    link.send(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL))


def receive(link: Link) -> Any:
    """Read one value; raises EOFError when the other end is gone, Refused as `Link.receive`."""
    return pickle.loads(link.receive())


def _pickles(value: object) -> bool:
    try:
        pickle.dumps(value)
    except Exception:  # any object may refuse, each with an error of its own
        return False
    return True
