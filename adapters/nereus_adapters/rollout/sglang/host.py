"""Host: the process of one engine, around `sglang.Engine`.

The driver's messages come over a private socket pair: ``(call id, method, arguments)``; answers go
back as ``("answer", id, value)`` or ``("failed", id, kind, text)``. Tokens are sent as they are
made, so that the driver has all of them when this process is killed:
``("tokens", prompt id, tokens, logprobs)`` and ``("done", prompt id, why)``.

A rank process that ends takes the whole engine with it, at once: half an engine serves nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import multiprocessing
import os
import signal
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from sglang.srt.entrypoints.engine import Engine

from nereus_adapters.rollout.resident import resident_bytes
from nereus_adapters.rollout.sglang.loading import run_rank
from nereus_adapters.rollout.sglang.meter import Meter
from nereus_adapters.rollout.sglang.receiving import LOOK_S, Declined, Receiver
from nereus_core.errors import WaitTimeout


class _ForkingEngine(Engine):
    """An engine whose ranks are forked from this process where that is safe, spawned where not.

    Prompts and responses are token ids, so no detokenizer process is started.
    """

    run_scheduler_process_func = staticmethod(run_rank)

    @classmethod
    def _launch_scheduler_processes(
        cls, server_args: Any, port_args: Any, *args: Any, **kwargs: Any
    ) -> Any:
        # SGLang names a file in shared memory after it and leaves it behind; whoever ends this
        # process knows it by this name.
        port_args.instance_id = Path(os.environ["TMPDIR"]).name
        with _start_method("fork" if _may_fork() else "spawn"):
            return super()._launch_scheduler_processes(server_args, port_args, *args, **kwargs)

    @classmethod
    def _launch_detokenizer_subprocesses(cls, **kwargs: Any) -> Any:
        return [], []


def _may_fork() -> bool:
    """Whether a forked child can use what this process has imported: no threads, no CUDA yet."""
    alone = threading.active_count() == 1 and len(os.listdir("/proc/self/task")) == 1
    return alone and not torch.cuda.is_initialized()


@contextlib.contextmanager
def _start_method(method: str) -> Iterator[None]:
    before = multiprocessing.get_start_method()
    multiprocessing.set_start_method(method, force=True)
    try:
        yield
    finally:
        multiprocessing.set_start_method(before, force=True)


def serve(connection: Connection, lease: dict[str, Any]) -> None:
    """Start the engine of a lease and serve it until the driver is gone.

    Args:
        connection: to the driver.
        lease: ``environment`` to set and ``arguments`` of `sglang.Engine`.
    """
    os.environ.update(lease["environment"])
    tempfile.tempdir = None  # was settled before TMPDIR was set
    started_s, base_bytes = time.perf_counter(), resident_bytes()
    engine = _ForkingEngine(**lease["arguments"])
    host = Host(engine, connection, base_bytes)
    pids = list(engine.get_all_child_pids())
    connection.send(("ready", pids, time.perf_counter() - started_s))
    engine.loop.run_until_complete(host.run(pids))


class Host:
    """Does what the driver asks, several requests at once, on the engine's event loop."""

    def __init__(self, engine: Engine, connection: Connection, base_bytes: int) -> None:
        self._engine, self._connection = engine, connection
        self._manager = engine.tokenizer_manager
        self._meter = Meter(engine, base_bytes)
        self._running: dict[str, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended = asyncio.Event()
        receiver = Receiver(engine)
        self._methods: dict[str, Callable[..., Awaitable[Any]]] = {
            "interrupt": self.interrupt,
            "signals": self.signals,
            "call_ranks": receiver.call_ranks,
            "join": receiver.join,
            "leave": receiver.leave,
            "begin_receiving": receiver.begin_receiving,
            "receive": receiver.receive,
            "end_receiving": receiver.end_receiving,
        }

    async def run(self, pids: list[int]) -> None:
        """Serve until the driver's end is closed; a rank that ends ends this process."""
        loop = asyncio.get_running_loop()
        # Not add_reader: uvloop makes what it polls non-blocking, and long messages would be cut.
        threading.Thread(target=self._listen, args=[loop], daemon=True, name="driver").start()
        for pid in pids:
            loop.add_reader(os.pidfd_open(pid), functools.partial(_end_all, pids))
        watch = loop.create_task(self._meter.watch(lambda: bool(self._running), LOOK_S))
        await self._ended.wait()
        watch.cancel()
        _end_all(pids)

    def _listen(self, loop: asyncio.AbstractEventLoop) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                loop.call_soon_threadsafe(self._take, *self._connection.recv())
        loop.call_soon_threadsafe(self._ended.set)

    def _take(self, call_id: int, method: str, arguments: dict[str, Any]) -> None:
        if method == "submit":
            task = asyncio.create_task(self._respond(**arguments))
            self._running[arguments["prompt_id"]] = task
        else:
            task = asyncio.create_task(self._answer(call_id, method, arguments))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, call_id: int, method: str, arguments: dict[str, Any]) -> None:
        try:
            value = await self._methods[method](**arguments)
        except Exception as error:
            self._send("failed", call_id, type(error).__name__, str(error))
        else:
            self._send("answer", call_id, value)

    def _send(self, *message: object) -> None:
        with contextlib.suppress(OSError):  # the driver is gone: its end is read next
            self._connection.send(message)

    # --- Responses --------------------------------------------------------------------------------

    async def _respond(self, prompt_id: str, tokens: list[int], sampling: dict[str, Any]) -> None:
        num_sent, why = 0, "abort"
        self._meter.arrived(prompt_id)
        try:
            parts = await self._engine.async_generate(
                input_ids=tokens,
                sampling_params=sampling,
                rid=prompt_id,
                return_logprob=True,
                stream=True,
            )
            async for part in parts:
                about = part["meta_info"]
                # Both lists are all there is so far. After an abort the newest token comes twice
                # to those who stream increments; counting what was sent is exact in either case.
                fresh = list(part["output_ids"][num_sent:])
                logprobs = [
                    value for value, *_ in about["output_token_logprobs"][num_sent:][: len(fresh)]
                ]
                if len(logprobs) < len(fresh):
                    raise Declined(f"{len(fresh)} tokens came with {len(logprobs)} logprobs")
                num_sent += len(fresh)
                self._meter.drew(prompt_id, len(fresh), about.get("num_retractions", 0))
                if fresh:
                    self._send("tokens", prompt_id, fresh, logprobs)
                if about["finish_reason"] is not None:
                    why = about["finish_reason"]["type"]
        except Exception as error:
            self._send("refused", prompt_id, f"{type(error).__name__}: {error}")
        else:
            self._send("done", prompt_id, why)
        finally:
            self._meter.left(prompt_id)
            del self._running[prompt_id]

    async def interrupt(self, timeout_s: float) -> None:
        """End all responses; each ends as ``abort`` with the tokens that it has."""
        # One that has not reached the ranks yet is not known there: ask again until none is left.
        deadline_s = time.monotonic() + timeout_s
        while tasks := list(self._running.values()):
            if time.monotonic() > deadline_s:
                raise WaitTimeout(f"the end of {', '.join(sorted(self._running))}", timeout_s)
            self._manager.abort_request(abort_all=True)
            await asyncio.wait(tasks, timeout=LOOK_S)

    # --- Looking ----------------------------------------------------------------------------------

    async def signals(self) -> dict[str, Any]:
        """Return what was seen since the last call."""
        return self._meter.take()


def _end_all(pids: list[int]) -> None:
    """End ranks and this process, without leave-taking: they hold nothing that must be saved."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    os._exit(0)
