"""The operators fa_attention::forward and fa_attention::backward: what torch.compile, torch.export, fake tensors and
functional transforms see of a call."""

from __future__ import annotations

from typing import Any, Callable, Optional, Sequence

import torch
from torch import Tensor
from torch import library as operators

from .. import _options
from . import _native, _raw
from ._raw import Call

_SHARED = ("Tensor? sink, Tensor[] captures, Tensor? cu_seqlens_q, Tensor? cu_seqlens_kv, Tensor? seqused_q, "
           "Tensor? seqused_kv, Tensor? rng_state, SymInt max_s_q, SymInt max_s_kv, SymInt seed, SymInt offset, "
           "float[] numbers, bool causal, float? scale, bool top_left, SymInt? window_left, SymInt? window_right, SymInt chunk, "
           "float dropout, bool deterministic, str? score, str? mask, str[] tensor_names, str[] number_names")
_ARRAYS = 5  # of those behind captures
_ALL = 22  # of those behind captures; invariant_forward has one more
_FORWARD = f"forward(Tensor q, Tensor k, Tensor v, {_SHARED}) -> (Tensor o, Tensor lse)"
_BACKWARD = (f"backward(Tensor? dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, {_SHARED}, "
             "bool[] needed) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsink, Tensor[] dcaptures)")
_INVARIANT_FORWARD = f"invariant_{_FORWARD}".replace(_SHARED, f"{_SHARED}, str invariance")
_INVARIANT_BACKWARD = f"invariant_{_BACKWARD}".replace(_SHARED, f"{_SHARED}, str invariance")

REASON = ("the gradients of fa_attention are differentiated: accepted are first derivatives only (where create_graph=True is "
          "meant for other parts of the graph, detach these gradients)")



class Once(torch.autograd.Function):
    """compute(*tensors), the gradients of a call. A node of its own, because only a node can refuse to be differentiated:
    gradients that are merely cut off from the graph would make second derivatives too small, without a word."""

    @staticmethod
    def forward(ctx: Any, compute: Callable[..., Any], *tensors: Optional[Tensor]) -> Any:
        return tuple(compute(*tensors))

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(REASON)


library = operators.Library("fa_attention", "DEF")
for _schema in (_FORWARD, _BACKWARD, _INVARIANT_FORWARD, _INVARIANT_BACKWARD):
    for _text in (_schema, _schema.replace("(", "_kernel(", 1)):
        library.define(_text, tags=(torch.Tag.pt2_compliant_tag,))
forward_op = torch.ops.fa_attention.forward.default
backward_op = torch.ops.fa_attention.backward.default
invariant_forward_op = torch.ops.fa_attention.invariant_forward.default
invariant_backward_op = torch.ops.fa_attention.invariant_backward.default


def forward_of(rest: Sequence[Any]) -> Any:
    """The operator for arguments behind rng_state."""
    return invariant_forward_op if len(rest) > _ALL - _ARRAYS else forward_op


def backward_of(rest: Sequence[Any]) -> Any:
    """Likewise, without `needed`."""
    return invariant_backward_op if len(rest) > _ALL - _ARRAYS else backward_op


def _options_of(rest: Sequence[Any]) -> _options.Options:
    """Of the arguments behind captures."""
    invariance = rest[_ALL] if len(rest) > _ALL and isinstance(rest[_ALL], str) else "none"
    return _options.make_options(*rest[10:20], tuple(rest[20]), tuple(rest[21]), rest[0] is not None, invariance=invariance)


def _call(rest: Sequence[Any]) -> Call:
    fields: list[Any] = [_options_of(rest), *rest[:9], tuple(rest[9])]
    return Call._make(fields)


def _forward(q: Tensor, k: Tensor, v: Tensor, sink: Optional[Tensor], captures: Sequence[Tensor],
             *rest: Any) -> tuple[Tensor, Tensor]:
    q, k, v = _raw.readable(q), _raw.readable(k), _raw.readable(v)
    _, o, lse = _raw.forward(q, k, v, sink, captures, _call(rest), (False,) * len(captures))
    assert lse is not None
    return o, lse


def _forward_fake(q: Tensor, k: Tensor, v: Tensor, sink: Optional[Tensor], captures: Sequence[Tensor],
                  *rest: Any) -> tuple[Tensor, Tensor]:
    varlen = rest[0] is not None
    _options.check_names(rest[18], rest[19], (*rest[20], *rest[21]))
    _raw.check_tensors(q, k, v, varlen)
    if _native.loaded:  # the kernels of a graph that is being made
        _native.start(q.is_cuda)
    q = _raw.readable(q)
    o = _raw.like(q, q.shape[1], q.shape[0 if varlen else 2], v.shape[-1])
    shape = (q.shape[1], q.shape[0]) if varlen else (q.shape[0], q.shape[1], q.shape[2])
    return o, q.new_empty(shape, dtype=_raw.lse_dtype(q.dtype))


def _backward(dout: Optional[Tensor], dlse: Optional[Tensor], q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
              sink: Optional[Tensor], captures: Sequence[Tensor],
              *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    needed, call = rest[-1], _call(rest)
    q, k, v = _raw.readable(q), _raw.readable(k), _raw.readable(v)
    plan = _raw.find_plan(q, k, v, sink, captures, call, tuple(needed[4:]))
    *main, dcaptures = _raw.backward(plan, dout, dlse, q, k, v, o, lse, sink, captures, call, needed)
    dq, dk, dv, dsink = (q.new_empty((0,)) if t is None else t for t in main)
    return dq, dk, dv, dsink, [q.new_empty((0,)) if t is None else t for t in dcaptures]


def _backward_fake(dout: Optional[Tensor], dlse: Optional[Tensor], q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
                   sink: Optional[Tensor], captures: Sequence[Tensor],
                   *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    needed = rest[-1]
    q, k, v = _raw.readable(q), _raw.readable(k), _raw.readable(v)
    dq, dk, dv = (_raw.gradient_like(t) if need else q.new_empty((0,)) for t, need in zip((q, k, v), needed))
    dsink = torch.empty_like(sink) if sink is not None and needed[3] else q.new_empty((0,))
    dcaptures = [t.new_empty(t.shape) if need else q.new_empty((0,)) for t, need in zip(captures, needed[4:])]
    return dq, dk, dv, dsink, dcaptures


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, sink, captures, *rest = inputs
    ctx.save_for_backward(q, k, v, *output, sink, *rest[:_ARRAYS], *captures)
    ctx.rest = rest[_ARRAYS:]
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dout: Optional[Tensor], dlse: Optional[Tensor]) -> tuple[Any, ...]:
    nothing: tuple[Any, ...] = tuple([] if argument == [] else None for argument in ctx.rest)  # of the structure of the arguments
    q, k, v, o, lse, sink, *others = ctx.saved_tensors
    arrays, captures = others[:_ARRAYS], others[_ARRAYS:]
    of_captures = ctx.needs_input_grad[4]
    needed = [*ctx.needs_input_grad[:4], *(of_captures if isinstance(of_captures, (list, tuple)) else [])]
    if dout is None and dlse is None:
        return (None,) * 4 + ([None] * len(captures),) + (None,) * _ARRAYS + nothing
    needed[3] = needed[3] and sink is not None
    needed += [False] * (4 + len(captures) - len(needed))
    operator = backward_of(ctx.rest)
    dq, dk, dv, dsink, dcaptures = operator(dout, dlse, q, k, v, o, lse, sink, captures, *arrays, *ctx.rest, needed)
    gradients = [t if need else None for t, need in zip((dq, dk, dv, dsink), needed)]
    return (*gradients, [t if need else None for t, need in zip(dcaptures, needed[4:])], *(None,) * _ARRAYS, *nothing)


def refuse(ctx: Any, *gradients: Any) -> Any:
    raise RuntimeError(REASON)


def select(argument: Any, dim: Any, n: int) -> Any:
    """Call `n` of those that vmap asks for."""
    if isinstance(argument, (list, tuple)) and isinstance(dim, (list, tuple)):
        return [select(part, of_part, n) for part, of_part in zip(argument, dim)]
    return argument.select(dim, n) if dim is not None and isinstance(argument, Tensor) else argument


def in_turn(operator: Callable[..., Any], info: Any, in_dims: Sequence[Any], *arguments: Any) -> Any:
    """What a rule of vmap returns where calls follow each other."""
    each = [operator(*(select(a, dim, n) for a, dim in zip(arguments, in_dims))) for n in range(info.batch_size)]
    stacked: list[Any] = []
    dims: list[Any] = []
    for parts in zip(*each):
        if isinstance(parts[0], (list, tuple)):
            stacked.append([torch.stack(items) for items in zip(*parts)])
            dims.append([0] * len(parts[0]))
        else:
            stacked.append(torch.stack(parts))
            dims.append(0)
    return tuple(stacked), tuple(dims)


def unmapped(dim: Any) -> bool:
    """Whether vmap maps no axis of an argument, or of none of a list."""
    return all(map(unmapped, dim)) if isinstance(dim, (list, tuple)) else dim is None


def fold(t: Tensor, dim: Optional[int], size: int) -> Tensor:
    t = t.movedim(dim, 0) if dim is not None else t.expand(size, *t.shape)
    return t.flatten(0, 1)


def _foldable(arguments: Sequence[Any], in_dims: Sequence[Any], main: int, needed: Sequence[bool]) -> bool:
    """Whether the mapped axis can be part of the batch: no function, dropout, packing or gradient sees where it ends."""
    options = _options_of(arguments[main + 2:])
    return (not options.varlen and options.dropout == 0 and not options.reads_batch and not any(needed[3:])
            and unmapped(in_dims[main:]))


def _mapped(operator: Callable[..., Any], main: int) -> Callable[..., Any]:
    """The rule of vmap for an operator whose first `main` arguments have a batch axis."""

    def rule(info: Any, in_dims: Any, *arguments: Any) -> Any:
        size = info.batch_size
        backward = operator in (backward_op, invariant_backward_op)
        needed = arguments[-1] if backward else ()
        if _foldable(arguments, in_dims, main, needed):
            folded = [None if t is None else fold(t, dim, size) for t, dim in zip(arguments[:main], in_dims)]
            results = list(operator(*folded, *arguments[main:]))
            results = [[] if isinstance(t, list) else t.unflatten(0, (size, -1)) if t.dim() > 1 else t.expand(size, 0)
                       for t in results]
            dims: Any = [[] if isinstance(t, list) else 0 for t in results]
            if backward and arguments[main + 1]:  # captures, which have no gradient here
                results[4], dims[4] = [arguments[2].new_empty((0,)) for _ in arguments[main + 1]], [None] * len(
                    arguments[main + 1])
            return tuple(results), tuple(dims)
        return in_turn(operator, info, in_dims, *arguments)

    return rule


def register_autograd(name: str, backward: Callable[..., Any], setup: Optional[Callable[..., Any]]) -> None:
    """As torch.library.register_autograd, with a derivative that calls `name`_kernel. Compiled graphs then hold that, which has no
    kernel in Python for autograd, at which each call would stop."""
    try:
        from torch._library import autograd

        kernel = autograd.make_autograd_impl(getattr(torch.ops.fa_attention, f"{name}_kernel").default,
                                             autograd.Info(backward, setup))
        library.impl(name, kernel, "Autograd", with_keyset=True)
    except (ImportError, AttributeError):
        operators.register_autograd(f"fa_attention::{name}", backward, setup_context=setup, lib=library)
    library.impl(f"{name}_kernel", operators.fallthrough_kernel, "Autograd")


_compiled = _native.load(library)  # which has no invariant operators
for _prefix, _both in (("", (forward_op, backward_op)), ("invariant_", (invariant_forward_op, invariant_backward_op))):
    for _suffix in ("", "_kernel"):
        for _key in ("CPU", "CUDA") if _prefix or not _compiled else ():
            library.impl(f"{_prefix}forward{_suffix}", _forward, _key)
            library.impl(f"{_prefix}backward{_suffix}", _backward, _key)
        operators.register_fake(f"fa_attention::{_prefix}forward{_suffix}", _forward_fake, lib=library)
        operators.register_fake(f"fa_attention::{_prefix}backward{_suffix}", _backward_fake, lib=library)
        operators.register_vmap(f"fa_attention::{_prefix}forward{_suffix}", _mapped(_both[0], 3), lib=library)
        operators.register_vmap(f"fa_attention::{_prefix}backward{_suffix}", _mapped(_both[1], 7), lib=library)
    register_autograd(f"{_prefix}forward", _differentiate, _remember)
    register_autograd(f"{_prefix}backward", refuse, None)
