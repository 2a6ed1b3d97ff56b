"""The functions of fa_attention.torch, and the way of a call that nothing watches."""

from __future__ import annotations

import numbers
from typing import Any, Mapping, Optional, Sequence, Union

import torch
from torch import Tensor

from .. import _options
from .._errors import type_name
from . import _native, _ops, _plain_ops, _raw
from ._raw import Call

RngState = Union[Tensor, Sequence[int], None]
Captures = Optional[Mapping[str, Union[Tensor, float]]]


class _Direct(torch.autograd.Function):
    """Forward and backward without the dispatcher."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sink: Optional[Tensor], call: Call, *captures: Tensor) -> Any:
        needs = ctx.needs_input_grad
        plan, o, lse = _raw.forward(q, k, v, sink, captures, call, needs[5:])
        # Lengths and the state of dropout are saved to be watched: what changes them before backward is told.
        watched = call[1:6] if call.options.varlen or call.rng_state is not None else ()
        ctx.save_for_backward(q, k, v, o, lse, sink, *captures, *watched)
        ctx.call = (plan, call, needs[:4] + needs[5:])
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(ctx: Any, dout: Optional[Tensor], dlse: Optional[Tensor]) -> Any:
        plan, call, needed = ctx.call
        if dout is None and dlse is None:
            return (None,) * (len(needed) + 1)
        saved = ctx.saved_tensors[: len(needed) + 2]
        if torch.is_grad_enabled() or torch._C._functorch.peek_interpreter_stack() is not None:
            gradients = _Gradients.apply(plan, call, needed, dout, dlse, *saved)
            return (*gradients[:4], None, *gradients[4:])
        q, k, v, o, lse, sink, *captures = saved
        dq, dk, dv, dsink, dcaptures = _raw.backward(plan, dout, dlse, q, k, v, o, lse, sink, captures, call, needed)
        return (dq, dk, dv, dsink, None, *dcaptures)


class _Gradients(torch.autograd.Function):
    """A node of its own, because only a node can refuse to be differentiated: gradients that are merely cut off from the
    graph would make second derivatives too small, without a word."""

    @staticmethod
    def forward(ctx: Any, plan: Any, call: Call, needed: Sequence[bool], dout: Optional[Tensor], dlse: Optional[Tensor],
                q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, sink: Optional[Tensor], *captures: Tensor) -> Any:
        dq, dk, dv, dsink, dcaptures = _raw.backward(plan, dout, dlse, q, k, v, o, lse, sink, captures, call, needed)
        return (dq, dk, dv, dsink, *dcaptures)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(_ops.REASON)


class _Transformed(torch.autograd.Function):
    """Forward under torch.func: a function whose rule for vmap is generated from the operator's."""

    generate_vmap_rule = True

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, sink: Optional[Tensor], arrays: Any, rest: Any, *captures: Tensor) -> Any:
        return _ops.forward_of(rest)(q, k, v, sink, captures, *arrays, *rest)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        q, k, v, sink, arrays, ctx.rest, *captures = inputs
        ctx.save_for_backward(q, k, v, *output, sink, *arrays, *captures)

    @staticmethod
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> Any:
        needs = ctx.needs_input_grad
        needed = (*needs[:4], *needs[6:])
        gradients = _TransformedGradients.apply(dout, dlse, ctx.rest, needed, *ctx.saved_tensors)
        gradients = [t if need else None for t, need in zip(gradients, needed)]
        return (*gradients[:4], None, None, *gradients[4:])


class _TransformedGradients(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(dout: Tensor, dlse: Tensor, rest: Any, needed: Any, *saved: Any) -> Any:
        *main, dcaptures = _ops.backward_of(rest)(dout, dlse, *saved[:6], saved[11:], *saved[6:11], *rest, needed)
        return (*main, *dcaptures)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(_ops.REASON)


_PLAIN = _native.PLAIN


def is_direct(*tensors: Optional[Tensor]) -> bool:
    """Whether nothing watches the call: no compiler, no mode, no transform, no subclass of tensors, and no tensor whose memory
    has the other sign, which the dispatcher resolves."""
    return _native.is_direct() and all([t is None or (type(t) in _PLAIN and not t.is_neg()) for t in tensors])


def _dropout_state(q: Tensor, rng_state: RngState, direct: bool) -> tuple[Optional[Tensor], int, int]:
    """An int64 tensor of seed and offset, or both: those given, else from PyTorch's generators."""
    if isinstance(rng_state, Tensor):
        if rng_state.dtype != torch.int64 or rng_state.device != q.device or not rng_state.is_contiguous():
            raise TypeError(f"rng_state is {rng_state.dtype} on {rng_state.device}: accepted is contiguous torch.int64 on "
                            f"{q.device}")
        if rng_state.numel() < 2:
            raise ValueError(f"rng_state has {rng_state.numel()} elements: accepted are (seed, offset)")
        return rng_state, 0, 0
    if rng_state is None and not direct:
        return torch.randint(0, 2**62, (2,), device=q.device), 0, 0
    if rng_state is not None and not isinstance(rng_state, (tuple, list)):
        raise TypeError(f"rng_state is a {type_name(rng_state)}: accepted are (seed, offset) and a torch.Tensor of both")
    pair = torch.randint(0, 2**62, (2,)).tolist() if rng_state is None else list(rng_state)
    if len(pair) != 2:
        raise ValueError(f"rng_state has {len(pair)} elements: accepted are (seed, offset)")
    return None, int(pair[0]), int(pair[1])


def split_captures(captures: Captures) -> tuple[tuple[str, ...], list[Tensor], tuple[str, ...], tuple[float, ...]]:
    """Names and values of captured tensors, and of numbers."""
    if captures is not None and not isinstance(captures, Mapping):
        raise TypeError(f"captures is a {type_name(captures)}: accepted is a mapping of names to tensors and numbers")
    names, tensors, scalars, values = [], [], [], []
    for name, value in (captures or {}).items():
        if isinstance(value, Tensor):
            names.append(name)
            tensors.append(value.reshape(1) if value.dim() == 0 else value)
        elif isinstance(value, (int, float)) or isinstance(value, numbers.Real):
            scalars.append(name)
            values.append(float(value))
        else:
            raise TypeError(f"captures[{name!r}] is a {type_name(value)}: accepted are a torch.Tensor and a number")
    return tuple(names), tensors, tuple(scalars), tuple(values)


def cast_for_autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What autocast makes of them, where it is on: fp64 stays, and so does what is no tensor."""
    kind = q.device.type if isinstance(q, Tensor) else "meta"
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return q, k, v
    dtype = torch.get_autocast_dtype(kind)
    cast = [t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() and t.dtype != torch.float64 else t for t in (q, k, v)]
    return cast[0], cast[1], cast[2]


def _attend(q: Tensor, k: Tensor, v: Tensor, fixed: tuple[Any, ...], varlen: Optional[tuple[Any, ...]], captures: Captures,
            sink: Optional[Tensor], rng_state: RngState, return_lse: bool, invariance: str = "none") -> Any:
    """fixed: the first fields of Options; varlen: cu_seqlens_q, cu_seqlens_kv, seqused_q, seqused_kv, max_s_q, max_s_kv."""
    kind = q.device.type
    direct = kind in ("cpu", "cuda") and is_direct(q, k, v, sink)
    if not direct:
        _raw.check_tensors(q, k, v, varlen is not None)
    q, k, v = cast_for_autocast(q, k, v)
    names, tensors, scalars, values = split_captures(captures) if captures else ((), [], (), ())
    if sink is not None:
        sink = _raw.sink_like(sink, q)
    rng, seed, offset = _dropout_state(q, rng_state, direct) if fixed[6] else (None, 0, 0)
    arrays, longest = (varlen[:4], varlen[4:]) if varlen is not None else ((None,) * 4, (0, 0))
    if not direct or (tensors and not is_direct(*tensors)):
        last = () if invariance == "none" else (invariance,)
        rest = (*longest, seed, offset, values, *fixed, names, scalars, *last)
        plain = None if varlen is not None or sink is not None or names or scalars or last else _plain_ops.options_of(fixed)
        if not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None:
            o, lse = _Transformed.apply(q, k, v, sink, (*arrays, rng), rest, *tensors)
        elif plain is not None:
            o, lse = _plain_ops.forward_op(q, k, v, *plain)
        else:
            o, lse = _ops.forward_of(rest)(q, k, v, sink, tensors, *arrays, rng, *rest)
        return (o, lse) if return_lse else o
    options = _options.make_options(*fixed, names, scalars, varlen is not None, invariance=invariance)
    fields: list[Any] = [options, *arrays, rng, *longest, seed, offset, values]
    call = Call._make(fields)
    if q.stride(-1) != 1 or k.stride(-1) != 1 or v.stride(-1) != 1:
        q, k, v = _raw.readable(q), _raw.readable(k), _raw.readable(v)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad or (
            sink is not None and sink.requires_grad) or any([t.requires_grad for t in tensors])):
        o, lse = _Direct.apply(q, k, v, sink, call, *tensors)
    else:
        _, o, lse = _raw.forward(q, k, v, sink, tensors, call, (False,) * len(tensors), return_lse)
    return (o, lse) if return_lse else o


def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: Optional[float] = None, top_left: bool = False,
              window_left: Optional[int] = None, window_right: Optional[int] = None, chunk: int = 0, dropout: float = 0.0,
              deterministic: bool = False, score: Optional[str] = None, mask: Optional[str] = None, captures: Captures = None,
              sink: Optional[Tensor] = None, rng_state: RngState = None, return_lse: bool = False,
              invariance: str = "none") -> Any:
    """softmax(score(scale * q k^T) + mask) v: o [b, h_q, s_q, d_v], in the memory order of q.

    q [b, h_q, s_q, d_qk], k [b, h_kv, s_kv, d_qk], v [b, h_kv, s_kv, d_v], of one dtype (fp16, bf16, fp32; fp64 on the CPU)
    and device; h_kv divides h_q. Head dims are multiples of 8, d_qk up to 576 and d_v up to 512. Differentiable in q, k, v, the
    sink and captures that require gradients, once: with head dims up to 256, and up to 512 where d_qk = d_v.

    scale: 1/sqrt(d_qk) unless given. causal: row i keeps the keys up to i' = i + s_kv - s_q, with top_left up to i' = i.
    window_left, window_right: keeps the keys from i' - window_left to i' + window_right. chunk: keeps the keys of the chunk
    of i', floor(i' / chunk).
    score, mask: functions as expressions (fa_attention.functions, docs/variants.md). captures: what they name, tensors of
    at most 4 axes (fp16, bf16, fp32, int32) or numbers.
    sink [h_q]: a logit of each head that takes part in the sum of each row. dropout: the probability with which an element
    of the softmax is dropped. rng_state: (seed, offset) of its mask, or an int64 tensor of both on the device, which a
    captured graph may advance; unless given, from PyTorch's generator.
    deterministic: gradients are bitwise repeatable. return_lse: (o, lse), with the log-sum-exp [b, h_q, s_q] (natural log,
    fp32; fp64 for fp64), which may take part in the loss.
    invariance: "batch" or "rows", what alone the bits of o and lse depend on, the request or the row (docs/invariance.md).

    Raises TypeError for what is no tensor or of another dtype, ValueError (fa_attention.InvalidArgument) for sizes and
    values, RuntimeError (fa_attention.Error) for what fails beyond that, naming the argument and what is accepted.
    """
    try:
        fixed = (causal, scale, top_left, window_left, window_right, chunk, dropout, deterministic, score, mask)
        if _native.loaded and not captures and sink is None and not dropout and invariance == "none":
            result = _native.attend(q, k, v, fixed, return_lse)
            if result is not None:
                return result
        return _attend(q, k, v, fixed, None, captures, sink, rng_state, return_lse, invariance)
    except (AttributeError, RuntimeError):
        _raw.check_tensors(q, k, v, False)
        raise


def varlen_attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_kv: Tensor, *, max_s_q: int = 0,
                     max_s_kv: int = 0, seqused_q: Optional[Tensor] = None, seqused_kv: Optional[Tensor] = None,
                     causal: bool = False, scale: Optional[float] = None, top_left: bool = False,
                     window_left: Optional[int] = None, window_right: Optional[int] = None, chunk: int = 0,
                     dropout: float = 0.0, deterministic: bool = False, score: Optional[str] = None,
                     mask: Optional[str] = None, captures: Captures = None, sink: Optional[Tensor] = None,
                     rng_state: RngState = None, return_lse: bool = False, invariance: str = "none") -> Any:
    """`attention` of sequences of different lengths, one after the other in q [total_q, h_q, d_qk], k [total_kv, h_kv, d_qk]
    and v [total_kv, h_kv, d_v]; o is [total_q, h_q, d_v], the log-sum-exp [h_q, total_q].

    Sequence i has the rows cu_seqlens_q[i] to cu_seqlens_q[i + 1] of q and the keys cu_seqlens_kv[i] to cu_seqlens_kv[i + 1],
    of int32 tensors [b + 1] on the device of q; seqused_q, seqused_kv [b]: how many of these count. max_s_q, max_s_kv: the
    longest, 0 where they are not known. Rows of no sequence get 0 (lse: -inf), and so do their gradients. The others are the
    arguments, and errors, of `attention`.
    """
    try:
        check_sequences(q, cu_seqlens_q, cu_seqlens_kv, seqused_q, seqused_kv)
        fixed = (causal, scale, top_left, window_left, window_right, chunk, dropout, deterministic, score, mask)
        varlen = (cu_seqlens_q, cu_seqlens_kv, seqused_q, seqused_kv, max_s_q, max_s_kv)
        return _attend(q, k, v, fixed, varlen, captures, sink, rng_state, return_lse, invariance)
    except (AttributeError, RuntimeError):
        _raw.check_tensors(q, k, v, True)
        raise


def check_sequences(q: Tensor, cu_seqlens_q: Tensor, cu_seqlens_kv: Tensor, seqused_q: Optional[Tensor],
                     seqused_kv: Optional[Tensor]) -> None:
    named = (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_kv", cu_seqlens_kv), ("seqused_q", seqused_q),
             ("seqused_kv", seqused_kv))
    for name, t in named:
        if t is None and name.startswith("seqused"):
            continue
        if not isinstance(t, Tensor):
            raise TypeError(f"{name} is a {type_name(t)}: accepted is a torch.Tensor")
        if t.dtype != torch.int32:
            raise TypeError(f"{name} is {t.dtype}: accepted is torch.int32")
        if t.device != q.device or not t.is_contiguous() or t.dim() != 1:
            raise ValueError(f"{name} is of shape {list(t.shape)} on {t.device}: accepted is one contiguous axis on {q.device}")
        least = cu_seqlens_q.numel() if name.startswith("cu") else cu_seqlens_q.numel() - 1
        if t.numel() < max(least, 1 if name.startswith("cu") else 0):
            raise ValueError(f"{name} has {t.numel()} elements: accepted are {max(least, 1)}")
    if cu_seqlens_kv.numel() != cu_seqlens_q.numel():
        raise ValueError(f"cu_seqlens_kv has {cu_seqlens_kv.numel()} elements: accepted are {cu_seqlens_q.numel()}, as in "
                         "cu_seqlens_q")
