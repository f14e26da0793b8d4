"""A torch job with vLLM rollouts, and the tokens that its weights should give."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from nereus_core.config import NereusConfig
from nereus_core.state import Slot
from nereus_core.workload import ACTOR_TRAIN

MODEL = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
}


def config(tmp_path, **backend):
    return NereusConfig.of(
        {
            "run_dir": tmp_path,
            "job": {
                "model": MODEL,
                "prompts_per_step": 4,
                "responses_per_prompt": 2,
                "max_prompt_tokens": 16,
                "max_response_tokens": 24,
                "learning_rate": 1e-3,
                "steps": 3,
                "plan": {"actor/generate": "tp1pp1dp2", "actor/train": "tp2pp1dp1"},
            },
            "backend": {
                "seats": 2,
                "rollout": "vllm",
                "vllm": {"eager": True, "kv_cache_bytes": 8 * 2**20, "max_running": 16},
                **backend,
            },
        }
    )


def greedy(running, folder, tokens):
    """Return Hugging Face's tokens for the weights that training has, put together here."""
    fleet = running.fleet
    unit = running.units.of(ACTOR_TRAIN)[0]
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).float().eval()
    named = dict(model.named_parameters())
    with torch.no_grad():
        for answer in fleet.settle(fleet.send({unit.id: {}}, "peek"), 60):
            for key, (offset, values) in answer.value.items():
                slot, _, name = key.partition("/")
                if slot == Slot.PARAM:
                    spans = zip(offset, values.shape, strict=True)
                    place = tuple(slice(o, o + n) for o, n in spans)
                    named[name][place] = torch.from_numpy(values)
        found = model.generate(
            torch.tensor([tokens]),
            do_sample=False,
            max_new_tokens=16,
            min_new_tokens=16,
            eos_token_id=None,
            pad_token_id=0,
        )
    return tuple(found[0, len(tokens) :].tolist())
