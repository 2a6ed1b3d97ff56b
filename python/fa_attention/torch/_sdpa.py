"""torch.nn.functional.scaled_dot_product_attention by fa."""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor
from torch.nn.attention.bias import CausalBias, CausalVariant

from .._errors import type_name
from ._attention import attention
from ._padding import padded_heads

KEEP, BIAS = "keep[b, h, q, kv] != 0", "score + bias[b, h, q, kv]"


def mask_options(mask: Optional[Tensor], dtype: torch.dtype) -> dict[str, Any]:
    """The arguments of `attention` for a mask of up to 4 axes that broadcast to [b, h_q, s_q, s_kv]: True is kept, a float is
    added to the score."""
    if mask is None:
        return {}
    mask = mask[(None,) * (4 - mask.dim())]
    if mask.dtype == torch.bool:
        return {"mask": KEEP, "captures": {"keep": mask.to(torch.int32)}}
    if not mask.is_floating_point():
        raise TypeError(f"attn_mask is {mask.dtype}: accepted are torch.bool and floating point")
    return {"score": BIAS, "captures": {"bias": mask if dtype == torch.float64 or mask.dtype != torch.float64 else mask.float()}}


def _alignment(bias: CausalBias, query: Tensor, key: Tensor) -> bool:
    """Whether the causal mask that a CausalBias stands for is top left. It has no elements of its own."""
    lengths = bias.seq_len_q, bias.seq_len_kv
    if lengths != (query.shape[-2], key.shape[-2]):
        raise ValueError(f"attn_mask is causal over {lengths[0]} queries and {lengths[1]} keys: accepted are {query.shape[-2]} and "
                         f"{key.shape[-2]}, as in query and key")
    return bool(bias.variant == CausalVariant.UPPER_LEFT)


def _check_mask(mask: Tensor, query: Tensor, key: Tensor) -> None:
    """ValueError for a mask that does not broadcast to [b, h_q, s_q, s_kv], or is elsewhere."""
    accepted = [*query.shape[:3], key.shape[2]]
    if mask.device != query.device:
        raise ValueError(f"attn_mask is on {mask.device}: accepted is where query is, {query.device}")
    if mask.dim() > 4 or any(n not in (1, size) for n, size in zip(reversed(mask.shape), reversed(accepted))):
        raise ValueError(f"attn_mask has shape {list(mask.shape)}: accepted is what broadcasts to [b, h_q, s_q, s_kv], {accepted}")


def _leading(t: Tensor, shape: torch.Size) -> Tensor:
    """With its axes before the heads broadcast to `shape`, and as one."""
    return t.expand(*shape, *t.shape[-3:]).reshape(-1, *t.shape[-3:])


def scaled_dot_product_attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Optional[Tensor] = None,
                                 dropout_p: float = 0.0, is_causal: bool = False, scale: Optional[float] = None,
                                 enable_gqa: bool = False) -> Tensor:
    """As torch.nn.functional.scaled_dot_product_attention: [..., h, s_q, d_v] of query [..., h_q, s_q, d_qk], key [..., h_kv,
    s_kv, d_qk] and value [..., h_kv, s_kv, d_v]. is_causal is top left: row i keeps the keys up to i.

    attn_mask broadcasts to [..., h_q, s_q, s_kv]: torch.bool keeps where it is True, a float is added to the scores and may
    require a gradient. A torch.nn.attention.bias.CausalBias is a causal mask of its alignment. Rows without keys are 0. Head dims
    are of any size, d_qk up to 576 and d_v up to 512: others than multiples of 8 are copied. Gradients where a head dim is above
    256 take d_qk = d_v.
    Raises ValueError for attn_mask with is_causal, and for fewer heads of key and value without enable_gqa; the other errors
    are those of `attention`.
    """
    for name, t in (("query", query), ("key", key), ("value", value)):
        if not isinstance(t, Tensor):
            raise TypeError(f"{name} is a {type_name(t)}: accepted is a torch.Tensor")
        if t.dim() < 2:
            raise ValueError(f"{name} has shape {list(t.shape)}: accepted is [..., h, s, d]")
    if attn_mask is not None and is_causal:
        raise ValueError("attn_mask and is_causal: accepted is one of them")
    if attn_mask is not None and not isinstance(attn_mask, Tensor):
        raise TypeError(f"attn_mask is a {type_name(attn_mask)}: accepted is a torch.Tensor")
    top_left = True
    if isinstance(attn_mask, CausalBias):
        top_left = _alignment(attn_mask, query, key)
        attn_mask, is_causal = None, True
    rank = max(t.dim() for t in (query, key, value))
    query, key, value = (t[(None,) * (rank - t.dim())] for t in (query, key, value))
    if rank < 4:
        query, key, value = (t[None, None] if rank == 2 else t[:, None] for t in (query, key, value))
        if attn_mask is not None and rank == 3 and attn_mask.dim() == 3:
            attn_mask = attn_mask[:, None]
    if query.shape[-3] != key.shape[-3] and not enable_gqa:
        raise ValueError(f"key has {key.shape[-3]} heads: accepted without enable_gqa are {query.shape[-3]}, as in query")
    batch = torch.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3])
    if query.shape[:-3] != batch or key.shape[:-3] != batch or value.shape[:-3] != batch or len(batch) > 1:
        query, key, value = (_leading(t, batch) for t in (query, key, value))
        if attn_mask is not None and attn_mask.dim() > 3:
            attn_mask = _leading(attn_mask, batch)
    if attn_mask is not None and not torch.compiler.is_compiling():
        _check_mask(attn_mask, query, key)
    d_v = value.shape[-1]
    query, key, value, scale = padded_heads(query, key, value, scale)
    o: Tensor = attention(query, key, value, causal=is_causal, top_left=top_left, scale=scale, dropout=dropout_p,
                          **mask_options(attn_mask, query.dtype))
    o = o[..., :d_v] if o.shape[-1] != d_v else o
    if rank < 4:
        return o[0, 0] if rank == 2 else o[:, 0]
    return o.unflatten(0, batch) if len(batch) > 1 else o
