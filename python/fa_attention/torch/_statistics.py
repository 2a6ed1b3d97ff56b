"""Statistics of scores and of P, with O, of PyTorch tensors: one call of the base layer, and one for gradients."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Mapping, NamedTuple, Optional, Sequence

import torch
from torch import Tensor

from .. import capi
from .._library import load
from .._options import words
from . import _ops, _raw
from ._attention import split_captures
from ._raw import CAPTURE_DTYPES, DTYPES


class AttentionStatistics(NamedTuple):
    """What `attention_statistics` returns; None for what was not asked for."""

    o: Tensor
    lse: Tensor
    max_logit: Optional[Tensor] = None
    entropy: Optional[Tensor] = None
    column_sums: Optional[Tensor] = None
    top_keys: Optional[Tensor] = None


class _Call(NamedTuple):
    """What a call has besides tensors that gradients may flow to; hashable but for what `given` names."""

    options: tuple[tuple[str, Any], ...]  # of the handle
    score: Optional[str]
    mask: Optional[str]
    given: Mapping[str, Any]  # what the functions capture
    names: tuple[str, ...]  # of captures that are tensors


@lru_cache(maxsize=256)
def _made(device: tuple[int, int], d_qk: int, d_v: int, dtype: str, score: Any, mask: Any, options: tuple[Any, ...]) -> capi.Attention:
    functions: dict[str, Any] = {name: capi.function(*given) for name, given in (("score", score), ("mask", mask)) if given}
    return capi.Attention(load(), d_qk, dtype, head_dim_v=d_v, device=device, **functions, **dict(options))


def function_of(expression: Optional[str], captures: Mapping[str, Any], grads: Mapping[str, bool]) -> Any:
    """Hashable: an expression and the captures that it names."""
    if not expression:
        return None
    named = words(expression)
    dtypes = {name: CAPTURE_DTYPES[value.dtype] if isinstance(value, Tensor) else "float32" for name, value in captures.items()}
    return expression, tuple((name, dtype, grads.get(name, False)) for name, dtype in dtypes.items() if name in named)


def made(q: Tensor, d_v: int, score: Any, mask: Any, options: Mapping[str, Any]) -> capi.Attention:
    """The handle of these, by what `function_of` makes of functions."""
    device = (capi.DEVICE_CUDA, q.device.index or 0) if q.device.type == "cuda" else (capi.DEVICE_HOST, 0)
    return _made(device, q.shape[-1], d_v, DTYPES[q.dtype], score, mask, tuple(options.items()))


def _attention(q: Tensor, v: Tensor, call: _Call, options: Mapping[str, Any], grads: Mapping[str, bool]) -> capi.Attention:
    score, mask = (function_of(text, call.given, grads) for text in (call.score, call.mask))
    return made(q, v.shape[3], score, mask, options)


def stream_of(q: Tensor) -> Optional[int]:
    return torch.cuda.current_stream(q.device).cuda_stream if q.device.type == "cuda" else None


def _forward(q: Tensor, k: Tensor, v: Tensor, sink: Optional[Tensor], call: _Call) -> AttentionStatistics:
    b, h_q, s_q, _ = q.shape
    options = dict(call.options)
    float_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    new = lambda *shape: torch.empty(shape, dtype=float_dtype, device=q.device)  # noqa: E731
    by_head, top_keys = options["max_logit_by_head"], options["top_keys"]
    heads = k.shape[1] if options["column_sums"] == "kv_heads" else h_q
    attention = _attention(q, v, call, options, {})
    results = AttentionStatistics(
        q.new_empty(b, h_q, s_q, v.shape[3]), new(b, h_q, s_q),
        (new(h_q) if by_head else new(b, h_q, s_q)) if options["max_logit"] != "none" else None,
        new(b, h_q, s_q) if options["entropy"] else None,
        new(b, heads, k.shape[2]) if options["column_sums"] != "none" else None,
        torch.empty((b, heads, top_keys), dtype=torch.int32, device=q.device) if top_keys > 0 else None)
    attention.bind_forward(q, k, v, results.o, results.lse, stream=stream_of(q), captures=call.given or None, sink=sink,
                           max_logit=results.max_logit, entropy=results.entropy, column_sums=results.column_sums,
                           top_keys=results.top_keys)()
    return results


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, q: Tensor, k: Tensor, v: Tensor, sink: Optional[Tensor], *captures: Tensor) -> Any:
        given = {**call.given, **dict(zip(call.names, captures))}
        call = call._replace(given=given)
        results = _forward(q, k, v, sink, call)
        if results.top_keys is not None:
            ctx.mark_non_differentiable(results.top_keys)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, results.o, results.lse, results.entropy, sink, *captures)
        ctx.call = call._replace(given={name: value for name, value in given.items() if name not in call.names})
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Optional[Tensor]) -> Any:
        call, needed = ctx.call, ctx.needs_input_grad[1:]
        compute = lambda *tensors: _backward(call, needed, *tensors)  # noqa: E731
        return (None, *_ops.Once.apply(compute, *gradients[:5], *ctx.saved_tensors))


def _given(gradient: Optional[Tensor], like: Tensor) -> Optional[Tensor]:
    return None if gradient is None else gradient.to(like.dtype).resolve_neg().contiguous()


def _backward(call: _Call, needed: Sequence[bool], dout: Optional[Tensor], dlse: Optional[Tensor], dmax_logit: Optional[Tensor],
              dentropy: Optional[Tensor], dcolumn_sums: Optional[Tensor], q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
              entropy: Optional[Tensor], sink: Optional[Tensor], *captures: Tensor) -> Any:
    """Gradients of q, k, v, the sink and captures; None for what is not `needed`."""
    call = call._replace(given={**call.given, **dict(zip(call.names, captures))})
    options = dict(call.options)
    dlse, dmax_logit, dentropy, dcolumn_sums = (_given(t, lse) for t in (dlse, dmax_logit, dentropy, dcolumn_sums))
    options.update(max_logit="none" if dmax_logit is None else options["max_logit"],
                   max_logit_by_head=dmax_logit is not None and options["max_logit_by_head"],
                   max_logit_gradient=dmax_logit is not None, entropy=dentropy is not None,
                   entropy_gradient=dentropy is not None, top_keys=0,
                   column_sums="none" if dcolumn_sums is None else options["column_sums"],
                   column_sums_gradient=dcolumn_sums is not None)
    grads = dict(zip(call.names, needed[4:]))
    attention = _attention(q, v, call, options, grads)
    dq, dk, dv = (_raw.gradient_like(t) if need else None for t, need in zip((q, k, v), needed))
    dsink = torch.empty_like(sink) if sink is not None and needed[3] else None
    dcaptures = {name: torch.empty(t.shape, dtype=lse.dtype, device=q.device)
                 for name, t in zip(call.names, captures) if grads[name]}
    dout = torch.zeros_like(o) if dout is None else _raw.readable(dout.to(o.dtype))
    attention.bind_backward(q, k, v, o, lse, dout, dq, dk, dv, dlse, stream_of(q), captures=call.given or None, sink=sink,
                            dcaptures=dcaptures or None, dsink=dsink, entropy=entropy if dentropy is not None else None,
                            dentropy=dentropy, dmax_logit=dmax_logit, dcolumn_sums=dcolumn_sums)()
    of_captures = [dcaptures[name].to(t.dtype) if grads[name] else None for name, t in zip(call.names, captures)]
    return (dq, dk, dv, dsink, *of_captures)


def attention_statistics(q: Tensor, k: Tensor, v: Tensor, *, max_logit: str = "none", max_logit_by_head: bool = False,
                         entropy: bool = False, column_sums: str = "none", top_keys: int = 0, causal: bool = False,
                         scale: Optional[float] = None, top_left: bool = False, window_left: Optional[int] = None, window_right: Optional[int] = None,
                         chunk: int = 0, score: Optional[str] = None, mask: Optional[str] = None,
                         captures: Optional[Mapping[str, Any]] = None, sink: Optional[Tensor] = None,
                         deterministic: bool = False) -> AttentionStatistics:
    """`attention`, and what it tells of its scores and of P (docs/statistics.md).

    max_logit: "softmax" or "scaled", of each row [b, h_q, s_q], or with max_logit_by_head of each query head [h_q], as
    QK-clip needs. entropy: of each row of P, in nats, [b, h_q, s_q]. column_sums: of P over the rows, of "query_heads"
    [b, h_q, s_kv], or of "kv_heads" [b, h_kv, s_kv]. top_keys: so many keys of each of these heads, without column_sums of
    query heads, int32 [b, h, top_keys], the greatest sum first and -1 where there is no key. The others are fp32 (fp64
    for fp64). The other arguments and the errors are those of `attention`.

    Gradients flow through all but top_keys; of equal logits to that of the first row, and of the first key in it.
    deterministic: they are bitwise repeatable."""
    _raw.check_tensors(q, k, v, False)
    names, arrays, scalars, values = split_captures(captures)
    given: dict[str, Any] = {**dict(zip(names, (_raw.resolved(t) for t in arrays))), **dict(zip(scalars, values))}
    if sink is not None:
        sink = _raw.resolved(_raw.sink_like(sink, q))
    _raw.check_captures(given, sink, q)
    options = {"causal": causal, "scale": scale, "top_left": top_left, "window_left": window_left, "window_right": window_right,
               "chunk": chunk, "sink": sink is not None, "max_logit": max_logit, "max_logit_by_head": max_logit_by_head,
               "entropy": entropy, "column_sums": column_sums, "top_keys": top_keys,
               "deterministic": deterministic}
    named = words(f"{score or ''} {mask or ''}")
    tensors = {name: t for name, t in given.items() if isinstance(t, Tensor) and name in named}
    call = _Call(tuple(options.items()), score, mask, {n: x for n, x in given.items() if n not in tensors}, tuple(tensors))
    readable = [_raw.readable(t) for t in (q, k, v)]
    return AttentionStatistics(*_Differentiable.apply(call, *readable, sink, *tensors.values()))
