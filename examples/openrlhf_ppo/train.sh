#!/usr/bin/env bash
# A PPO job with a critic and a KL penalty, as one would run it with OpenRLHF. Under Nereus one line
# differs: NEREUS=1 ./train.sh runs
#     python -m nereus_plugins.openrlhf --nereus.enable --nereus.config nereus.toml \
# where ./train.sh runs
#     python -m openrlhf.cli.train_ppo_ray \
# Every other flag is the same.
set -euo pipefail
cd "$(dirname "$0")"

if [[ ${NEREUS:-0} == 1 ]]; then
  launch=(nereus_plugins.openrlhf --nereus.enable --nereus.config nereus.toml)
else
  launch=(openrlhf.cli.train_ppo_ray)
fi

exec python -m "${launch[@]}" \
  --actor.model_name_or_path "${MODEL:-Qwen/Qwen2.5-0.5B-Instruct}" \
  --reward.remote_url "$PWD/reward.py" \
  --data.prompt_dataset "${PROMPTS:-$PWD/prompts.jsonl}" \
  --data.input_key prompt --data.label_key label \
  --data.max_len 2048 --rollout.max_new_tokens 1536 \
  --algo.advantage.estimator gae --algo.kl.init_coef 0.01 \
  --vllm.num_engines 2 --vllm.tensor_parallel_size 1 \
  --actor.num_nodes 1 --actor.num_gpus_per_node 2 \
  --critic.num_nodes 1 --critic.num_gpus_per_node 2 \
  --ref.num_nodes 1 --ref.num_gpus_per_node 2 \
  --ds.zero_stage 2 --ds.param_dtype bf16 --actor.gradient_checkpointing_enable \
  --rollout.batch_size 64 --rollout.n_samples_per_prompt 4 --rollout.micro_batch_size 4 \
  --train.batch_size 256 --train.micro_batch_size 4 \
  --actor.adam.lr 1e-6 --critic.adam.lr 9e-6 \
  --logger.tensorboard_dir "$PWD/boards" \
  --ckpt.output_dir "$PWD/out" --ckpt.path "$PWD/ckpt" \
  "$@"
