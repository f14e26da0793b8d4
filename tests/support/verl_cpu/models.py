"""Tiny models of several families, with numbers in every parameter."""

import torch
from transformers import AutoConfig

FAMILIES = {
    # Its vocabulary divides by 4, its padding token gets no gradient, every projection has a bias.
    "qwen2": {"num_key_value_heads": 4, "vocab_size": 96, "pad_token_id": 3},
    # Norms of each head, heads shared by queries, embedding and head tied, a rank with padding.
    "qwen3": {
        "num_key_value_heads": 2,
        "vocab_size": 64,
        "head_dim": 16,
        "tie_word_embeddings": True,
        "pad_token_id": 40,
    },
    # A vocabulary that nobody divides.
    "llama": {"num_key_value_heads": 2, "vocab_size": 61, "attention_bias": True, "mlp_bias": True},
    "mistral": {"num_key_value_heads": 4, "vocab_size": 64},
    # Its embeddings are scaled, and tied to the head.
    "gemma3_text": {
        "num_key_value_heads": 2,
        "vocab_size": 64,
        "head_dim": 16,
        "pad_token_id": 40,
    },
}


def tiny(kind, **more):
    """Return the configuration of a model of two layers; ``more`` counts first."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "bos_token_id": None, "eos_token_id": 2}
    return AutoConfig.for_model(kind, **{**sizes, **heads, **more})


def randomized(auto_class, config):
    """Build a model; biases and norms begin as 0 and 1, which would hide where they go."""
    torch.manual_seed(7)
    model = auto_class.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model
