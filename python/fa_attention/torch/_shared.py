"""Attention over a KV cache whose requests share prefixes."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, Optional, Sequence

import torch
from torch import Tensor

from .. import capi, load
from .._errors import type_name
from .._options import Options
from . import _cache_ops, _cache_raw, _raw


class SharedPrefix(NamedTuple):
    """A level of prefixes, for `shared_prefix_attention`: int32 tensors on q's device, which are read when the kernels run.

    block_table: [groups, max_pages], the pages of a group's prefix, from position 0 on. cu_rows: [groups + 1], of q group g
    has the rows cu_rows[g] to cu_rows[g + 1] - 1, of whole requests; dense queries count row i of request n as n s_q + i.
    lengths, begin: [groups], the position behind a group's last key, and that of its first (None: 0). positions: [groups,
    max_rows], the position of each row, with a window, a chunk or a score of rows. max_rows, max_length: no group has more; 0:
    not known.
    """

    block_table: Tensor
    cu_rows: Tensor
    lengths: Tensor
    begin: Optional[Tensor] = None
    positions: Optional[Tensor] = None
    max_rows: int = 0
    max_length: int = 0


@functools.lru_cache(maxsize=256)
def _attention(device: tuple[int, int], fields: tuple[tuple[str, Any], ...], score: Optional[str]) -> capi.Attention:
    more = dict(fields)
    if score:
        more["score"] = capi.function(score)
    return capi.Attention(load(), more.pop("head_dim"), more.pop("dtype"), device=device, **more)


def shared_prefix_attention(q: Tensor, k_pages: Tensor, v_pages: Tensor, block_table: Tensor, seqused_kv: Tensor,
                            seq_begin: Tensor, prefixes: Sequence[SharedPrefix], *, layout: str = "NHD",
                            cu_seqlens_q: Optional[Tensor] = None, max_s_q: int = 0, max_s_kv: int = 0,
                            causal: bool = False, scale: Optional[float] = None, window_left: Optional[int] = None,
                            chunk: int = 0, score: Optional[str] = None, sink: Optional[Tensor] = None,
                            return_lse: bool = False, out: Optional[Tensor] = None) -> Any:
    """`paged_attention` of requests that share prefixes, which are read once a group (docs/shared_prefixes.md).

    Of each request block_table has the pages of its own keys, from position seq_begin, int32 [b], on, where its prefix ends.
    Positions count the prefix. prefixes: levels, which follow each other. score does not depend on b, and on q, s_q and
    s_kv in q + s_kv - s_q alone. The rest is as in `paged_attention`; pages of 8 bits are refused. out: where o goes. A call
    allocates o, the log-sum-exp and its scratch memory alone, and may be captured in a CUDA graph once an equal one has run. It
    has no gradients.
    """
    if torch.is_grad_enabled():
        named = (("q", q), ("k_pages", k_pages), ("v_pages", v_pages), ("sink", sink))
        _cache_ops.refuse_gradients("shared_prefix_attention", named)
    if layout not in ("NHD", "HND"):
        raise ValueError(f"layout is {layout!r}: accepted are 'NHD' and 'HND'")
    for name, t in (("q", q), ("k_pages", k_pages), ("v_pages", v_pages)):
        if not isinstance(t, Tensor):
            raise TypeError(f"{name} is a {type_name(t)}: accepted is a torch.Tensor")
    for name, t in (("k_pages", k_pages), ("v_pages", v_pages)):
        if isinstance(t, Tensor) and t.dtype in _cache_raw.CACHED_CODES:
            raise TypeError(f"{name} is {t.dtype}: accepted with shared prefixes is what q is, {q.dtype}, and for fewer bits "
                            "paged_attention")
    if not isinstance(block_table, Tensor):
        raise TypeError(f"block_table is a {type_name(block_table)}: accepted is a torch.Tensor of torch.int32")
    packed = cu_seqlens_q is not None
    if sink is not None:
        sink = _raw.resolved(_raw.sink_like(sink, q))
    call = _cache_raw.PagedCall(Options(varlen=packed), layout, block_table, seqused_kv, cu_seqlens_q, seq_begin=seq_begin)
    _cache_raw.check_kinds(q, k_pages, v_pages, sink, (), call)
    k, v = (_raw.resolved(t.transpose(1, 2) if layout == "NHD" else t) for t in (k_pages, v_pages))
    q = _raw.readable(q)
    o = out if out is not None else q.new_empty((*q.shape[:-1], v.shape[-1]))
    rows = (q.shape[1], q.shape[0]) if packed else q.shape[:-1]
    lse = torch.empty(rows, dtype=_raw.lse_dtype(q.dtype), device=q.device) if return_lse else None
    fields = {"head_dim": q.shape[-1], "head_dim_v": v.shape[-1], "dtype": q.dtype, "causal": causal, "scale": scale,
              "page_size": k.shape[2], "varlen": packed, "window_left": window_left, "chunk": chunk,
              "sink": sink is not None}
    cuda = q.device.type == "cuda"
    device = (capi.DEVICE_CUDA, q.device.index) if cuda else (capi.DEVICE_HOST, 0)
    attention = _attention(device, tuple(fields.items()), score)
    stream = _raw.current_stream(q.device.index) if cuda else None
    levels = [capi.shared_prefix(*prefix) for prefix in prefixes]
    run = attention.bind_forward(
        q, k, v, o, lse, stream=stream, sink=sink, cache=capi.paged_cache(block_table, seq_begin=seq_begin),
        sequences=capi.requests(seqused_kv, cu_seqlens_q, max_s_q=max_s_q, max_s_kv=max_s_kv), prefixes=levels,
        workspace=_workspace(attention, q, k, block_table, prefixes, max_s_q, max_s_kv, seqused_kv) if cuda else None)
    run()
    return (o, lse) if return_lse else o


def _workspace(attention: capi.Attention, q: Tensor, k: Tensor, table: Tensor, prefixes: Sequence[SharedPrefix],
               max_s_q: int, max_s_kv: int, seqused_kv: Tensor) -> Tensor:
    def positions(of: Tensor, most: int) -> int:
        room = of.shape[1] * k.shape[2]
        return min(most, room) if most else room

    packed = q.dim() == 3
    h_q, total = (q.shape[1], q.shape[0]) if packed else (q.shape[1], 0)
    sizes = (seqused_kv.shape[0], h_q, k.shape[1], max_s_q if packed else q.shape[2], positions(table, max_s_kv), total)
    levels = tuple((p.block_table.shape[0], p.max_rows, positions(p.block_table, p.max_length), p.begin is not None)
                   for p in prefixes)
    return torch.empty(_size(attention, sizes, levels), dtype=torch.uint8, device=q.device)


@functools.lru_cache(maxsize=1024)
def _size(attention: capi.Attention, sizes: tuple[int, ...], levels: tuple[tuple[int, int, int, bool], ...]) -> int:
    return max(attention.shared_workspace_size(sizes, levels, aligned) for aligned in (True, False))
