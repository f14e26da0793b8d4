"""What the conformance harness trains: a tiny Qwen2, a tokenizer, prompts, a reward, and flags."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CLI = "openrlhf.cli.train_ppo_ray"
GLOBAL_BATCH = 8
STEPS = 16
"""More than any case takes; prompts for as many are written."""
_VOCAB = 510
_REWARD = '''
import torch


def reward_func(queries, prompts, labels):
    """Reward the part of a response that is digits: dense, so that advantages are not zero."""
    texts = [query[len(prompt):] for query, prompt in zip(queries, prompts)]
    share = torch.tensor([sum(c.isdigit() for c in text) / max(1, len(text)) for text in texts])
    return {"rewards": share[0].item(), "scores": share[0].item(), "extra_logs": {}}
'''
MODEL: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "bos_token_id": None,
    "use_sliding_window": False,
}
"""vLLM's attention on a CPU needs heads of 32; AutoTP cuts whole heads of keys and values."""


def prompt(number: int) -> str:
    """Return a prompt by its number, by which a step's samples are told."""
    return f"Question {number}: what is {number % 37} plus {number % 29}? Answer:"


def write(folder: Path) -> None:
    """Write all that the flags name into a folder."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|pad|>", "<|eos|>"]
    learner = trainers.BpeTrainer(
        vocab_size=_VOCAB, special_tokens=special, initial_alphabet=alphabet
    )
    prompts = [prompt(number) for number in range(GLOBAL_BATCH * STEPS)]
    tokenizer.train_from_iterator(prompts, learner)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|eos|>", pad_token="<|pad|>"
    )
    fast.save_pretrained(folder / "model")
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**MODEL)).to(torch.bfloat16)
    model.save_pretrained(folder / "model")
    lines = [json.dumps({"prompt": text, "label": ""}) for text in prompts]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / "reward.py").write_text(_REWARD, encoding="utf-8")


def flags(folder: Path, *, critic: bool) -> list[str]:
    """Return the flags of a job of `train_ppo_ray` on what `write` wrote."""
    values: dict[str, object] = {
        "actor.model_name_or_path": folder / "model",
        "reward.remote_url": folder / "reward.py",
        "data.prompt_dataset": folder / "prompts.jsonl",
        "data.input_key": "prompt",
        "data.label_key": "label",
        "data.max_len": 64,
        "data.max_samples": GLOBAL_BATCH * STEPS,
        "rollout.max_new_tokens": 8,
        "rollout.batch_size": GLOBAL_BATCH,
        "rollout.n_samples_per_prompt": 1,
        "rollout.micro_batch_size": 2,
        "train.batch_size": GLOBAL_BATCH,
        "train.micro_batch_size": 2,
        "train.num_episodes": 1,
        "train.max_epochs": 1,
        "vllm.num_engines": 1,
        "vllm.tensor_parallel_size": 1,
        "vllm.sync_backend": "gloo",
        "vllm.gpu_memory_utilization": 0.05,
        "actor.num_gpus_per_node": 1,
        "ref.num_gpus_per_node": 1,
        "ds.zero_stage": 2,
        "ds.attn_implementation": "eager",
        "ds.param_dtype": "bf16",
        "algo.advantage.estimator": "gae" if critic else "reinforce",
        "algo.kl.init_coef": 0.01,
        "actor.adam.lr": 1e-2,  # weights in bfloat16 have to move in every step
        "actor.lr_warmup_ratio": 0,
        "ckpt.output_dir": folder / "final",
        "ckpt.path": folder / "ckpt",
    }
    if critic:
        values |= {"critic.model_name_or_path": folder / "model", "critic.num_gpus_per_node": 1}
    words = ["--vllm.enforce_eager"]
    for key, value in values.items():
        words += [f"--{key}", str(value)]
    return words


class _Told(Exception):
    def __init__(self, args: Any) -> None:
        self.args_ = args


def arguments(words: Sequence[str]) -> Any:
    """Return what `train_ppo_ray` makes of flags: it parses them in its main block alone."""
    from openrlhf import utils

    def tell(args: Any) -> None:
        raise _Told(args)

    before, argv = utils.get_strategy, sys.argv
    utils.get_strategy, sys.argv = tell, [CLI, *words]
    try:
        runpy.run_module(CLI, run_name="__main__", alter_sys=True)
    except _Told as told:
        return told.args_
    finally:
        utils.get_strategy, sys.argv = before, argv
    raise RuntimeError(f"{CLI} ended without asking for a strategy")
