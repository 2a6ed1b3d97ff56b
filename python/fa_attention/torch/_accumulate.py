"""The operator fa_attention::accumulate: a forward that adds its keys to what o and lse hold, in place. It has no gradients."""

from __future__ import annotations

from typing import Any, Optional, Sequence

import torch
from torch import Tensor
from torch import library as operators

from .. import _options
from . import _bound, _raw
from ._attention import Captures, check_sequences, is_direct, split_captures
from ._cache_ops import refuse_gradients, without_gradients
from ._ops import library
from ._raw import DTYPES, Call

_SCHEMA = ("accumulate(Tensor q, Tensor k, Tensor v, Tensor(a!) o, Tensor(b!) lse, Tensor[] captures, Tensor? cu_seqlens_q, "
           "Tensor? cu_seqlens_kv, Tensor? seqused_q, Tensor? seqused_kv, SymInt max_s_q, SymInt max_s_kv, float[] numbers, "
           "bool causal, float? scale, bool top_left, SymInt? window_left, SymInt? window_right, SymInt chunk, str? score, "
           "str? mask, str[] tensor_names, str[] number_names) -> ()")
_WRITTEN = (3, 4)

library.define(_SCHEMA, tags=(torch.Tag.pt2_compliant_tag,))
accumulate_op = torch.ops.fa_attention.accumulate.default


def _call(rest: Sequence[Any]) -> Call:
    """Of the arguments behind captures."""
    cu_q, cu_kv, used_q, used_kv, max_s_q, max_s_kv, numbers, *fixed, score, mask, names, scalars = rest
    options = _options.make_options(*fixed, 0.0, False, score, mask, tuple(names), tuple(scalars), cu_q is not None)
    return Call(options._replace(accumulate=True), cu_q, cu_kv, used_q, used_kv, None, max_s_q, max_s_kv, 0, 0, tuple(numbers))


def check(q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, captures: Sequence[Tensor], call: Call) -> None:
    """TypeError and ValueError for what the library cannot see, or relies on."""
    packed = call.options.varlen
    _raw.check_tensors(q, k, v, packed)
    _raw.check_others(q, None, captures, call)
    shape = (q.shape[0], q.shape[1], v.shape[-1]) if packed else (q.shape[0], q.shape[1], q.shape[2], v.shape[-1])
    rows = (q.shape[1], q.shape[0]) if packed else q.shape[:3]
    for name, t, dtype, accepted in (("o", o, q.dtype, shape), ("lse", lse, _raw.lse_dtype(q.dtype), rows)):
        if not isinstance(t, Tensor):
            raise TypeError(f"{name} is a {type(t).__module__}.{type(t).__qualname__}: accepted is a torch.Tensor")
        if t.dtype != dtype:
            raise TypeError(f"{name} is {t.dtype}: accepted with q of {q.dtype} is {dtype}")
        if t.device != q.device:
            raise ValueError(f"{name} is on {t.device}: accepted is where q is, {q.device}")
        if tuple(t.shape) != tuple(accepted):
            raise ValueError(f"{name} has shape {list(t.shape)}: accepted is {list(accepted)}")
    if isinstance(v.shape[-1], int) and v.shape[-1] > 1 and o.stride(-1) != 1:
        raise ValueError(f"o has strides {list(o.stride())}: accepted is a head dim without gaps, a stride of 1")


def _accumulate(q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, captures: Sequence[Tensor], *rest: Any) -> None:
    call = _call(rest)
    if q.dtype not in DTYPES:
        check(q, k, v, o, lse, captures, call)
    q, k, v = _raw.readable(q), _raw.readable(k), _raw.readable(v)
    _bound.forward(call, (("q", q), ("k", k), ("v", v)), captures, (("o", o), ("lse", lse)), DTYPES[q.dtype],
                   lambda: check(q, k, v, o, lse, captures, call))


def _accumulate_fake(q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, captures: Sequence[Tensor], *rest: Any) -> None:
    _options.check_names(rest[13], rest[14], (*rest[15], *rest[16]))
    options = _options.Options(tensors=tuple(rest[15]), varlen=rest[0] is not None)
    check(q, k, v, o, lse, captures, Call(options))


for _key in ("CPU", "CUDA"):
    library.impl("accumulate", _accumulate, _key)
operators.register_fake("fa_attention::accumulate", _accumulate_fake, lib=library)
operators.register_vmap("fa_attention::accumulate", _bound.each_in_turn(accumulate_op, _WRITTEN), lib=library)
library.impl("accumulate", without_gradients(accumulate_op), "Autograd", with_keyset=True)
library.impl("accumulate", _bound.count_versions(accumulate_op, _WRITTEN), "ADInplaceOrView", with_keyset=True)


def accumulate(q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, *, cu_seqlens_q: Optional[Tensor] = None,
               cu_seqlens_kv: Optional[Tensor] = None, seqused_q: Optional[Tensor] = None, seqused_kv: Optional[Tensor] = None,
               max_s_q: int = 0, max_s_kv: int = 0, causal: bool = False, scale: Optional[float] = None, top_left: bool = False,
               window_left: Optional[int] = None, window_right: Optional[int] = None, chunk: int = 0, score: Optional[str] = None,
               mask: Optional[str] = None, captures: Captures = None) -> None:
    """`attention` over more keys: adds k and v to o and lse, which hold attention of the same q over others, in place.

    q [b, h_q, s_q, d_qk], k [b, h_kv, s_kv, d_qk], v [b, h_kv, s_kv, d_v] and o [b, h_q, s_q, d_v], all of one dtype (fp16,
    bf16, fp32; fp64 on the CPU) and device; lse [b, h_q, s_q], fp32 (fp64 for fp64), a natural log. o has a contiguous head
    dim, and shares no memory with others. With cu_seqlens_q and cu_seqlens_kv they are packed, as in `varlen_attention`:
    q [total_q, h_q, d_qk], o [total_q, h_q, d_v], lse [h_q, total_q]. To begin with no keys, lse is -inf in every row,
    whatever o holds. Rows without keys in this call keep their bits.

    The other arguments are those of `attention`. There is no sink: the state has it already, or `merge_states` adds it.
    o is rounded once in each call; states in fp32 that `merge_states` merges are rounded once in all.

    There are no gradients: RuntimeError where an input, o or lse requires one and gradients are recorded. `merge_states` has
    them. Other errors are those of `attention`. Under torch.vmap o and lse are mapped, too.
    """
    names, tensors, scalars, values = split_captures(captures) if captures else ((), [], (), ())
    arrays = (cu_seqlens_q, cu_seqlens_kv, seqused_q, seqused_kv)
    options = (causal, scale, top_left, window_left, window_right, chunk, score, mask)
    call = Call(_options.Options(tensors=names, varlen=cu_seqlens_q is not None))
    if not torch.compiler.is_compiling():
        check(q, k, v, o, lse, tensors, call)
        if cu_seqlens_q is None and any(t is not None for t in arrays):
            raise ValueError("cu_seqlens_q is None: accepted with cu_seqlens_kv, seqused_q or seqused_kv is a torch.Tensor")
        if cu_seqlens_q is not None:
            check_sequences(q, *arrays)  # type: ignore[arg-type]
    rest = (*arrays, max_s_q, max_s_kv, values, *options, names, scalars)
    if q.device.type not in ("cpu", "cuda") or not is_direct(q, k, v, o, lse, *tensors, *arrays):
        accumulate_op(q, k, v, o, lse, tensors, *rest)
        return
    refuse_gradients("accumulate", (("q", q), ("k", k), ("v", v), ("o", o), ("lse", lse),
                                    *((f"captures[{n!r}]", t) for n, t in zip(names, tensors))))
    _accumulate(q, k, v, o, lse, tensors, *rest)
    if not o.is_inference() and not lse.is_inference():
        torch.autograd.graph.increment_version((o, lse))
