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
import itertools
import multiprocessing
import os
import pickle
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from sglang.srt.entrypoints.engine import Engine
from sglang.srt.managers.io_struct import (
    BeginWeightUpdateReqInput,
    DestroyWeightsUpdateGroupReqInput,
    EndWeightUpdateReqInput,
    InitWeightsUpdateGroupReqInput,
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightsFromTensorReqInput,
)
from sglang.srt.utils.common import MultiprocessingSerializer

from nereus_adapters.rollout.resident import resident_bytes
from nereus_adapters.rollout.sglang.calls import Outcome, outcome_file
from nereus_adapters.rollout.sglang.loading import CALL, DIGESTS, run_rank
from nereus_adapters.rollout.sglang.meter import Meter
from nereus_core.errors import NereusError, WaitTimeout

_IDLE_S = 30.0
"""Longest that ranks take to finish the step they are in once all is interrupted. Chosen."""
_LOOK_S = 0.05
"""How often to look at what has no event of its own; chosen, not measured."""


class Declined(NereusError):
    """The engine answered that it did not do what it was asked for."""


class Garbled(NereusError):
    """Weights arrived changed."""


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
        self._serials = itertools.count()

    async def run(self, pids: list[int]) -> None:
        """Serve until the driver's end is closed; a rank that ends ends this process."""
        loop = asyncio.get_running_loop()
        # Not add_reader: uvloop makes what it polls non-blocking, and long messages would be cut.
        threading.Thread(target=self._listen, args=[loop], daemon=True, name="driver").start()
        for pid in pids:
            loop.add_reader(os.pidfd_open(pid), functools.partial(_end_all, pids))
        watch = loop.create_task(self._meter.watch(lambda: bool(self._running), _LOOK_S))
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
            value = await getattr(self, method)(**arguments)
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
            await asyncio.wait(tasks, timeout=_LOOK_S)

    # --- Weights ----------------------------------------------------------------------------------

    async def call_ranks(self, call: bytes, timeout_s: float) -> list[object]:
        """Let every rank do a `loading.Call`, within an update; return what each returned.

        Raises:
            Garbled: what a rank read has another digest than it was published with.
            Declined: a rank could not do it.
        """
        ranks = range(self._engine.server_args.tp_size)
        with self._path() as path:
            path.write_bytes(call)
            request = UpdateWeightsFromTensorReqInput(
                serialized_named_tensors=[MultiprocessingSerializer.serialize([]) for _ in ranks],
                load_format=f"{CALL}{path}",
                flush_cache=False,
            )
            await self.begin_receiving()
            try:
                answer = await self._manager.update_weights_from_tensor(request, None)
                _expect("update weights", answer)
                return await self._outcomes(path, timeout_s)
            finally:
                await self.end_receiving()

    async def join(self, address: str, port: int, name: str, offset: int, size: int) -> None:
        """Join a group in which rank 0 holds weights and ranks from ``offset`` on are ours."""
        _expect(
            "join a weight group",
            await self._manager.init_weights_update_group(
                InitWeightsUpdateGroupReqInput(
                    master_address=address,
                    master_port=port,
                    rank_offset=offset,
                    world_size=size,
                    group_name=name,
                    backend="nccl" if self._engine.server_args.device == "cuda" else "gloo",
                ),
                None,
            ),
        )

    async def leave(self, name: str) -> None:
        """Leave a weight group."""
        _expect(
            "leave a weight group",
            await self._manager.destroy_weights_update_group(
                DestroyWeightsUpdateGroupReqInput(group_name=name), None
            ),
        )

    async def begin_receiving(self) -> None:
        """Be ready for weights from groups; their senders may begin once this has returned."""
        await self._wait_idle()
        _expect("begin an update", await self._manager.begin_weight_update(_BEGIN, None))

    async def receive(
        self,
        group: str,
        names: list[str],
        dtypes: list[str],
        shapes: list[list[int]],
        timeout_s: float,
    ) -> None:
        """Take tensors that rank 0 of a group broadcasts; the last holds the others' digests."""
        with self._path() as path:
            request = UpdateWeightsFromDistributedReqInput(
                names=[*names[:-1], f"{DIGESTS}{path}"],
                dtypes=dtypes,
                shapes=shapes,
                group_name=group,
                flush_cache=False,
            )
            _expect(
                f"receive weights from group {group}",
                await self._manager.update_weights_from_distributed(request, None),
            )
            await self._outcomes(path, timeout_s)

    async def end_receiving(self) -> None:
        """Make what was received what is served."""
        _expect("end an update", await self._manager.end_weight_update(_END, None))

    async def _outcomes(self, path: Path, timeout_s: float) -> list[object]:
        """Wait until every rank has said how it went."""
        arguments = self._engine.server_args
        files = [outcome_file(path, r) for r in range(arguments.tp_size * arguments.pp_size)]
        deadline_s = time.monotonic() + timeout_s
        while missing := [rank for rank, file in enumerate(files) if not file.exists()]:
            if time.monotonic() > deadline_s:
                ranks = ", ".join(map(str, missing))
                raise WaitTimeout(f"rank {ranks} to say how its update went", timeout_s)
            await asyncio.sleep(_LOOK_S / 10)
        found: list[Outcome] = [pickle.loads(file.read_bytes()) for file in files]
        for file in files:
            file.unlink()
        if problem := "; ".join(o.problem for o in found if o.problem is not None):
            raise Garbled(problem) if any(o.garbled for o in found) else Declined(problem)
        return [o.value for o in found]

    @contextlib.contextmanager
    def _path(self) -> Iterator[Path]:
        """Return a path for what concerns one update."""
        path = Path(tempfile.gettempdir()) / f"update{next(self._serials)}"
        yield path
        path.unlink(missing_ok=True)

    async def _wait_idle(self) -> None:
        """Wait until no rank computes, and forget keys and values of the weights so far."""
        deadline_s = time.monotonic() + _IDLE_S
        while not (await self._manager.flush_cache()).success:
            if time.monotonic() > deadline_s:
                raise WaitTimeout("ranks to be idle before an update of weights", _IDLE_S)
            await asyncio.sleep(_LOOK_S)

    # --- Looking ----------------------------------------------------------------------------------

    async def signals(self) -> dict[str, Any]:
        """Return what was seen since the last call."""
        return self._meter.take()


_BEGIN, _END = BeginWeightUpdateReqInput(), EndWeightUpdateReqInput()


def _expect(doing: str, answer: tuple[bool, str]) -> None:
    succeeded, message = answer[:2]
    if not succeeded:
        raise Declined(f"could not {doing}: {message}")


def _end_all(pids: list[int]) -> None:
    """End ranks and this process, without leave-taking: they hold nothing that must be saved."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    os._exit(0)
