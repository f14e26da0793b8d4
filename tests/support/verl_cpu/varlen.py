"""Flash attention's entry for packed sequences, in plain torch: what verl's Ulysses stands on.

``attn_implementation=varlen_cpu`` takes transformers' flash attention path, which verl turns for
Ulysses, down to the kernel itself.
"""

import torch
from torch.nn.functional import scaled_dot_product_attention

from nereus_plugins.post_import import after_import

NAME = "varlen_cpu"
heads = set()
"""Numbers of query heads that the kernel was asked for in this process; see `verl_cpu.forced`."""


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q=None,
    max_seqlen_k=None,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
):
    """Attend within each packed sequence; shapes [tokens, heads, head_dim]."""
    assert dropout_p == 0.0
    heads.add(q.shape[1])
    found = []
    for start, end in zip(cu_seqlens_q[:-1].tolist(), cu_seqlens_q[1:].tolist(), strict=True):
        one, other, values = (t[start:end].transpose(0, 1).unsqueeze(0) for t in (q, k, v))
        out = scaled_dot_product_attention(
            one, other, values, is_causal=causal, scale=softmax_scale, enable_gqa=True
        )
        found.append(out.squeeze(0).transpose(0, 1))
    assert torch.equal(cu_seqlens_q, cu_seqlens_k)
    return torch.cat(found)


def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False):
    """The same for sequences of one length; shapes [batch, tokens, heads, head_dim]."""
    batch, tokens = q.shape[:2]
    starts = torch.arange(0, (batch + 1) * tokens, tokens, dtype=torch.int32)
    flat = (t.reshape(batch * tokens, *t.shape[2:]) for t in (q, k, v))
    out = flash_attn_varlen_func(
        *flat, starts, starts, dropout_p=dropout_p, softmax_scale=softmax_scale, causal=causal
    )
    return out.reshape(q.shape)


def _load(module):
    module._loaded_implementation = NAME
    module._flash_fn, module._flash_varlen_fn = flash_attn_func, flash_attn_varlen_func
    module._pad_fn, module._unpad_fn = module._pad_input, module._unpad_input
    module._process_flash_kwargs_fn = module._lazy_define_process_function(flash_attn_varlen_func)


def _attention(module):
    def forward(*args, **kwargs):
        from transformers.integrations.flash_attention import flash_attention_forward

        return flash_attention_forward(*args, **kwargs)

    module.AttentionInterface.register(NAME, forward)


def _mask(module):
    module.AttentionMaskInterface.register(NAME, module.flash_attention_mask)


after_import("transformers.modeling_flash_attention_utils", _load)
after_import("transformers.modeling_utils", _attention)
after_import("transformers.masking_utils", _mask)
