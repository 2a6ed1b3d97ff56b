"""Attention of q, k and v in 8 bits, and what makes these of wider ones: the operators fa_attention::quantized_forward and
fa_attention::quantize. Neither has gradients."""

from __future__ import annotations

from typing import Any, NamedTuple, Optional, Sequence

import torch
from torch import Tensor
from torch import library as operators

from .. import _abi, _options
from .._options import HandleKey, Options, handle
from . import _bound, _cache_raw, _raw
from ._attention import Captures, check_sequences, is_direct, split_captures
from ._cache_ops import refuse_gradients, without_gradients
from ._ops import library
from ._raw import CODED_RESULTS, CODES, Call, check_codes, check_result, check_scale

_WIDE = (torch.float16, torch.bfloat16, torch.float32)  # what may be quantized
_SCALED = ("q_scale", "k_scale", "v_scale", "row_bias")

_FORWARD = ("quantized_forward(Tensor q, Tensor k, Tensor v, Tensor? q_scale, Tensor? k_scale, Tensor? v_scale, Tensor? row_bias, "
            "Tensor? sink, Tensor[] captures, Tensor? cu_seqlens_q, Tensor? cu_seqlens_kv, Tensor? seqused_q, Tensor? seqused_kv, "
            "SymInt max_s_q, SymInt max_s_kv, float[] numbers, bool key_scales, bool value_scales, bool precise, ScalarType dtype, "
            "bool causal, float? scale, bool top_left, SymInt? window_left, SymInt? window_right, SymInt chunk, str? score, "
            "str? mask, str[] tensor_names, str[] number_names) -> (Tensor o, Tensor lse)")
_QUANTIZE = ("quantize(Tensor? q, Tensor? k, Tensor? v, Tensor? q_scale, Tensor? k_scale, Tensor? v_scale, Tensor? k_mean, "
             "ScalarType dtype, bool smooth) -> (Tensor q_codes, Tensor k_codes, Tensor v_codes, Tensor q_scale_out, "
             "Tensor k_scale_out, Tensor v_scale_out, Tensor k_mean_out, Tensor row_bias)")

for _schema in (_FORWARD, _QUANTIZE):
    library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))
forward_op = torch.ops.fa_attention.quantized_forward.default
quantize_op = torch.ops.fa_attention.quantize.default


def check(q: Tensor, k: Tensor, v: Tensor, scales: Sequence[Optional[Tensor]], sink: Optional[Tensor], captures: Sequence[Tensor],
          call: Call, dtype: Any) -> None:
    """TypeError and ValueError for what the library cannot see, or relies on. scales: q_scale, k_scale, v_scale, row_bias."""
    packed = call.options.varlen
    for name, t, accepted in zip("qkv", (q, k, v), _raw.AXES[packed]):
        _cache_raw.check_strided(name, t, q if isinstance(q, Tensor) else None)
        if t.dtype not in CODES:
            raise TypeError(f"{name} is {t.dtype}: accepted are {', '.join(map(str, CODES))}, and wider ones by attention")
        if t.dim() != accepted.count(",") + 1:
            raise ValueError(f"{name} has shape {list(t.shape)}: accepted is {accepted}")
    check_codes(q, k, v)
    check_result(dtype)
    for name, of_t in zip(_SCALED, scales):
        check_scale(name, of_t, (2,) if packed else (2, 3), q)
    _raw.check_others(q, sink, captures, call)


def _outputs(q: Tensor, v: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    packed = q.dim() == 3
    o = _raw.like(q, q.shape[1], q.shape[0 if packed else 2], v.shape[-1], dtype)
    shape = (q.shape[1], q.shape[0]) if packed else (q.shape[0], q.shape[1], q.shape[2])
    return o, q.new_empty(shape, dtype=torch.float32)


def _call(rest: Sequence[Any]) -> Call:
    """Of the arguments behind captures."""
    (cu_q, cu_kv, used_q, used_kv, max_s_q, max_s_kv, numbers, key_scales, value_scales, precise, dtype, *fixed, score, mask, names,
     scalars) = rest
    options = _options.make_options(*fixed, 0.0, False, score, mask, tuple(names), tuple(scalars), cu_q is not None)
    options = options._replace(key_scales=key_scales, value_scales=value_scales, precise=precise, o_dtype=CODED_RESULTS.get(dtype))
    return Call(options, cu_q, cu_kv, used_q, used_kv, None, max_s_q, max_s_kv, 0, 0, tuple(numbers))


def _attend(arguments: Sequence[Any], want_lse: bool) -> tuple[Tensor, Optional[Tensor]]:
    q, k, v, q_scale, k_scale, v_scale, row_bias, sink, captures, *rest = arguments
    call, dtype, scales = _call(rest), rest[10], (q_scale, k_scale, v_scale, row_bias)
    if q.dtype not in CODES or dtype not in CODED_RESULTS:
        check(q, k, v, scales, sink, captures, call, dtype)
    q, k, v = _raw.readable(q), _raw.readable(k), _raw.readable(v)
    o, lse = _outputs(q, v, dtype)
    if call.options.varlen and dtype == torch.float8_e4m3fn:  # else the library does it, of rows of no sequence
        o.view(torch.uint8).zero_()
        lse.fill_(float("-inf"))
    read = (("q", q), ("k", k), ("v", v), *zip(_SCALED, scales), ("sink", sink))
    _bound.forward(call, read, captures, (("o", o), ("lse", lse if want_lse else None)), CODES[q.dtype],
                   lambda: check(q, k, v, scales, sink, captures, call, dtype))
    return o, lse if want_lse else None


def _forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    o, lse = _attend(arguments, True)
    assert lse is not None
    return o, lse


def _forward_fake(q: Tensor, k: Tensor, v: Tensor, q_scale: Optional[Tensor], k_scale: Optional[Tensor], v_scale: Optional[Tensor],
                  row_bias: Optional[Tensor], sink: Optional[Tensor], captures: Sequence[Tensor],
                  *rest: Any) -> tuple[Tensor, Tensor]:
    score, mask, names, scalars = rest[-4:]
    _options.check_names(score, mask, (*names, *scalars))
    call = Call(Options(tensors=tuple(names), varlen=rest[0] is not None))
    check(q, k, v, (q_scale, k_scale, v_scale, row_bias), sink, captures, call, rest[10])
    return _outputs(_raw.readable(q), v, rest[10])


def _check_quantize(main: Sequence[Optional[Tensor]], scales: Sequence[Optional[Tensor]], k_mean: Optional[Tensor], dtype: Any,
                    smooth: bool) -> Tensor:
    """The first of q, k and v. TypeError and ValueError for what the library cannot see, or relies on."""
    if dtype not in (torch.int8, torch.float8_e4m3fn):
        raise TypeError(f"dtype is {dtype}: accepted of codes are torch.int8 and torch.float8_e4m3fn")
    given = [(name, t) for name, t in zip("qkv", main) if t is not None]
    if not given:
        raise ValueError("q, k and v are None: accepted is one at least")
    of, first = given[0]
    for name, t in given:
        _cache_raw.check_strided(name, t, first if isinstance(first, Tensor) else None, of)
        if t.dtype not in _WIDE:
            raise TypeError(f"{name} is {t.dtype}: accepted are {', '.join(map(str, _WIDE))}")
        if t.dim() not in (3, 4) or t.dim() != first.dim():
            raise ValueError(f"{name} has shape {list(t.shape)}: accepted are [b, h, s, d], and for all packed, [total, h, d]")
    if first.device.type not in ("cpu", "cuda", "meta"):
        raise ValueError(f"{of} is on {first.device}: accepted are cpu and cuda")
    read = any(t is not None for t in scales)
    for name, of_t, scale in zip("qkv", main, scales):
        if (scale is not None) != (read and of_t is not None):
            accepted = f"the scales of {name}, as of the others" if scale is None else f"None without {name}"
            raise ValueError(f"{name}_scale is {'None' if scale is None else 'given'}: accepted is {accepted}")
        if scale is not None:
            check_scale(f"{name}_scale", scale, (first.dim() - 1,), first)
    if k_mean is not None:
        check_scale("k_mean", k_mean, (first.dim() - 1,), first)
        if smooth or (main[0] is None and main[1] is None):
            raise ValueError(f"k_mean is given: accepted is None {'with smooth' if smooth else 'without q or k'}")
    elif smooth and main[1] is None:
        raise ValueError("smooth is True: accepted is False without k, whose mean it takes")
    return first


def _new_rows(t: Tensor) -> Tensor:
    shape = (t.shape[1], t.shape[0]) if t.dim() == 3 else (t.shape[0], t.shape[1], t.shape[2])
    return t.new_empty(shape, dtype=torch.float32)


def _new_codes(main: Sequence[Optional[Tensor]], scales: Sequence[Optional[Tensor]], k_mean: Optional[Tensor], dtype: torch.dtype,
               smooth: bool) -> list[Optional[Tensor]]:
    """What the operator writes, in its order."""
    codes: list[Optional[Tensor]] = []
    made: list[Optional[Tensor]] = []
    for t, scale, kind in zip(main, scales, (dtype, dtype, torch.float8_e4m3fn)):
        t = None if t is None else _raw.readable(t)
        codes.append(None if t is None else _raw.like(t, t.shape[1], t.shape[0 if t.dim() == 3 else 2], t.shape[-1], kind))
        made.append(None if t is None or scale is not None else _new_rows(t))
    q, k, _ = main
    mean = bias = None
    if smooth and k is not None:
        mean = k.new_empty((*(() if k.dim() == 3 else (k.shape[0],)), k.shape[1], k.shape[-1]), dtype=torch.float32)
    if q is not None and (smooth or k_mean is not None):
        bias = _new_rows(q)
    return [*codes, *made, mean, bias]


def _present(results: Sequence[Optional[Tensor]], like: Tensor) -> tuple[Tensor, ...]:
    return tuple(like.new_empty((0,)) if t is None else t for t in results)


def _quantize(q: Optional[Tensor], k: Optional[Tensor], v: Optional[Tensor], q_scale: Optional[Tensor], k_scale: Optional[Tensor],
              v_scale: Optional[Tensor], k_mean: Optional[Tensor], dtype: torch.dtype, smooth: bool) -> tuple[Tensor, ...]:
    given = (q_scale, k_scale, v_scale)
    first = _check_quantize((q, k, v), given, k_mean, dtype, smooth)
    results = _new_codes((q, k, v), given, k_mean, dtype, smooth)
    index = first.device.index or 0 if first.is_cuda else -1
    device = (_abi.DEVICE_CUDA, index) if first.is_cuda else (_abi.DEVICE_HOST, 0)
    d_qk = next((t.shape[-1] for t in (q, k, v) if t is not None), 0)
    d_v = v.shape[-1] if v is not None else d_qk
    attention = handle(HandleKey(Options(varlen=first.dim() == 3), device, CODES[dtype], d_qk, d_v, False, (), ()))
    arrays: dict[str, Any] = {name: None if t is None else _raw.readable(t) for name, t in zip("qkv", (q, k, v))}
    arrays.update(zip(("q_codes", "k_codes", "v_codes"), results[:3]))
    arrays.update((name, made if scale is None else scale) for name, scale, made in zip(_SCALED, given, results[3:6]))
    arrays.update(k_mean=results[6] if k_mean is None else k_mean, row_bias=results[7])
    options = {"scales_given": any(t is not None for t in given), "mean_given": k_mean is not None}
    _cache_raw.on_device(index, lambda stream: attention.bind_quantize(**arrays, **options, stream=stream)())
    return _present(results, first)


def _quantize_fake(q: Optional[Tensor], k: Optional[Tensor], v: Optional[Tensor], q_scale: Optional[Tensor],
                   k_scale: Optional[Tensor], v_scale: Optional[Tensor], k_mean: Optional[Tensor], dtype: torch.dtype,
                   smooth: bool) -> tuple[Tensor, ...]:
    given = (q_scale, k_scale, v_scale)
    first = _check_quantize((q, k, v), given, k_mean, dtype, smooth)
    return _present(_new_codes((q, k, v), given, k_mean, dtype, smooth), first)


for _name, _kernel, _fake, _operator in (("quantized_forward", _forward, _forward_fake, forward_op),
                                         ("quantize", _quantize, _quantize_fake, quantize_op)):
    for _key in ("CPU", "CUDA"):
        library.impl(_name, _kernel, _key)
    operators.register_fake(f"fa_attention::{_name}", _fake, lib=library)
    operators.register_vmap(f"fa_attention::{_name}", _bound.each_in_turn(_operator), lib=library)
    library.impl(_name, without_gradients(_operator), "Autograd", with_keyset=True)


def quantized_attention(q: Tensor, k: Tensor, v: Tensor, *, q_scale: Optional[Tensor] = None, k_scale: Optional[Tensor] = None,
                        v_scale: Optional[Tensor] = None, row_bias: Optional[Tensor] = None, key_scales: bool = False,
                        value_scales: bool = False, dtype: torch.dtype = torch.bfloat16, precise: bool = False,
                        cu_seqlens_q: Optional[Tensor] = None, cu_seqlens_kv: Optional[Tensor] = None,
                        seqused_q: Optional[Tensor] = None, seqused_kv: Optional[Tensor] = None, max_s_q: int = 0,
                        max_s_kv: int = 0, causal: bool = False, scale: Optional[float] = None, top_left: bool = False,
                        window_left: Optional[int] = None, window_right: Optional[int] = None, chunk: int = 0,
                        score: Optional[str] = None, mask: Optional[str] = None, captures: Captures = None,
                        sink: Optional[Tensor] = None, return_lse: bool = False) -> Any:
    """`attention` of q, k and v in 8 bits, by products of 8 bits (docs/fp8.md, docs/int8.md): o [b, h_q, s_q, d_v], in the
    memory order of q. On GPUs of compute capability 8.9 or later, int8 and `precise` on Hopper alone, and on the CPU.

    q [b, h_q, s_q, d_qk], k [b, h_kv, s_kv, d_qk], v [b, h_kv, s_kv, d_v], all torch.float8_e4m3fn or all torch.float8_e5m2;
    or q and k torch.int8 beside a v of torch.float8_e4m3fn. Head dims are multiples of 16 up to 256, and contiguous. With
    cu_seqlens_q and cu_seqlens_kv they are packed, as in `varlen_attention`: q [total_q, h_q, d_qk].

    An element stands for its value times a scale, fp32 of any strides, 1 unless given. q_scale: [b, h_q, s_q], or [b, h_q] for
    one a head; packed [h_q, total_q]. k_scale, v_scale: [b, h_kv], also of b packed sequences; or one a key, [b, h_kv, s_kv],
    and packed [h_kv, total_kv], which key_scales, and value_scales, say. row_bias, with int8 alone: what is added to q k of a
    row before it is scaled, of the shapes of q_scale; `quantize` makes it.

    dtype: of o, bf16, fp16 or torch.float8_e4m3fn, which saturates. precise: P and V are multiplied as fp16, which leaves a
    tenth of the error. The log-sum-exp is fp32. The other arguments are those of `attention`, without dropout.

    There are no gradients: RuntimeError where an input requires one and gradients are recorded. TypeError for other dtypes;
    other errors are those of `attention`. `Unsupported` on other GPUs. Under torch.vmap calls follow each other.
    """
    names, tensors, scalars, values = split_captures(captures) if captures else ((), [], (), ())
    if isinstance(sink, Tensor):
        sink = sink.to(torch.float32)
    arrays, scales = (cu_seqlens_q, cu_seqlens_kv, seqused_q, seqused_kv), (q_scale, k_scale, v_scale, row_bias)
    packed = cu_seqlens_q is not None
    if not torch.compiler.is_compiling():
        check(q, k, v, scales, sink, tensors, Call(Options(tensors=names, varlen=packed)), dtype)
        if not packed and any(t is not None for t in arrays):
            raise ValueError("cu_seqlens_q is None: accepted with cu_seqlens_kv, seqused_q or seqused_kv is a torch.Tensor")
        if packed:
            check_sequences(q, *arrays)  # type: ignore[arg-type]
    if not packed:  # what shapes say
        key_scales = key_scales or (k_scale is not None and k_scale.dim() == 3)
        value_scales = value_scales or (v_scale is not None and v_scale.dim() == 3)
    options = (causal, scale, top_left, window_left, window_right, chunk, score, mask)
    arguments = (q, k, v, *scales, sink, tensors, *arrays, max_s_q, max_s_kv, values, key_scales, value_scales, precise, dtype,
                 *options, names, scalars)
    if q.device.type not in ("cpu", "cuda") or not is_direct(q, k, v, *scales, sink, *tensors, *arrays):
        o, lse = forward_op(*arguments)
    else:
        refuse_gradients("quantized_attention", (("q", q), ("k", k), ("v", v), *zip(_SCALED, scales), ("sink", sink),
                                                 *((f"captures[{n!r}]", t) for n, t in zip(names, tensors))))
        o, lse = _attend(arguments, return_lse)
    return (o, lse) if return_lse else o


class Quantized(NamedTuple):
    """What `quantize` makes of q, k and v; None for what was not given, or not asked for."""

    q: Optional[Tensor] = None
    k: Optional[Tensor] = None
    v: Optional[Tensor] = None
    q_scale: Optional[Tensor] = None
    k_scale: Optional[Tensor] = None
    v_scale: Optional[Tensor] = None
    k_mean: Optional[Tensor] = None
    row_bias: Optional[Tensor] = None

    def attention(self, **options: Any) -> Any:
        """`quantized_attention` of the codes with their scales; options: its other arguments. ValueError where q, k or v was
        not given, and where k is torch.float8_e4m3fn less its mean, and return_lse, a sink or a score function would see that."""
        for name, t in zip("qkv", self[:3]):
            if t is None:
                raise ValueError(f"{name} is None: accepted is what quantize makes of q, k and v")
        assert self.q is not None and self.k is not None and self.v is not None
        row_bias = self.row_bias if self.q.dtype == torch.int8 else None
        for name in ("return_lse", "sink", "score"):
            if self.row_bias is not row_bias and options.get(name) not in (None, False):
                raise ValueError(f"{name} is given: accepted with k of {self.k.dtype} less its mean is none, because "
                                 "row_bias is of torch.int8 alone")
        return quantized_attention(self.q, self.k, self.v, q_scale=self.q_scale, k_scale=self.k_scale, v_scale=self.v_scale,
                                   row_bias=row_bias, key_scales=True, value_scales=True, **options)


def quantize(q: Optional[Tensor] = None, k: Optional[Tensor] = None, v: Optional[Tensor] = None, *,
             dtype: torch.dtype = torch.int8, smooth: bool = False, q_scale: Optional[Tensor] = None,
             k_scale: Optional[Tensor] = None, v_scale: Optional[Tensor] = None, k_mean: Optional[Tensor] = None) -> Quantized:
    """Codes of 8 bits for q, k and v, and scales of their rows, for `quantized_attention` (docs/int8.md).

    q [b, h_q, s_q, d_qk], k [b, h_kv, s_kv, d_qk] and v [b, h_kv, s_kv, d_v], or packed, [total, h, d]; fp16, bf16 or fp32,
    each of its own, on one device. Which are given is free. Head dims are multiples of 16 up to 256.
    dtype: of codes of q and k, torch.int8 or torch.float8_e4m3fn; those of v are torch.float8_e4m3fn.

    A row x is stored as x / scale, rounded to the nearest, ties to even. Its scale is its greatest magnitude over 127, or over
    448 for torch.float8_e4m3fn; a row with an infinity or a NaN has a NaN. q_scale, k_scale, v_scale: fp32 [b, h, s], packed
    [h, total], any strides, which are read instead, for all of what is given or none; greater elements become the greatest.
    smooth: k is stored less its mean over the keys, k_mean [b, h_kv, d_qk], of a packed batch [h_kv, d_qk] over all keys,
    which changes no softmax. k_mean: that mean where it is known, as for keys that come later. With either, and q, row_bias
    [b, h_q, s_q], packed [h_q, total_q], is q times that mean, by which the log-sum-exp, sinks and score functions see k itself.

    There are no gradients: RuntimeError where an input requires one and gradients are recorded. TypeError for what is no tensor
    or of another dtype, ValueError for shapes, devices and arguments that do not go together.
    """
    scales = (q_scale, k_scale, v_scale)
    if not torch.compiler.is_compiling():
        _check_quantize((q, k, v), scales, k_mean, dtype, smooth)
    results = quantize_op(q, k, v, *scales, k_mean, dtype, smooth)
    codes = [None if t is None else made for t, made in zip((q, k, v), results[:3])]
    of_rows = [None if t is None else made if scale is None else scale
               for t, scale, made in zip((q, k, v), scales, results[3:6])]
    mean = k_mean if k_mean is not None else results[6] if smooth else None
    row_bias = results[7] if q is not None and mean is not None else None
    return Quantized._make([*codes, *of_rows, mean, row_bias])
