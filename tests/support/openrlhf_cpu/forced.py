"""Forces transitions on a job under test, and looks behind the adapter before and after each.

`OPENRLHF_TEST_FORCE` holds JSON: RL step -> model-stage -> list of units, each a list of indices in
the devices that the stage began on; a unit of several devices is tensor-parallel. What was seen
goes to `OPENRLHF_TEST_SEEN`, one JSON object a line. `OPENRLHF_TEST_FAULT` holds JSON: RL step ->
names of faults (see FAULTS) that strike the transition of that step; "dead engine" strikes between
steps. `OPENRLHF_TEST_LEAVE` holds JSON: RL step -> model-stage -> indices of devices that are asked
back from then on, none where it is empty; what Nereus does about it is its own decision.
`OPENRLHF_TEST_NODE` holds JSON: RL step -> "drained" or "killed", which is what becomes of the Ray
node at 127.0.0.2 before the boundary of that step; "killed amid generation", "... experience" or
"... broadcast" strikes in the step that follows, and Nereus is told nothing. Devices of that node
are called "away:0", those of the other "home:0" in what `OPENRLHF_TEST_FORCE` holds.
"""

import hashlib
import json
import os
import time
from pathlib import Path

from post_import import on_import


def _gathered(actor):
    """SHA-256 of every whole tensor, gathered by DeepSpeed's own means. Collective."""
    import torch
    import torch.distributed as dist
    from deepspeed.checkpoint.constants import DS_AUTOTP_UC_META
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    from nereus_adapters.openrlhf.ranks import engine_of

    engine = engine_of(actor)
    group = actor.strategy.ds_device_mesh["tp"].get_group()
    tp = dist.get_world_size(group)
    if not hasattr(engine.optimizer, "fp32_partitioned_groups_flat"):
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    found = {}
    for name, param in engine.module.named_parameters():
        if not param.requires_grad:
            continue
        meta = getattr(param, DS_AUTOTP_UC_META, None) or {}
        dim = None if meta.get("replicated") or tp == 1 else meta.get("partition_dim")
        for slot, tensor in (
            ("param", safe_get_full_fp32_param(param)),
            ("exp_avg", safe_get_full_optimizer_state(param, "exp_avg")),
            ("exp_avg_sq", safe_get_full_optimizer_state(param, "exp_avg_sq")),
        ):
            if dim is not None:
                parts = [torch.empty_like(tensor) for _ in range(tp)]
                dist.all_gather(parts, tensor.contiguous(), group=group)
                tensor = torch.cat(parts, dim)
            data = tensor.detach().float().contiguous().cpu().numpy().tobytes()
            found[f"{slot}/{name}"] = hashlib.sha256(data).hexdigest()
    inner = engine.optimizer.optimizer
    steps = {float(s["step"]) for s in inner.state.values() if "step" in s}
    return {
        "tensors": found,
        "steps": sorted(steps),
        "scheduler": engine.lr_scheduler.state_dict()["last_epoch"],
        "global_steps": engine.global_steps,
        "micro_steps": engine.micro_steps,
        "accumulation": engine.gradient_accumulation_steps(),
    }


def _greedy(actor, prompts, count):
    """Greedy tokens of the actor's own model, and by how much each was ahead of the next best.

    Only where one rank has all of the model.
    """
    import torch

    model = actor.actor.model.module
    was = model.training
    model.eval()
    found = []
    with torch.no_grad():
        for prompt in prompts:
            tokens, leads = list(prompt), []
            for _ in range(count):
                logits = model(torch.tensor([tokens])).logits[0, -1].float()
                best, next_best = logits.topk(2).values.tolist()
                leads.append(best - next_best)
                tokens.append(int(logits.argmax()))
            found.append({"tokens": tokens[len(prompt) :], "leads": leads})
    model.train(was)
    return found


def _look(session):
    import ray

    _note_ranks(session)
    running = session.controller._adapter._running
    found = {"at": {}, "plan": session.controller.plan.to_json(), "time": time.time()}
    found["seated"] = len(running.seated)
    for stage in running.groups:
        if str(stage).endswith("train"):
            handles = running.handles(stage)
            seen = ray.get([h.__ray_call__.remote(_gathered) for h in handles], timeout=120)
            found["at"][str(stage)] = seen[0]
            found["world", str(stage)] = len(handles)
    return {(k if isinstance(k, str) else "/".join(k)): v for k, v in found.items()}


def _same_tokens(session):
    """Greedy tokens of every engine beside the actor's own."""
    import ray
    from vllm import SamplingParams

    from nereus_core.workload import ACTOR_TRAIN

    running = session.controller._adapter._running
    prompts = [[40 + i, 50 + 2 * i, 60 + 3 * i] for i in range(4)]
    greedy = SamplingParams(temperature=0.0, max_tokens=8, min_tokens=8)
    engines = []
    for engine in running.trainer.vllm_engines:
        outputs = ray.get([engine.generate.remote(p, greedy) for p in prompts], timeout=240)
        engines.append([list(o.outputs[0].token_ids) for o in outputs])
    actor = None
    if running.layout(ACTOR_TRAIN).tp == 1 and running.args.ds.zero_stage < 3:
        (handle, *_) = running.handles(ACTOR_TRAIN)
        actor = ray.get(handle.__ray_call__.remote(_greedy, prompts, 8), timeout=120)
    return {"engines": engines, "actor": actor}


FAULTS = {}
"""What OPENRLHF_TEST_FAULT may name: a function that arranges for the fault, once."""


def _once(module, name, before):
    """Call ``before(*arguments)`` in front of the next call of a function, and never again."""
    original = getattr(module, name)

    def replaced(*args, **kwargs):
        setattr(module, name, original)
        before(*args)
        return original(*args, **kwargs)

    setattr(module, name, replaced)


def _killed_rank():
    import ray

    from nereus_adapters.openrlhf import groups

    # before digests are compared: the last rank of the new group has its state, and dies
    _once(groups, "_verify", lambda running, stage, handles, parked: ray.kill(handles[-1]))


def _killed_engine():
    import ray

    from nereus_adapters.openrlhf import engines

    _once(engines, "tie", lambda running: ray.kill(next(iter(running.engines.values()))))


def _stopped(actor):
    """Stop the core of an engine in a seat: it no longer answers. Says which processes it is.

    Workers go on, and see by a pipe that their core is gone.
    """
    import signal

    import psutil

    cores = [
        psutil.Process(p.pid) for p in actor.llm.engine_core.resources.engine_manager.processes
    ]
    pids = [p.pid for core in cores for p in (core, *core.children(recursive=True))]
    for core in cores:
        os.kill(core.pid, signal.SIGSTOP)
    return pids


def _hung_broadcast():
    import ray

    from nereus_adapters.openrlhf import engines

    def stop_first(*_):
        engine = handles_of_engines[0]
        pids = ray.get(engine.__ray_call__.remote(_stopped), timeout=60)
        with Path(os.environ["OPENRLHF_TEST_SEEN"]).with_suffix(".pids").open("w") as lines:
            lines.write("\n".join(map(str, pids)))

    handles_of_engines = []

    def before_tie(running):
        handles_of_engines.extend(running.engines.values())
        _once(engines, "ask", stop_first)

    _once(engines, "tie", before_tie)


FAULTS |= {
    "killed rank": _killed_rank,
    "killed engine": _killed_engine,
    "hung engine": _hung_broadcast,
}


_began_on = {}
"""Devices of each stage before the first transition."""


def _plan(session, wanted):
    from nereus_core.layout import Layout
    from nereus_core.plan import Placement, Plan
    from nereus_core.workload import ModelStage

    now = dict(session.controller.plan)
    for stage, placement in now.items():
        _began_on.setdefault(str(stage), sorted(placement.devices))
    for stage, units in wanted.items():
        placed = tuple(tuple(_device(session, stage, i) for i in unit) for unit in units)
        now[ModelStage.parse(stage)] = Placement(Layout(len(units[0])), placed)
    return Plan(now)


def _device(session, stage, name):
    """Find a device by its index among those that a stage began on, or by node and index."""
    if isinstance(name, int):
        return _began_on[stage][name]
    where, index = name.split(":")
    devices = session.controller._adapter.job().cluster.devices
    return [d for d in devices if (d.node == NODE) == (where == "away")][int(index)]


def _ask_back(session, wanted):
    """Write the devices that are to leave into the file that the adapter reads."""
    _plan(session, {})  # notes where stages began
    names = [str(_began_on[stage][i]) for stage, found in wanted.items() for i in found]
    (session.config.run_dir / "leaving").write_text("\n".join(names))
    with (session.config.run_dir / "asked").open("a") as asked:
        asked.writelines(f"{name}\n" for name in names)


_placed = {}
"""Device of every actor of Ray that was a rank when the job was looked at, by the actor's id."""


def _note_ranks(session):
    ranks = session.controller._adapter._running.ranks
    _placed.update({rank._actor_id.hex(): str(device) for (_, device), rank in ranks.items()})


def _waits_on(session):
    """Devices on which Ray has processes of ranks: those that Nereus knows, and what it has left.

    Ray ends an actor that was killed a little later; one that nobody killed is told of.
    """
    from ray._private.state import actors

    known = {r._actor_id.hex() for r in session.controller._adapter._running.ranks.values()}
    deadline_s = time.monotonic() + 20
    while True:
        alive = {actor for actor, told in actors().items() if told["State"] == "ALIVE"}
        alive &= _placed.keys()
        if alive <= known or time.monotonic() > deadline_s:
            return sorted({_placed[actor] for actor in alive})
        time.sleep(0.1)


NODE = "127.0.0.2"


def _node(session, becomes):
    """Announce that the second node will leave, or end it; returns when Nereus can see it."""
    import ray
    from ray._raylet import GcsClient

    supply = session.controller._adapter._supply
    if becomes == "drained":
        (node_id,) = [n["NodeID"] for n in ray.nodes() if n["NodeManagerAddress"] == NODE]
        preempted, deadline_ms = 2, int((time.time() + 600) * 1000)  # DrainNodeReason of Ray
        client = GcsClient(address=ray.get_runtime_context().gcs_address)
        accepted, why = client.drain_node(node_id, preempted, "spot notice", deadline_ms)
        assert accepted, why
        look = supply.leaving
    else:
        _kill_node()
        look = supply.gone
    deadline_s = time.monotonic() + 60
    while not look():
        assert time.monotonic() < deadline_s, f"node {NODE} {becomes}, and Ray does not say so"
        time.sleep(0.1)


def _pids_there(session):
    """Processes of ranks and engines on the second node; on a node that is lost all end at once."""
    import ray

    running = session.controller._adapter._running
    handles = [rank for (_, device), rank in running.ranks.items() if device.node == NODE]
    for unit, engine in running.engines.items():
        if any(device.node == NODE for device in running.alive[unit].devices):
            handles.append(engine)
    return ray.get([h.__ray_call__.remote(_own_pid) for h in handles], timeout=60)


def _own_pid(actor):
    return os.getpid()


def _kill_node(pids=()):
    """End the raylet of the second node and these processes, without a word to anybody."""
    import psutil
    import ray

    # other jobs' Rays on this machine may have a node of that address too
    gcs = ray.get_runtime_context().gcs_address
    mine = {f"--node_ip_address={NODE}", f"--gcs-address={gcs}"}
    (raylet,) = [
        process
        for process in psutil.process_iter(["cmdline"])
        if (words := process.info["cmdline"] or [""])[0].endswith("raylet") and mine.issubset(words)
    ]
    for pid in pids:
        for process in [*psutil.Process(pid).children(recursive=True), psutil.Process(pid)]:
            process.kill()
    raylet.kill()


AMID = "killed amid "
_killed_s = {}
"""When a node was killed in a step, by the step."""
_armed = set()


def _arm(session, step, part):
    """Let the second node be killed in the next step, in the middle of this part of it."""
    trainer, pids = session.controller._adapter._running.trainer, _pids_there(session)

    def kill(*_):
        _kill_node(pids)
        _killed_s[step] = time.time()

    if part == "generation":  # the first response has come
        _once(trainer.samples_generator, "_process_response_into_experience", kill)
    elif part == "experience":
        _once(trainer.experience_maker, "make_experience", kill)
    else:
        begin = trainer.actor_model_group.async_run_method

        def begun(method_name, *args, **kwargs):
            if method_name == "broadcast_to_vllm" and step not in _killed_s:
                kill()
            return begin(method_name, *args, **kwargs)

        trainer.actor_model_group.async_run_method = begun


def _trains_on(session):
    running = session.controller._adapter._running
    stages = [stage for stage in running.groups if str(stage).endswith("train")]
    return {device for stage in stages for device in running.devices_of(stage)}


def ray_kill(handle):
    import ray

    ray.kill(handle)


def _timed_phases(adapter):
    """Sum up the seconds of what a transition does, by name."""
    from nereus_adapters.openrlhf import engines, groups

    spent = {}

    def timed(module, name, phase):
        original = getattr(module, name)

        def run(*args, **kwargs):
            start_s = time.monotonic()
            try:
                return original(*args, **kwargs)
            finally:
                spent[phase] = spent.get(phase, 0.0) + time.monotonic() - start_s

        run.original = getattr(original, "original", original)
        setattr(module, name, run)

    for module, name, phase in (
        (groups, "hand_out", "park: state to host memory"),
        (groups, "vacate", "park: memory freed"),
        (engines, "stop", "engines end"),
        (groups, "seat", "groups: model built, state taken in, digests compared"),
        (engines, "await_all", "engines start, beyond groups"),
        (engines, "tie", "weights to engines"),
    ):
        if hasattr(getattr(module, name), "original"):
            setattr(module, name, getattr(module, name).original)
        timed(module, name, phase)
    return spent


def _session(module):
    wanted = json.loads(os.environ.get("OPENRLHF_TEST_FORCE", "{}"))
    leave = json.loads(os.environ.get("OPENRLHF_TEST_LEAVE", "{}"))
    node = json.loads(os.environ.get("OPENRLHF_TEST_NODE", "{}"))
    faults = json.loads(os.environ.get("OPENRLHF_TEST_FAULT", "{}"))
    seen = Path(os.environ["OPENRLHF_TEST_SEEN"])
    original = module.Session.at_boundary

    def write(record):
        with seen.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(record) + "\n")

    def at_boundary(self):
        step = self.controller._adapter._running.signals.step + 1
        amid = node.get(str(step), "").startswith(AMID)
        if amid and step not in _armed:
            figures = original(self)
            _armed.add(step)
            _arm(self, step, node[str(step)].removeprefix(AMID))
            return figures
        if amid:  # in the middle of the step
            try:
                before = None if self.lost & _trains_on(self) else _look(self)
                figures = original(self)
            except Exception as raised:
                write({"step": step, "error": f"{type(raised).__name__}: {raised}",
                       "killed": _killed_s[step], "time": time.time()})  # fmt: skip
                raise
            record = {"step": step, "before": before, "after": _look(self)}
            record |= {"ranks on": _waits_on(self), "tokens": _same_tokens(self)}
            write(record | {"killed": _killed_s[step]})
            return figures
        if str(step) in {**leave, **node}:
            before = _look(self)
            if str(step) in leave:
                _ask_back(self, leave[str(step)])
            else:
                _node(self, node[str(step)])
            figures = original(self)
            after = _look(self)
            write({"step": step, "before": before, "after": after, "ranks on": _waits_on(self),
                   "tokens": _same_tokens(self)})  # fmt: skip
            return figures
        figures = original(self)
        if str(step) not in wanted:
            if "dead engine" in faults.get(str(step), ()):
                ray_kill(next(iter(self.controller._adapter._running.engines.values())))
            return figures
        before = _look(self)
        for fault in faults.get(str(step), ()):
            FAULTS[fault]()
        phases = _timed_phases(self.controller._adapter)
        start_s = time.monotonic()
        try:
            self.controller.go_to(_plan(self, wanted[str(step)]), "asked for by a test")
        except Exception as raised:
            write({"step": step, "error": f"{type(raised).__name__}: {raised}"})
            raise
        held_s = time.monotonic() - start_s
        after = _look(self)
        write(
            {
                "step": step,
                "held_s": held_s,
                "phases": phases,
                "before": before,
                "after": after,
                "tokens": _same_tokens(self),
            }
        )
        return figures

    module.Session.at_boundary = at_boundary


def install():
    on_import("nereus_plugins.session", _session)
