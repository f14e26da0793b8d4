"""Looks at a job under test from behind the adapter: state, tokens, processes, seconds."""

import hashlib
import time


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


def look(session):
    import ray

    note_ranks(session)
    running = session.controller._adapter._running
    found = {"at": {}, "plan": session.controller.plan.to_json(), "time": time.time()}
    found["seated"] = len(running.seated)
    found["free"] = _free_gpus()
    for stage in running.groups:
        if str(stage).endswith("train"):
            handles = running.handles(stage)
            seen = ray.get([h.__ray_call__.remote(_gathered) for h in handles], timeout=120)
            found["at"][str(stage)] = seen[0]
            found["world", str(stage)] = len(handles)
    return {(k if isinstance(k, str) else "/".join(k)): v for k, v in found.items()}


def _free_gpus():
    """GPUs that Ray has free for anybody, once it has taken back what it is given back."""
    from nereus_adapters.ray_bundles import free_by_node

    def count():
        return sum(free.count for free in free_by_node().values())

    seen, deadline_s = [count()], time.monotonic() + 60
    while len(seen) < 10 or len(set(seen[-10:])) > 1:
        assert time.monotonic() < deadline_s, f"free GPUs go on changing: {seen[-10:]}"
        time.sleep(0.1)
        seen.append(count())
    return seen[-1]


def same_tokens(session):
    """Greedy tokens of every engine beside the actor's own."""
    import ray
    from vllm import SamplingParams

    from nereus_core.workload import ACTOR_TRAIN

    running = session.controller._adapter._running
    prompts = [[40 + i, 50 + 2 * i, 60 + 3 * i] for i in range(4)]
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    engines = []
    for engine in running.trainer.vllm_engines:
        outputs = ray.get([engine.generate.remote(p, greedy) for p in prompts], timeout=240)
        engines.append([list(o.outputs[0].token_ids) for o in outputs])
    actor = None
    if running.layout(ACTOR_TRAIN).tp == 1 and running.args.ds.zero_stage < 3:
        (handle, *_) = running.handles(ACTOR_TRAIN)
        actor = ray.get(handle.__ray_call__.remote(_greedy, prompts, 8), timeout=120)
    return {"engines": engines, "actor": actor}


_placed = {}
"""Device of every actor of Ray that was a rank when the job was looked at, by the actor's id."""


def note_ranks(session):
    ranks = session.controller._adapter._running.ranks
    _placed.update({rank._actor_id.hex(): str(device) for (_, device), rank in ranks.items()})


def waits_on(session):
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


def trains_on(session):
    running = session.controller._adapter._running
    stages = [stage for stage in running.groups if str(stage).endswith("train")]
    return {device for stage in stages for device in running.devices_of(stage)}


def timed_phases(adapter):
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
