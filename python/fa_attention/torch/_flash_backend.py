"""fa as an implementation of the flash backend of torch.nn.functional.scaled_dot_product_attention."""

from __future__ import annotations

import math
from typing import Any, Optional, Sequence

import torch
from torch import Tensor
from torch.library import Library

from .._errors import Unsupported
from . import _ops

NAME = "fa"
_COLUMNS = 128  # of the mask of dropout, that a call yields


def register_flash_attention(activate: bool = True) -> None:
    """Makes fa an implementation of PyTorch's flash backend, "fa" of torch.nn.attention.list_flash_attention_impls, and
    activates it unless told otherwise: scaled_dot_product_attention of CUDA tensors then runs fa where PyTorch chooses its
    flash backend, in fp16 and bf16, with gradients, on the current stream. torch.nn.attention.restore_flash_attention_impl
    gives PyTorch's own back, activate_flash_attention_impl("fa") takes fa again.

    Served are q [b, h_q, s_q, d], k and v [b, h_kv, s_kv, d] with is_causal, scale and dropout, and the packed form
    [total, h, d] of torch.nn.attention.varlen, with windows. With dropout return_debug_mask is served by the mask alone, [b,
    h_q, s_q, s_kv]: 1 where an element of P is kept, -1 where it is dropped. What PyTorch asks for beyond, alibi_slopes and
    block_table, is refused by a ValueError. Raises fa_attention.Unsupported, a NotImplementedError, where this PyTorch has no
    registry.
    """
    from torch.nn import attention

    register, start = (getattr(attention, f"{word}_flash_attention_impl", None) for word in ("register", "activate"))
    if register is None or start is None:
        raise Unsupported(f"torch {torch.__version__} has no torch.nn.attention.register_flash_attention_impl: accepted is a "
                          "PyTorch that has one; fa_attention.torch.scaled_dot_product_attention needs none")
    register(NAME, register_fn=lambda: Handle("CUDA"))
    if activate:
        start(NAME)


class Handle:
    """The kernels of a dispatch key, until it is removed."""

    def __init__(self, key: str) -> None:
        self.registration: Optional[Library] = Library("aten", "IMPL", key)
        for name, kernel in (("_scaled_dot_product_flash_attention", sdpa_forward),
                             ("_scaled_dot_product_flash_attention_backward", sdpa_backward),
                             ("_flash_attention_forward", forward), ("_flash_attention_backward", backward),
                             ("_flash_attention_forward_no_dropout_inplace", forward_into)):
            if hasattr(torch.ops.aten, name):
                self.registration.impl(name, kernel, key)

    def remove(self) -> None:
        self.registration = None


def _refuse(**given: Any) -> None:
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"{name} is given: accepted by fa as PyTorch's flash backend is None")


def _rest(arrays: Sequence[Optional[Tensor]], longest: Sequence[int], dropout: float, causal: bool, scale: Optional[float],
          window: Sequence[Optional[int]]) -> list[Any]:
    """The arguments of the operators behind captures. arrays: cu_seqlens_q, cu_seqlens_kv, seqused_q, seqused_kv, rng_state."""
    left, right = (n if n is not None and n >= 0 else None for n in window)
    return [*arrays, *longest, 0, 0, [], causal, scale, False, left, None if causal else right, 0, dropout,
            torch.are_deterministic_algorithms_enabled(), None, None, [], []]


def _draw(dropout: float, device: torch.device) -> Optional[Tensor]:
    return torch.randint(0, 2**62, (2,), device=device) if dropout else None


def _states(q: Tensor, rng: Optional[Tensor], mask: Optional[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """rng_state, unused and the debug mask, as PyTorch's kernels return them."""
    state = rng.view(torch.uint64) if rng is not None else torch.empty(2, dtype=torch.uint64, device=q.device)
    empty = torch.empty(0, dtype=q.dtype, device=q.device)
    return state, torch.empty((), dtype=torch.uint64, device=q.device), empty if mask is None else mask


def _debug_mask(like: Tensor, sizes: Sequence[int], dropout: float, rng: Optional[Tensor]) -> Tensor:
    """The mask of dropout, [b, h, s_q, s_kv], as kernels draw it, which neither scores nor head dims change: equal scores give
    equal P, and values that are columns of a unit matrix give P itself, some columns a call. Nothing here waits for a GPU."""
    if rng is None:
        raise ValueError("return_debug_mask is given: accepted by fa as PyTorch's flash backend is False without dropout")
    b, h, s_q, s_kv = sizes
    rest, found = _rest((None, None, None, None, rng), (0, 0), dropout, False, None, (None, None)), []
    q, k = like.new_zeros(b, h, s_q, _COLUMNS), like.new_zeros(b, 1, s_kv, _COLUMNS)
    for first in range(0, s_kv, _COLUMNS):
        v = like.new_zeros(b, 1, s_kv, _COLUMNS)
        v.diagonal(-first, 2, 3).fill_(1)
        found.append(_ops._forward(q, k, v, None, [], *rest)[0])
    return torch.cat(found, -1)[..., :s_kv].gt(0).to(like.dtype).mul_(2).sub_(1)


def _as(t: Tensor, like: Tensor) -> Tensor:
    """`t` in the memory order of `like`, as the meta kernels of PyTorch say; a copy for orders that are rare."""
    if like.shape == t.shape:
        strides: Sequence[int] = torch.empty_like(like, device="meta").stride()
    else:
        order = sorted(range(like.dim()), key=lambda n: like.stride()[n] or math.inf)
        made, step = [0] * like.dim(), 1
        for n in order:
            made[n], step = step, step * t.shape[n]
        strides = made
    if all(n <= 1 or x == y for n, x, y in zip(t.shape, t.stride(), strides)):
        return t
    return torch.empty_strided(t.shape, strides, dtype=t.dtype, device=t.device).copy_(t)


def sdpa_forward(query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, is_causal: bool = False,
                 return_debug_mask: bool = False, *, scale: Optional[float] = None) -> Any:
    rng = _draw(dropout_p, query.device)
    mask = _debug_mask(query, (*query.shape[:3], key.shape[2]), dropout_p, rng) if return_debug_mask else None
    rest = _rest((None, None, None, None, rng), (0, 0), dropout_p, is_causal, scale, (None, None))
    o, lse = _ops._forward(query, key, value, None, [], *rest)
    return (_as(o, query), lse, None, None, query.shape[2], key.shape[2], *_states(query, rng, mask))


def _gradients(grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, rest: Sequence[Any]) -> Any:
    return _ops._backward(grad_out, None, q, k, v, o, lse, None, [], *rest, [True, True, True, False])[:3]


def _given(rng_state: Optional[Tensor], dropout: float) -> Optional[Tensor]:
    return rng_state.view(torch.int64) if rng_state is not None and dropout else None


def sdpa_backward(grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
                  cum_seq_q: Optional[Tensor], cum_seq_k: Optional[Tensor], max_q: int, max_k: int, dropout_p: float,
                  is_causal: bool, philox_seed: Tensor, philox_offset: Tensor, *, scale: Optional[float] = None) -> Any:
    rng = _given(philox_seed, dropout_p)
    rest = _rest((None, None, None, None, rng), (0, 0), dropout_p, is_causal, scale, (None, None))
    gradients = _gradients(grad_out, query, key, value, out, logsumexp, rest)
    return tuple(map(_as, gradients, (query, key, value)))


def forward(query: Tensor, key: Tensor, value: Tensor, cum_seq_q: Optional[Tensor], cum_seq_k: Optional[Tensor], max_q: int,
            max_k: int, dropout_p: float, is_causal: bool, return_debug_mask: bool, *, scale: Optional[float] = None,
            window_size_left: Optional[int] = None, window_size_right: Optional[int] = None,
            seqused_k: Optional[Tensor] = None, alibi_slopes: Optional[Tensor] = None, block_table: Optional[Tensor] = None,
            num_splits: Optional[int] = None) -> Any:
    """query [b, s_q, h_q, d] and so on, or with cum_seq_q and cum_seq_k packed, [total_q, h_q, d]."""
    _refuse(alibi_slopes=alibi_slopes, block_table=block_table)
    if seqused_k is not None and (cum_seq_q is None or any(t.requires_grad for t in (query, key, value))):
        raise ValueError("seqused_k is given: accepted by fa as PyTorch's flash backend is None, but for packed tensors of which "
                         "none requires a gradient")
    if (cum_seq_q is None) != (cum_seq_k is None):
        raise ValueError("cum_seq_q and cum_seq_k: accepted are both or none")
    rng, packed = _draw(dropout_p, query.device), cum_seq_q is not None
    arrays = (cum_seq_q, cum_seq_k, None, seqused_k, rng)
    rest = _rest(arrays, (max_q, max_k) if packed else (0, 0), dropout_p, is_causal, scale, (window_size_left, window_size_right))
    q, k, v = (query, key, value) if packed else (t.transpose(1, 2) for t in (query, key, value))
    mask = None
    if return_debug_mask:
        sizes = (cum_seq_q.numel() - 1, query.shape[1], max_q, max_k) if cum_seq_q is not None else (*q.shape[:3], k.shape[2])
        mask = _debug_mask(query, sizes, dropout_p, rng)
    o, lse = _ops._forward(q, k, v, None, [], *rest)
    return (_as(o if packed else o.transpose(1, 2), query), lse, *_states(query, rng, mask))


def forward_into(out: Tensor, query: Tensor, key: Tensor, value: Tensor, *arguments: Any, **options: Any) -> Tensor:
    o, lse, *_ = forward(query, key, value, *arguments, **options)
    out.copy_(o)
    assert isinstance(lse, Tensor)
    return lse


def backward(grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
             cum_seq_q: Optional[Tensor], cum_seq_k: Optional[Tensor], max_q: int, max_k: int, dropout_p: float, is_causal: bool,
             rng_state: Tensor, unused: Tensor, *, scale: Optional[float] = None, window_size_left: Optional[int] = None,
             window_size_right: Optional[int] = None) -> Any:
    packed = cum_seq_q is not None and cum_seq_q.numel() > 0
    arrays = ((cum_seq_q, cum_seq_k) if packed else (None, None)) + (None, None, _given(rng_state, dropout_p))
    rest = _rest(arrays, (max_q, max_k) if packed else (0, 0), dropout_p, is_causal, scale, (window_size_left, window_size_right))
    dout, q, k, v, o = (t if packed else t.transpose(1, 2) for t in (grad_out, query, key, value, out))
    gradients = _gradients(dout, q, k, v, o, logsumexp, rest)
    return tuple(_as(t if packed else t.transpose(1, 2), like) for t, like in zip(gradients, (query, key, value)))
