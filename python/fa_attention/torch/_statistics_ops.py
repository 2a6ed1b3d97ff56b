"""The operators fa_attention::statistics_forward and statistics_backward: `forward` and `backward` with statistics of scores and
of P, of which each call names those that it asks for. The others are empty tensors."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Callable, Mapping, NamedTuple, Optional, Sequence

import torch
from torch import Tensor
from torch import library as operators

from .. import _options, capi
from .._library import load
from .._options import words
from . import _cache_raw, _ops, _raw
from ._raw import CAPTURE_DTYPES, DTYPES

_SHARED = ("Tensor? sink, Tensor[] captures, float[] numbers, str max_logit, bool max_logit_by_head, bool entropy, "
           "str column_sums, SymInt top_keys, bool causal, float? scale, bool top_left, SymInt? window_left, SymInt? window_right, "
           "SymInt chunk, bool deterministic, str? score, str? mask, str[] tensor_names, str[] number_names")
_FORWARD = (f"statistics_forward(Tensor q, Tensor k, Tensor v, {_SHARED}) -> (Tensor o, Tensor lse, Tensor max_logits, "
            "Tensor entropies, Tensor sums, Tensor keys)")
_BACKWARD = ("statistics_backward(Tensor? dout, Tensor? dlse, Tensor? dmax_logit, Tensor? dentropy, Tensor? dcolumn_sums, "
             f"Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, Tensor entropies, {_SHARED}, bool[] needed) -> (Tensor dq, "
             "Tensor dk, Tensor dv, Tensor dsink, Tensor[] dcaptures)")

for _schema in (_FORWARD, _BACKWARD):
    for _text in (_schema, _schema.replace("(", "_kernel(", 1)):
        _ops.library.define(_text, tags=(torch.Tag.pt2_compliant_tag,))
forward_op = torch.ops.fa_attention.statistics_forward.default
backward_op = torch.ops.fa_attention.statistics_backward.default


class Fixed(NamedTuple):
    """The operators' arguments from max_logit to deterministic."""

    max_logit: str
    max_logit_by_head: bool
    entropy: bool
    column_sums: str
    top_keys: int
    causal: bool
    scale: Optional[float]
    top_left: bool
    window_left: Optional[int]
    window_right: Optional[int]
    chunk: int
    deterministic: bool


class Call(NamedTuple):
    """What a call has besides q, k, v, a sink and captured tensors."""

    numbers: Sequence[float]
    fixed: Fixed
    score: Optional[str]
    mask: Optional[str]
    tensor_names: Sequence[str]
    number_names: Sequence[str]

    def captures(self, tensors: Sequence[Tensor]) -> dict[str, Any]:
        return {**dict(zip(self.tensor_names, tensors)), **dict(zip(self.number_names, self.numbers))}


_COUNT = 1 + len(Fixed._fields) + 4  # of the arguments behind captures


def call_of(rest: Sequence[Any]) -> Call:
    """Of the arguments behind captures."""
    numbers, *fixed = rest[:_COUNT - 4]
    return Call(numbers, Fixed(*fixed), *rest[_COUNT - 4:_COUNT])


def check(q: Tensor, k: Tensor, v: Tensor, sink: Optional[Tensor], captures: Sequence[Tensor], call: Call) -> None:
    """TypeError and ValueError for what the library cannot see, or relies on."""
    _raw.check_tensors(q, k, v, False)
    if q.device.type not in ("cpu", "cuda", "meta"):
        raise ValueError(f"q is on {q.device}: accepted are cpu and cuda")
    _raw.check_captures(dict(zip(call.tensor_names, captures)), sink, q)
    _options.check_names(call.score, call.mask, (*call.tensor_names, *call.number_names))
    for name, table in (("max_logit", capi.MAX_LOGITS), ("column_sums", capi.COLUMN_SUMS)):
        given = getattr(call.fixed, name)
        if given not in table:
            raise ValueError(f"{name} is {given!r}: accepted are {', '.join(map(repr, table))}")


@lru_cache(maxsize=256)
def _made(device: tuple[int, int], d_qk: int, d_v: int, dtype: str, score: Any, mask: Any,
          options: tuple[Any, ...]) -> capi.Attention:
    functions: dict[str, Any] = {name: capi.function(*given) for name, given in (("score", score), ("mask", mask)) if given}
    return capi.Attention(load(), d_qk, dtype, head_dim_v=d_v, device=device, **functions, **dict(options))


def function_of(expression: Optional[str], captures: Mapping[str, Any], grads: Mapping[str, bool]) -> Any:
    """Hashable: an expression and the captures that it names."""
    if not expression:
        return None
    dtypes = {name: CAPTURE_DTYPES[value.dtype] if isinstance(value, Tensor) else "float32" for name, value in captures.items()}
    return expression, tuple((name, dtype, grads.get(name, False)) for name, dtype in dtypes.items() if name in words(expression))


def made(q: Tensor, d_v: int, score: Any, mask: Any, options: Mapping[str, Any]) -> capi.Attention:
    """The handle of these, by what `function_of` makes of functions."""
    device = (capi.DEVICE_CUDA, q.device.index or 0) if q.is_cuda else (capi.DEVICE_HOST, 0)
    return _made(device, q.shape[-1], d_v, DTYPES[q.dtype], score, mask, tuple(options.items()))


def _attention(q: Tensor, v: Tensor, captures: Sequence[Tensor], call: Call, options: Mapping[str, Any],
               grads: Sequence[bool]) -> capi.Attention:
    """grads: which captured tensors have their gradient computed."""
    named = {name: bool(grad) for name, grad in zip(call.tensor_names, grads)}
    _options.check_gradients(call.score, named.items())
    score, mask = (function_of(text, call.captures(captures), named) for text in (call.score, call.mask))
    return made(q, v.shape[3], score, mask, options)


def _run(q: Tensor, bind: Any, *tensors: Any, **named: Any) -> None:
    index = q.device.index or 0 if q.is_cuda else -1
    _cache_raw.on_device(index, lambda stream: bind(*tensors, stream=stream, **named)())


def _outputs(q: Tensor, k: Tensor, v: Tensor, fixed: Fixed) -> tuple[Tensor, ...]:
    b, h_q, s_q, _ = q.shape
    new = lambda *shape: q.new_empty(shape, dtype=_raw.lse_dtype(q.dtype))  # noqa: E731
    heads = k.shape[1] if fixed.column_sums == "kv_heads" else h_q
    rows = (h_q,) if fixed.max_logit_by_head else (b, h_q, s_q)
    return (_raw.like(q, h_q, s_q, v.shape[3]), new(b, h_q, s_q), new(*rows) if fixed.max_logit != "none" else new(0),
            new(b, h_q, s_q) if fixed.entropy else new(0), new(b, heads, k.shape[2]) if fixed.column_sums != "none" else new(0),
            q.new_empty((b, heads, fixed.top_keys) if fixed.top_keys > 0 else (0,), dtype=torch.int32))


def present(results: Sequence[Any], fixed: Fixed) -> tuple[Optional[Tensor], ...]:
    """None in place of what was not asked for."""
    asked = (True, True, fixed.max_logit != "none", fixed.entropy, fixed.column_sums != "none", fixed.top_keys > 0)
    return tuple(t if wanted else None for t, wanted in zip(results, asked))


def forward(q: Tensor, k: Tensor, v: Tensor, sink: Optional[Tensor], captures: Sequence[Tensor], *rest: Any) -> tuple[Tensor, ...]:
    call = call_of(rest)
    check(q, k, v, sink, captures, call)
    q, k, v = _raw.readable(q), _raw.readable(k), _raw.readable(v)
    attention = _attention(q, v, captures, call, {**call.fixed._asdict(), "sink": sink is not None}, (False,) * len(captures))
    results = _outputs(q, k, v, call.fixed)
    o, lse, max_logit, entropy, column_sums, top_keys = present(results, call.fixed)
    _run(q, attention.bind_forward, q, k, v, o, lse, captures=call.captures(captures) or None, sink=sink, max_logit=max_logit,
         entropy=entropy, column_sums=column_sums, top_keys=top_keys)
    return results


def _forward_fake(q: Tensor, k: Tensor, v: Tensor, sink: Optional[Tensor], captures: Sequence[Tensor],
                  *rest: Any) -> tuple[Tensor, ...]:
    call = call_of(rest)
    check(q, k, v, sink, captures, call)
    return _outputs(_raw.readable(q), k, v, call.fixed)


def _given(gradient: Optional[Tensor], like: Tensor) -> Optional[Tensor]:
    return None if gradient is None else gradient.to(like.dtype).resolve_neg().contiguous()


def _new_gradients(q: Tensor, k: Tensor, v: Tensor, sink: Optional[Tensor], captures: Sequence[Tensor], dtype: torch.dtype,
                   needed: Sequence[bool]) -> tuple[list[Tensor], Tensor, list[Tensor]]:
    """Those of q, k and v, of the sink, and of captures, in `dtype`; empty where they are not needed."""
    nothing = lambda: q.new_empty((0,))  # noqa: E731
    main = [_raw.gradient_like(t) if need else nothing() for t, need in zip((q, k, v), needed)]
    dsink = torch.empty_like(sink, memory_format=torch.contiguous_format) if sink is not None and needed[3] else nothing()
    return main, dsink, [t.new_empty(t.shape, dtype=dtype) if need else nothing() for t, need in zip(captures, needed[4:])]


def backward(dout: Optional[Tensor], dlse: Optional[Tensor], dmax_logit: Optional[Tensor], dentropy: Optional[Tensor],
             dcolumn_sums: Optional[Tensor], q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, entropies: Tensor,
             sink: Optional[Tensor], captures: Sequence[Tensor],
             *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    call, needed = call_of(rest), rest[-1]
    q, k, v = _raw.readable(q), _raw.readable(k), _raw.readable(v)
    dlse, dmax_logit, dentropy, dcolumn_sums = (_given(t, lse) for t in (dlse, dmax_logit, dentropy, dcolumn_sums))
    fixed = call.fixed._replace(
        max_logit="none" if dmax_logit is None else call.fixed.max_logit, entropy=dentropy is not None, top_keys=0,
        max_logit_by_head=dmax_logit is not None and call.fixed.max_logit_by_head,
        column_sums="none" if dcolumn_sums is None else call.fixed.column_sums)
    options = {**fixed._asdict(), "sink": sink is not None, "max_logit_gradient": dmax_logit is not None,
               "entropy_gradient": dentropy is not None, "column_sums_gradient": dcolumn_sums is not None}
    attention = _attention(q, v, captures, call, options, needed[4:])
    main, dsink, dcaptures = _new_gradients(q, k, v, sink, captures, lse.dtype, needed)
    dout = torch.zeros_like(o) if dout is None else _raw.readable(dout.to(o.dtype))
    written = {name: t for name, t, need in zip(call.tensor_names, dcaptures, needed[4:]) if need}
    _run(q, attention.bind_backward, q, k, v, _raw.readable(o), lse, dout,
         *(t if need else None for t, need in zip(main, needed)), dlse=dlse, captures=call.captures(captures) or None, sink=sink,
         dcaptures=written or None, dsink=dsink if sink is not None and needed[3] else None,
         entropy=entropies if dentropy is not None else None, dentropy=dentropy, dmax_logit=dmax_logit, dcolumn_sums=dcolumn_sums)
    dcaptures = [t.to(of.dtype) if need else t for t, of, need in zip(dcaptures, captures, needed[4:])]
    return main[0], main[1], main[2], dsink, dcaptures


def _backward_fake(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    q, k, v = (_raw.readable(t) for t in arguments[5:8])
    sink, captures, needed = arguments[11], arguments[12], arguments[-1]
    main, dsink, dcaptures = _new_gradients(q, k, v, sink, captures, arguments[9].dtype, needed)
    dcaptures = [t.new_empty(t.shape, dtype=of.dtype) if need else t for t, of, need in zip(dcaptures, captures, needed[4:])]
    return main[0], main[1], main[2], dsink, dcaptures


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, sink, captures, *ctx.rest = inputs
    ctx.save_for_backward(q, k, v, *output[:2], output[3], sink, *captures)
    ctx.set_materialize_grads(False)


def gradients_of(arriving: Sequence[Optional[Tensor]], saved: Sequence[Any], rest: Sequence[Any], needed: Sequence[bool],
                 operator: Callable[..., Any] = backward_op) -> Any:
    """Of q, k, v, the sink, and a list of those of captures. arriving: gradients of the results; saved: as `_remember` saves."""
    q, k, v, o, lse, entropies, sink, *captures = saved
    given = present((*arriving, None)[:6], call_of(rest).fixed)
    return operator(*given[:5], q, k, v, o, lse, entropies, sink, captures, *rest, needed)


def _differentiate(ctx: Any, *arriving: Optional[Tensor]) -> tuple[Any, ...]:
    saved = ctx.saved_tensors
    count = len(saved) - 7  # of captures
    nothing: tuple[Any, ...] = tuple([] if argument == [] else None for argument in ctx.rest)  # of the structure of the arguments
    if all(t is None for t in arriving[:5]):
        return (None,) * 4 + ([None] * count,) + nothing
    of_captures = ctx.needs_input_grad[4]
    needed = [*ctx.needs_input_grad[:4], *(of_captures if isinstance(of_captures, (list, tuple)) else [])]
    needed[3] = needed[3] and saved[6] is not None
    needed += [False] * (4 + count - len(needed))
    *main, dcaptures = gradients_of(arriving, saved, ctx.rest, needed)
    main = [t if need else None for t, need in zip(main, needed)]
    return (*main, [t if need else None for t, need in zip(dcaptures, needed[4:])], *nothing)


def _mapped(operator: Any, main: int, at: int) -> Any:
    """The rule of vmap: the mapped axis is part of the batch, where no function, maximum of a head or gradient sees where it ends.
    Else calls follow each other. The first `main` arguments have a batch axis, and so do the sums; `at`: where the sink is."""

    def rule(info: Any, in_dims: Sequence[Any], *arguments: Any) -> Any:
        size, call = info.batch_size, call_of(arguments[at + 2:])
        needed = arguments[-1] if operator is backward_op else ()
        plain = _ops.unmapped(in_dims[at:]) and not any(needed[3:])
        if not plain or call.fixed.max_logit_by_head or "b" in words(call.score) | words(call.mask):
            return _ops.in_turn(operator, info, in_dims, *arguments)
        folded = [None if t is None else _ops.fold(t, dim, size) for t, dim in zip(arguments[:main], in_dims)]
        results = operator(*folded, *arguments[main:])
        unfolded = [t if isinstance(t, list) else t.unflatten(0, (size, -1)) if t.dim() > 1 else t.expand(size, 0) for t in results]
        return tuple(unfolded), tuple([None] * len(t) if isinstance(t, list) else 0 for t in unfolded)

    return rule


for _suffix in ("", "_kernel"):
    for _key in ("CPU", "CUDA"):
        _ops.library.impl(f"statistics_forward{_suffix}", forward, _key)
        _ops.library.impl(f"statistics_backward{_suffix}", backward, _key)
    operators.register_fake(f"fa_attention::statistics_forward{_suffix}", _forward_fake, lib=_ops.library)
    operators.register_fake(f"fa_attention::statistics_backward{_suffix}", _backward_fake, lib=_ops.library)
    operators.register_vmap(f"fa_attention::statistics_forward{_suffix}", _mapped(forward_op, 3, 3), lib=_ops.library)
    operators.register_vmap(f"fa_attention::statistics_backward{_suffix}", _mapped(backward_op, 11, 11), lib=_ops.library)
_ops.register_autograd("statistics_forward", _differentiate, _remember)
_ops.register_autograd("statistics_backward", _ops.refuse, None)
