"""Front: a process with an `AsyncLLM`, whose scheduler is beside it and whose ranks are on seats.

vLLM's asynchronous front end keeps scheduler and executor, its engine core, in a process that it
starts with each engine. The stem forks the front, the front forks the core while it has one thread,
and the core leases every rank from a seat: nothing is imported, and seats stay.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import pickle
import threading
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection, Listener
from typing import Any

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from nereus_adapters.rollout.prctl import end_with_parent
from nereus_adapters.rollout.vllm import executor, lease
from nereus_adapters.rollout.vllm.hosting import (
    drawn,
    request,
    require_idle,
    require_reset,
    update_infos,
)
from nereus_adapters.rollout.vllm.meter import Meter
from nereus_adapters.rollout.vllm.transfer import BACKEND
from nereus_adapters.rollout.vllm.values import BROKEN, Boot, Call, Drawn, Fork, Reply, Seen
from nereus_adapters.rollout.weights import Manifest
from nereus_core.errors import WaitTimeout

_END_S = 30.0
"""An abort takes far less, and so does the end of a core; chosen, not measured."""
_LOOK_S = 0.1
"""How often to look whether the engine core is there; chosen, not measured."""


class EndingExecutor(executor.LeasedExecutor):
    """The executor of a core that ends with its front."""

    def _init_executor(self) -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        assert parent.pid is not None
        end_with_parent(parent.pid)
        super()._init_executor()


class Front:
    """Does what the driver asks, any number of calls at once, on one event loop.

    Args:
        llm: the engine.
        meter: its logger.
        driver: connection to the driver.
    """

    def __init__(self, llm: AsyncLLM, meter: Meter, driver: Connection) -> None:
        self._llm, self._meter, self._driver = llm, meter, driver
        self._version, self._broken = -1, False
        self._arriving: dict[str, asyncio.Task[Any] | None] = {}
        """Requests that vLLM is being told of: an abort would not find them yet."""
        self._responses: dict[str, asyncio.Task[None]] = {}
        self._calls: set[asyncio.Task[None]] = set()
        self._ended = asyncio.Event()

    async def run(self, started: int) -> None:
        """Answer the call that started the engine, and serve until the driver says goodbye."""
        try:
            await self._rpc("init_weight_transfer_engine", {"init_info": {}})
        except Exception as error:
            self._send(failed(started, error))
            return
        self._send(Reply(started))
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._listen, args=[loop], daemon=True, name="driver").start()
        watch = asyncio.create_task(self._watch())
        await self._ended.wait()
        watch.cancel()

    def _listen(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            with contextlib.suppress(EOFError, OSError):
                while (call := self._driver.recv()) is not None:
                    loop.call_soon_threadsafe(self._take, call)
        finally:  # a message that cannot be read ends the front too, with what it was in the log
            loop.call_soon_threadsafe(self._ended.set)

    def _take(self, call: Call) -> None:
        task = asyncio.create_task(self._answer(call))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    async def _answer(self, call: Call) -> None:
        try:
            reply = Reply(call.id, await getattr(self, f"do_{call.method}")(**call.kwargs))
        except Exception as error:
            reply = failed(call.id, error)
        self._send(reply)

    def _send(self, message: Reply | list[Drawn]) -> None:
        with contextlib.suppress(OSError):  # the driver is gone: its end is read next
            self._driver.send(message)

    async def _watch(self) -> None:
        """Say so when the engine core has ended with nothing in flight."""
        while not self._llm.errored:
            await asyncio.sleep(_LOOK_S)
        self._break(EngineDeadError())

    def _break(self, error: Exception) -> None:
        if not self._broken:
            self._broken = True
            self._send(failed(BROKEN, error))

    # --- Calls of the driver ----------------------------------------------------------------------

    async def do_submit(self, requests: list[dict[str, Any]]) -> dict[str, str]:
        """Begin responses; returns those refused, with the reason."""
        refused = {}
        for asked in requests:
            name = asked["id"]
            self._arriving[name] = asyncio.current_task()
            try:
                made = request(asked["tokens"], asked["sampling"])
                outputs = await self._llm.add_request(name, *made)
            except ValueError as error:
                refused[name] = str(error)
            except EngineDeadError as error:
                self._break(error)
            else:
                self._responses[name] = asyncio.create_task(self._respond(name, outputs))
                self._meter.busy(True)
            finally:
                del self._arriving[name]
        return refused

    async def _respond(self, name: str, outputs: Any) -> None:
        """Send tokens on as they are drawn."""
        try:
            while True:
                output = outputs.get_nowait() or await outputs.get()
                self._send([drawn(output, self._version)])
                if output.finished:
                    return
        except Exception as error:
            self._break(error)
        finally:
            del self._responses[name]
            self._meter.busy(bool(self._responses))

    async def do_interrupt(self, ids: list[str]) -> None:
        """Drop requests; what was drawn of them has been sent when this returns."""
        arriving = {task for name in ids if (task := self._arriving.get(name)) is not None}
        if arriving and (await asyncio.wait(arriving, timeout=_END_S))[1]:
            raise WaitTimeout(f"vLLM to take {', '.join(ids)}, which are to be aborted", _END_S)
        await self._llm.abort(ids)
        # Each gets its last output from the abort.
        left = {name: self._responses[name] for name in ids if name in self._responses}
        if left and (await asyncio.wait(left.values(), timeout=_END_S))[1]:
            raise WaitTimeout(f"the end of {', '.join(left)}, which were aborted", _END_S)

    async def do_check(self, manifest: Manifest) -> None:
        """Check weights before they are loaded."""
        await self._rpc("nereus_check", {"manifest": manifest})

    async def do_update(self, manifest: Manifest) -> None:
        """Load weights; nothing is in flight."""
        require_idle(bool(self._arriving or self._responses), manifest.version)
        await self._rpc("start_weight_update")
        await self._rpc("update_weights", {"update_info": update_infos(manifest)})
        await self._rpc("finish_weight_update")
        await self._llm.update_weight_version(str(manifest.version))
        require_reset(await self._llm.reset_prefix_cache(), manifest.version)
        self._version = manifest.version

    async def do_signals(self) -> Seen:
        """Return the engine's figures."""
        return self._meter.take(await self._rpc("nereus_peak_bytes"))

    async def do_rpc(self, method: str, kwargs: dict[str, Any]) -> list[Any]:
        """Run a method on every rank of the engine."""
        return await self._rpc(method, kwargs)

    async def do_stop(self) -> None:
        """End the engine, its core included."""
        self._broken = True  # what ends now is meant to
        self._llm.shutdown(timeout=_END_S)

    async def _rpc(self, method: str, kwargs: Mapping[str, Any] | None = None) -> list[Any]:
        content = pickle.dumps((method, dict(kwargs or {})))
        found = await self._llm.collective_rpc("nereus_call", args=(content,))
        return [pickle.loads(each) for each in found]


def failed(call_id: int, error: BaseException) -> Reply:
    """Return the reply that says what went wrong."""
    return Reply(call_id, None, f"{type(error).__name__}: {error}", traceback.format_exc())


def serve(boot: Boot, fork: Fork, stem: int) -> None:
    """Be a front, forked by the process of a stem: the first call starts the engine."""
    end_with_parent(stem)
    with Listener(fork.address, "AF_UNIX", authkey=bytes.fromhex(boot.secret)) as listener:
        driver = listener.accept()
    driver.recv()  # who it is: nobody else knows of this socket
    driver.send(Reply(-1, os.getpid()))
    call: Call | None = driver.recv()
    if call is None:
        return
    try:
        meter = Meter()
        llm = _started(meter, **call.kwargs)
    except BaseException as error:
        driver.send(failed(call.id, error))
        return
    asyncio.run(Front(llm, meter, driver).run(call.id))


def _started(
    meter: Meter, args: dict[str, Any], env: dict[str, str | None], secret: bytes
) -> AsyncLLM:
    executor.secret = secret
    lease.set_environment(env)
    made = {
        "weight_transfer_config": {"backend": BACKEND},
        "distributed_executor_backend": EndingExecutor,
        **args,
    }
    config = AsyncEngineArgs(**made).create_engine_config()
    # Sound here: one thread, no device. (vLLM has every process of a CPU engine import anew.)
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    return AsyncLLM.from_vllm_config(config, stat_loggers=[meter])
