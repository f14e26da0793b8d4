"""Engines: start and end vLLM engines on given devices, and tie them to the actor's weights."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterator
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from nereus_adapters.openrlhf import ranks, warm
from nereus_adapters.openrlhf.checks import refuse_scattered
from nereus_adapters.openrlhf.groups import SHARE
from nereus_adapters.openrlhf.running import Running
from nereus_adapters.ray_calls import ask, inside, outcome
from nereus_core.errors import NereusError
from nereus_core.units import Unit, UnitId
from nereus_core.workload import ACTOR_GENERATE, ACTOR_TRAIN


class _Recorded:
    """Stands in for the engine's actor class while OpenRLHF computes its arguments."""

    def __init__(self) -> None:
        self.arguments: dict[str, Any] = {}

    def options(self, **_: Any) -> _Recorded:
        return self

    def remote(self, **arguments: Any) -> None:
        self.arguments = arguments


def start(running: Running, unit: Unit) -> Any:
    """Start an engine on a unit's devices; returns its actor, which may still be loading.

    What an engine is started with is OpenRLHF's business (`create_vllm_engines`); where, ours.

    Raises:
        Infeasible: the devices lie on several nodes, in different placement groups.
    """
    refuse_scattered(running, unit)
    bundles = [running.bundles[device] for device in unit.devices]
    pg, together = bundles[0].pg, warm.together(running, unit)
    arguments = _arguments(running, unit, pg)
    if warm.fits(running, unit) and not (running.cold and together):
        seat = warm.take(running, unit)
        # One node: vLLM's own worker processes, which are forked, do what actors of Ray would.
        executor = "uni" if unit.layout.tp == 1 else "mp"
        arguments |= {"bundle_indices": None, "distributed_executor_backend": executor}
        running.seated[unit.id] = seat
        running.opening[unit.id] = seat.handle.open.remote(warm.visible(running, unit), arguments)
        return seat.handle
    from openrlhf.trainer.ray.vllm_engine import RolloutRayActor

    alone, indices = unit.layout.tp == 1, [bundle.index for bundle in bundles]
    share = SHARE if alone else 0
    return RolloutRayActor.options(
        num_cpus=share,
        num_gpus=share,
        scheduling_strategy=PlacementGroupSchedulingStrategy(
            placement_group=pg,
            placement_group_capture_child_tasks=True,
            placement_group_bundle_index=indices[0],
        ),
    ).remote(**arguments | {"bundle_indices": None if alone else indices})


def _arguments(running: Running, unit: Unit, pg: Any) -> dict[str, Any]:
    """Return what OpenRLHF starts such an engine with."""
    from openrlhf.trainer.ray import vllm_engine

    args, recorded = running.args, _Recorded()
    with _in_place_of(vllm_engine, "RolloutRayActor", recorded):
        vllm_engine.create_vllm_engines(
            1,
            unit.layout.tp,
            args.actor.model_name_or_path,
            args.train.seed + unit.id.serial,
            args.train.full_determinism_enable,
            args.vllm.enable_prefix_caching,
            args.vllm.enforce_eager,
            args.data.max_len,
            pg,
            args.vllm.gpu_memory_utilization,
            False,
            "processed_logprobs" if args.algo.advantage.is_correction_level != "off" else None,
            agent_func_path=args.train.agent_func_path,
            remote_rm_url=args.reward.remote_url,
        )
    return recorded.arguments | {"enable_sleep_mode": args.vllm.enable_sleep}


@contextlib.contextmanager
def _in_place_of(module: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def _shut_down(actor: Any) -> None:
    actor.llm.shutdown()
    del actor.llm


def stop(running: Running, units: Collection[UnitId]) -> None:
    """End engines and their processes, all at once, but keep their seats.

    Those that have not answered `call_s` after all were asked are killed.
    """
    deadline_s = time.monotonic() + running.section.call_s
    asked = {unit: inside(running.engines[unit], _shut_down) for unit in units}
    for unit, ref in asked.items():
        handle, seat = running.engines.pop(unit), running.seated.pop(unit, None)
        running.opening.pop(unit, None)
        left_s = max(0.0, deadline_s - time.monotonic())
        try:
            outcome(ref, f"engine {unit} to shut down", left_s)
        except (NereusError, RayError):
            seat = None
        if seat is None:
            ray.kill(handle)
        else:
            running.waiting.append(seat)


def forget(running: Running, units: Collection[UnitId]) -> None:
    """End engines whose devices are gone; waits for none, for they do not answer."""
    for unit in [unit for unit in units if unit in running.engines]:
        ray.kill(running.engines.pop(unit))
        running.seated.pop(unit, None)
        running.opening.pop(unit, None)


def kill_all(running: Running) -> None:
    """End every engine and every seat, whatever they are doing."""
    seats = [seat.handle for seat in running.waiting]
    for handle in [*running.engines.values(), *seats]:
        ray.kill(handle)
    for kept in (running.engines, running.seated, running.opening, running.waiting):
        kept.clear()


def start_missing(running: Running) -> None:
    """Start what engines the units alive lack, and end those that have no unit; waits for none.

    Raises:
        Infeasible: an engine cannot be started on its devices.
    """
    wanted = {unit.id: unit for unit in running.alive.of(ACTOR_GENERATE)}
    stop(running, [u for u in running.engines if u not in wanted])
    for unit_id, unit in wanted.items():
        if unit_id not in running.engines:
            running.engines[unit_id] = start(running, unit)


def await_all(running: Running) -> None:
    """Wait until every engine answers.

    Raises:
        WaitTimeout, SeatDead: an engine has not come up.
    """
    opening, engines = list(running.opening.values()), list(running.engines.values())
    outcome(opening, f"{len(opening)} engines to start", running.section.start_s)
    running.opening.clear()
    outcome(
        [engine.get_num_unfinished_requests.remote() for engine in engines],
        f"{len(engines)} engines to answer",
        running.section.start_s,
    )


def tie(running: Running) -> None:
    """Give the actor's ranks the engines of the units alive, and the engines its weights.

    Raises:
        WaitTimeout: the group or the broadcast hangs; names which.
        SeatDead: a rank or an engine has ended.
    """
    trainer, section = running.trainer, running.section
    engines = [running.engines[u.id] for u in running.alive.of(ACTOR_GENERATE)]
    tp = running.layout(ACTOR_GENERATE).tp
    running.args.vllm.num_engines, running.args.vllm.tensor_parallel_size = len(engines), tp
    trainer.vllm_engines[:] = engines
    if trainer.vllm_engines is not _of_generator(trainer):
        _of_generator(trainer)[:] = engines
    handles = running.handles(ACTOR_TRAIN)
    awaited = f"the weight-sync group of {len(engines)} engines"
    ask(handles, ranks.tie, engines, len(engines), tp, awaited=awaited, timeout_s=section.call_s)
    if running.args.vllm.enable_sleep:
        woken = [engine.wake_up.remote(tags=["weights"]) for engine in engines]
        outcome(woken, "engines to wake up for their weights", section.call_s)
    outcome(
        [handle.broadcast_to_vllm.remote() for handle in handles],
        f"the broadcast of weights to {len(engines)} engines",
        section.call_s,
    )


def _of_generator(trainer: Any) -> list[Any]:
    """Return the engine list that generates; in an asynchronous job that is in another process."""
    generator = getattr(trainer, "samples_generator", None)
    found: list[Any] = trainer.vllm_engines if generator is None else generator.vllm_engines
    return found
