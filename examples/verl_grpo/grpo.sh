#!/usr/bin/env bash
# A user's own GRPO job on verl 0.9. What Nereus asks for is the last line; without it, this is verl's.
#   MODEL=Qwen/Qwen2.5-0.5B-Instruct DATA=~/data/gsm8k bash grpo.sh
# Any override may follow, e.g. +nereus.mode=adapt trainer.total_training_steps=50
set -euo pipefail
HERE=$(cd "$(dirname "$0")" && pwd)
MODEL=${MODEL:?a Hugging Face model} DATA=${DATA:?a folder with train.parquet and test.parquet}
GPUS=${GPUS:-8}

python3 -m verl.trainer.main_ppo \
  algorithm.adv_estimator=grpo \
  data.train_files="$DATA/train.parquet" data.val_files="$DATA/test.parquet" \
  data.train_batch_size=256 data.max_prompt_length=512 data.max_response_length=4096 \
  actor_rollout_ref.model.path="$MODEL" \
  actor_rollout_ref.actor.strategy=fsdp2 actor_rollout_ref.actor.fsdp_config.strategy=fsdp2 \
  actor_rollout_ref.ref.fsdp_config.strategy=fsdp2 \
  actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.actor.ppo_mini_batch_size=64 \
  actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8 actor_rollout_ref.actor.use_kl_loss=True \
  actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=16 \
  actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=8 \
  actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
  actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16 \
  trainer.n_gpus_per_node="$GPUS" trainer.nnodes=1 'trainer.logger=["console","tensorboard"]' \
  trainer.total_epochs=1 trainer.test_freq=20 trainer.save_freq=50 \
  "$@" \
  +nereus.enable=true +nereus.config="$HERE/nereus.toml"
