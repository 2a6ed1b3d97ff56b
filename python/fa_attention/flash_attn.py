"""Functions with the names and signatures of the package flash_attn, by fa.

    from fa_attention.flash_attn import flash_attn_func, flash_attn_varlen_func

Tensors are [b, s, h, d], packed ones [total, h, d], and window_size of (-1, -1) is no window, as there. Beyond flash_attn
these take fp32, fp64 on the CPU, d_v != d_qk, and CPU tensors. Not here: flash_attn_with_kvcache. Refused: block_table of
flash_attn_varlen_func. With return_attn_probs the third result, which flash_attn has for its own tests, is None.
"""

from __future__ import annotations

from typing import Any, Optional

from torch import Tensor

from . import functions
from .torch import attention, varlen_attention
from .torch._padding import padded_heads

__all__ = ["flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func",
           "flash_attn_varlen_kvpacked_func", "flash_attn_varlen_qkvpacked_func"]


def _options(dropout_p: float, causal: bool, window_size: tuple[int, int], softcap: float, alibi_slopes: Optional[Tensor],
             deterministic: bool) -> dict[str, Any]:
    left, right = window_size
    score = functions.softcap(softcap) if softcap else None
    captures = None
    if alibi_slopes is not None:
        score = functions.compose(score, functions.alibi(alibi_slopes.dim() == 2))
        captures = {"slope": alibi_slopes}
    return {"causal": causal, "window_left": left if left >= 0 else None,
            "window_right": right if right >= 0 and not causal else None, "dropout": dropout_p, "deterministic": deterministic,
            "score": score, "captures": captures}


def _result(o: Tensor, d_v: int) -> Tensor:
    return o[..., :d_v] if o.shape[-1] != d_v else o


def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: Optional[float] = None,
                    causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
                    alibi_slopes: Optional[Tensor] = None, deterministic: bool = False,
                    return_attn_probs: bool = False) -> Any:
    """o [b, s_q, h_q, d_v] of q [b, s_q, h_q, d_qk], k [b, s_kv, h_kv, d_qk] and v [b, s_kv, h_kv, d_v]. alibi_slopes: fp32 [h_q]
    or [b, h_q]. return_attn_probs: (o, lse [b, h_q, s_q], None). Errors as of fa_attention.torch.attention."""
    d_v = v.shape[-1]
    q, k, v, softmax_scale = padded_heads(q, k, v, softmax_scale)
    options = _options(dropout_p, causal, window_size, softcap, alibi_slopes, deterministic)
    result = attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), scale=softmax_scale,
                       return_lse=return_attn_probs, **options)
    if return_attn_probs:
        return _result(result[0].transpose(1, 2), d_v), result[1], None
    return _result(result.transpose(1, 2), d_v)


def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *arguments: Any, **options: Any) -> Any:
    """flash_attn_func of kv [b, s_kv, 2, h_kv, d]."""
    return flash_attn_func(q, kv[:, :, 0], kv[:, :, 1], *arguments, **options)


def flash_attn_qkvpacked_func(qkv: Tensor, *arguments: Any, **options: Any) -> Any:
    """flash_attn_func of qkv [b, s, 3, h, d]."""
    return flash_attn_func(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], *arguments, **options)


def flash_attn_varlen_func(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
                           max_seqlen_k: int, dropout_p: float = 0.0, softmax_scale: Optional[float] = None,
                           causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
                           alibi_slopes: Optional[Tensor] = None, deterministic: bool = False,
                           return_attn_probs: bool = False, block_table: Optional[Tensor] = None) -> Any:
    """o [total_q, h_q, d_v] of q [total_q, h_q, d_qk], k [total_kv, h_kv, d_qk] and v [total_kv, h_kv, d_v], whose sequences lie
    as int32 cu_seqlens_q and cu_seqlens_k [b + 1] say. return_attn_probs: (o, lse [h_q, total_q], None). Raises
    NotImplementedError for block_table; other errors as of fa_attention.torch.varlen_attention."""
    if block_table is not None:
        raise NotImplementedError("block_table is a tensor: accepted is None, a paged cache is not served")
    d_v = v.shape[-1]
    q, k, v, softmax_scale = padded_heads(q, k, v, softmax_scale)
    options = _options(dropout_p, causal, window_size, softcap, alibi_slopes, deterministic)
    result = varlen_attention(q, k, v, cu_seqlens_q, cu_seqlens_k, max_s_q=max_seqlen_q, max_s_kv=max_seqlen_k,
                              scale=softmax_scale, return_lse=return_attn_probs, **options)
    return (_result(result[0], d_v), result[1], None) if return_attn_probs else _result(result, d_v)


def flash_attn_varlen_kvpacked_func(q: Tensor, kv: Tensor, *arguments: Any, **options: Any) -> Any:
    """flash_attn_varlen_func of kv [total_kv, 2, h_kv, d]."""
    return flash_attn_varlen_func(q, kv[:, 0], kv[:, 1], *arguments, **options)


def flash_attn_varlen_qkvpacked_func(qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, *arguments: Any, **options: Any) -> Any:
    """flash_attn_varlen_func of qkv [total, 3, h, d]."""
    return flash_attn_varlen_func(qkv[:, 0], qkv[:, 1], qkv[:, 2], cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *arguments,
                                  **options)
