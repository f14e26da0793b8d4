"""The command line and environment of a small verl job on CPU."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

SUPPORT = Path(__file__).parent.parent


def overrides(
    assets: Path,
    work: Path,
    *,
    devices: int = 2,
    ray_devices: int | None = None,
    steps: int = 3,
    response: int = 32,
    critic: bool = False,
    reference: bool = False,
    shard_size: int = -1,
    micro: int = 8,
    packed: int = 0,
) -> list[str]:
    """Return main_ppo's overrides: GRPO, or PPO with critic, on ``devices`` logical GPUs.

    Where ``packed``, sequences are, and that many ranks share each (Ulysses).
    """
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    found = [
        f"data.train_files={assets}/train.parquet",
        f"data.val_files={assets}/test.parquet",
        "data.train_batch_size=8",
        "data.max_prompt_length=64",
        f"data.max_response_length={response}",
        "data.dataloader_num_workers=0",
        "data.return_raw_chat=True",
        "data.shuffle=False",
        f"actor_rollout_ref.model.path={assets}/model",
        "actor_rollout_ref.model.use_remove_padding=False",
        "actor_rollout_ref.model.enable_gradient_checkpointing=False",
        "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        f"{actor}.strategy=fsdp2",
        f"{actor}.fsdp_config.strategy=fsdp2",
        "actor_rollout_ref.ref.fsdp_config.strategy=fsdp2",
        f"{actor}.use_torch_compile=False",
        f"{actor}.fsdp_config.use_torch_compile=False",
        "actor_rollout_ref.ref.fsdp_config.use_torch_compile=False",
        f"+{actor}.fsdp_config.mixed_precision.param_dtype=fp32",
        "+actor_rollout_ref.ref.fsdp_config.mixed_precision.param_dtype=fp32",
        "actor_rollout_ref.ref.fsdp_config.model_dtype=fp32",
        f"{actor}.ppo_mini_batch_size=8",
        f"{actor}.ppo_micro_batch_size_per_gpu={micro}",
        f"{actor}.fsdp_config.fsdp_size={shard_size}",
        f"{actor}.optim.lr=1e-3",
        f"{actor}.use_kl_loss={critic or reference}",
        f"actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu={micro}",
        f"{rollout}.name=hf_cpu",
        f"{rollout}.dtype=float32",
        f"{rollout}.tensor_model_parallel_size=1",
        f"{rollout}.enforce_eager=True",
        f"{rollout}.free_cache_engine=False",
        f"+{rollout}.enable_sleep_mode=False",
        f"{rollout}.log_prob_micro_batch_size_per_gpu={micro}",
        f"{rollout}.n=4",
        f"{rollout}.max_model_len={64 + response}",
        f"{rollout}.agent.num_workers=1",
        f"{rollout}.checkpoint_engine.update_weights_bucket_megabytes=16",
        f"{rollout}.calculate_log_probs=True",
        "reward.num_workers=1",
        f"reward.custom_reward_function.path={SUPPORT}/verl_cpu/reward.py",
        "trainer.device=cpu",
        f"trainer.n_gpus_per_node={devices}",
        "trainer.nnodes=1",
        'trainer.logger=["console","file"]',
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.resume_mode=disable",
        f"trainer.total_training_steps={steps}",
        "trainer.total_epochs=1",
        f"trainer.default_local_dir={work}/checkpoints",
        f"hydra.run.dir={work}/hydra",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        "+ray_kwargs.ray_init.address=local",  # never a cluster that somebody else has started
        "ray_kwargs.ray_init.num_cpus=24",
        f"+ray_kwargs.ray_init.num_gpus={ray_devices or devices}",
        "+ray_kwargs.ray_init.include_dashboard=False",
        "+ray_kwargs.ray_init.object_store_memory=500000000",
        f"algorithm.adv_estimator={'gae' if critic else 'grpo'}",
    ]
    if critic:
        found += [
            f"critic.model.path={assets}/model",
            "critic.model.use_remove_padding=False",
            "critic.model.enable_gradient_checkpointing=False",
            "+critic.model.override_config.attn_implementation=sdpa",
            "critic.strategy=fsdp2",
            "critic.fsdp.strategy=fsdp2",
            "critic.fsdp.use_torch_compile=False",
            "+critic.fsdp.mixed_precision.param_dtype=fp32",
            f"critic.ppo_micro_batch_size_per_gpu={micro}",
            "critic.optim.lr=1e-3",
        ]
    return found + (ulysses(packed, critic) if packed else [])


def ulysses(degree: int, critic: bool) -> list[str]:
    """Return the overrides of jobs with Ulysses; they come after the others, and count."""
    models = ["actor_rollout_ref.model", *(["critic.model"] if critic else [])]
    engines = ["actor_rollout_ref.actor.fsdp_config", "actor_rollout_ref.ref.fsdp_config"]
    engines += ["critic.fsdp"] if critic else []
    return [
        *(f"{model}.use_remove_padding=True" for model in models),
        *(f"{model}.override_config.attn_implementation=varlen_cpu" for model in models),
        *(f"{engine}.ulysses_sequence_parallel_size={degree}" for engine in engines),
    ]


SEPARATE = (
    "trainer.v1.trainer_mode=separate_async",
    "actor_rollout_ref.hybrid_engine=False",
    "actor_rollout_ref.rollout.nnodes=1",
    "actor_rollout_ref.rollout.n_gpus_per_node=1",
    "actor_rollout_ref.rollout.checkpoint_engine.backend=cpu_store",
    "actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=verl_cpu.weights",
    "trainer.v1.separate_async.parameter_sync_step=2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
)
"""Trainers in a pool of their own, one standalone replica beside it, two mini-batches a step."""


def environment(work: Path, **changes: str) -> dict[str, str]:
    """Return the environment in which verl runs on CPU and writes its metrics to a file."""
    paths = [str(SUPPORT), os.environ.get("PYTHONPATH", "")]
    # Ray refuses logical GPUs where this names none, as the tox environments do.
    inherited = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
    return {
        **inherited,
        "PYTHONPATH": os.pathsep.join(p for p in paths if p),
        "VERL_USE_EXTERNAL_MODULES": "verl_cpu.platform,verl_cpu.rollout",
        "VERL_PLATFORM": "cpu",
        "VERL_ENGINE_DEVICE": "cuda",
        "VERL_FILE_LOGGER_PATH": str(work / "metrics.jsonl"),
        "VERL_CPU_WORK": str(work),
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "0",
        "TORCHDYNAMO_DISABLE": "1",
        **changes,
    }


@dataclass(frozen=True)
class Ran:
    """A job that ended."""

    returncode: int
    output: str
    """Standard output and error together."""
    metrics: list[dict[str, float]]
    """What the job's file logger got, by step from 1."""


def run_job(
    work: Path, arguments: Sequence[str], *, timeout_s: float, env: Mapping[str, str] | None = None
) -> Ran:
    """Run ``python -m verl.trainer.main_ppo`` to its end in its own session."""
    work.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *arguments]
    log = work / "output.log"
    with log.open("w") as file:
        process = subprocess.Popen(
            command,
            cwd=work,
            env=environment(work, **(env or {})),
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout_s)
        finally:
            if process.poll() is None:
                process.terminate()  # verl's driver ends the Ray it started
                process.wait(60)
    return Ran(code, log.read_text(), read_metrics(work / "metrics.jsonl"))


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Read what verl's file logger wrote."""
    if not path.exists():
        return []
    return [json.loads(line)["data"] for line in path.read_text().splitlines()]
