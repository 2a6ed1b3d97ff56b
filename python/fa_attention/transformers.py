"""fa as an attention implementation of Hugging Face transformers.

    from fa_attention.transformers import register
    register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="fa")
"""

from __future__ import annotations

from typing import Any, Callable, Optional

import torch
from torch import Tensor

from . import functions
from .torch import attention
from .torch._padding import padded_heads
from .torch._sdpa import mask_options

_PADDING = "keep[b, kv] != 0"  # a mask of [b, s_kv], beside a causal one


def _mask(mask: Optional[Tensor], dtype: torch.dtype) -> dict[str, Any]:
    """A mask as `fa_mask` makes it, or one of the user's, [b, 1 or h, s_q, s_kv]."""
    if mask is not None and mask.dim() == 2:
        return {"mask": _PADDING, "captures": {"keep": mask.to(torch.int32)}}
    return mask_options(mask, dtype)


def fa_attention_forward(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Optional[Tensor],
                         dropout: float = 0.0, scaling: Optional[float] = None, is_causal: Optional[bool] = None,
                         softcap: Optional[float] = None, s_aux: Optional[Tensor] = None,
                         position_bias: Optional[Tensor] = None, **_: Any) -> tuple[Tensor, None]:
    """What transformers' AttentionInterface calls: o [b, s_q, h_q, d_v] of query [b, h_q, s_q, d_qk], key [b, h_kv, s_kv, d_qk]
    and value [b, h_kv, s_kv, d_v]. s_aux: sinks [h_q]. position_bias broadcasts to [b, h_q, s_q, s_kv]. A window is part of
    attention_mask, or None is given because it hides nothing. No weights are returned."""
    if is_causal is None:
        is_causal = bool(getattr(module, "is_causal", True))
    causal = is_causal and (attention_mask is None or attention_mask.dim() == 2)
    options = _mask(attention_mask, query.dtype)
    captures = dict(options.pop("captures", {}))
    score = functions.softcap(softcap) if softcap else None
    score = functions.compose(score, options.pop("score", None))
    if position_bias is not None:
        score = functions.compose(score, "score + position[b, h, q, kv]")
        captures["position"] = position_bias[(None,) * (4 - position_bias.dim())]
    d_v = value.shape[-1]
    query, key, value, scaling = padded_heads(query, key, value, scaling)
    o: Tensor = attention(query, key, value, causal=causal, scale=scaling, dropout=dropout, sink=s_aux, score=score,
                          captures=captures, **options)
    return o[..., :d_v].transpose(1, 2).contiguous(), None


def fa_mask(batch_size: int, q_length: int, kv_length: int, q_offset: Any = 0, kv_offset: int = 0,
            mask_function: Optional[Callable[..., Any]] = None, attention_mask: Optional[Tensor] = None,
            **more: Any) -> Optional[Tensor]:
    """What transformers' AttentionMaskInterface calls. None where causal attention, or all of it, is meant; the padding
    [b, s_kv] where it is causal besides; else whatever `sdpa` has."""
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    whole = isinstance(q_offset, int) and kv_offset == 0 and q_offset + q_length == kv_length
    if whole and mask_function is causal_mask_function:
        if attention_mask is None:
            return None
        if attention_mask.shape[-1] == kv_length:
            attention_mask = attention_mask.to(torch.bool)
            return None if not torch.compiler.is_compiling() and bool(attention_mask.all()) else attention_mask
    if mask_function is not None:
        more["mask_function"] = mask_function
    mask: Optional[Tensor] = sdpa_mask(batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset,
                                       kv_offset=kv_offset, attention_mask=attention_mask, **more)
    return mask


def register(name: str = "fa") -> str:
    """Makes `attn_implementation=name` attention by fa, in this process, and returns the name. ImportError where transformers
    is missing or has no AttentionInterface and AttentionMaskInterface (before 4.53)."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(name, fa_attention_forward)
    AttentionMaskInterface.register(name, fa_mask)
    return name
