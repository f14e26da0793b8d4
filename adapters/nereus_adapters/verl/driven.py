"""driven: one verl trainer whose ``fit`` stands still at its boundaries; for the harness."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from typing import Any

import ray

from nereus_adapters.ray_calls import call_all
from nereus_adapters.verl import behind, draining, shards
from nereus_adapters.verl.adapter import VerlAdapter
from nereus_adapters.verl.fleet import Fleet, Seat
from nereus_adapters.verl.paced import Paced
from nereus_adapters.verl.standing import ROLES
from nereus_core.cluster import Device
from nereus_core.config import NereusConfig
from nereus_core.events import EventLog
from nereus_core.plan import Plan
from nereus_core.transition import compile_transition, execute
from nereus_core.units import Unit, UnitId
from nereus_core.workload import (
    ACTOR_GENERATE,
    ACTOR_TRAIN,
    CRITIC_TRAIN,
    REF_INFER,
    Job,
    ModelStage,
)

DEVICES = 4
WAIT_S = 120.0
"""For anything that a small job does; chosen, not measured."""
STAND_S = 600.0
"""That a case leaves a job between two steps at most; chosen, not measured."""
POLL_S = 0.05
"""verl's replay buffer looks every 2 s whether a batch is there; chosen, not measured."""
ROLE_OF = {stage: role for role, stage in ROLES.items()}
_INSIDE = {
    "_update_actor": ACTOR_TRAIN,
    "_update_critic": CRITIC_TRAIN,
    "_compute_ref_log_prob": REF_INFER,
}
"""Methods of verl's trainer during which a stage runs."""


class Running:
    """One trainer of verl's on four ranks, its ``fit`` on a thread, and the adapter of the moment.

    Args:
        config: verl's.
        job: as the harness has it.
    """

    def __init__(self, config: Any, job: Job) -> None:
        from verl.trainer.ppo.v1 import AgentLoopManagerTQ, get_trainer_cls

        self.trainer = get_trainer_cls(config.trainer.v1.trainer_mode)(config)
        self.asynchronous = self.trainer.trainer_mode != "sync"
        """Whether rollouts have prompts under way while it trains."""
        self.trainer._setup()
        self.trainer.replay_buffer.poll_interval = POLL_S
        self._loops = AgentLoopManagerTQ.create(
            config=config,
            llm_client=self.trainer.get_llm_client(),
            teacher_client=self.trainer.get_teacher_client(),
            reward_loop_worker_handles=self.trainer.get_reward_handles(),
        )
        self.moved = False
        """Whether its state is another than at the start."""
        self.spoiled = ""
        """What was done to it that a launch may not find a way back from; empty: nothing."""
        self.sample_ids: tuple[int, ...] = ()
        """Of the batch that the last step returned; see `consumed`."""
        self._submitted: dict[str, int] = {}
        """Prompts that went to the rollout, in that order: verl's uid -> index in the data."""
        self._metrics: dict[str, Any] = {}
        self._fit: Paced | None = None
        self._training = ExitStack()
        """Left when what a step does after it has sampled is done."""
        self._wrap(config)
        self._seats: dict[Device, Seat] = {}
        self.adapter = self.attach(job)
        workers = self.workers()
        first = min(workers)
        self._schedules = call_all(
            {first: workers[first]}, behind.schedules, awaited="schedules", timeout_s=WAIT_S
        )[first]
        self._weights = {
            ROLE_OF[unit.model_stage]: behind.assembled(
                list(
                    call_all(
                        {d: workers[d] for d in unit.devices}, behind.parts,
                        ROLE_OF[unit.model_stage], str(unit.id),
                        awaited=f"weights of {unit.id}", timeout_s=WAIT_S,
                    ).values()
                ),
                str(unit.id),
            )
            for unit in self.adapter.units().values()
            if unit.model_stage in ROLE_OF
        }  # fmt: skip

    def attach(self, job: Job) -> VerlAdapter:
        """Attach a new adapter, with the memory that the job's devices are said to have."""
        if self._seats:
            self.adapter.close()
        backend = {
            "max_devices": DEVICES,
            "device_memory_bytes": job.cluster.device_spec.memory_bytes,
        }
        config = NereusConfig.of({"adapter": "verl", "mode": "adapt", "backend": backend})
        self.adapter = VerlAdapter(self.trainer, config)
        _take_in(self.adapter.fleet, self._seats)
        self._seats = _seats(self.adapter.fleet)
        return self.adapter

    def begin(self, job: Job, plan: Plan) -> None:
        """Bring the job to a plan, and to where it began."""
        self._stop()
        self._tidy()
        self.attach(job)
        if Plan.of_units(self.adapter.units()) != plan:
            graph = compile_transition(self.adapter.units(), plan, job, prefix="arrange")
            with self.adapter.boundary(job.workload.stages, timeout_s=WAIT_S):
                execute(graph, self.adapter, log=EventLog(None, lambda: 0.0), timeout_s=WAIT_S)
                self.adapter.relink(plan)
        self._seats = _seats(self.adapter.fleet)
        if not self.moved:
            self.spoiled = ""
            return
        linked = self.workers(self.adapter.linked.values())
        call_all(
            linked, behind.reset, self._weights, self._schedules,
            awaited="the state of the start", timeout_s=WAIT_S,
        )  # fmt: skip
        self.trainer.global_steps, self.trainer.train_dataloader_it = 0, None
        self.trainer.checkpoint_manager.update_weights(0)
        self.moved, self.spoiled = False, ""

    def _wrap(self, config: Any) -> None:
        """Let the trainer stand at its boundaries, and say what it consumes and where it is."""
        trainer, each = self.trainer, int(config.actor_rollout_ref.rollout.n)
        submit, step = trainer._submit_batch_to_rollout, trainer.step
        self._sync, sampled = trainer.on_step_end, trainer.on_sample_end

        def on_step_end() -> Any:
            assert self._fit is not None  # it is what calls this
            self._fit.stand()
            with self._critical():
                return self._sync()

        def on_sample_end() -> Any:
            self._training.enter_context(self._critical())
            return sampled()

        def submitted(batch: Any) -> Any:
            indices = (int(index) for index in batch["index"])
            self._submitted |= dict(zip(map(str, batch["uid"]), indices, strict=True))
            return submit(batch)

        def stepped(metrics: dict[str, Any], timing_raw: dict[str, float]) -> Any:
            self._metrics = metrics
            with self._training:
                batch = step(metrics, timing_raw)
            self.sample_ids = consumed(batch, self._submitted, each)
            return batch

        trainer.on_step_end, trainer._submit_batch_to_rollout = on_step_end, submitted
        trainer.on_sample_end, trainer.step = on_sample_end, stepped
        trainer.replay_buffer.sample = self._inside(trainer.replay_buffer.sample, ACTOR_GENERATE)
        for name, stage in _INSIDE.items():
            setattr(trainer, name, self._inside(getattr(trainer, name), stage))

    def _critical(self) -> AbstractContextManager[None]:
        """Be between the start of training and the weight synchronization that follows it.

        Not in between: an asynchronous job stands at its boundary there. A synchronous one is at
        none while a step is in flight.
        """
        return self.adapter.gate.critical() if self.asynchronous else nullcontext()

    def _inside(self, once: Callable[..., Any], stage: ModelStage) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with self.adapter.gate.stages(stage):
                return once(*args, **kwargs)

        return call

    def step(self) -> dict[str, Any]:
        """Let ``fit`` go on to its next boundary; raises as `Paced.turn` does."""
        self.moved = True
        if self._fit is None:
            self._fit = Paced(self._run, "verl's fit", turn_s=WAIT_S, stand_s=STAND_S)
        try:
            self._fit.turn()
        except BaseException as error:
            self.spoiled = f"a step raised {type(error).__name__}: {error}"
            raise
        return self._metrics

    def _run(self, _: Paced) -> None:
        self.trainer.on_init_end()  # weights go to the rollout
        if self.asynchronous:  # replicas that came between two runs wait for the end of a step
            self.trainer.checkpoint_manager.resume_generation_replicas()
        self.trainer.fit(self._loops)

    # --- Looking --------------------------------------------------------------------------------

    def workers(self, units: Iterable[Unit] | None = None) -> dict[Device, Any]:
        """Return worker processes by device: all, or those of some units."""
        found = {device: seat.worker for device, seat in _seats(self.adapter.fleet).items()}
        if units is None:
            return found
        return {d: found[d] for unit in units for d in unit.devices}

    def servers(self) -> dict[UnitId, Any]:
        """Return the server of every replica."""
        return {unit: r.servers[0] for unit, r in self.adapter.rollouts.replicas.items()}

    def replica_devices(self, unit: UnitId) -> tuple[Device, ...]:
        """Return the devices of a replica's workers."""
        known = {worker._actor_id: device for device, worker in self.workers().items()}
        replica = self.adapter.rollouts.replicas[unit]
        return tuple(known[w._actor_id] for w in replica.workers if w._actor_id in known)

    # --- Ending ---------------------------------------------------------------------------------

    def _stop(self) -> None:
        """End ``fit`` where it stands, and forget what it had."""
        if self._fit is None:
            return
        self._fit.end()
        self._fit = None
        if self.asynchronous:
            draining.drain(self._sync, WAIT_S)
        draining.forget()
        self._submitted.clear()

    def _tidy(self) -> None:
        """Drop what primitives have staged and nobody was linked to."""
        adapter = self.adapter
        for unit in set(adapter.rollouts.replicas) - set(adapter.linked):
            adapter.rollouts.end(unit)
        call_all(self.workers(), _forget, awaited="staged states to go", timeout_s=WAIT_S)
        self._seats |= _seats(adapter.fleet)

    def end(self) -> None:
        """End everything of the job; Ray and verl's transfer queue stay."""
        if self._fit is not None:
            with suppress(Exception):
                self._fit.end()
        trainer, adapter = self.trainer, self.adapter
        adapter.close()
        with suppress(Exception):
            trainer._shutdown_dump_executor()
        actors = [*self.servers().values(), *self.workers().values()]
        actors += [*self._loops.agent_loop_workers, *trainer.get_reward_handles()]
        actors.append(trainer.llm_server_manager.global_load_balancer)
        for actor in actors:
            ray.kill(actor)
        with suppress(Exception):
            draining.forget()
        for pool in trainer.resource_pool_manager.resource_pool_dict.values():
            for placement in pool.pgs or ():
                ray.util.remove_placement_group(placement)


def consumed(batch: Any, submitted: Mapping[str, int], responses: int) -> tuple[int, ...]:
    """Return a number for every response in a batch, in the order in which prompts were submitted.

    verl's own order is that in which it balances lengths over the ranks of the moment.

    Args:
        batch: What verl's ``step`` returns: keys ``{uid}_{response}_{part}``, and a tag for each.
        submitted: Index in the data by uid, in order.
        responses: To each prompt.

    Raises:
        KeyError: a prompt that was never submitted.
    """
    order = {uid: place for place, uid in enumerate(submitted)}
    keys = (
        key.rsplit("_", 2)
        for key, tag in zip(batch.keys, batch.tags, strict=True)
        if not tag.get("is_padding", False)
    )
    found = sorted((order[uid], int(turn), submitted[uid]) for uid, turn, _ in keys)
    return tuple(index * responses + turn for _, turn, index in found)


def _forget(worker: Any) -> None:
    shards.staged(worker).clear()


def _seats(fleet: Fleet) -> dict[Device, Seat]:
    """Return worker processes by device."""
    return dict(fleet._seats)


def _take_in(fleet: Fleet, seats: Mapping[Device, Seat]) -> None:
    """Let it know of parked processes that another started, where it has none; it keeps them."""
    for device, seat in seats.items():
        fleet._seats.setdefault(device, Seat(seat.worker, seat.name))
