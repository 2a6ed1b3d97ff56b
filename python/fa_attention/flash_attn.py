"""Functions with the names and signatures of the package flash_attn, by fa.

    from fa_attention.flash_attn import flash_attn_func, flash_attn_varlen_func

Tensors are [b, s, h, d], packed ones [total, h, d], and window_size of (-1, -1) is no window, as there. Beyond flash_attn
these take fp32, fp64 on the CPU, d_v != d_qk, and CPU tensors. With return_attn_probs the third result, which flash_attn has
for its own tests, is None. A KV cache may have pages of any size, in flash_attn_with_kvcache and flash_attn_varlen_func; it has
no gradients. The log-sum-exp of a row without keys is -inf.
"""

from __future__ import annotations

import operator
from typing import Any, Optional, Union

import torch
from torch import Tensor

from . import functions
from ._errors import type_name
from .torch import append, attention, paged_attention, varlen_attention
from .torch._cache import first_rows
from .torch._cache_ops import refuse_gradients
from .torch._cache_raw import STORED
from .torch._padding import padded, padded_heads

__all__ = ["flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func",
           "flash_attn_varlen_kvpacked_func", "flash_attn_varlen_qkvpacked_func", "flash_attn_with_kvcache"]


def _window(window_size: Any) -> tuple[int, int]:
    """Both sides, of integers or of tensors of one."""
    try:
        left, right = window_size
    except (TypeError, ValueError):
        raise TypeError(f"window_size is {window_size!r}: accepted is a pair (left, right), -1 for none") from None
    return operator.index(left), operator.index(right)


def _check(q: Any, k: Any, v: Any, axes: str) -> None:
    """TypeError and ValueError for q, k and v that are no tensors of these axes."""
    for name, t in (("q", q), ("k", k), ("v", v)):
        if not isinstance(t, Tensor):
            raise TypeError(f"{name} is a {type_name(t)}: accepted is a torch.Tensor")
        if t.dim() != axes.count(",") + 1:
            raise ValueError(f"{name} has shape {list(t.shape)}: accepted is {axes}")


def _check_slopes(slopes: Any, heads: Any) -> None:
    if not isinstance(slopes, Tensor):
        raise TypeError(f"alibi_slopes is a {type_name(slopes)}: accepted is a torch.Tensor")
    if slopes.dim() not in (1, 2) or slopes.shape[-1] != heads:
        raise ValueError(f"alibi_slopes has shape {list(slopes.shape)}: accepted are [h_q] and [b, h_q], h_q = {heads}")


def _options(dropout_p: float, causal: bool, window_size: tuple[int, int], softcap: float, alibi_slopes: Optional[Tensor],
             deterministic: bool, heads: Any) -> dict[str, Any]:
    left, right = _window(window_size)
    score = functions.softcap(softcap) if softcap else None
    captures = None
    if alibi_slopes is not None:
        _check_slopes(alibi_slopes, heads)
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
    _check(q, k, v, "[b, s, h, d]")
    d_v = v.shape[-1]
    q, k, v, softmax_scale = padded_heads(q, k, v, softmax_scale)
    options = _options(dropout_p, causal, window_size, softcap, alibi_slopes, deterministic, q.shape[2])
    result = attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), scale=softmax_scale,
                       return_lse=return_attn_probs, **options)
    if return_attn_probs:
        return _result(result[0].transpose(1, 2), d_v), result[1], None
    return _result(result.transpose(1, 2), d_v)


def _check_packed(name: str, t: Any, axes: str, count: int) -> None:
    """Of tensors with `count` of q, k and v behind each other."""
    if not isinstance(t, Tensor):
        raise TypeError(f"{name} is a {type_name(t)}: accepted is a torch.Tensor")
    rank = axes.count(",") + 1
    if t.dim() != rank or t.shape[rank - 3] != count:
        raise ValueError(f"{name} has shape {list(t.shape)}: accepted is {axes}")


def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *arguments: Any, **options: Any) -> Any:
    """flash_attn_func of kv [b, s_kv, 2, h_kv, d]."""
    _check_packed("kv", kv, "[b, s_kv, 2, h_kv, d]", 2)
    return flash_attn_func(q, kv[:, :, 0], kv[:, :, 1], *arguments, **options)


def flash_attn_qkvpacked_func(qkv: Tensor, *arguments: Any, **options: Any) -> Any:
    """flash_attn_func of qkv [b, s, 3, h, d]."""
    _check_packed("qkv", qkv, "[b, s, 3, h, d]", 3)
    return flash_attn_func(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], *arguments, **options)


def flash_attn_varlen_func(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
                           max_seqlen_k: int, dropout_p: float = 0.0, softmax_scale: Optional[float] = None,
                           causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
                           alibi_slopes: Optional[Tensor] = None, deterministic: bool = False,
                           return_attn_probs: bool = False, block_table: Optional[Tensor] = None) -> Any:
    """o [total_q, h_q, d_v] of q [total_q, h_q, d_qk], k [total_kv, h_kv, d_qk] and v [total_kv, h_kv, d_v], whose sequences lie
    as int32 cu_seqlens_q and cu_seqlens_k [b + 1] say. With block_table, int32 [b, max_pages], k and v are pages,
    [pages, page_size, h_kv, d], and the lengths of keys are the differences of cu_seqlens_k; there are then no gradients, and
    no dropout. return_attn_probs: (o, lse [h_q, total_q], None). Errors as of fa_attention.torch.varlen_attention."""
    _check(q, *((k, v) if block_table is None else (q, q)), axes="[total, h, d]")
    options = _options(dropout_p, causal, window_size, softcap, alibi_slopes, deterministic, q.shape[1])
    if block_table is not None:
        return _varlen_over_pages(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_table, return_attn_probs,
                                  softmax_scale, options)
    d_v = v.shape[-1]
    q, k, v, softmax_scale = padded_heads(q, k, v, softmax_scale)
    result = varlen_attention(q, k, v, cu_seqlens_q, cu_seqlens_k, max_s_q=max_seqlen_q, max_s_kv=max_seqlen_k,
                              scale=softmax_scale, return_lse=return_attn_probs, **options)
    return (_result(result[0], d_v), result[1], None) if return_attn_probs else _result(result, d_v)


def _varlen_over_pages(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
                       max_seqlen_k: int, block_table: Tensor, return_lse: bool, scale: Optional[float],
                       options: dict[str, Any]) -> Any:
    _check_caches(q, k, v, "k", "v")
    _check_array("cu_seqlens_k", cu_seqlens_k, q, None)
    if options.pop("dropout"):
        raise ValueError("dropout_p is given: accepted is 0 with a block_table")
    del options["deterministic"]
    lengths = cu_seqlens_k[1:] - cu_seqlens_k[:-1]
    result = paged_attention(q, k, v, block_table, lengths, cu_seqlens_q=cu_seqlens_q, max_s_q=max_seqlen_q,
                             max_s_kv=max_seqlen_k, scale=scale, return_lse=return_lse, **options)
    return (*result, None) if return_lse else result


def flash_attn_varlen_kvpacked_func(q: Tensor, kv: Tensor, *arguments: Any, **options: Any) -> Any:
    """flash_attn_varlen_func of kv [total_kv, 2, h_kv, d]."""
    _check_packed("kv", kv, "[total_kv, 2, h_kv, d]", 2)
    return flash_attn_varlen_func(q, kv[:, 0], kv[:, 1], *arguments, **options)


def flash_attn_varlen_qkvpacked_func(qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, *arguments: Any, **options: Any) -> Any:
    """flash_attn_varlen_func of qkv [total, 3, h, d]."""
    _check_packed("qkv", qkv, "[total, 3, h, d]", 3)
    return flash_attn_varlen_func(qkv[:, 0], qkv[:, 1], qkv[:, 2], cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *arguments,
                                  **options)


def _check_caches(q: Any, k: Any, v: Any, *names: str, stored: bool = False) -> None:
    """Of the arguments' own names, what would else be said of others. stored: k and v may have 8 bits."""
    for name, t in (("q", q), *zip(names, (k, v))):
        if not isinstance(t, Tensor):
            raise TypeError(f"{name} is a {type_name(t)}: accepted is a torch.Tensor")
        if name != "q" and t.dim() != 4:
            raise ValueError(f"{name} has shape {list(t.shape)}: accepted is [b, s, h_kv, d], or [pages, page_size, h_kv, d]")
        of_8_bits = stored and t.dtype in STORED
        if t.dtype != q.dtype and not of_8_bits:
            accepted = f"{q.dtype}, {' and '.join(map(str, STORED))}" if stored else str(q.dtype)
            raise TypeError(f"{name} is {t.dtype}: accepted is what q is, {accepted}")
        if t.device != q.device:
            raise ValueError(f"{name} is on {t.device}: accepted is where q is, {q.device}")
        if t.shape[-1] % (16 if of_8_bits else 8):
            raise ValueError(f"{name} has a head dim of {t.shape[-1]}: accepted with a cache "
                             + ("of 8 bits are multiples of 16" if of_8_bits else "are multiples of 8"))
        if name != "q" and t.stride(-1) != 1 and t.shape[-1] > 1:
            raise ValueError(f"{name} has strides {list(t.stride())}: accepted is a head dim without gaps, a stride of 1")


def _check_array(name: str, t: Any, q: Tensor, b: Optional[int]) -> None:
    if t is None:
        return
    if not isinstance(t, Tensor):
        raise TypeError(f"{name} is a {type_name(t)}: accepted is a torch.Tensor")
    if t.dtype != torch.int32:
        raise TypeError(f"{name} is {t.dtype}: accepted is torch.int32")
    if t.device != q.device:
        raise ValueError(f"{name} is on {t.device}: accepted is where q is, {q.device}")
    if t.dim() != 1 or (b is not None and t.shape[0] != b):
        raise ValueError(f"{name} has shape {list(t.shape)}: accepted is one axis" + (f", [{b}]" if b is not None else ""))


def _cache_lengths(q: Tensor, k: Optional[Tensor], room: int, cache_seqlens: Union[int, Tensor, None]) -> Tensor:
    """int32 [b], the keys that the cache has before the call."""
    if cache_seqlens is None:
        if k is not None:
            raise ValueError("cache_seqlens is None: accepted with k and v are an int and a torch.Tensor")
        cache_seqlens = room
    if isinstance(cache_seqlens, int):
        return torch.full((q.shape[0],), cache_seqlens, dtype=torch.int32, device=q.device)
    _check_array("cache_seqlens", cache_seqlens, q, q.shape[0])
    return cache_seqlens


def _scales(name: str, descale: Optional[Tensor], cache_name: str, cache: Tensor, q: Tensor, by_row: bool) -> Optional[Tensor]:
    """k_descale or v_descale [b, h_kv] as scales of the rows of the cache, [rows, s, h_kv], expanded. by_row: row i of the
    cache is request i's."""
    if cache.dtype not in STORED:
        if descale is not None:
            raise ValueError(f"{name} is given: accepted is None with {cache_name} of {cache.dtype}")
        return None
    if descale is None:
        return torch.ones((1, 1, 1), dtype=torch.float32, device=q.device).expand(cache.shape[:-1])
    if not isinstance(descale, Tensor):
        raise TypeError(f"{name} is a {type_name(descale)}: accepted is a torch.Tensor")
    if descale.dtype != torch.float32:
        raise TypeError(f"{name} is {descale.dtype}: accepted is torch.float32")
    if descale.device != q.device:
        raise ValueError(f"{name} is on {descale.device}: accepted is where q is, {q.device}")
    b, h_kv = q.shape[0], cache.shape[2]
    if descale.dim() != 2 or descale.shape[0] != b or descale.shape[1] != h_kv:
        raise ValueError(f"{name} has shape {list(descale.shape)}: accepted is [b, h_kv], [{b}, {h_kv}]")
    if b == 1 or descale.stride(0) == 0:
        return descale[:1, None].expand(cache.shape[:-1])
    if not by_row:
        raise ValueError(f"{name} has strides {list(descale.stride())}: accepted with block_table or cache_batch_idx is one "
                         "scale of a head for all requests, expanded with a stride of 0, because they may share what they read")
    return descale[:, None].expand(b, cache.shape[1], h_kv)


def _turned(q: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, positions: Tensor, rotary: dict[str, Any]) -> Tensor:
    """q [b, h_q, s_q, d] with its rotary embedding at positions [b, s_q]: an append whose rows are not cached."""
    h_kv, d_v = k_cache.shape[2], v_cache.shape[3]
    unused = q[:, :h_kv]
    values = unused[..., :d_v] if d_v <= q.shape[-1] else v.new_zeros(()).expand(q.shape[0], h_kv, q.shape[2], d_v).contiguous()
    nowhere = torch.full((positions.numel(),), -1, dtype=torch.int32, device=q.device)
    turned = append(unused, values, k_cache, v_cache, slots=nowhere, q=q, positions=positions.flatten(), **rotary)
    assert turned is not None
    return turned


def _is_padded(q: Any, k_cache: Any, v_cache: Any) -> bool:
    """Whether head dims have to be made longer, of what the queries' dtype is."""
    tensors = (q, k_cache, v_cache)
    return (all(isinstance(t, Tensor) and t.dim() == 4 for t in tensors) and len({t.dtype for t in tensors}) == 1
            and q.shape[-1] == k_cache.shape[-1] and (q.shape[-1] % 8 != 0 or v_cache.shape[-1] % 8 != 0))


def _with_longer_heads(q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Optional[Tensor], v: Optional[Tensor],
                       scale: Optional[float], options: dict[str, Any]) -> Any:
    """flash_attn_with_kvcache over copies with zeros behind each row."""
    d_v = v_cache.shape[-1]
    for name, t, cache in (("k", k, k_cache), ("v", v, v_cache)):
        if t is not None and t.shape[-1] != cache.shape[-1]:
            raise ValueError(f"{name} has a head dim of {t.shape[-1]}: accepted is {cache.shape[-1]}, as in {name}_cache")
    queries, keys, values, scale = padded_heads(q, k_cache, v_cache, scale)
    new_k, new_v = (t if t is None else padded(t) for t in (k, v))
    result = flash_attn_with_kvcache(queries, keys, values, new_k, new_v, softmax_scale=scale, **options)
    if k is not None:
        k_cache.copy_(keys[..., :k_cache.shape[-1]])
        v_cache.copy_(values[..., :d_v])
    return (_result(result[0], d_v), result[1]) if options["return_softmax_lse"] else _result(result, d_v)


def flash_attn_with_kvcache(q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Optional[Tensor] = None, v: Optional[Tensor] = None,
                            rotary_cos: Optional[Tensor] = None, rotary_sin: Optional[Tensor] = None,
                            cache_seqlens: Union[int, Tensor, None] = None, cache_batch_idx: Optional[Tensor] = None,
                            cache_leftpad: Optional[Tensor] = None, block_table: Optional[Tensor] = None,
                            softmax_scale: Optional[float] = None, causal: bool = False,
                            window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, rotary_interleaved: bool = True,
                            alibi_slopes: Optional[Tensor] = None, num_splits: int = 0, return_softmax_lse: bool = False,
                            k_descale: Optional[Tensor] = None, v_descale: Optional[Tensor] = None) -> Any:
    """o [b, s_q, h_q, d_v] of q [b, s_q, h_q, d_qk] over a cache: k_cache and v_cache [b_cache, s_max, h_kv, d], or with
    block_table, int32 [b, max_pages], pages [pages, page_size, h_kv, d].

    k, v [b, s_new, h_kv, d] are first written to the cache, in place, behind the cache_seqlens keys that each request has:
    an int, int32 [b], or None for a whole cache, to which nothing is added. cache_batch_idx: int32 [b], rows of the cache, or
    of block_table. cache_leftpad: int32 [b], where the keys of each begin; it moves no position.

    rotary_cos, rotary_sin [positions, rotary_dim / 2], of fp32 or the dtype of q, turn k at its positions, from cache_seqlens
    on. q is turned at the same, row by row, if causal or with a window, else all of it at cache_seqlens. Causal masks and
    windows count from the last key. alibi_slopes: fp32 [h_q] or [b, h_q]. num_splits is left to the planner, whatever it is.
    return_softmax_lse: (o, lse [b, h_q, s_q]).

    k_cache and v_cache may be torch.float8_e4m3fn or torch.int8 under a q of fp16 or bf16, with head dims in multiples of 16.
    k_descale, v_descale: fp32 [b, h_kv], what their elements are multiplied by; None: 1. New rows, of the dtype of q, are
    divided by them and rounded. With block_table or cache_batch_idx a head has one for all requests: b is 1, or the tensor
    is expanded over b, with a stride of 0. A scale a row is for fa_attention.torch.paged_attention.

    Head dims that are no multiples of 8 are served by copies of the whole cache, and back where k and v are given.

    Refused: inputs that require gradients while these are recorded (RuntimeError), k without v, rotary_cos without k
    (ValueError), and integers other than int32 (TypeError). Lengths and tables that do not fit are
    refused on the CPU; on a GPU they give wrong results, and no access outside of the cache.
    """
    refuse_gradients("flash_attn_with_kvcache", (("q", q), ("k_cache", k_cache), ("v_cache", v_cache), ("k", k), ("v", v),
                                                 ("alibi_slopes", alibi_slopes), ("k_descale", k_descale),
                                                 ("v_descale", v_descale)))
    if _is_padded(q, k_cache, v_cache):
        others = {"rotary_cos": rotary_cos, "rotary_sin": rotary_sin, "cache_seqlens": cache_seqlens, "block_table": block_table,
                  "cache_batch_idx": cache_batch_idx, "cache_leftpad": cache_leftpad, "causal": causal, "softcap": softcap,
                  "window_size": window_size, "rotary_interleaved": rotary_interleaved, "alibi_slopes": alibi_slopes,
                  "return_softmax_lse": return_softmax_lse, "k_descale": k_descale, "v_descale": v_descale}
        return _with_longer_heads(q, k_cache, v_cache, k, v, softmax_scale, others)
    _check_caches(q, k_cache, v_cache, "k_cache", "v_cache", stored=True)
    if q.dim() != 4:
        raise ValueError(f"q has shape {list(q.shape)}: accepted is [b, s_q, h_q, d_qk]")
    if k is None or v is None:
        for name, t, other in (("k", k, "v"), ("v", v, "k"), ("rotary_cos", rotary_cos, "k and v"),
                               ("rotary_sin", rotary_sin, "k and v")):
            if t is not None:
                raise ValueError(f"{name} is given: accepted is None without {other}")
    elif k.dim() != 4 or v.dim() != 4:
        raise ValueError(f"k has shape {list(k.shape)} and v {list(v.shape)}: accepted is [b, s_new, h_kv, d]")
    room = k_cache.shape[1] * (block_table.shape[1] if block_table is not None else 1)
    lengths = _cache_lengths(q, k, room, cache_seqlens)
    for name, array in (("cache_batch_idx", cache_batch_idx), ("cache_leftpad", cache_leftpad)):
        _check_array(name, array, q, q.shape[0])
    by_row = block_table is None and cache_batch_idx is None
    k_scale = _scales("k_descale", k_descale, "k_cache", k_cache, q, by_row)
    v_scale = _scales("v_descale", v_descale, "v_cache", v_cache, q, by_row)
    if by_row:
        k_cache, v_cache, k_scale, v_scale = first_rows(k_cache, v_cache, k_scale, v_scale, q.shape[0])
    scales: dict[str, Any] = {"k_scale": k_scale, "v_scale": v_scale}
    queries = q.transpose(1, 2)
    if k is not None and v is not None:
        rotary: dict[str, Any] = {"rotary_cos": rotary_cos, "rotary_sin": rotary_sin, "rotary_interleaved": rotary_interleaved,
                                  **scales, "scales_given": k_scale is not None or v_scale is not None}
        turns_by_row = causal or _window(window_size) != (-1, -1)
        used, s_q = lengths + k.shape[1], q.shape[1]
        together = rotary_cos is not None and s_q == k.shape[1] and (turns_by_row or s_q == 1)
        if rotary_cos is not None and not together:
            steps = torch.arange(s_q, dtype=torch.int32, device=q.device) * int(turns_by_row)
            queries = _turned(queries, v, k_cache, v_cache, lengths[:, None] + steps, rotary)
        turned = append(k.transpose(1, 2), v.transpose(1, 2), k_cache, v_cache, used, block_table=block_table,
                        batch_index=cache_batch_idx, q=queries if together else None, **rotary)
        queries, lengths = turned if turned is not None else queries, used
    options = _options(0.0, causal, window_size, softcap, alibi_slopes, False, q.shape[2])
    del options["dropout"], options["deterministic"]
    result = paged_attention(queries, k_cache, v_cache, block_table, lengths, batch_index=cache_batch_idx,
                             seq_begin=cache_leftpad, scale=softmax_scale, return_lse=return_softmax_lse, **scales, **options)
    return (result[0].transpose(1, 2), result[1]) if return_softmax_lse else result.transpose(1, 2)
