"""Attention over a KV cache whose requests share prefixes: the operators fa_attention::shared_prefix_forward and
shared_prefix_forward_out. Neither has gradients."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, Optional, Sequence

import torch
from torch import Tensor
from torch import library as operators

from .. import _options, capi
from .._errors import type_name
from . import _bound, _cache_ops, _cache_raw, _raw
from ._attention import Captures, is_direct, split_captures
from ._cache_raw import PagedCall, PagedPlan
from ._ops import library

MOST_LEVELS = 8


class SharedPrefix(NamedTuple):
    """A level of prefixes, for `shared_prefix_attention`: int32 tensors on q's device, which are read when the kernels run.

    block_table: [groups, max_pages], the pages of a group's prefix, from position 0 on. cu_rows: [groups + 1], of q group g
    has the rows cu_rows[g] to cu_rows[g + 1] - 1, of whole requests; dense queries count row i of request n as n s_q + i.
    lengths, begin: [groups], the position behind a group's last key, and that of its first (None: 0). positions: [groups,
    max_rows], the position of each row, with a window, a chunk or a function of rows. max_rows, max_length: no group has more; 0:
    not known.
    """

    block_table: Tensor
    cu_rows: Tensor
    lengths: Tensor
    begin: Optional[Tensor] = None
    positions: Optional[Tensor] = None
    max_rows: int = 0
    max_length: int = 0


_ARGUMENTS = ("Tensor q, Tensor k_pages, Tensor? v_pages, Tensor? sink, Tensor[] captures, Tensor block_table, Tensor seqused_kv, "
              "Tensor? cu_seqlens_q, Tensor? seqused_q, Tensor seq_begin, SymInt max_s_q, SymInt max_s_kv, float[] numbers, "
              "str layout, bool causal, float? scale, SymInt? window_left, SymInt? window_right, SymInt chunk, str? score, "
              "str? mask, str[] tensor_names, str[] number_names, Tensor? k_scale, Tensor? v_scale, SymInt value_in_key, "
              "Tensor[] block_tables, Tensor[] cu_rows, Tensor[] lengths, Tensor?[] begins, Tensor?[] positions, "
              "SymInt[] max_rows, SymInt[] max_lengths")
library.define(f"shared_prefix_forward({_ARGUMENTS}) -> (Tensor o, Tensor lse)", tags=(torch.Tag.pt2_compliant_tag,))
library.define(f"shared_prefix_forward_out(Tensor(a!) out, {_ARGUMENTS}) -> Tensor lse", tags=(torch.Tag.pt2_compliant_tag,))
forward_op = torch.ops.fa_attention.shared_prefix_forward.default
forward_out_op = torch.ops.fa_attention.shared_prefix_forward_out.default


def _call(rest: Sequence[Any], checked: bool) -> tuple[PagedCall, list[SharedPrefix]]:
    """Of the arguments behind captures. checked: whether sizes are numbers, of which the library's options are made."""
    table, used, cu_q, used_q, begin, max_s_q, max_s_kv, numbers, layout, *fixed = rest[:16]
    names, scalars, k_scale, v_scale, value_in_key, *levels = rest[16:]
    if checked:
        options = _cache_ops.paged_options(tuple(fixed), names, scalars, cu_q is not None)
    else:
        _options.check_names(fixed[5], fixed[6], (*names, *scalars))
        options = _options.Options(varlen=cu_q is not None, tensors=tuple(names))
    call = PagedCall(options, layout, table, used, cu_q, used_q, None, begin, max_s_q, max_s_kv, tuple(numbers), k_scale, v_scale,
                     value_in_key=value_in_key)
    return call, [SharedPrefix(*level) for level in zip(*levels)]


def _check_levels(prefixes: Any, q: Tensor) -> None:
    if not isinstance(prefixes, (list, tuple)) or isinstance(prefixes, SharedPrefix):
        raise TypeError(f"prefixes is a {type_name(prefixes)}: accepted is a list of SharedPrefix")
    if not 1 <= len(prefixes) <= MOST_LEVELS:
        raise ValueError(f"prefixes has {len(prefixes)} elements: accepted are 1 to {MOST_LEVELS} levels")
    for n, level in enumerate(prefixes):
        if not isinstance(level, SharedPrefix):
            raise TypeError(f"prefixes[{n}] is a {type_name(level)}: accepted is a SharedPrefix")
        for name, axes in (("block_table", "[groups, max_pages]"), ("cu_rows", "[groups + 1]"), ("lengths", "[groups]"),
                           ("begin", "[groups]"), ("positions", "[groups, max_rows]")):
            t = getattr(level, name)
            if t is not None or name in ("block_table", "cu_rows", "lengths"):
                _check_array(f"prefixes[{n}].{name}", t, axes, q)


def _check_array(name: str, t: Any, axes: str, q: Tensor) -> None:
    """TypeError and ValueError for what is no int32 tensor of these axes on the device of q."""
    _cache_raw.check_strided(name, t)
    if t.dtype != torch.int32:
        raise TypeError(f"{name} is {t.dtype}: accepted is torch.int32")
    if t.dim() != axes.count(",") + 1:
        raise ValueError(f"{name} has shape {list(t.shape)}: accepted is {axes}")
    _cache_raw.check_strided(name, t, q)
    if t.dim() == 1 and not t.is_contiguous():
        raise ValueError(f"{name} has strides {list(t.stride())}: accepted is a contiguous tensor")


def check(q: Any, k: Any, v: Any, sink: Optional[Tensor], captures: Sequence[Tensor], call: PagedCall, prefixes: Any) -> None:
    """TypeError and ValueError for what the library cannot see, or relies on, and what needs no sizes."""
    for name, t in (("q", q), ("k_pages", k)):
        _cache_raw.check_strided(name, t)
    if q.dtype not in _raw.DTYPES:
        raise TypeError(f"q is {q.dtype}: accepted with shared prefixes are {', '.join(map(str, _raw.DTYPES))}")
    for name, t in (("block_table", call.block_table), ("seq_begin", call.seq_begin)):
        if not isinstance(t, Tensor):
            raise TypeError(f"{name} is a {type_name(t)}: accepted is a torch.Tensor of torch.int32")
    _cache_raw.check_kinds(q, k, v, sink, captures, call)
    _check_levels(prefixes, q)


def _check_out(out: Any, plan: PagedPlan, q: Tensor) -> None:
    _cache_raw.check_strided("out", out)
    if out.dtype != q.dtype:
        raise TypeError(f"out is {out.dtype}: accepted is what q is, {q.dtype}")
    _cache_raw.check_strided("out", out, q)
    if tuple(out.shape) != plan.o.shape:
        raise ValueError(f"out has shape {list(out.shape)}: accepted is {list(plan.o.shape)}")
    if out.shape[-1] > 1 and out.stride(-1) != 1:
        raise ValueError(f"out has strides {list(out.stride())}: accepted is a head dim without gaps, a stride of 1")


def _run(out: Optional[Tensor], want_lse: bool, q: Tensor, k: Tensor, v: Optional[Tensor], sink: Optional[Tensor],
         captures: Sequence[Tensor], *rest: Any) -> tuple[Tensor, Optional[Tensor]]:
    call, prefixes = _call(rest, True)
    check(q, k, v, sink, captures, call, prefixes)
    q = _raw.readable(q)
    plan = _cache_raw.find_plan(q, k, v, sink, captures, call)
    if out is not None:
        _check_out(out, plan, q)
    o = out if out is not None else torch.empty_strided(*plan.o[:2], dtype=plan.o.dtype, device=plan.device)
    lse = torch.empty_strided(*plan.lse[:2], dtype=plan.lse.dtype, device=plan.device) if want_lse else None
    named = {**dict(zip(call.options.tensors, captures)), **dict(zip(call.options.numbers, call.numbers))}
    turned = [t.transpose(1, 2) if t is not None and call.layout == "NHD" else t for t in (k, v, call.k_scale, call.v_scale)]
    requests = capi.requests(call.seqused_kv, call.cu_seqlens_q, call.seqused_q, max_s_q=call.max_s_q, max_s_kv=call.max_s_kv)

    def run(stream: int) -> None:
        plan.attention.bind_forward(
            q, *turned[:2], o, lse, stream=stream, sink=sink, captures=named or None, k_scale=turned[2], v_scale=turned[3],
            cache=capi.paged_cache(call.block_table, seq_begin=call.seq_begin), sequences=requests,
            prefixes=[capi.shared_prefix(*level) for level in prefixes],
            workspace=_workspace(plan, prefixes) if plan.index >= 0 else None)()

    _cache_raw.on_device(plan.index, run)
    return o, lse


def _workspace(plan: PagedPlan, prefixes: Sequence[SharedPrefix]) -> Tensor:
    levels = []
    for level in prefixes:
        room = level.block_table.shape[1] * plan.k.shape[2]
        longest = min(level.max_length, room) if level.max_length else room
        levels.append((level.block_table.shape[0], level.max_rows, longest, level.begin is not None))
    return torch.empty(_size(plan.attention, plan.sizes, tuple(levels)), dtype=torch.uint8, device=plan.device)


@functools.lru_cache(maxsize=1024)
def _size(attention: capi.Attention, sizes: tuple[int, ...], levels: tuple[tuple[int, int, int, bool], ...]) -> int:
    return max(attention.shared_workspace_size(sizes[:6], levels, aligned) for aligned in (True, False))


def _forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    o, lse = _run(None, True, *arguments)
    assert lse is not None
    return o, lse


def _forward_out(out: Tensor, *arguments: Any) -> Tensor:
    lse = _run(out, True, *arguments)[1]
    assert lse is not None
    return lse


def _forward_fake(q: Tensor, k: Tensor, v: Optional[Tensor], sink: Optional[Tensor], captures: Sequence[Tensor],
                  *rest: Any) -> tuple[Tensor, Tensor]:
    call, prefixes = _call(rest, False)
    check(q, k, v, sink, captures, call, prefixes)
    return _cache_ops.outputs(q, v, call)


def _forward_out_fake(out: Tensor, *arguments: Any) -> Tensor:
    return _forward_fake(*arguments)[1]


for _name, _kernel, _fake, _operator, _written in (
        ("shared_prefix_forward", _forward, _forward_fake, forward_op, ()),
        ("shared_prefix_forward_out", _forward_out, _forward_out_fake, forward_out_op, (0,))):
    for _key in ("CPU", "CUDA"):
        library.impl(_name, _kernel, _key)
    operators.register_fake(f"fa_attention::{_name}", _fake, lib=library)
    operators.register_vmap(f"fa_attention::{_name}", _bound.each_in_turn(_operator, _written), lib=library)
    library.impl(_name, _cache_ops.without_gradients(_operator), "Autograd", with_keyset=True)
library.impl("shared_prefix_forward_out", _bound.count_versions(forward_out_op, (0,)), "ADInplaceOrView", with_keyset=True)


def shared_prefix_attention(q: Tensor, k_pages: Tensor, v_pages: Optional[Tensor], block_table: Tensor, seqused_kv: Tensor,
                            seq_begin: Tensor, prefixes: Sequence[SharedPrefix], *, layout: str = "NHD",
                            cu_seqlens_q: Optional[Tensor] = None, seqused_q: Optional[Tensor] = None, max_s_q: int = 0,
                            max_s_kv: int = 0, causal: bool = False, scale: Optional[float] = None,
                            window_left: Optional[int] = None, window_right: Optional[int] = None, chunk: int = 0,
                            score: Optional[str] = None, mask: Optional[str] = None, captures: Captures = None,
                            sink: Optional[Tensor] = None, return_lse: bool = False, out: Optional[Tensor] = None,
                            k_scale: Optional[Tensor] = None, v_scale: Optional[Tensor] = None, value_in_key: int = 0) -> Any:
    """`paged_attention` of requests that share prefixes, which are read once a group (docs/shared_prefixes.md).

    Of each request block_table has the pages of its own keys, from position seq_begin, int32 [b], on, where its prefix ends.
    Positions count the prefix. prefixes: 1 to 8 levels, which follow each other. A score function does not depend on b, and on q,
    s_q and s_kv in q + s_kv - s_q alone; a mask function likewise, or it keeps all keys in front of s_kv - s_q. out: where o goes,
    of its shape, dtype and device. Dense queries with s_q > 1 lie in memory as [b, s_q, h_q, d]. The rest is as in
    `paged_attention`; q of 8 bits is refused.

    A call allocates o, the log-sum-exp and its scratch memory alone, and may be captured in a CUDA graph once an equal one has run.
    The operators are torch.ops.fa_attention.shared_prefix_forward and, with out, shared_prefix_forward_out.

    There are no gradients: RuntimeError where an input requires one and gradients are recorded. Other errors are those of
    `paged_attention`. Under torch.vmap calls follow each other, and `out` is mapped, too.
    """
    compiling = torch.compiler.is_compiling()
    if not compiling and torch.is_grad_enabled():
        named = (("q", q), ("k_pages", k_pages), ("v_pages", v_pages), ("sink", sink), ("k_scale", k_scale), ("v_scale", v_scale))
        _cache_ops.refuse_gradients("shared_prefix_attention", named)
    names, tensors, scalars, values = split_captures(captures) if captures else ((), [], (), ())
    if not compiling:
        unbound = PagedCall(_options.Options(varlen=cu_seqlens_q is not None, tensors=names), layout, block_table, seqused_kv,
                            cu_seqlens_q, seqused_q, None, seq_begin, max_s_q, max_s_kv, (), k_scale, v_scale,
                            value_in_key=value_in_key)
        check(q, k_pages, v_pages, None, tensors, unbound, prefixes)
        if out is not None:
            _cache_raw.check_strided("out", out, q)
    if sink is not None:
        sink = _raw.sink_like(sink, q)
    tables, cu_rows, lengths, begins, positions, max_rows, max_lengths = map(list, zip(*prefixes))
    arguments = (q, k_pages, v_pages, sink, tensors, block_table, seqused_kv, cu_seqlens_q, seqused_q, seq_begin, max_s_q, max_s_kv,
                 values, layout, causal, scale, window_left, window_right, chunk, score, mask, names, scalars, k_scale, v_scale,
                 value_in_key, tables, cu_rows, lengths, begins, positions, max_rows, max_lengths)
    if is_direct(q, k_pages, v_pages, sink, block_table, seqused_kv, seq_begin, out, k_scale, v_scale, *tensors, *tables, *cu_rows,
                 *lengths, *begins, *positions):
        _cache_ops.refuse_gradients("shared_prefix_attention", ((f"captures[{n!r}]", t) for n, t in zip(names, tensors)))
        o, lse = _run(out, return_lse, *arguments)
        if out is not None and not out.is_inference():
            torch.autograd.graph.increment_version(out)
    elif out is not None:
        o, lse = out, forward_out_op(out, *arguments)
    else:
        o, lse = forward_op(*arguments)
    return (o, lse) if return_lse else o
