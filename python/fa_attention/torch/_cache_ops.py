"""The operators fa_attention::paged_forward and fa_attention::append: what torch.compile, torch.export and fake tensors see
of a call over a KV cache. Neither has gradients, of any mode and order; vmap is served."""

from __future__ import annotations

from typing import Any, Callable, Iterable, Optional, Sequence

import torch
from torch import Tensor
from torch import library as operators
from torch.autograd import forward_ad

from .. import _options
from . import _cache_raw, _raw
from ._cache_raw import AppendCall, PagedCall
from ._ops import fold, library, select

FORWARD = ("paged_forward(Tensor q, Tensor k_pages, Tensor? v_pages, Tensor? sink, Tensor[] captures, Tensor? block_table, "
           "Tensor seqused_kv, Tensor? cu_seqlens_q, Tensor? seqused_q, Tensor? batch_index, Tensor? seq_begin, SymInt max_s_q, "
           "SymInt max_s_kv, float[] numbers, str layout, bool causal, float? scale, SymInt? window_left, "
           "SymInt? window_right, SymInt chunk, str? score, str? mask, str[] tensor_names, str[] number_names, "
           "Tensor? k_scale=None, Tensor? v_scale=None, Tensor? q_scale=None, Tensor? row_bias=None, ScalarType? dtype=None, "
           "bool precise=False, SymInt value_in_key=0, str invariance=\"none\", Tensor? schedule=None) -> (Tensor o, Tensor lse)")
_APPEND = ("append(Tensor k, Tensor? v, Tensor(a!) k_cache, Tensor(b!)? v_cache, Tensor? q, Tensor? block_table, "
           "Tensor? seqused_kv, Tensor? cu_seqlens_k_new, Tensor? batch_index, Tensor? slots, Tensor? rotary_cos, "
           "Tensor? rotary_sin, Tensor? positions, str layout, SymInt rotary_dims, float rotary_base, bool rotary_interleaved, "
           "Tensor(c!)? k_scale=None, Tensor(d!)? v_scale=None, Tensor? k_scale_given=None, Tensor? v_scale_given=None) "
           "-> Tensor q_out")
_WRITTEN_SCALES = 17  # where they are among the arguments of append

library.define(FORWARD, tags=(torch.Tag.pt2_compliant_tag,))
library.define(_APPEND, tags=(torch.Tag.pt2_compliant_tag,))
forward_op = torch.ops.fa_attention.paged_forward.default
append_op = torch.ops.fa_attention.append.default


def paged_options(fixed: Any, names: Sequence[str], scalars: Sequence[str], packed: bool,
                  invariance: str = "none") -> _options.Options:
    """fixed: causal, scale, window_left, window_right, chunk, score and mask."""
    causal, scale, left, right, chunk, score, mask = fixed
    return _options.make_options(causal, scale, False, left, right, chunk, 0.0, False, score, mask, tuple(names), tuple(scalars),
                                 packed, invariance=invariance)


def _padded(arguments: Sequence[Any], count: int) -> Sequence[Any]:
    """With those that were left out, which are None."""
    return [*arguments, *[None] * (count - len(arguments))]


def _last(arguments: Sequence[Any]) -> Sequence[Any]:
    """The last fields of PagedCall, of which an operator's call may leave some out, and invariance in front of a schedule."""
    *given, precise, value_in_key, _, schedule = _padded(arguments, 9)
    return [*given, bool(precise), value_in_key or 0, schedule]


def paged_call(rest: Sequence[Any]) -> PagedCall:
    """Of the arguments behind captures."""
    table, used_kv, cu_q, used_q, index, begin, max_s_q, max_s_kv, numbers, layout, *options = rest
    fixed = paged_options(tuple(options[:7]), options[7], options[8], cu_q is not None, *options[16:17])
    return PagedCall(fixed, layout, table, used_kv, cu_q, used_q, index, begin, max_s_q, max_s_kv, tuple(numbers),
                     *_last(options[9:18]))


def _append_call(rest: Sequence[Any]) -> AppendCall:
    """Of the arguments behind q."""
    *written, k_given, v_given = _padded(rest[12:], 4)
    given = k_given is not None or v_given is not None
    if given and written != [None, None]:
        raise ValueError("k_scale_given and v_scale_given: accepted are None where k_scale or v_scale is given")
    scales = (k_given, v_given) if given else written
    return AppendCall._make([rest[8], *rest[:8], *scales, *rest[9:12], given])


def _forward(q: Tensor, k: Tensor, v: Optional[Tensor], sink: Optional[Tensor], captures: Sequence[Tensor],
             *rest: Any) -> tuple[Tensor, Tensor]:
    _cache_raw.check_layout(rest[9])
    o, lse = _cache_raw.forward(_raw.readable(q), k, v, sink, captures, paged_call(rest))
    assert lse is not None
    return o, lse


def check_kinds_of(q: Tensor, k: Tensor, v: Optional[Tensor], sink: Optional[Tensor], captures: Sequence[Tensor],
                   rest: Sequence[Any]) -> PagedCall:
    """The call of an operator whose sizes may be symbols, checked."""
    _options.check_names(rest[15], rest[16], (*rest[17], *rest[18]))
    fixed = _options.Options(varlen=rest[2] is not None, tensors=tuple(rest[17]))
    call = PagedCall._make([fixed, rest[9], *rest[:8], (), *_last(rest[19:28])])
    _cache_raw.check_kinds(q, k, v, sink, captures, call)
    return call


def _forward_fake(q: Tensor, k: Tensor, v: Optional[Tensor], sink: Optional[Tensor], captures: Sequence[Tensor],
                  *rest: Any) -> tuple[Tensor, Tensor]:
    return outputs(q, v, check_kinds_of(q, k, v, sink, captures, rest))


def outputs(q: Tensor, v: Optional[Tensor], call: PagedCall) -> tuple[Tensor, Tensor]:
    """Empty tensors for o and lse, of sizes that may be symbols."""
    q = _raw.readable(q)
    packed = q.dim() == 3
    o = _raw.like(q, q.shape[1], q.shape[0 if packed else 2], _cache_raw.d_v_of(v, call), _cache_raw.result_dtype(q, call))
    shape = (q.shape[1], q.shape[0]) if packed else (q.shape[0], q.shape[1], q.shape[2])
    return o, q.new_empty(shape, dtype=_raw.lse_dtype(q.dtype))


def _append(k: Tensor, v: Optional[Tensor], k_cache: Tensor, v_cache: Optional[Tensor], q: Optional[Tensor],
            *rest: Any) -> Tensor:
    q = _raw.readable(q) if q is not None else None
    call = _append_call(rest)
    _cache_raw.check_layout(call.layout)
    q_out = _cache_raw.append(_raw.readable(k), _raw.readable(v) if v is not None else None, k_cache, v_cache, q, call)
    return q_out if q_out is not None else k.new_empty((0,))


def _append_fake(k: Tensor, v: Optional[Tensor], k_cache: Tensor, v_cache: Optional[Tensor], q: Optional[Tensor],
                 *rest: Any) -> Tensor:
    _cache_raw.check_append_kinds(k, v, k_cache, v_cache, q, _append_call(rest))
    return _cache_raw.q_like(_raw.readable(q)) if q is not None else k.new_empty((0,))


def refuse_gradients(operator: str, named: Iterable[tuple[str, Any]]) -> None:
    """RuntimeError for the first tensor that requires a gradient, or has the tangent of forward mode, where gradients are
    recorded. What the operators return requires none, so that none of a higher order can be asked for."""
    if not torch.is_grad_enabled():
        return
    dual = forward_ad._current_level >= 0
    for name, t in named:
        if not isinstance(t, Tensor):
            continue
        why = "requires a gradient" if t.requires_grad else ""
        if not why and dual and forward_ad.unpack_dual(t).tangent is not None:
            why = "has a tangent"
        if why:
            raise RuntimeError(f"{name} {why}: accepted are tensors without, or a call under torch.no_grad(), because {operator} "
                               "has no gradients")


def without_gradients(operator: Any) -> Callable[..., Any]:
    """A kernel for Autograd: it refuses what requires a gradient."""
    names = [argument.name for argument in operator._schema.arguments]

    def kernel(keys: Any, *arguments: Any) -> Any:
        refuse_gradients(operator._schema.name, _named(names, arguments))
        with torch._C._AutoDispatchBelowAutograd():
            return operator.redispatch(keys & torch._C._after_autograd_keyset, *arguments)

    return kernel


def _named(names: Sequence[str], arguments: Sequence[Any]) -> Iterable[tuple[str, Any]]:
    for name, argument in zip(names, arguments):
        if isinstance(argument, (list, tuple)):
            yield from ((f"{name}[{n}]", part) for n, part in enumerate(argument))
        else:
            yield name, argument


def _count_version(keys: Any, *arguments: Any) -> Any:
    """What autograd saved of a cache is told that it changed."""
    scales = arguments[_WRITTEN_SCALES:_WRITTEN_SCALES + 2]
    torch.autograd.graph.increment_version([t for t in (*arguments[2:4], *scales) if t is not None])
    with torch._C._AutoDispatchBelowADInplaceOrView():
        return append_op.redispatch(keys & torch._C._after_ADInplaceOrView_keyset, *arguments)


def _folded(t: Optional[Tensor], dim: Optional[int], size: int) -> Optional[Tensor]:
    if t is None:
        return None
    folded = fold(t, dim, size)
    return folded.contiguous() if folded.dim() == 1 else folded  # of one request each it may be expanded


def _forward_mapped(info: Any, in_dims: Sequence[Any], *arguments: Any) -> Any:
    """The rule of vmap: a mapped axis of q and of what says where keys are becomes part of the requests. Where the cache, a
    sink or captures are mapped too, where queries are packed or a function depends on b, calls follow each other."""
    if len(arguments) > 32 and arguments[32] is not None:
        raise ValueError("schedule is given: accepted under torch.vmap is None, because it is of the requests of one call")
    size = info.batch_size
    q, k, v, sink, captures, table, used_kv, cu_q, used_q, index, begin, *rest = arguments
    dims = [None if isinstance(dim, (list, tuple)) and all(part is None for part in dim) else dim for dim in in_dims]
    options = paged_options(tuple(rest[4:11]), rest[11], rest[12], cu_q is not None)
    foldable = all(dim is None for dim in (*dims[1:5], dims[7], dims[8], *dims[11:])) and cu_q is None and not options.reads_batch
    foldable = foldable and (dims[5] is None or index is None) and q.dtype not in _raw.CODES
    if foldable:
        b = q.shape[0] if dims[0] is None else q.movedim(dims[0], 0).shape[1]
        if dims[5] is not None:
            rows = table.movedim(dims[5], 0).shape[1]
            table, foldable = _folded(table, dims[5], size), rows == b
        elif index is None and (k if table is None else table).shape[0] != b:
            foldable = False
        else:
            index = _folded(torch.arange(b, dtype=torch.int32, device=q.device) if index is None else index, dims[9], size)
    if foldable:
        results = forward_op(_folded(q, dims[0], size), k, v, sink, captures, table, _folded(used_kv, dims[6], size), None, None,
                             index, _folded(begin, dims[10], size), *rest)
        return tuple(t.unflatten(0, (size, b)) for t in results), (0, 0)
    each = [forward_op(*(select(t, dim, n) for t, dim in zip(arguments, in_dims))) for n in range(size)]
    return tuple(torch.stack(parts) for parts in zip(*each)), (0, 0)


def _append_mapped(info: Any, in_dims: Sequence[Any], *arguments: Any) -> Any:
    """The rule of vmap: calls follow each other, each with a cache of its own. ValueError where what is written is not
    mapped: by the meaning of vmap each call would have the same cache without what the others write."""
    names = [argument.name for argument in append_op._schema.arguments]
    for n in (2, 3, _WRITTEN_SCALES, _WRITTEN_SCALES + 1):
        if n < len(arguments) and arguments[n] is not None and in_dims[n] is None:
            mapped = next(name for name, dim in zip(names, in_dims) if dim is not None)
            raise ValueError(f"{names[n]} is not mapped by torch.vmap, and {mapped} is: accepted is a {names[n]} with the mapped "
                             "axis, because append writes to it in place")
    each = [append_op(*(select(t, dim, n) for t, dim in zip(arguments, in_dims))) for n in range(info.batch_size)]
    return torch.stack(each), 0


for _key in ("CPU", "CUDA"):
    library.impl("paged_forward", _forward, _key)
    library.impl("append", _append, _key)
operators.register_fake("fa_attention::paged_forward", _forward_fake, lib=library)
operators.register_fake("fa_attention::append", _append_fake, lib=library)
operators.register_vmap("fa_attention::paged_forward", _forward_mapped, lib=library)
operators.register_vmap("fa_attention::append", _append_mapped, lib=library)
library.impl("paged_forward", without_gradients(forward_op), "Autograd", with_keyset=True)
library.impl("append", without_gradients(append_op), "Autograd", with_keyset=True)
library.impl("append", _count_version, "ADInplaceOrView", with_keyset=True)
