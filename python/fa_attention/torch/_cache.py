"""Attention over a KV cache, and new keys and values for it."""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from .._errors import type_name
from .._options import Options
from . import _cache_ops, _cache_raw, _raw, _schedule
from ._attention import Captures, is_direct, split_captures
from ._cache_raw import AppendCall, PagedCall


def paged_attention(q: Tensor, k_pages: Tensor, v_pages: Optional[Tensor], block_table: Optional[Tensor], seqused_kv: Tensor, *,
                    layout: str = "NHD", cu_seqlens_q: Optional[Tensor] = None, seqused_q: Optional[Tensor] = None,
                    max_s_q: int = 0, max_s_kv: int = 0, batch_index: Optional[Tensor] = None,
                    seq_begin: Optional[Tensor] = None, causal: bool = False, scale: Optional[float] = None,
                    window_left: Optional[int] = None, window_right: Optional[int] = None, chunk: int = 0,
                    score: Optional[str] = None, mask: Optional[str] = None, captures: Captures = None,
                    sink: Optional[Tensor] = None, return_lse: bool = False, k_scale: Optional[Tensor] = None,
                    v_scale: Optional[Tensor] = None, q_scale: Optional[Tensor] = None, row_bias: Optional[Tensor] = None,
                    dtype: Optional[torch.dtype] = None, precise: bool = False, value_in_key: int = 0,
                    invariance: str = "none", schedule: Optional[Tensor] = None) -> Any:
    """`attention` of requests whose keys and values are in pages, or rows of a contiguous cache: o [b, h_q, s_q, d_v], in
    the memory order of q.

    q [b, h_q, s_q, d_qk], or with cu_seqlens_q packed, [total_q, h_q, d_qk], and then o is [total_q, h_q, d_v]. k_pages and
    v_pages are pools, [pages, page_size, h_kv, d] for the layout "NHD", [pages, h_kv, page_size, d] for "HND", of any
    strides whose last is 1: K and V may be interleaved in one tensor. All are of one dtype and device, as for `attention`.

    block_table: int32 [rows, max_pages]; position j of a request is row j % page_size of page
    `block_table[row][j // page_size]`, and row is the request's number, or batch_index's. Where it is None, k_pages and v_pages
    are a contiguous cache, [rows, s_max, h_kv, d] or for "HND" [rows, h_kv, s_max, d], and a request's row is one of it.
    seqused_kv: int32 [b], the positions
    of each request, new tokens counted. Row i of a request's s_q rows stands at position seqused_kv - s_q + i: causal
    masks, windows and chunks count positions. cu_seqlens_q: int32 [b + 1]; seqused_q: int32 [b], how many of a request's
    rows count. max_s_q, max_s_kv: the longest, 0 where they are not known. batch_index, seq_begin: int32 [b], the row of the
    table, and the first position that counts. These arrays are read when the kernel runs: a captured graph may be replayed
    with others.

    Pages may be torch.float8_e4m3fn or torch.int8, each of the two for itself, under a q of fp16 or bf16 with head dims in
    multiples of 16. Then k_scale and v_scale are fp32, [pages, page_size, h_kv] or for "HND" [pages, h_kv, page_size], of any
    strides: an element stands for its value times the scale of its row. A tensor that is expanded shares scales.

    Pages of torch.uint8 have two codes of 4 bits in a byte, [pages, page_size, h_kv, d / 2]. k_scale, or v_scale, is of the
    dtype of q then, [pages, page_size, h_kv, 2 d / g], a scale and an offset in turn for each g = 32, 64 or 128 columns
    (docs/quantized_caches.md). Head dims are multiples of g.

    value_in_key: V is the first so many columns of K, as in absorbed latent attention (docs/mla.md). v_pages is None, and o has
    so many columns, up to 512 of up to 576. k_pages are of the dtype of q; or for 512 of 576 columns torch.float8_e4m3fn rows of
    656 bytes under a q of fp16 or bf16, which have their scales in them, so that k_scale is None.

    q may be of 8 bits, too, on the CPU and on GPUs as for `quantized_attention`: torch.float8_e4m3fn or torch.float8_e5m2 over
    such pages, or torch.int8 over k_pages of it and v_pages of torch.float8_e4m3fn. Then scales are those of
    `quantized_attention`, and may be None: q_scale and, with torch.int8, row_bias are fp32 [b, h_q, s_q] or [b, h_q], of packed
    queries [h_q, total_q]; k_scale and v_scale are of the rows of pages, or [b, h_kv], of each request. dtype: of o, bf16
    unless given, fp16 or torch.float8_e4m3fn. precise: as there. There is no seq_begin.

    schedule: what `schedule` has made for calls like this one, in place of one of its own.

    Functions, captures, sink, invariance and return_lse are as in `attention`; the log-sum-exp is [b, h_q, s_q], of packed queries
    [h_q, total_q]. Rows without keys are 0, their log-sum-exp -inf, or the sink.

    There are no gradients: RuntimeError where an input requires one and gradients are recorded. Other errors are those of
    `attention`. Wrong lengths and tables are refused on the CPU; on a GPU they give wrong results, and no access outside of
    the pools.
    """
    call = (block_table, seqused_kv, cu_seqlens_q, seqused_q, batch_index, seq_begin, max_s_q, max_s_kv)
    options = (causal, scale, window_left, window_right, chunk, score, mask)
    last = (k_scale, v_scale, q_scale, row_bias, dtype, precise, value_in_key, schedule)
    try:
        return _paged(q, k_pages, v_pages, layout, call, options, captures, sink, last, return_lse, invariance)
    except (AttributeError, RuntimeError):
        fixed = Options(varlen=cu_seqlens_q is not None)
        _cache_raw.check_kinds(q, k_pages, v_pages, None, (), PagedCall._make([fixed, layout, *call, (), *last]))
        raise


def _paged(q: Tensor, k: Tensor, v: Optional[Tensor], layout: str, arrays: tuple[Any, ...], options: tuple[Any, ...],
           captures: Captures, sink: Optional[Tensor], last: tuple[Any, ...], return_lse: bool,
           invariance: str) -> Any:
    """arrays: fields 2 to 9 of PagedCall; options: what `paged_options` takes; last: the last fields, from k_scale on."""
    names, tensors, scalars, values = split_captures(captures) if captures else ((), [], (), ())
    if sink is not None:
        sink = _raw.sink_like(sink, q)
    if q.device.type not in ("cpu", "cuda") or not is_direct(q, k, v, sink, *arrays[:2], *tensors, *last[:4], last[7]):
        if not torch.compiler.is_compiling():
            fixed = Options(varlen=arrays[2] is not None, tensors=names)
            _cache_raw.check_kinds(q, k, v, sink, tensors, PagedCall._make([fixed, layout, *arrays, values, *last]))
        o, lse = _cache_ops.forward_op(q, k, v, sink, tensors, *arrays, values, layout, *options, names, scalars, *last[:7],
                                       invariance, last[7])
        return (o, lse) if return_lse else o
    if torch.is_grad_enabled():
        named = (("q", q), ("k_pages", k), ("v_pages", v), ("sink", sink), *zip(PagedCall._fields[11:15], last),
                 *((f"captures[{n!r}]", t) for n, t in zip(names, tensors)))
        _cache_ops.refuse_gradients("paged_attention", named)
    if layout not in _cache_raw.LAYOUTS:
        _cache_raw.check_layout(layout)
    fixed = _cache_ops.paged_options(options, names, scalars, arrays[2] is not None, invariance)
    call = PagedCall._make([fixed, layout, *arrays, values, *last])
    o, lse = _cache_raw.forward(_raw.readable(q), k, v, sink, tensors, call, return_lse)
    return (o, lse) if return_lse else o


def append(k: Tensor, v: Optional[Tensor], k_cache: Tensor, v_cache: Optional[Tensor], seqused_kv: Optional[Tensor] = None, *,
           block_table: Optional[Tensor] = None, layout: str = "NHD", cu_seqlens_k_new: Optional[Tensor] = None,
           batch_index: Optional[Tensor] = None, slots: Optional[Tensor] = None, q: Optional[Tensor] = None,
           rotary_dims: int = 0, rotary_base: float = 10000.0, rotary_interleaved: bool = False,
           rotary_cos: Optional[Tensor] = None, rotary_sin: Optional[Tensor] = None,
           positions: Optional[Tensor] = None, k_scale: Optional[Tensor] = None, v_scale: Optional[Tensor] = None,
           scales_given: bool = False) -> Optional[Tensor]:
    """Writes new keys and values into a cache, in place, and returns q with its rotary embedding, or None without q.

    k [b, h_kv, s_new, d_qk] and v [b, h_kv, s_new, d_v], or packed, [total_new, h_kv, d], by cu_seqlens_k_new, int32 [b + 1].
    With block_table k_cache and v_cache are pages, as in `paged_attention`. Without it they are contiguous,
    [rows, s_max, h_kv, d] for the layout "NHD", [rows, h_kv, s_max, d] for "HND", and a request's row is its number, or
    batch_index's. Their last stride is 1.

    seqused_kv: int32 [b], the positions of each request, the new ones counted: row j of a request's n new ones goes to
    position seqused_kv - n + j. slots: int32 or int64 [rows], where each new row goes instead, page * page_size + row of
    the page, in a contiguous cache row * s_max + position; a negative one is not cached.

    rotary_dims: so many columns of k and q are turned, by angles of rotary_base, or by rotary_cos and rotary_sin
    [positions, rotary_dims / 2], of fp32 or the dtype of k; with these rotary_dims need not be given. rotary_interleaved:
    pairs are columns 2 i and 2 i + 1, else i and i + rotary_dims / 2. positions: int32 or int64 [rows], where each new row
    stands, if not where it is put. q [b, h_q, s_new, d_qk], or packed, [total_new, h_q, d_qk], is not changed.

    k_cache and v_cache may be torch.float8_e4m3fn or torch.int8, each for itself, under a k of fp16 or bf16 with head dims in
    multiples of 16. Then k_scale and v_scale are fp32, of their rows: the shape of k_cache without its last axis. Of each new
    row a scale is written, its greatest magnitude / 448, or / 127 for torch.int8, and the row divided by it, rounded to the
    nearest. With scales_given the scales that are there are read instead, may be expanded, and greater elements become the
    greatest that there is.

    Caches of torch.uint8 have 4 bits, and k_scale and v_scale are pairs of the dtype of k, as in `paged_attention`; each group
    of a new row gets its own. A k_cache of torch.float8_e4m3fn may have latent rows of 656 bytes, of a k of 576 columns, for
    `paged_attention` with value_in_key 512: v, v_cache and scales are None, and rotary_dims counts from column 512 on.

    Under torch.vmap the cache and its scales are mapped, too: ValueError where they are not. The stream is PyTorch's current one.

    There are no gradients: RuntimeError where an input requires one and gradients are recorded. Other errors are those of
    `attention`. Wrong lengths, tables and slots are refused on the CPU; on a GPU such rows are not cached.
    """
    if isinstance(rotary_cos, Tensor) and rotary_dims == 0:
        rotary_dims = 2 * rotary_cos.shape[-1]
    rest = (block_table, seqused_kv, cu_seqlens_k_new, batch_index, slots, rotary_cos, rotary_sin, positions, k_scale, v_scale)
    rotary = (rotary_dims, rotary_base if rotary_cos is None else 0.0, rotary_interleaved, scales_given)
    try:
        return _append(k, v, k_cache, v_cache, q, layout, rest, rotary)
    except (AttributeError, RuntimeError):
        _cache_raw.check_append_kinds(k, v, k_cache, v_cache, q, AppendCall._make([layout, *rest, *rotary]))
        raise


def _append(k: Tensor, v: Optional[Tensor], k_cache: Tensor, v_cache: Optional[Tensor], q: Optional[Tensor], layout: str,
            rest: tuple[Any, ...], rotary: tuple[Any, ...]) -> Optional[Tensor]:
    """rest and rotary: fields of AppendCall."""
    if k.device.type not in ("cpu", "cuda") or not is_direct(k, v, k_cache, v_cache, q, *rest[:2], *rest[8:]):
        if not torch.compiler.is_compiling():
            _cache_raw.check_append_kinds(k, v, k_cache, v_cache, q, AppendCall._make([layout, *rest, *rotary]))
        scales = (None, None, *rest[8:]) if rotary[3] else rest[8:]
        turned: Tensor = _cache_ops.append_op(k, v, k_cache, v_cache, q, *rest[:8], layout, *rotary[:3], *scales)
        return turned if q is not None else None
    if torch.is_grad_enabled():
        _cache_ops.refuse_gradients("append", (("k", k), ("v", v), ("k_cache", k_cache), ("v_cache", v_cache), ("q", q),
                                               ("k_scale", rest[8]), ("v_scale", rest[9])))
    if layout not in _cache_raw.LAYOUTS:
        _cache_raw.check_layout(layout)
    result = _cache_raw.append(_raw.readable(k), _raw.readable(v) if v is not None else None, k_cache, v_cache,
                               _raw.readable(q) if q is not None else None, AppendCall._make([layout, *rest, *rotary]))
    written = [t for t in (k_cache, v_cache, *(() if rotary[3] else rest[8:])) if t is not None]
    if not any([t.is_inference() for t in written]):
        torch.autograd.graph.increment_version(written)
    return result


class KVCache(NamedTuple):
    """Keys and values of requests, in pages or contiguous, and where they are. The tensors are somebody else's: `append`
    writes to k and v, and nothing changes the others.

    k, v: pages as in `paged_attention`; without block_table contiguous, [rows, s_max, h_kv, d] for the layout "NHD",
    [rows, h_kv, s_max, d] for "HND". seqused_kv: int32 [b], positions of each request, the new ones of this call counted.
    batch_index, seq_begin: int32 [b], as in `paged_attention`; without block_table batch_index names rows of k and v.
    k_scale, v_scale: of k and v of 8 or 4 bits, as in `paged_attention`, which `append` writes, too. value_in_key: as there;
    v is None then.
    """

    k: Tensor
    v: Optional[Tensor]
    seqused_kv: Tensor
    block_table: Optional[Tensor] = None
    batch_index: Optional[Tensor] = None
    seq_begin: Optional[Tensor] = None
    layout: str = "NHD"
    k_scale: Optional[Tensor] = None
    v_scale: Optional[Tensor] = None
    value_in_key: int = 0

    def append(self, k: Tensor, v: Optional[Tensor] = None, **options: Any) -> Optional[Tensor]:
        """`append` of k [b, h_kv, s_new, d_qk] and v [b, h_kv, s_new, d_v] at the end of each request; options: slots, q,
        the rotary embedding's and scales_given."""
        return append(k, v, self.k, self.v, self.seqused_kv, block_table=self.block_table, batch_index=self.batch_index,
                      layout=self.layout, k_scale=self.k_scale, v_scale=self.v_scale, **options)

    def attention(self, q: Tensor, **options: Any) -> Any:
        """`paged_attention` of q [b, h_q, s_q, d_qk] over the cache; options: the other arguments."""
        k, v, k_scale, v_scale = self._rows()
        return paged_attention(q, k, v, self.block_table, self.seqused_kv, batch_index=self.batch_index,
                               seq_begin=self.seq_begin, layout=self.layout, k_scale=k_scale, v_scale=v_scale,
                               value_in_key=self.value_in_key, **options)


    def _rows(self) -> tuple[Any, ...]:
        """k, v and their scales as `paged_attention` takes them."""
        given = (self.k, self.v, self.k_scale, self.v_scale)
        if self.block_table is not None or self.batch_index is not None or not isinstance(self.seqused_kv, Tensor):
            return given
        return first_rows(*given, self.seqused_kv.shape[0])

    def schedule(self, q: Tensor, **options: Any) -> Tensor:
        """`schedule` of the cache's calls with q; options: out, and those of `attention`, without return_lse and schedule."""
        k, v, k_scale, v_scale = self._rows()
        return _schedule.schedule(q, k, v, self.block_table, self.seqused_kv, batch_index=self.batch_index,
                                  seq_begin=self.seq_begin, layout=self.layout, k_scale=k_scale, v_scale=v_scale,
                                  value_in_key=self.value_in_key, **options)


def first_rows(k: Tensor, v: Optional[Tensor], k_scale: Optional[Tensor], v_scale: Optional[Tensor], b: int) -> tuple[Any, ...]:
    """The rows of a contiguous cache that b requests have in their order, and scales of them."""
    for name, t in (("k_cache", k), ("v_cache", v)):
        if t is not None and not isinstance(t, Tensor):
            raise TypeError(f"{name} is a {type_name(t)}: accepted is a torch.Tensor")
        if t is not None and t.shape[0] < b:
            raise ValueError(f"{name} has {t.shape[0]} rows: accepted without batch_index are {b} and more, the b of q")
    return tuple(t[:b] if t is not None and t.shape[0] > b else t for t in (k, v, k_scale, v_scale))
