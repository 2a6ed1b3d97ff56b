"""The operator fa_attention::schedule: how calls over a KV cache share their keys out among thread blocks, made once for all
layers of a step."""

from __future__ import annotations

from typing import Any, Optional, Sequence

import torch
from torch import Tensor
from torch import library as operators

from .. import _abi, capi
from .._options import Options
from . import _bound, _cache_ops, _cache_raw, _raw
from ._attention import Captures, is_direct, split_captures
from ._cache_raw import PagedCall, PagedPlan
from ._ops import library

_OF_FORWARD = _cache_ops.FORWARD[_cache_ops.FORWARD.index("(") + 1:_cache_ops.FORWARD.index(", Tensor? schedule")]
library.define(f"schedule(Tensor(a!) memory, {_OF_FORWARD}) -> ()", tags=(torch.Tag.pt2_compliant_tag,))
schedule_op = torch.ops.fa_attention.schedule.default


def _aligned(plan: PagedPlan, q: Tensor, k: Tensor, v: Optional[Tensor]) -> bool:
    """Whether the calls' rows start at multiples of 16 bytes, as far as these tensors say it."""
    return plan.forward(False).is_aligned([t.data_ptr() for t in (q, k, v) if t is not None])


def _size(plan: PagedPlan, q: Tensor, k: Tensor, v: Optional[Tensor]) -> int:
    return int(plan.attention.schedule_size(*plan.sizes, rows_aligned=_aligned(plan, q, k, v)))


def _schedule(memory: Tensor, q: Tensor, k: Tensor, v: Optional[Tensor], sink: Optional[Tensor], captures: Sequence[Tensor],
              *rest: Any) -> None:
    _cache_raw.check_layout(rest[9])
    q, call = _raw.readable(q), _cache_ops.paged_call(rest)
    plan = _cache_raw.find_plan(q, k, v, sink, captures, call)
    _cache_raw.check_schedule(memory, q, "out")
    size = _size(plan, q, k, v)
    if memory.numel() < size:
        raise ValueError(f"out has {memory.numel()} bytes: accepted are {size} and more for calls of these sizes")
    if q.is_cuda and size == 0:  # calls take none
        return
    data, count = _cache_raw.memory_of(memory)
    requests = capi.requests(call.seqused_kv, call.cu_seqlens_q, call.seqused_q, max_s_q=call.max_s_q, max_s_kv=call.max_s_kv)
    given = _abi.ScheduleMemory(data=data, size=count)
    _cache_raw.on_device(plan.index, lambda stream: plan.attention.bind_schedule(
        given, plan.sizes, requests, call.seq_begin, _aligned(plan, q, k, v), stream)())


def _schedule_fake(memory: Tensor, q: Tensor, k: Tensor, v: Optional[Tensor], sink: Optional[Tensor], captures: Sequence[Tensor],
                   *rest: Any) -> None:
    _cache_ops.check_kinds_of(q, k, v, sink, captures, rest)
    _cache_raw.check_schedule(memory, q, "out")


def _mapped(info: Any, in_dims: Any, *arguments: Any) -> Any:
    raise ValueError("schedule under torch.vmap: accepted is a call in front of it, without a mapped axis, because a schedule is "
                     "of all requests of a call")


for _key in ("CPU", "CUDA"):
    library.impl("schedule", _schedule, _key)
operators.register_fake("fa_attention::schedule", _schedule_fake, lib=library)
operators.register_vmap("fa_attention::schedule", _mapped, lib=library)
library.impl("schedule", _cache_ops.without_gradients(schedule_op), "Autograd", with_keyset=True)
library.impl("schedule", _bound.count_versions(schedule_op, (0,)), "ADInplaceOrView", with_keyset=True)


def schedule(q: Tensor, k_pages: Tensor, v_pages: Optional[Tensor], block_table: Optional[Tensor], seqused_kv: Tensor, *,
             out: Optional[Tensor] = None, layout: str = "NHD", cu_seqlens_q: Optional[Tensor] = None,
             seqused_q: Optional[Tensor] = None, max_s_q: int = 0, max_s_kv: int = 0, batch_index: Optional[Tensor] = None,
             seq_begin: Optional[Tensor] = None, causal: bool = False, scale: Optional[float] = None,
             window_left: Optional[int] = None, window_right: Optional[int] = None, chunk: int = 0, score: Optional[str] = None,
             mask: Optional[str] = None, captures: Captures = None, sink: Optional[Tensor] = None,
             k_scale: Optional[Tensor] = None, v_scale: Optional[Tensor] = None, q_scale: Optional[Tensor] = None,
             row_bias: Optional[Tensor] = None, dtype: Optional[torch.dtype] = None, precise: bool = False, value_in_key: int = 0,
             invariance: str = "none") -> Tensor:
    """How the thread blocks of `paged_attention` share the keys of requests, for its argument schedule: made once for all layers
    of a step, which otherwise make one each (docs/inference.md). Returns `out`.

    The arguments are those of these calls, of which shapes, dtypes and strides count, and of the arrays seqused_kv, cu_seqlens_q,
    seqused_q and seq_begin, which the kernel reads when it runs. Layers whose calls have equal shapes, masks and options share
    it, one after the other in one stream. Of other lengths than theirs it gives wrong results, and no access outside of the
    pools; calls of other sizes, masks or alignment refuse it, with ValueError.

    out: torch.uint8 [bytes] on the device of q, contiguous: what an earlier call for equal sizes returned. A step of a captured
    CUDA graph is given one, so that each replay makes it anew; so is a call under torch.compile, where out is needed. Unless
    given it is allocated. It has no elements where calls take no schedule: on the CPU, and where requests are short.

    Errors are those of `paged_attention`; ValueError for an `out` that is too small, and under torch.vmap. The stream is
    PyTorch's current one.
    """
    arrays = (block_table, seqused_kv, cu_seqlens_q, seqused_q, batch_index, seq_begin, max_s_q, max_s_kv)
    options = (causal, scale, window_left, window_right, chunk, score, mask)
    last = (k_scale, v_scale, q_scale, row_bias, dtype, precise, value_in_key)
    names, tensors, scalars, values = split_captures(captures)
    if not torch.compiler.is_compiling():
        unbound = Options(varlen=cu_seqlens_q is not None, tensors=names)
        _cache_raw.check_kinds(q, k_pages, v_pages, None, tensors, PagedCall._make([unbound, layout, *arrays, values, *last, None]))
        if out is not None:
            _cache_raw.check_schedule(out, q, "out")
    if sink is not None:
        sink = _raw.sink_like(sink, q)
    if out is None:
        if not is_direct(q, k_pages, v_pages, sink, *arrays[:6], *tensors, *last[:4]):
            raise ValueError("out is None: accepted under torch.compile, fake tensors and torch.func is what `schedule` has "
                             "returned for equal sizes, because how many bytes it has is found out by a call alone")
        fixed = _cache_ops.paged_options(options, names, scalars, cu_seqlens_q is not None, invariance)
        rows = _raw.readable(q)
        plan = _cache_raw.find_plan(rows, k_pages, v_pages, sink, tensors,
                                    PagedCall._make([fixed, layout, *arrays, values, *last, None]))
        out = torch.empty(_size(plan, rows, k_pages, v_pages), dtype=torch.uint8, device=q.device)
    schedule_op(out, q, k_pages, v_pages, sink, tensors, *arrays, values, layout, *options, names, scalars, *last, invariance)
    return out
