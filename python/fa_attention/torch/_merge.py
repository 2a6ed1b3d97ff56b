"""The operator fa_attention::merge_states: partial results over different keys become that over all, with gradients."""

from __future__ import annotations

from typing import Any, Optional, Sequence

import torch
from torch import Tensor
from torch import library as operators

from .. import _abi
from .._errors import type_name
from .._options import HandleKey, Options, handle
from . import _cache_raw, _raw
from ._ops import fold, library, select
from ._raw import DTYPES

MOST_STATES = 16

library.define("merge_states(Tensor[] o, Tensor[] lse, Tensor? sink, ScalarType? dtype) -> (Tensor o, Tensor lse)",
               tags=(torch.Tag.pt2_compliant_tag,))
merge_op = torch.ops.fa_attention.merge_states.default


def _check_tensor(name: str, t: Any) -> None:
    if not isinstance(t, Tensor):
        raise TypeError(f"{name} is a {type_name(t)}: accepted is a torch.Tensor")
    if t.is_nested:
        raise TypeError(f"{name} is a nested tensor: accepted is a strided one")


def _check_state(n: int, o: Tensor, lse: Tensor, first: Tensor) -> None:
    names = f"states[{n}].o", f"states[{n}].lse"
    for name, t in zip(names, (o, lse)):
        _check_tensor(name, t)
        if t.device != first.device:
            raise ValueError(f"{name} is on {t.device}: accepted is where states[0].o is, {first.device}")
    if o.dtype not in DTYPES:
        raise TypeError(f"{names[0]} is {o.dtype}: accepted are {', '.join(map(str, DTYPES))}")
    if o.dim() not in (3, 4):
        raise ValueError(f"{names[0]} has shape {list(o.shape)}: accepted are [b, h_q, s_q, d_v] and packed [total_q, h_q, d_v]")
    if o.shape != first.shape:
        raise ValueError(f"{names[0]} has shape {list(o.shape)}: accepted is that of states[0].o, {list(first.shape)}")
    if lse.dtype != _raw.lse_dtype(first.dtype):
        raise TypeError(f"{names[1]} is {lse.dtype}: accepted is {_raw.lse_dtype(first.dtype)} with states[0].o of {first.dtype}")
    if tuple(lse.shape) != _rows(o):
        raise ValueError(f"{names[1]} has shape {list(lse.shape)}: accepted is {list(_rows(o))}, the rows of {names[0]}")


def _rows(o: Tensor) -> tuple[Any, ...]:
    """The shape of the log-sum-exp."""
    return (o.shape[1], o.shape[0]) if o.dim() == 3 else (o.shape[0], o.shape[1], o.shape[2])


def _dtypes(o: Sequence[Tensor], dtype: Optional[torch.dtype]) -> tuple[torch.dtype, torch.dtype]:
    """The dtype of the handle, and that of the merged o."""
    result = o[0].dtype if dtype is None else dtype
    main = next((t.dtype for t in o if t.dtype != torch.float32), result)
    accepted = (torch.float64,) if main == torch.float64 else (main, torch.float32)
    for name, given in (*((f"states[{n}].o", t.dtype) for n, t in enumerate(o)), ("dtype", result)):
        if given not in DTYPES or given not in accepted:
            raise TypeError(f"{name} is {given}: accepted with the other states are {', '.join(map(str, dict.fromkeys(accepted)))}")
    return main, result


def check(o: Sequence[Tensor], lse: Sequence[Tensor], sink: Optional[Tensor], dtype: Optional[torch.dtype]) -> None:
    """TypeError and ValueError for what the library cannot see, or relies on."""
    if not 1 <= len(o) <= MOST_STATES:
        raise ValueError(f"states has {len(o)} elements: accepted are 1 to {MOST_STATES}")
    if len(lse) != len(o):
        raise ValueError(f"lse has {len(lse)} elements: accepted are {len(o)}, as of o")
    _check_tensor("states[0].o", o[0])
    for n, (part, sums) in enumerate(zip(o, lse)):
        _check_state(n, part, sums, o[0])
    if o[0].device.type not in ("cpu", "cuda", "meta"):
        raise ValueError(f"states[0].o is on {o[0].device}: accepted are cpu and cuda")
    _dtypes(o, dtype)
    if sink is None:
        return
    _check_tensor("sink", sink)
    if sink.device != o[0].device:
        raise ValueError(f"sink is on {sink.device}: accepted is where states[0].o is, {o[0].device}")
    if sink.dtype != lse[0].dtype or sink.dim() != 1 or sink.shape[0] != o[0].shape[1]:
        raise ValueError(f"sink is {sink.dtype} {list(sink.shape)}: accepted is {lse[0].dtype} [{o[0].shape[1]}], one for a head")


def _outputs(o: Sequence[Tensor], dtype: Optional[torch.dtype]) -> tuple[Tensor, Tensor]:
    first = _raw.readable(o[0])
    result = _raw.like(first, first.shape[1], first.shape[0 if first.dim() == 3 else 2], first.shape[-1], _dtypes(o, dtype)[1])
    return result, first.new_empty(_rows(first), dtype=_raw.lse_dtype(first.dtype))


def _merge(o: Sequence[Tensor], lse: Sequence[Tensor], sink: Optional[Tensor],
           dtype: Optional[torch.dtype]) -> tuple[Tensor, Tensor]:
    check(o, lse, sink, dtype)
    first = o[0]
    index = first.device.index or 0 if first.is_cuda else -1
    device = (_abi.DEVICE_CUDA, index) if first.is_cuda else (_abi.DEVICE_HOST, 0)
    d_v = first.shape[-1]
    attention = handle(HandleKey(Options(varlen=first.dim() == 3), device, DTYPES[_dtypes(o, dtype)[0]], d_v, d_v, False, (), ()))
    states = [(_raw.readable(part), sums) for part, sums in zip(o, lse)]
    merged, merged_lse = _outputs(o, dtype)
    _cache_raw.on_device(index, lambda stream: attention.bind_merge(states, merged, merged_lse, sink, stream)())
    return merged, merged_lse


def _merge_fake(o: Sequence[Tensor], lse: Sequence[Tensor], sink: Optional[Tensor],
                dtype: Optional[torch.dtype]) -> tuple[Tensor, Tensor]:
    check(o, lse, sink, dtype)
    return _outputs(o, dtype)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    o, lse, sink, _ = inputs
    ctx.save_for_backward(*o, *lse, sink, output[1])
    ctx.set_materialize_grads(False)


def gradients(dout: Optional[Tensor], dlse: Optional[Tensor], o: Sequence[Tensor], lse: Sequence[Tensor], sink: Optional[Tensor],
              merged_lse: Tensor) -> tuple[list[Tensor], list[Tensor], Optional[Tensor]]:
    """Of a merge: with w_i = exp(lse_i - lse) do_i = w_i do, and dlse_i = w_i (do . o_i - sum_j w_j do . o_j + dlse). States
    that take no part get 0."""
    packed = o[0].dim() == 3
    rows = (lambda t: t.transpose(0, 1)) if packed else (lambda t: t)  # noqa: E731
    whole = torch.where(merged_lse.isinf(), 0, merged_lse)
    weights, dots = [], []
    delta = torch.zeros_like(merged_lse) if dlse is None else dlse
    for part, sums in zip(o, lse):
        takes_part = ~sums.isinf()
        weights.append(torch.where(takes_part, torch.where(takes_part, sums - whole, 0).exp(), 0))
        dot = torch.zeros_like(sums)
        if dout is not None:
            kept = torch.where(rows(takes_part)[..., None], part, 0)
            dot = rows((dout.to(sums.dtype) * kept).sum(-1))
        dots.append(dot)
        delta = delta - weights[-1] * dot
    do = [torch.zeros_like(part) if dout is None else (rows(w)[..., None] * dout).to(part.dtype) for part, w in zip(o, weights)]
    of_sums = [w * (dot + delta) for w, dot in zip(weights, dots)]
    dsink = None
    if sink is not None:
        each = (sink[:, None] - whole).exp() * torch.where(merged_lse.isinf(), 0, delta)
        dsink = each.sum(1) if packed else each.sum((0, 2))
    return do, of_sums, dsink


def _differentiate(ctx: Any, dout: Optional[Tensor], dlse: Optional[Tensor]) -> tuple[Any, ...]:
    *states, sink, merged_lse = ctx.saved_tensors
    count = len(states) // 2
    if dout is None and dlse is None:
        return [None] * count, [None] * count, None, None
    return (*gradients(dout, dlse, states[:count], states[count:], sink, merged_lse), None)


def _mapped(info: Any, in_dims: Sequence[Any], *arguments: Any) -> Any:
    """The rule of vmap: the mapped axis is a part of the batch; of packed states and a mapped sink calls follow each other."""
    size = info.batch_size
    o, lse, sink, dtype = arguments
    of_o, of_lse = (dims if isinstance(dims, (list, tuple)) else [dims] * len(o) for dims in in_dims[:2])
    if in_dims[2] is None and all(part.dim() - (dim is not None) == 4 for part, dim in zip(o, of_o)):
        results = merge_op([fold(t, dim, size) for t, dim in zip(o, of_o)], [fold(t, dim, size) for t, dim in zip(lse, of_lse)],
                           sink, dtype)
        return tuple(t.unflatten(0, (size, -1)) for t in results), (0, 0)
    each = [merge_op(select(o, of_o, n), select(lse, of_lse, n), select(sink, in_dims[2], n), dtype) for n in range(size)]
    return tuple(torch.stack(parts) for parts in zip(*each)), (0, 0)


for _key in ("CPU", "CUDA"):
    library.impl("merge_states", _merge, _key)
operators.register_fake("fa_attention::merge_states", _merge_fake, lib=library)
operators.register_vmap("fa_attention::merge_states", _mapped, lib=library)
operators.register_autograd("fa_attention::merge_states", _differentiate, setup_context=_remember, lib=library)


class _Transformed(torch.autograd.Function):
    """Under torch.func: a function whose rule for vmap is generated from the operator's."""

    generate_vmap_rule = True

    @staticmethod
    def forward(count: int, sink: Optional[Tensor], dtype: Optional[torch.dtype], *states: Tensor) -> Any:
        return merge_op(states[:count], states[count:], sink, dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.count, sink, _, *states = inputs
        ctx.save_for_backward(*states, sink, output[1])

    @staticmethod
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> Any:
        *states, sink, merged_lse = ctx.saved_tensors
        do, of_sums, dsink = gradients(dout, dlse, states[:ctx.count], states[ctx.count:], sink, merged_lse)
        return (None, dsink, None, *do, *of_sums)


def merge_states(states: Sequence[tuple[Tensor, Tensor]], *, sink: Optional[Tensor] = None,
                 dtype: Optional[torch.dtype] = None) -> tuple[Tensor, Tensor]:
    """Merges partial results of attention over keys that have nothing in common: (o, lse) of all keys (docs/merging.md).

    states: 1 to 16 pairs (o, lse), as `attention(..., return_lse=True)` returns them: o [b, h_q, s_q, d_v] and lse [b, h_q,
    s_q], or of packed batches [total_q, h_q, d_v] and [h_q, total_q]. Each o is fp16, bf16 or fp32, of one 16-bit dtype beside
    fp32 at most; fp64 goes with fp64 alone, on the CPU. lse is fp32 (fp64 for fp64), a natural log. All are on one device.
    sink [h_q]: a logit that joins the sum of each row of a head. It enters once: here, or in one of the states.
    dtype: of the merged o, the 16-bit dtype of the states or fp32; unless given, that of the first o.

    lse = ln(sum_i exp(lse_i) + exp(sink)), o = sum_i exp(lse_i - lse) o_i, rounded once. A state with lse = -inf or +inf takes
    no part in its row, whatever its o holds. Rows of which none takes part are 0, their log-sum-exp -inf, or the sink.

    Differentiable in every o, every lse and the sink, through o and lse, any number of times. Gradients of parts that
    `attention` made are then those of attention over all keys.

    Raises TypeError for what is no tensor or of another dtype, ValueError for shapes, devices and numbers of states.
    """
    if not isinstance(states, (list, tuple, Tensor)):
        raise TypeError(f"states is a {type_name(states)}: accepted is a list of pairs (o, lse)")
    for n, state in enumerate(states):
        if not isinstance(state, (tuple, list)) or len(state) != 2:
            raise TypeError(f"states[{n}] is a {type_name(state)}: accepted is a pair (o, lse)")
    o, lse = [state[0] for state in states], [state[1] for state in states]
    if isinstance(sink, Tensor) and o and isinstance(o[0], Tensor):
        sink = sink.to(_raw.lse_dtype(o[0].dtype))
    if not torch.compiler.is_compiling():
        check(o, lse, sink, dtype)
        if torch._C._functorch.peek_interpreter_stack() is not None:
            transformed: tuple[Tensor, Tensor] = _Transformed.apply(len(o), sink, dtype, *o, *lse)
            return transformed
    result: tuple[Tensor, Tensor] = merge_op(o, lse, sink, dtype)
    return result
