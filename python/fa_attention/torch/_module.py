"""Attention as a module."""

from __future__ import annotations

import math
from typing import Any, Optional

import torch
from torch import Tensor

from .. import functions
from .._errors import type_name
from ..capi import INVARIANCES
from ._attention import attention
from ._cache import KVCache


class Attention(torch.nn.Module):
    """Attention of q [b, s_q, heads, head_dim] over k and v [b, s_kv, kv_heads, head_dim], or over a cache.

    head_dim: a multiple of 8 up to 512, of q, k and v. kv_heads divides heads, and is `heads` unless given. causal,
    window_left, window_right, scale: as in `attention`.
    softcap: scores become softcap * tanh(score / softcap). sinks: a parameter `sinks`, fp32 [heads], zeros at first, whose
    logits take part in the sum of each row. dropout: the probability with which an element of the softmax is dropped, in
    training. invariance: as in `attention`. Without sinks the module has no state, and its state_dict is empty.

    TypeError for sizes that are no integers, ValueError for sizes and numbers that are not accepted, naming them.
    """

    sinks: Optional[Tensor]

    def __init__(self, heads: int, head_dim: int, *, kv_heads: Optional[int] = None, causal: bool = False,
                 window_left: Optional[int] = None, window_right: Optional[int] = None, softcap: Optional[float] = None,
                 scale: Optional[float] = None, sinks: bool = False, dropout: float = 0.0,
                 device: Any = None, invariance: str = "none") -> None:
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        for name, size in (("heads", heads), ("head_dim", head_dim), ("kv_heads", kv_heads)):
            if not isinstance(size, int):
                raise TypeError(f"{name} is a {type_name(size)}: accepted is an integer")
        if heads < 1 or kv_heads < 1 or heads % kv_heads:
            raise ValueError(f"heads is {heads} and kv_heads {kv_heads}: accepted are positive numbers, the second divides the "
                             "first")
        if head_dim < 8 or head_dim > 512 or head_dim % 8:
            raise ValueError(f"head_dim is {head_dim}: accepted is a multiple of 8 up to 512")
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout is {dropout}: accepted is a probability below 1")
        for name, n in (("window_left", window_left), ("window_right", window_right)):
            if n is not None and n < 0:
                raise ValueError(f"{name} is {n}: accepted are None and numbers from 0")
        if scale is not None and not math.isfinite(scale):
            raise ValueError(f"scale is {scale}: accepted is a finite number")
        if invariance not in INVARIANCES:
            raise ValueError(f"invariance is {invariance!r}: accepted are {', '.join(INVARIANCES)}")
        self.heads, self.head_dim, self.kv_heads, self.causal = heads, head_dim, kv_heads, causal
        self.window_left, self.window_right = window_left, window_right
        self.softcap, self.scale, self.dropout, self.invariance = softcap, scale, dropout, invariance
        self._score = functions.softcap(softcap) if softcap is not None else None
        self.register_parameter("sinks", torch.nn.Parameter(torch.zeros(heads, dtype=torch.float32, device=device)) if sinks
                                else None)

    def forward(self, q: Tensor, k: Optional[Tensor] = None, v: Optional[Tensor] = None,
                cache: Optional[KVCache] = None) -> Tensor:
        """o [b, s_q, heads, head_dim]. With a cache k and v are first written to it, as its seqused_kv says, which counts
        them, and may be None; q, k and v then have no gradients, and there is no dropout. Errors are those of `attention`
        and `paged_attention`."""
        self._check(q, k, v, cache)
        o: Tensor
        if cache is None:
            assert k is not None and v is not None
            o = attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal=self.causal, scale=self.scale,
                          window_left=self.window_left, window_right=self.window_right, score=self._score,
                          sink=self.sinks, dropout=self.dropout if self.training else 0.0, invariance=self.invariance)
            return o.transpose(1, 2)
        if k is not None and v is not None:
            cache.append(k.transpose(1, 2), v.transpose(1, 2))
        o = cache.attention(q.transpose(1, 2), causal=self.causal, scale=self.scale, window_left=self.window_left,
                            window_right=self.window_right, score=self._score, sink=self.sinks, invariance=self.invariance)
        return o.transpose(1, 2)

    def _check(self, q: Tensor, k: Optional[Tensor], v: Optional[Tensor], cache: Optional[KVCache]) -> None:
        if cache is not None and not isinstance(cache, KVCache):
            raise TypeError(f"cache is a {type_name(cache)}: accepted is a KVCache")
        if (k is None) != (v is None) or (k is None and cache is None):
            raise ValueError(f"{'k' if k is None else 'v'} is None: accepted is a torch.Tensor, or with a cache None for both")
        for name, t, heads in (("q", q, self.heads), ("k", k, self.kv_heads), ("v", v, self.kv_heads)):
            if t is not None and not isinstance(t, Tensor):
                raise TypeError(f"{name} is a {type_name(t)}: accepted is a torch.Tensor")
            if t is not None and (t.dim() != 4 or t.shape[2] != heads or t.shape[3] != self.head_dim):
                raise ValueError(f"{name} has shape {list(t.shape)}: accepted is [b, s, {heads}, {self.head_dim}]")
        if cache is not None and self.training and self.dropout:
            raise ValueError(f"dropout is {self.dropout}: accepted in training with a cache is 0")

    def extra_repr(self) -> str:
        names = ("heads", "head_dim", "kv_heads", "causal", "window_left", "window_right", "softcap", "scale", "dropout",
                 "invariance")
        return ", ".join(f"{name}={getattr(self, name)}" for name in names)
