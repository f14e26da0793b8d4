"""Receiver: what an engine process does with weights, between responses."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import pickle
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

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

from nereus_adapters.rollout.sglang.calls import Outcome, outcome_file
from nereus_adapters.rollout.sglang.loading import CALL, DIGESTS
from nereus_core.errors import NereusError, WaitTimeout

LOOK_S = 0.05
"""How often to look at what has no event of its own; chosen, not measured."""
_IDLE_S = 30.0
"""Longest that ranks take to finish the step they are in once all is interrupted; chosen,
not measured."""


class Declined(NereusError):
    """The engine answered that it did not do what it was asked for."""


class Garbled(NereusError):
    """Weights arrived changed."""


class Receiver:
    """Lets the ranks of an engine take weights."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._manager = engine, engine.tokenizer_manager
        self._serials = itertools.count()

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
            await asyncio.sleep(LOOK_S / 10)
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
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)

    async def _wait_idle(self) -> None:
        """Wait until no rank computes, and forget keys and values of the weights so far."""
        deadline_s = time.monotonic() + _IDLE_S
        while not (await self._manager.flush_cache()).success:
            if time.monotonic() > deadline_s:
                raise WaitTimeout("ranks to be idle before an update of weights", _IDLE_S)
            await asyncio.sleep(LOOK_S)


_BEGIN, _END = BeginWeightUpdateReqInput(), EndWeightUpdateReqInput()


def _expect(doing: str, answer: tuple[bool, str]) -> None:
    succeeded, message = answer[:2]
    if not succeeded:
        raise Declined(f"could not {doing}: {message}")
