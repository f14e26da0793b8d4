"""How a seat answers a call, however the call came to it."""

from __future__ import annotations

import time
from collections.abc import Callable

from nereus_adapters.torch.wire import Call, Failure, Reply
from nereus_core.errors import NereusError


def answer(seat: Callable[[], object], call: Call) -> Reply:
    """Run a method of the seat that ``seat`` returns; what either raises is part of the reply."""
    start_s = time.perf_counter()
    value, failure = None, None
    try:
        method = getattr(seat(), call.method, None)
        if method is None or call.method.startswith("_"):
            raise NereusError(f"a seat has no method {call.method!r}.")
        value = method(**call.kwargs)
    except Exception as error:
        failure = Failure.of(error)
    return Reply(call.id, value, failure, time.perf_counter() - start_s)
