"""Forward and backward of PyTorch tensors, below autograd: layouts are worked out once, then kept."""

from __future__ import annotations

import threading
from typing import Any, Mapping, NamedTuple, Optional, Protocol, Sequence

import torch
from torch import Tensor

from .. import _abi
from .._errors import type_name
from .._options import HandleKey, Options, check_kinds, handle
from .._prepared import Layout, PreparedCall, Spec

DTYPES = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32", torch.float64: "float64"}
CAPTURE_DTYPES = {**DTYPES, torch.int32: "int32"}
CODES = {torch.float8_e4m3fn: "float8_e4m3fn", torch.float8_e5m2: "float8_e5m2", torch.int8: "int8"}  # of q in 8 bits
CODED_RESULTS = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float8_e4m3fn: "float8_e4m3fn"}
_NAMES = {**CAPTURE_DTYPES, **CODES}
_MOST_PLANS = 2048

_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_empty = torch.empty_strided


class Call(NamedTuple):
    """What a call has besides q, k, v, a sink and captured tensors."""

    options: Options
    cu_seqlens_q: Optional[Tensor] = None
    cu_seqlens_kv: Optional[Tensor] = None
    seqused_q: Optional[Tensor] = None
    seqused_kv: Optional[Tensor] = None
    rng_state: Optional[Tensor] = None
    max_s_q: int = 0
    max_s_kv: int = 0
    seed: int = 0
    offset: int = 0
    numbers: tuple[float, ...] = ()


def resolved(t: Tensor) -> Tensor:
    """`t` itself, unless its memory has the other sign."""
    return t.resolve_neg() if t.is_neg() else t


def readable(t: Tensor) -> Tensor:
    """`t` itself, unless its memory has the other sign or its head dim is not contiguous, as in the gradient of a sum, which is
    expanded."""
    t = resolved(t)
    if t.stride(-1) == 1 or t.shape[-1] <= 1:
        return t
    return t.clone(memory_format=torch.contiguous_format)  # contiguous() has an expanded tensor without elements as it is


def sink_like(sink: Tensor, q: Tensor) -> Tensor:
    """`sink` in the dtype of logits of `q`. TypeError for what is no tensor."""
    if not isinstance(sink, Tensor):
        raise TypeError(f"sink is a {type_name(sink)}: accepted is a torch.Tensor")
    dtype = lse_dtype(q.dtype)
    return sink if sink.dtype == dtype else sink.to(dtype)


def like(t: Tensor, heads: Any, rows: Any, head_dim: Any, dtype: Optional[torch.dtype] = None) -> Tensor:
    """An empty [b, h, s, d] tensor in the memory order of `t`, or [total, h, d] where `t` is that."""
    if t.dim() == 3:
        return t.new_empty((rows, heads, head_dim), dtype=dtype)
    if t.stride(1) < t.stride(2):
        return t.new_empty((t.shape[0], rows, heads, head_dim), dtype=dtype).transpose(1, 2)
    return t.new_empty((t.shape[0], heads, rows, head_dim), dtype=dtype)


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def spec(t: Tensor) -> Spec:
    return Spec(_NAMES[t.dtype], tuple(t.shape), tuple(t.stride()))


class Output(NamedTuple):
    """How an output is allocated."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def spec(self) -> Spec:
        return Spec(_NAMES[self.dtype], self.shape, self.strides)


def output_of(t: Tensor) -> Output:
    return Output(tuple(t.shape), tuple(t.stride()), t.dtype)


def dense(shape: Sequence[int], dtype: torch.dtype) -> Output:
    return output_of(torch.empty(tuple(shape), dtype=dtype, device="meta"))


class Plan:
    """All that is known about the calls of one layout."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, sink: Optional[Tensor], captures: Sequence[Tensor], call: Call,
                 grads: tuple[bool, ...]) -> None:
        options = call.options
        index = q.device.index or 0 if q.is_cuda else -1
        device = (_abi.DEVICE_CUDA, index) if q.is_cuda else (_abi.DEVICE_HOST, 0)
        key = HandleKey(options, device, DTYPES[q.dtype], q.shape[-1], v.shape[-1], sink is not None,
                        tuple(CAPTURE_DTYPES[t.dtype] for t in captures), grads)
        self.attention = handle(key)
        self.index = index
        self.device = q.device
        if options.varlen:
            b = call.cu_seqlens_q.numel() - 1 if call.cu_seqlens_q is not None else 0
            self.sizes: tuple[int, ...] = (b, q.shape[1], k.shape[1], call.max_s_q, call.max_s_kv, q.shape[0], k.shape[0])
            heads, rows = q.shape[1], q.shape[0]
            lse_shape: tuple[int, ...] = (heads, rows)
        else:
            self.sizes = (q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2])
            heads, rows = q.shape[1], q.shape[2]
            lse_shape = (q.shape[0], heads, rows)
        meta = torch.empty_strided(q.shape, q.stride(), dtype=q.dtype, device="meta")
        self.o = output_of(like(meta, heads, rows, v.shape[-1]))
        self.lse = dense(lse_shape, lse_dtype(q.dtype))
        inputs = [("q", spec(q)), ("k", spec(k)), ("v", spec(v))]
        self.read = inputs
        self.sink = [("sink", spec(sink))] if sink is not None else []
        self.captures = [(name, spec(t)) for name, t in zip(options.tensors, captures)]
        self.grads = grads
        self.options = options
        self._forwards: dict[bool, PreparedCall] = {}
        self._backwards: dict[Any, Any] = {}

    def _layout(self, read: list[tuple[str, Spec]], written: list[tuple[str, Spec]],
                gradients: list[tuple[str, Spec]]) -> Layout:
        options = self.options
        return Layout(read + self.sink, written, self.captures, gradients, options.numbers, options.varlen,
                      options.dropout != 0)

    def forward(self, want_lse: bool) -> PreparedCall:
        found = self._forwards.get(want_lse)
        if found is None:
            written = [("o", self.o.spec())] + ([("lse", self.lse.spec())] if want_lse else [])
            found = PreparedCall(self.attention, self._layout(self.read, written, []), self.sizes)
            self._forwards[want_lse] = found
        return found

    def backward(self, key: Any, inputs: Sequence[Optional[Tensor]], sink: Optional[Tensor], captures: Sequence[Tensor],
                 wanted: Sequence[bool]) -> tuple[PreparedCall, list[Output]]:
        """inputs: q, k, v, o, lse, dout, dlse; wanted: gradients of q, k, v and the sink."""
        found = self._backwards.get(key)
        if found is None:
            if len(self._backwards) > 64:
                self._backwards.clear()
            names = ("q", "k", "v", "o", "lse", "dout", "dlse")
            read = [(name, spec(t)) for name, t in zip(names, inputs) if t is not None]
            outputs = [_gradient_like(t) for t, want in zip(inputs[:3], wanted) if t is not None and want]
            named = [name for name, want in zip(("dq", "dk", "dv"), wanted) if want]
            written = [(name, output.spec()) for name, output in zip(named, outputs)]
            if wanted[3] and sink is not None:
                outputs.append(dense(sink.shape, sink.dtype))
                written.append(("dsink", outputs[-1].spec()))
            gradients = []
            for name, t, grad in zip(self.options.tensors, captures, self.grads):
                if grad:
                    outputs.append(dense(t.shape, self.lse.dtype))
                    gradients.append((name, outputs[-1].spec()))
            found = (PreparedCall(self.attention, self._layout(read, written, gradients), self.sizes), outputs)
            self._backwards[key] = found
        result: tuple[PreparedCall, list[Output]] = found
        return result


def _gradient_like(t: Tensor) -> Output:
    meta = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
    return output_of(gradient_like(meta))


def gradient_like(t: Tensor) -> Tensor:
    """An empty tensor for the gradient of q, k or v."""
    return like(t, t.shape[1], t.shape[0 if t.dim() == 3 else 2], t.shape[-1])


_plans: dict[Any, Plan] = {}
_lock = threading.Lock()


def find_plan(q: Tensor, k: Tensor, v: Tensor, sink: Optional[Tensor], captures: Sequence[Tensor], call: Call,
              grads: tuple[bool, ...]) -> Plan:
    """The plan for tensors like these, whose head dims are contiguous."""
    key: Any = (call.options, q.dtype, q.device, q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride())
    if k.dtype != q.dtype or v.dtype != q.dtype or k.device != q.device or v.device != q.device:
        check_tensors(q, k, v, call.options.varlen)
    if sink is not None or captures or call.cu_seqlens_q is not None:
        key += (sink is not None and (sink.dtype, sink.device, sink.shape, sink.stride()), grads, call.max_s_q, call.max_s_kv,
                call.cu_seqlens_q is not None and call.cu_seqlens_q.shape,
                tuple([t is not None and t.device for t in call[1:6]]),
                tuple([(t.dtype, t.device, t.shape, t.stride()) for t in captures]))
    plan = _plans.get(key)
    if plan is None:
        check_tensors(q, k, v, call.options.varlen)
        check_others(q, sink, captures, call)
        plan = Plan(q, k, v, sink, captures, call, grads)
        with _lock:
            if len(_plans) >= _MOST_PLANS:
                _plans.clear()
            _plans[key] = plan
    return plan


AXES = (("[b, h_q, s_q, d_qk]", "[b, h_kv, s_kv, d_qk]", "[b, h_kv, s_kv, d_v]"),
         ("[total_q, h_q, d_qk]", "[total_kv, h_kv, d_qk]", "[total_kv, h_kv, d_v]"))


def check_tensors(q: Tensor, k: Tensor, v: Tensor, varlen: bool) -> None:
    """TypeError and ValueError for what the code before the library's own checks relies on."""
    for name, t, accepted in zip(("q", "k", "v"), (q, k, v), AXES[1 if varlen else 0]):
        if not isinstance(t, Tensor):
            raise TypeError(f"{name} is a {type(t).__module__}.{type(t).__qualname__}: accepted is a torch.Tensor")
        if t.is_nested:
            raise TypeError(f"{name} is a nested tensor: accepted are its values by varlen_attention, with their offsets")
        if t.layout != torch.strided:
            raise TypeError(f"{name} is of {t.layout}: accepted is torch.strided")
        if t.dim() != accepted.count(",") + 1:
            raise ValueError(f"{name} has shape {list(t.shape)}: accepted is {accepted}")
        if t.dtype not in DTYPES:
            raise TypeError(f"{name} is {t.dtype}: accepted are {', '.join(map(str, DTYPES))}")
        if t.dtype != q.dtype:
            raise TypeError(f"{name} is {t.dtype}: accepted is what q is, {q.dtype}")
        if t.device != q.device:
            raise ValueError(f"{name} is on {t.device}: accepted is where q is, {q.device}")


def check_others(q: Tensor, sink: Optional[Tensor], captures: Sequence[Tensor], call: Call) -> None:
    if q.device.type not in ("cpu", "cuda", "meta"):
        raise ValueError(f"q is on {q.device}: accepted are cpu and cuda")
    check_kinds({"max_s_q": call.max_s_q, "max_s_kv": call.max_s_kv})
    for name, t in zip(Call._fields[1:6], call[1:6]):
        if t is not None and t.device != q.device:
            raise ValueError(f"{name} is on {t.device}: accepted is where q is, {q.device}")
    check_captures(dict(zip(call.options.tensors, captures)), sink, q)


def check_captures(captures: Mapping[str, Any], sink: Optional[Tensor], q: Tensor) -> None:
    """ValueError and TypeError for tensors among `captures` and a sink that the library cannot read."""
    others = [(name, t) for name, t in captures.items() if isinstance(t, Tensor)] + ([("sink", sink)] if sink is not None else [])
    for name, t in others:
        if t.device != q.device:
            raise ValueError(f"{name} is on {t.device}: accepted is where q is, {q.device}")
        if t.dtype not in CAPTURE_DTYPES:
            raise TypeError(f"{name} is {t.dtype}: accepted are {', '.join(map(str, CAPTURE_DTYPES))}")
        if t.dim() > 4:
            raise ValueError(f"{name} has shape {list(t.shape)}: accepted are at most 4 axes")


def check_codes(q: Tensor, k: Tensor, v: Tensor, names: Sequence[str] = ("q", "k", "v")) -> None:
    """TypeError for dtypes of q, k and v that do not go together."""
    beside = torch.float8_e4m3fn if q.dtype == torch.int8 else q.dtype
    for name, t, accepted in ((names[1], k, q.dtype), (names[2], v, beside)):
        if t.dtype != accepted:
            raise TypeError(f"{name} is {t.dtype}: accepted with {names[0]} of {q.dtype} is {accepted}")


def check_result(dtype: Any) -> None:
    if dtype not in CODED_RESULTS:
        raise TypeError(f"dtype is {dtype}: accepted of o are {', '.join(map(str, CODED_RESULTS))}")


def check_scale(name: str, t: Optional[Tensor], axes: Sequence[int], q: Tensor) -> None:
    """Of q_scale, k_scale, v_scale and row_bias; axes: how many it may have."""
    if t is None:
        return
    if not isinstance(t, Tensor):
        raise TypeError(f"{name} is a {type(t).__module__}.{type(t).__qualname__}: accepted is a torch.Tensor")
    if t.device != q.device:
        raise ValueError(f"{name} is on {t.device}: accepted is where q is, {q.device}")
    if t.dtype != torch.float32:
        raise TypeError(f"{name} is {t.dtype}: accepted is torch.float32")
    if t.dim() not in axes:
        raise ValueError(f"{name} has shape {list(t.shape)}: accepted are {' or '.join(map(str, axes))} axes")
    if name == "row_bias" and q.dtype != torch.int8:
        raise ValueError(f"row_bias is given: accepted with q of {q.dtype} is None")


def _sequences(call: Call) -> Any:
    q, kv = call.cu_seqlens_q, call.cu_seqlens_kv
    if q is None or kv is None:
        return None
    used_q, used_kv = call.seqused_q, call.seqused_kv
    return (q.numel() - 1, q.data_ptr(), kv.data_ptr(), used_q.data_ptr() if used_q is not None else None,
            used_kv.data_ptr() if used_kv is not None else None, call.max_s_q, call.max_s_kv)


def current_stream(index: int) -> int:
    """PyTorch's current stream of a GPU."""
    return int(_raw_stream(index) if _raw_stream is not None else torch.cuda.current_stream(index).cuda_stream)


class Placed(Protocol):
    """A plan, of which a launch sees the GPU's index, or -1, and the device."""

    index: int
    device: torch.device


def run(plan: Placed, prepared: PreparedCall, addresses: list[int], call: Call) -> None:
    index = plan.index
    if index < 0:
        stream = 0
    elif torch._C._cuda_getDevice() != index:
        with torch.cuda.device(index):
            run(plan, prepared, addresses, call)
        return
    else:
        stream = current_stream(index)
    size = prepared.scratch_size(addresses)
    scratch = torch.empty(size, dtype=torch.uint8, device=plan.device) if size else None
    sequences = _sequences(call) if call.options.varlen else None
    dropout = None
    if call.options.dropout != 0:
        dropout = (call.seed, call.offset, call.rng_state.data_ptr() if call.rng_state is not None else None)
    prepared(addresses, stream, scratch.data_ptr() if scratch is not None else 0, size, call.numbers, sequences, dropout)


def forward(q: Tensor, k: Tensor, v: Tensor, sink: Optional[Tensor], captures: Sequence[Tensor], call: Call,
            grads: tuple[bool, ...] = (), want_lse: bool = True) -> tuple[Plan, Tensor, Optional[Tensor]]:
    """The plan, o and lse. q, k and v are `readable`."""
    plan = find_plan(q, k, v, sink, captures, call, grads)
    shape, strides, dtype = plan.o
    o = _empty(shape, strides, dtype=dtype, device=plan.device)
    addresses = [q.data_ptr(), k.data_ptr(), v.data_ptr()]
    if sink is not None:
        addresses.append(sink.data_ptr())
    addresses.append(o.data_ptr())
    lse = None
    if want_lse:
        shape, strides, dtype = plan.lse
        lse = _empty(shape, strides, dtype=dtype, device=plan.device)
        addresses.append(lse.data_ptr())
    for t in captures:
        addresses.append(t.data_ptr())
    run(plan, plan.forward(want_lse), addresses, call)
    return plan, o, lse


Gradients = tuple[Optional[Tensor], Optional[Tensor], Optional[Tensor], Optional[Tensor], list[Optional[Tensor]]]


def backward(plan: Plan, dout: Optional[Tensor], dlse: Optional[Tensor], q: Tensor, k: Tensor, v: Tensor, o: Tensor,
             lse: Tensor, sink: Optional[Tensor], captures: Sequence[Tensor], call: Call,
             needed: Sequence[bool]) -> Gradients:
    """Gradients of q, k, v, the sink and captures; None for what is not `needed`."""
    dout = torch.zeros_like(o) if dout is None else readable(dout)
    if dlse is not None:
        dlse = dlse.to(lse.dtype).resolve_neg()
    o = readable(o)
    wanted = (bool(needed[0]), bool(needed[1]), bool(needed[2]), sink is not None and bool(needed[3]))
    written = sum(wanted)
    if written == 0 and not any(plan.grads):
        return (None, None, None, None, [None] * len(captures))
    key = (dout.stride(), o.stride(), lse.stride(), None if dlse is None else dlse.stride(), wanted)
    inputs = (q, k, v, o, lse, dout, dlse)
    prepared, outputs = plan.backward(key, inputs, sink, captures, wanted)
    results = [_empty(shape, strides, dtype=dtype, device=plan.device) for shape, strides, dtype in outputs]
    addresses = [t.data_ptr() for t in inputs if t is not None]
    if sink is not None:
        addresses.append(sink.data_ptr())
    addresses += [t.data_ptr() for t in results[:written]]
    addresses += [t.data_ptr() for t in captures]
    addresses += [t.data_ptr() for t in results[written:]]
    run(plan, prepared, addresses, call)
    dcaptures: list[Optional[Tensor]] = []
    if captures:
        gradients = iter(results[written:])
        for t, grad in zip(captures, plan.grads or (False,) * len(captures)):
            dcaptures.append(next(gradients).to(t.dtype) if grad else None)
    main = iter(results[:written])
    dq, dk, dv, dsink = (next(main) if want else None for want in wanted)
    return dq, dk, dv, dsink, dcaptures
