"""Attention of arrays: NumPy on the host device, CuPy, and whatever has DLPack or the array interface.

PyTorch tensors are passed on to fa_attention.torch, where they are differentiable. Other arrays have `attention` as the
forward, with the log-sum-exp, and `gradients` as the backward.
"""

from __future__ import annotations

import importlib
import numbers
import sys
from typing import Any, Mapping, NamedTuple, Optional, Sequence

from . import _abi, _options, _views, capi
from ._errors import type_name
from ._options import HandleKey
from ._views import View, view

Captures = Optional[Mapping[str, Any]]


class Gradients(NamedTuple):
    """Gradients of a loss: dq [b, h_q, s_q, d_qk], dk [b, h_kv, s_kv, d_qk], dv [b, h_kv, s_kv, d_v] in the dtype of q, and of
    a sink [h_q] and captures in fp32 (fp64 for fp64), by name."""

    dq: Any
    dk: Any
    dv: Any
    dsink: Any
    dcaptures: dict[str, Any]


class _Inputs(NamedTuple):
    """What forward and backward are both given. `fixed`: the first fields of Options; `sequences`: cu_seqlens_q,
    cu_seqlens_kv, seqused_q, seqused_kv, max_s_q, max_s_kv."""

    q: Any
    k: Any
    v: Any
    fixed: tuple[Any, ...]
    captures: Captures
    sink: Any
    rng_state: Optional[Sequence[int]]
    sequences: Optional[tuple[Any, ...]]
    stream: Optional[int]


def _is_torch(array: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


class _Prepared(NamedTuple):
    views: dict[str, View]
    captures: dict[str, Any]
    attention: capi.Attention
    more: dict[str, Any]  # of bind_forward and bind_backward
    lse_dtype: str

    @property
    def rows(self) -> tuple[int, ...]:
        """The shape of the log-sum-exp."""
        shape = self.views["q"].shape
        return shape[:3] if len(shape) == 4 else (shape[1], shape[0])


_AXES = (("[b, h_q, s_q, d_qk]", "[b, h_kv, s_kv, d_qk]", "[b, h_kv, s_kv, d_v]"),
         ("[total_q, h_q, d_qk]", "[total_kv, h_kv, d_qk]", "[total_kv, h_kv, d_v]"))


def _check(views: Mapping[str, View], varlen: bool) -> None:
    q = views["q"]
    for name, accepted in zip("qkv", _AXES[varlen]):
        seen = views[name]
        if len(seen.shape) != accepted.count(",") + 1:
            raise ValueError(f"{name} has shape {list(seen.shape)}: accepted is {accepted}")
        if seen.dtype not in ("float16", "bfloat16", "float32", "float64") or seen.dtype != q.dtype:
            raise TypeError(f"{name} is {seen.dtype}: accepted are float16, bfloat16, float32 and float64, as in q")
    for name, seen in views.items():
        if seen.device != q.device:
            raise ValueError(f"{name} is on another device than q: accepted is one device")


def _prepare(given: _Inputs, grads: Sequence[str] = ()) -> _Prepared:
    if given.captures is not None and not isinstance(given.captures, Mapping):
        raise TypeError(f"captures is a {type_name(given.captures)}: accepted is a mapping of names to arrays and numbers")
    given_captures = dict(given.captures or {})
    views = {name: view(name, array, given.stream) for name, array in zip("qkv", given[:3])}
    if given.sink is not None:
        views["sink"] = view("sink", given.sink, given.stream)
    varlen = given.sequences is not None
    tensors = {name: view(f"captures[{name!r}]", value, given.stream) for name, value in given_captures.items()
               if not isinstance(value, numbers.Real)}
    _check({**views, **tensors}, varlen)
    for name in grads:
        if name not in tensors:
            raise ValueError(f"requires_grad has {name!r}: accepted are captured arrays, {', '.join(tensors) or 'none'}")
    scalars = tuple(name for name in given_captures if name not in tensors)
    options = _options.make_options(*given.fixed, tuple(tensors), scalars, varlen)
    q, dtypes = views["q"], tuple(seen.dtype for seen in tensors.values())
    attention = _options.handle(HandleKey(options, q.device, q.dtype, q.shape[-1], views["v"].shape[-1], "sink" in views,
                                          dtypes, tuple(name in grads for name in tensors)))
    more: dict[str, Any] = {"stream": given.stream, "sink": views.get("sink"), "captures": {**given_captures, **tensors}}
    if given.sequences is not None:
        more["sequences"] = capi.sequences(*given.sequences)
    if options.dropout:
        more["dropout"] = _dropout(given.rng_state)
    return _Prepared(views, given_captures, attention, more, "float64" if q.dtype == "float64" else "float32")


def _dropout(rng_state: Optional[Sequence[int]]) -> _abi.DropoutState:
    if rng_state is None:
        raise ValueError("rng_state is None: accepted with dropout is (seed, offset)")
    if hasattr(rng_state, "dtype"):
        return capi.dropout_state(device=rng_state)
    if not isinstance(rng_state, (tuple, list)):
        raise TypeError(f"rng_state is a {type_name(rng_state)}: accepted are (seed, offset) and an int64 array of both")
    if len(rng_state) != 2:
        raise ValueError(f"rng_state has {len(rng_state)} elements: accepted are (seed, offset)")
    return capi.dropout_state(int(rng_state[0]), int(rng_state[1]))


def _empty(name: str, like: Any, seen: View, shape: tuple[int, ...], dtype: Optional[str]) -> Any:
    """An array for an output beside `like`, by NumPy or CuPy; `dtype` None: that of `like`."""
    library = "numpy" if seen.device == _views.HOST else "cupy"
    if library == "cupy" and not type(like).__module__.startswith("cupy"):
        raise ValueError(f"{name} is None: accepted is an array on the device of q, since {type(like).__module__} has no arrays "
                         "that can be written to")
    module = importlib.import_module(library)
    return module.empty(shape, dtype=dtype or like.dtype)


def _beside(call: _Prepared, stream: Optional[int], **arrays: Any) -> dict[str, Any]:
    """Views of other arrays, which have to be where q is."""
    seen: dict[str, Any] = {name: view(name, array, stream) if array is not None else None for name, array in arrays.items()}
    for name, of_one in seen.items():
        if of_one is not None and of_one.device != call.views["q"].device:
            raise ValueError(f"{name} is on another device than q: accepted is one device")
    return seen


def _attend(given: _Inputs, out: Any, return_lse: bool) -> Any:
    call = _prepare(given)
    q, v = call.views["q"], call.views["v"]
    shape = (*q.shape[:-1], v.shape[-1])
    o = _empty("out", given.q, q, shape, None) if out is None else out
    lse = _empty("out", given.q, q, call.rows, call.lse_dtype) if return_lse else None
    call.attention.bind_forward(q, call.views["k"], v, **_beside(call, given.stream, o=o, lse=lse), **call.more)()
    return (o, lse) if return_lse else o


def _differentiate(given: _Inputs, dout: Any, o: Any, lse: Any, dlse: Any, requires_grad: Sequence[str],
                   out: Optional[Sequence[Any]]) -> Gradients:
    call = _prepare(given, requires_grad)
    views, arrays = call.views, dict(zip("qkv", given[:3]))
    if out is not None and len(out) != 3:
        raise ValueError(f"out has {len(out)} elements: accepted are arrays for dq, dk and dv")
    dq, dk, dv = out if out is not None else [
        _empty("out", array, views[name], views[name].shape, None) for name, array in arrays.items()]
    dsink = None
    if "sink" in views:
        dsink = _empty("dsink", given.q, views["q"], views["sink"].shape, call.lse_dtype)
    dcaptures = {name: _empty(f"dcaptures[{name!r}]", given.q, views["q"], view(name, call.captures[name]).shape, call.lse_dtype)
                 for name in requires_grad}
    others = _beside(call, given.stream, o=o, lse=lse, dout=dout, dq=dq, dk=dk, dv=dv, dlse=dlse)
    call.attention.bind_backward(views["q"], views["k"], views["v"], **others, **call.more, dcaptures=dcaptures,
                                 dsink=dsink)()
    return Gradients(dq, dk, dv, dsink, dcaptures)


def attention(q: Any, k: Any, v: Any, *, causal: bool = False, scale: Optional[float] = None, top_left: bool = False,
              window_left: Optional[int] = None, window_right: Optional[int] = None, chunk: int = 0, dropout: float = 0.0,
              deterministic: bool = False, score: Optional[str] = None, mask: Optional[str] = None, captures: Captures = None,
              sink: Any = None, rng_state: Any = None, return_lse: bool = False, out: Any = None,
              stream: Optional[int] = None) -> Any:
    """softmax(score(scale * q k^T) + mask) v: o [b, h_q, s_q, d_v].

    q [b, h_q, s_q, d_qk], k [b, h_kv, s_kv, d_qk], v [b, h_kv, s_kv, d_v], of one dtype (float16, bfloat16, float32; float64
    on the host) and one device; h_kv divides h_q. Head dims are contiguous and multiples of 8, d_qk up to 576 and d_v up to
    512; `gradients` takes both up to 256, and up to 512 where they are equal. Arrays in the host's memory are computed there.

    PyTorch tensors: see fa_attention.torch.attention, which this calls; the two arguments below are not theirs.
    out: where o goes; unless given, a new array of NumPy or CuPy. Arrays of JAX on a GPU need one, since they cannot be
    written to. stream: the cudaStream_t on which the work is queued, as a number.
    The other arguments, and the errors, are those of fa_attention.torch.attention. rng_state is needed with dropout.
    """
    if _is_torch(q):
        from .torch import attention as torch_attention

        if out is not None or stream is not None:
            raise ValueError("out and stream: accepted are neither for PyTorch tensors, which have their own")
        return torch_attention(q, k, v, causal=causal, scale=scale, top_left=top_left, window_left=window_left,
                               window_right=window_right, chunk=chunk, dropout=dropout, deterministic=deterministic,
                               score=score, mask=mask, captures=captures, sink=sink, rng_state=rng_state,
                               return_lse=return_lse)
    fixed = (causal, scale, top_left, window_left, window_right, chunk, dropout, deterministic, score, mask)
    return _attend(_Inputs(q, k, v, fixed, captures, sink, rng_state, None, stream), out, return_lse)


def gradients(dout: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, *, dlse: Any = None, causal: bool = False,
              scale: Optional[float] = None, top_left: bool = False, window_left: Optional[int] = None,
              window_right: Optional[int] = None, chunk: int = 0, dropout: float = 0.0, deterministic: bool = False,
              score: Optional[str] = None, mask: Optional[str] = None, captures: Captures = None,
              requires_grad: Sequence[str] = (), sink: Any = None, rng_state: Any = None,
              out: Optional[Sequence[Any]] = None, stream: Optional[int] = None) -> Gradients:
    """The gradients of what `attention` with the same arguments made, o [b, h_q, s_q, d_v] and lse [b, h_q, s_q], from dout
    [b, h_q, s_q, d_v] and, if given, dlse [b, h_q, s_q].

    requires_grad: the names of captures whose gradients are wanted. out: where dq, dk and dv go. Errors as of `attention`.
    """
    fixed = (causal, scale, top_left, window_left, window_right, chunk, dropout, deterministic, score, mask)
    given = _Inputs(q, k, v, fixed, captures, sink, rng_state, None, stream)
    return _differentiate(given, dout, o, lse, dlse, requires_grad, out)


def varlen_attention(q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_kv: Any, *, max_s_q: int = 0, max_s_kv: int = 0,
                     seqused_q: Any = None, seqused_kv: Any = None, causal: bool = False, scale: Optional[float] = None,
                     top_left: bool = False, window_left: Optional[int] = None, window_right: Optional[int] = None,
                     chunk: int = 0, dropout: float = 0.0, deterministic: bool = False, score: Optional[str] = None,
                     mask: Optional[str] = None, captures: Captures = None, sink: Any = None, rng_state: Any = None,
                     return_lse: bool = False, out: Any = None, stream: Optional[int] = None) -> Any:
    """`attention` of sequences one after the other in q [total_q, h_q, d_qk], k [total_kv, h_kv, d_qk] and v [total_kv, h_kv,
    d_v]; lse is [h_q, total_q]. See fa_attention.torch.varlen_attention for the other arguments."""
    if _is_torch(q):
        from .torch import varlen_attention as torch_attention

        if out is not None or stream is not None:
            raise ValueError("out and stream: accepted are neither for PyTorch tensors, which have their own")
        return torch_attention(q, k, v, cu_seqlens_q, cu_seqlens_kv, max_s_q=max_s_q, max_s_kv=max_s_kv, seqused_q=seqused_q,
                               seqused_kv=seqused_kv, causal=causal, scale=scale, top_left=top_left,
                               window_left=window_left, window_right=window_right, chunk=chunk, dropout=dropout,
                               deterministic=deterministic, score=score, mask=mask, captures=captures, sink=sink,
                               rng_state=rng_state, return_lse=return_lse)
    fixed = (causal, scale, top_left, window_left, window_right, chunk, dropout, deterministic, score, mask)
    sequences = (cu_seqlens_q, cu_seqlens_kv, seqused_q, seqused_kv, max_s_q, max_s_kv)
    return _attend(_Inputs(q, k, v, fixed, captures, sink, rng_state, sequences, stream), out, return_lse)


def varlen_gradients(dout: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, cu_seqlens_q: Any, cu_seqlens_kv: Any, *,
                     dlse: Any = None, max_s_q: int = 0, max_s_kv: int = 0, seqused_q: Any = None, seqused_kv: Any = None,
                     causal: bool = False, scale: Optional[float] = None, top_left: bool = False,
                     window_left: Optional[int] = None, window_right: Optional[int] = None, chunk: int = 0,
                     dropout: float = 0.0, deterministic: bool = False, score: Optional[str] = None,
                     mask: Optional[str] = None, captures: Captures = None, requires_grad: Sequence[str] = (),
                     sink: Any = None, rng_state: Any = None, out: Optional[Sequence[Any]] = None,
                     stream: Optional[int] = None) -> Gradients:
    """`gradients` of what `varlen_attention` with the same arguments made."""
    fixed = (causal, scale, top_left, window_left, window_right, chunk, dropout, deterministic, score, mask)
    sequences = (cu_seqlens_q, cu_seqlens_kv, seqused_q, seqused_kv, max_s_q, max_s_kv)
    given = _Inputs(q, k, v, fixed, captures, sink, rng_state, sequences, stream)
    return _differentiate(given, dout, o, lse, dlse, requires_grad, out)
