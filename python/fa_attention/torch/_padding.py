"""Head dims that the kernels have no layout for, made longer by zeros, which change no score and no result."""

from __future__ import annotations

from typing import Optional

import torch.nn.functional as functional
from torch import Tensor


def padded(t: Tensor) -> Tensor:
    """With a head dim that is a multiple of 8, and not 0."""
    short = -t.shape[-1] % 8 if t.shape[-1] else 8
    return functional.pad(t, (0, short)) if short else t


def padded_heads(q: Tensor, k: Tensor, v: Tensor, scale: Optional[float]) -> tuple[Tensor, Tensor, Tensor, Optional[float]]:
    """q, k and v, and the scale that belongs to their own head dim."""
    if q.shape[-1] % 8 == 0 and v.shape[-1] % 8 == 0 and q.shape[-1] and v.shape[-1]:
        return q, k, v, scale
    if scale is None:
        scale = q.shape[-1] ** -0.5 if q.shape[-1] else 1.0
    return padded(q), padded(k), padded(v), scale
