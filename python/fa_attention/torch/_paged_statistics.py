"""Statistics of scores and of P of requests over a KV cache, with O, of PyTorch tensors: one call of the base layer."""

from __future__ import annotations

from typing import Any, Mapping, Optional

import torch
from torch import Tensor

from .. import _abi, capi
from .._options import Options, check_names
from . import _cache_ops, _cache_raw, _raw
from ._attention import split_captures
from ._cache_raw import PagedCall
from ._raw import DTYPES
from ._statistics import AttentionStatistics
from ._statistics_ops import function_of, made


def paged_statistics(q: Tensor, k_pages: Tensor, v_pages: Optional[Tensor], block_table: Optional[Tensor], seqused_kv: Tensor, *,
                     max_logit: str = "none", max_logit_by_head: bool = False, entropy: bool = False,
                     column_sums: str = "none", top_keys: int = 0, layout: str = "NHD",
                     cu_seqlens_q: Optional[Tensor] = None, seqused_q: Optional[Tensor] = None, max_s_q: int = 0,
                     max_s_kv: int = 0, batch_index: Optional[Tensor] = None, seq_begin: Optional[Tensor] = None,
                     causal: bool = False, scale: Optional[float] = None, window_left: Optional[int] = None,
                     window_right: Optional[int] = None, chunk: int = 0, score: Optional[str] = None,
                     mask: Optional[str] = None, captures: Optional[Mapping[str, Any]] = None,
                     sink: Optional[Tensor] = None, k_scale: Optional[Tensor] = None, v_scale: Optional[Tensor] = None,
                     value_in_key: int = 0) -> AttentionStatistics:
    """`paged_attention`, and what it tells of its scores and of P (docs/statistics.md).

    column_sums [b, h, s_kv] and top_keys [b, h, top_keys] are those of `attention_statistics`, of positions of each request,
    of packed queries too. s_kv is max_s_kv, or without it what a row of block_table, or of the cache, has room for. Positions
    that do not count for a request have sums of 0 and are no top keys. max_logit and entropy are [b, h_q, s_q], of packed
    queries [h_q, total_q]; rows of no request hold anything. The other arguments and the errors are those of
    `paged_attention`, without a q of 8 bits. There are no gradients."""
    names, tensors, scalars, values = split_captures(captures)
    if sink is not None:
        sink = _raw.resolved(_raw.sink_like(sink, q))
    packed = cu_seqlens_q is not None
    call = PagedCall(Options(varlen=packed, tensors=names), layout, block_table, seqused_kv, cu_seqlens_q, seqused_q,
                     batch_index, seq_begin, max_s_q, max_s_kv, values, k_scale, v_scale, value_in_key=value_in_key)
    if isinstance(q, Tensor) and q.dtype not in DTYPES:
        raise TypeError(f"q is {q.dtype}: accepted are {', '.join(map(str, DTYPES))}")
    _cache_raw.check_forward(q, k_pages, v_pages, sink, tensors, call)
    _cache_ops.refuse_gradients("paged_statistics", (("q", q), ("k_pages", k_pages), ("v_pages", v_pages), ("sink", sink),
                                                     *((f"captures[{n!r}]", t) for n, t in zip(names, tensors))))
    check_names(score, mask, names + scalars)
    given: dict[str, Any] = {**dict(zip(names, (_raw.resolved(t) for t in tensors))), **dict(zip(scalars, values))}
    q, d_v = _raw.readable(q), _cache_raw.d_v_of(v_pages, call)
    k, v, of_k, of_v = (_by_heads(t, layout) for t in (k_pages, v_pages, k_scale, v_scale))
    options = {"causal": causal, "scale": scale, "window_left": window_left, "window_right": window_right, "chunk": chunk,
               "sink": sink is not None, "max_logit": max_logit, "max_logit_by_head": max_logit_by_head,
               "entropy": entropy, "column_sums": column_sums, "top_keys": top_keys, "varlen": packed,
               "page_size": k.shape[2] if block_table is not None else _abi.CONTIGUOUS, "value_in_key": value_in_key,
               **_cache_raw.stored_kinds(q, k_pages, v_pages, call)}
    attention = made(q, d_v, function_of(score, given, {}), function_of(mask, given, {}), options)
    results = _outputs(q, k, d_v, call, options)
    index = q.device.index or 0 if q.is_cuda else -1
    _cache_raw.on_device(index, lambda stream: attention.bind_forward(
        q, k, v, results.o, results.lse, stream=stream, captures=given or None, sink=sink, k_scale=of_k, v_scale=of_v,
        sequences=capi.requests(seqused_kv, cu_seqlens_q, seqused_q, max_s_q, max_s_kv),
        cache=capi.paged_cache(block_table, batch_index, seq_begin), max_logit=results.max_logit, entropy=results.entropy,
        column_sums=results.column_sums, top_keys=results.top_keys)())
    return results


def _by_heads(t: Optional[Tensor], layout: str) -> Any:
    """By meaning [pages, h_kv, page_size, ...]."""
    return t if t is None or layout == "HND" else t.transpose(1, 2)


def _outputs(q: Tensor, k: Tensor, d_v: int, call: PagedCall, options: Mapping[str, Any]) -> AttentionStatistics:
    new = lambda *shape: torch.empty(shape, dtype=_raw.lse_dtype(q.dtype), device=q.device)  # noqa: E731
    h_q, b = q.shape[1], call.seqused_kv.shape[0]
    rows = (h_q, q.shape[0]) if call.options.varlen else (b, h_q, q.shape[2])
    longest = k.shape[2] * (1 if call.block_table is None else call.block_table.shape[1])
    s_kv = min(call.max_s_kv, longest) if call.max_s_kv > 0 else longest
    heads = k.shape[1] if options["column_sums"] == "kv_heads" else h_q
    top_keys = options["top_keys"]
    return AttentionStatistics(
        q.new_empty(*q.shape[:-1], d_v), new(*rows),
        (new(h_q) if options["max_logit_by_head"] else new(*rows)) if options["max_logit"] != "none" else None,
        new(*rows) if options["entropy"] else None,
        new(b, heads, s_kv) if options["column_sums"] != "none" else None,
        torch.empty((b, heads, top_keys), dtype=torch.int32, device=q.device) if top_keys > 0 else None)
