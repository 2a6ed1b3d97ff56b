"""Forwards of PyTorch tensors whose outputs the caller has allocated: layouts are worked out once, then kept. What operators
without gradients have in common is here, too."""

from __future__ import annotations

import threading
from typing import Any, Callable, Optional, Sequence

import torch
from torch import Tensor

from .. import _abi
from .._options import HandleKey, handle
from .._prepared import Layout, PreparedCall
from . import _raw
from ._ops import select
from ._raw import CAPTURE_DTYPES, Call

_MOST_PLANS = 1024

Named = Sequence[tuple[str, Optional[Tensor]]]


class _Plan:
    """All that is known about the calls of one layout."""

    def __init__(self, call: Call, read: Sequence[tuple[str, Tensor]], captures: Sequence[Tensor],
                 written: Sequence[tuple[str, Tensor]], dtype: str) -> None:
        options = call.options
        (_, q), (_, k), (_, v) = read[:3]
        self.index = q.device.index or 0 if q.is_cuda else -1
        self.device = q.device
        device = (_abi.DEVICE_CUDA, self.index) if q.is_cuda else (_abi.DEVICE_HOST, 0)
        has_sink = any(name == "sink" for name, _ in read)
        dtypes = tuple(CAPTURE_DTYPES[t.dtype] for t in captures)
        attention = handle(HandleKey(options, device, dtype, q.shape[-1], v.shape[-1], has_sink, dtypes, (False,) * len(dtypes)))
        if options.varlen:
            b = call.cu_seqlens_q.numel() - 1 if call.cu_seqlens_q is not None else 0
            sizes: tuple[int, ...] = (b, q.shape[1], k.shape[1], call.max_s_q, call.max_s_kv, q.shape[0], k.shape[0])
        else:
            sizes = (q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2])
        inputs, outputs, captured = ([(name, _raw.spec(t)) for name, t in named] for named in (
            read, written, [*zip(options.tensors, captures)]))
        layout = Layout(inputs, outputs, captured, [], options.numbers, options.varlen, False)
        self.prepared = PreparedCall(attention, layout, sizes)


_plans: dict[Any, _Plan] = {}
_lock = threading.Lock()


def forward(call: Call, read: Named, captures: Sequence[Tensor], written: Named, dtype: str, check: Callable[[], None]) -> None:
    """Runs a forward into `written`. read: q, k, v and what else is an input, by the names of the C ABI; None is left out.
    check: what is asked of a layout that is seen for the first time."""
    tensors = [(name, t) for name, t in read if t is not None]
    outputs = [(name, t) for name, t in written if t is not None]
    facts = tuple([(name, t.dtype, t.device, t.shape, t.stride()) for name, t in (*tensors, *outputs)])
    key = (call.options, call.max_s_q, call.max_s_kv, call.cu_seqlens_q is not None and call.cu_seqlens_q.shape, facts,
           tuple([(t.dtype, t.device, t.shape, t.stride()) for t in captures]))
    plan = _plans.get(key)
    if plan is None:
        check()
        plan = _Plan(call, tensors, captures, outputs, dtype)
        with _lock:
            if len(_plans) >= _MOST_PLANS:
                _plans.clear()
            _plans[key] = plan
    _raw.run(plan, plan.prepared, [t.data_ptr() for _, t in (*tensors, *outputs)] + [t.data_ptr() for t in captures], call)


def each_in_turn(operator: Any, written: Sequence[int] = ()) -> Callable[..., Any]:
    """A rule of vmap: calls follow each other. ValueError where one of the arguments numbered `written`, which the operator
    changes in place, is not mapped: by the meaning of vmap each call would change a copy of its own."""
    names = [argument.name for argument in operator._schema.arguments]

    def rule(info: Any, in_dims: Sequence[Any], *arguments: Any) -> Any:
        for n in written:
            if in_dims[n] is None:
                raise ValueError(f"{names[n]} is not mapped by torch.vmap, and another argument is: accepted is a {names[n]} with "
                                 f"the mapped axis, because {operator._schema.name} writes to it in place")
        each = [operator(*(select(t, dim, n) for t, dim in zip(arguments, in_dims))) for n in range(info.batch_size)]
        if each[0] is None:
            return None, None
        if isinstance(each[0], Tensor):
            return torch.stack(each), 0
        return tuple(torch.stack(parts) for parts in zip(*each)), (0,) * len(each[0])

    return rule


def count_versions(operator: Any, written: Sequence[int]) -> Callable[..., Any]:
    """A kernel for ADInplaceOrView: what autograd saved of the arguments numbered `written` is told that they changed."""

    def kernel(keys: Any, *arguments: Any) -> Any:
        torch.autograd.graph.increment_version([arguments[n] for n in written])
        with torch._C._AutoDispatchBelowADInplaceOrView():
            return operator.redispatch(keys & torch._C._after_ADInplaceOrView_keyset, *arguments)

    return kernel
