"""Statistics of scores and of P, with O, of PyTorch tensors."""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from .._options import check_gradients, check_kinds
from . import _raw
from . import _statistics_ops as ops
from ._attention import Captures, cast_for_autocast, is_direct, split_captures
from ._ops import REASON, Once


class AttentionStatistics(NamedTuple):
    """What `attention_statistics` returns; None for what was not asked for."""

    o: Tensor
    lse: Tensor
    max_logit: Optional[Tensor] = None
    entropy: Optional[Tensor] = None
    column_sums: Optional[Tensor] = None
    top_keys: Optional[Tensor] = None


def _transforms() -> bool:
    """Whether torch.func transforms the call."""
    return torch._C._functorch.peek_interpreter_stack() is not None


class _Direct(torch.autograd.Function):
    """Forward and backward without the dispatcher, whose nodes cost the host several times as much."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sink: Optional[Tensor], rest: Any, *captures: Tensor) -> Any:
        results = ops.forward(q, k, v, sink, captures, *rest)
        ctx.mark_non_differentiable(results[5])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, *results[:2], results[3], sink, *captures)
        ctx.rest = rest
        return results

    @staticmethod
    def backward(ctx: Any, *arriving: Optional[Tensor]) -> Any:
        needed, rest = _needed(ctx), ctx.rest
        if all(t is None for t in arriving[:5]):
            return (None,) * (len(needed) + 1)
        compute = lambda *tensors: _flat(tensors, rest, needed, ops.backward)  # noqa: E731
        tensors = (*arriving[:5], *ctx.saved_tensors)
        watched = torch.is_grad_enabled() or _transforms()
        return _of_inputs(Once.apply(compute, *tensors) if watched else compute(*tensors), needed)


class _Transformed(torch.autograd.Function):
    """Under torch.func: a function whose rule for vmap is generated from the operator's."""

    generate_vmap_rule = True

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, sink: Optional[Tensor], rest: Any, *captures: Tensor) -> Any:
        return ops.forward_op(q, k, v, sink, captures, *rest)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        q, k, v, sink, ctx.rest, *captures = inputs
        ctx.mark_non_differentiable(output[5])
        ctx.save_for_backward(q, k, v, *output[:2], output[3], sink, *captures)

    @staticmethod
    def backward(ctx: Any, *arriving: Optional[Tensor]) -> Any:
        needed = _needed(ctx)
        return _of_inputs(_TransformedGradients.apply(ctx.rest, needed, *arriving[:5], *ctx.saved_tensors), needed)


class _TransformedGradients(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(rest: Any, needed: Any, *tensors: Any) -> Any:
        return _flat(tensors, rest, needed, ops.backward_op)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(REASON)


def _needed(ctx: Any) -> tuple[bool, ...]:
    """Which gradients of q, k, v, the sink and captures are, of a node whose inputs have the operator's options between."""
    needs = ctx.needs_input_grad
    return (*needs[:3], needs[3] and ctx.saved_tensors[6] is not None, *needs[5:])


def _flat(tensors: Any, rest: Any, needed: Any, operator: Any) -> Any:
    """Gradients in the order of `needed`, of five that arrive and what was saved."""
    *main, dcaptures = ops.gradients_of(tensors[:5], tensors[5:], rest, needed, operator)
    return (*main, *dcaptures)


def _of_inputs(gradients: Any, needed: Any) -> Any:
    gradients = [t if need else None for t, need in zip(gradients, needed)]
    return (*gradients[:4], None, *gradients[4:])


def attention_statistics(q: Tensor, k: Tensor, v: Tensor, *, max_logit: str = "none", max_logit_by_head: bool = False,
                         entropy: bool = False, column_sums: str = "none", top_keys: int = 0, causal: bool = False,
                         scale: Optional[float] = None, top_left: bool = False, window_left: Optional[int] = None,
                         window_right: Optional[int] = None, chunk: int = 0, score: Optional[str] = None,
                         mask: Optional[str] = None, captures: Captures = None, sink: Optional[Tensor] = None,
                         deterministic: bool = False) -> AttentionStatistics:
    """`attention`, and what it tells of its scores and of P (docs/statistics.md).

    max_logit: "softmax" or "scaled", of each row [b, h_q, s_q], or with max_logit_by_head of each query head [h_q], as
    QK-clip needs. entropy: of each row of P, in nats, [b, h_q, s_q]. column_sums: of P over the rows, of "query_heads"
    [b, h_q, s_kv], or of "kv_heads" [b, h_kv, s_kv]. top_keys: so many keys of each of these heads, without column_sums of
    query heads, int32 [b, h, top_keys], the greatest sum first and -1 where there is no key. The others are fp32 (fp64
    for fp64). The other arguments and the errors are those of `attention`.

    Gradients flow through all but top_keys; of equal logits to that of the first row, and of the first key in it.
    deterministic: they are bitwise repeatable. The operator is torch.ops.fa_attention.statistics_forward."""
    compiling = torch.compiler.is_compiling()
    names, tensors, scalars, values = split_captures(captures) if captures else ((), [], (), ())
    q, k, v = cast_for_autocast(q, k, v)
    if not compiling:
        _raw.check_tensors(q, k, v, False)
        check_kinds({"scale": scale, "window_left": window_left, "window_right": window_right, "chunk": chunk, "top_keys": top_keys,
                     "score": score, "mask": mask, "causal": causal, "top_left": top_left, "deterministic": deterministic})
    if sink is not None:
        sink = _raw.sink_like(sink, q)
    fixed = ops.Fixed(max_logit, max_logit_by_head, entropy, column_sums, top_keys, causal, scale, top_left, window_left,
                      window_right, chunk, deterministic)
    if tensors and not compiling and torch.is_grad_enabled():
        check_gradients(score, ((name, t.requires_grad) for name, t in zip(names, tensors)))
    rest = (values, *fixed, score, mask, names, scalars)
    if not compiling and _transforms():
        results = _Transformed.apply(q, k, v, sink, rest, *tensors)
    elif not is_direct(q, k, v, sink, *tensors):
        results = ops.forward_op(q, k, v, sink, tensors, *rest)
    elif torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (q, k, v, sink, *tensors)):
        results = _Direct.apply(q, k, v, sink, rest, *tensors)
    else:
        results = ops.forward(q, k, v, sink, tensors, *rest)
    return AttentionStatistics(*ops.present(results, fixed))  # type: ignore[arg-type]
