"""The operators fa_attention::plain_forward and plain_backward: `forward` and `backward` of calls without windows, functions,
sinks, dropout and packing. A compiled graph calls an operator from Python, which costs the host time for each argument."""

from __future__ import annotations

from typing import Any, Callable, Optional, Sequence

import torch
from torch import Tensor
from torch import library as operators

from . import _native, _ops

_OPTIONS = "float? scale, bool causal, bool top_left, bool deterministic"
_FORWARD = f"plain_forward(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor o, Tensor lse)"
_BACKWARD = (f"plain_backward(Tensor? dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, {_OPTIONS}, "
             "bool[] needed) -> (Tensor dq, Tensor dk, Tensor dv)")

for _schema in (_FORWARD, _BACKWARD):
    for _text in (_schema, _schema.replace("(", "_kernel(", 1)):
        _ops.library.define(_text, tags=(torch.Tag.pt2_compliant_tag,))
forward_op = torch.ops.fa_attention.plain_forward.default
backward_op = torch.ops.fa_attention.plain_backward.default


def options_of(fixed: tuple[Any, ...]) -> Optional[tuple[Any, ...]]:
    """The operators' options for the first fields of Options; None where these ask for more."""
    causal, scale, top_left, window_left, window_right, chunk, dropout, deterministic, score, mask = fixed
    if window_left is not None or window_right is not None or chunk or dropout or score is not None or mask is not None:
        return None
    return scale, causal, top_left, deterministic


def _rest(scale: Any, causal: Any, top_left: Any, deterministic: Any) -> tuple[Any, ...]:
    """What `forward` has behind captures."""
    return (*(None,) * 5, 0, 0, 0, 0, [], causal, scale, top_left, None, None, 0, 0.0, deterministic, None, None, [], [])


def _forward(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    return _ops._forward(q, k, v, None, [], *_rest(*options))


def _forward_fake(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    return _ops._forward_fake(q, k, v, None, [], *_rest(*options))


def _backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    *tensors, scale, causal, top_left, deterministic, needed = arguments
    rest = _rest(scale, causal, top_left, deterministic)
    return _ops._backward(*tensors, None, [], *rest, [*needed, False])[:3]


def _backward_fake(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    *tensors, scale, causal, top_left, deterministic, needed = arguments
    rest = _rest(scale, causal, top_left, deterministic)
    return _ops._backward_fake(*tensors, None, [], *rest, [*needed, False])[:3]


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dout: Optional[Tensor], dlse: Optional[Tensor]) -> tuple[Any, ...]:
    if dout is None and dlse is None:
        return (None,) * 7
    needed = list(ctx.needs_input_grad[:3])
    gradients = backward_op(dout, dlse, *ctx.saved_tensors, *ctx.options, needed)
    return (*(t if need else None for t, need in zip(gradients, needed)), *(None,) * 4)


def _mapped(operator: Callable[..., Any], main: int) -> Callable[..., Any]:
    """The rule of vmap: the mapped axis is a part of the batch."""

    def rule(info: Any, in_dims: Sequence[Any], *arguments: Any) -> Any:
        size = info.batch_size
        folded = [None if t is None else _ops.fold(t, dim, size) for t, dim in zip(arguments[:main], in_dims)]
        results = operator(*folded, *arguments[main:])
        return tuple(t.unflatten(0, (size, -1)) if t.dim() > 1 else t.expand(size, 0) for t in results), (0,) * len(results)

    return rule


if not _native.loaded:
    for _key in ("CPU", "CUDA"):
        for _suffix in ("", "_kernel"):
            _ops.library.impl(f"plain_forward{_suffix}", _forward, _key)
            _ops.library.impl(f"plain_backward{_suffix}", _backward, _key)
for _suffix in ("", "_kernel"):
    operators.register_fake(f"fa_attention::plain_forward{_suffix}", _forward_fake, lib=_ops.library)
    operators.register_fake(f"fa_attention::plain_backward{_suffix}", _backward_fake, lib=_ops.library)
    operators.register_vmap(f"fa_attention::plain_forward{_suffix}", _mapped(forward_op, 3), lib=_ops.library)
    operators.register_vmap(f"fa_attention::plain_backward{_suffix}", _mapped(backward_op, 7), lib=_ops.library)
_ops.register_autograd("plain_forward", _differentiate, _remember)
_ops.register_autograd("plain_backward", _ops.refuse, None)
