"""Models for examples, tests and simulation: one tiny, and the usual sizes by their shapes."""

from __future__ import annotations

from nereus_core.model import ModelSpec

TINY = ModelSpec("tiny", "llama", 4, 64, 128, 4, 2, 16, 101, tied_embeddings=True)
"""4 heads over 2 kv heads, tied embeddings, a vocabulary no even degree divides."""

LLAMA_3_1_8B = ModelSpec("llama-3.1-8b", "llama", 32, 4096, 14336, 32, 8, 128, 128256)
"""Source: config.json of meta-llama/Llama-3.1-8B."""
QWEN2_5_7B = ModelSpec("qwen2.5-7b", "qwen2", 28, 3584, 18944, 28, 4, 128, 152064, qkv_bias=True)
"""Source: config.json of Qwen/Qwen2.5-7B."""
