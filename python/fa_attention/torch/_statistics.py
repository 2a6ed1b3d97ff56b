"""Statistics of scores and of P, with O, of PyTorch tensors: one call of the base layer, without gradients."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Mapping, NamedTuple, Optional

import torch
from torch import Tensor

from .. import capi
from .._library import load
from .._options import words
from . import _raw
from ._raw import CAPTURE_DTYPES, DTYPES


class AttentionStatistics(NamedTuple):
    """What `attention_statistics` returns; None for what was not asked for."""

    o: Tensor
    lse: Tensor
    max_logit: Optional[Tensor] = None
    entropy: Optional[Tensor] = None
    column_sums: Optional[Tensor] = None
    top_keys: Optional[Tensor] = None


@lru_cache(maxsize=256)
def _handle(device: tuple[int, int], d_qk: int, d_v: int, dtype: str, score: Any, mask: Any, options: tuple[Any, ...]) -> capi.Attention:
    functions: dict[str, Any] = {name: capi.function(*given) for name, given in (("score", score), ("mask", mask)) if given}
    return capi.Attention(load(), d_qk, dtype, head_dim_v=d_v, device=device, **functions, **dict(options))


def _function(expression: Optional[str], captures: Mapping[str, Any]) -> Any:
    """Hashable: an expression and the captures that it names."""
    if not expression:
        return None
    named = words(expression)
    dtypes = {name: CAPTURE_DTYPES[value.dtype] if isinstance(value, Tensor) else "float32" for name, value in captures.items()}
    return expression, tuple((name, dtype, False) for name, dtype in dtypes.items() if name in named)


@torch.no_grad()
def attention_statistics(q: Tensor, k: Tensor, v: Tensor, *, max_logit: str = "none", max_logit_by_head: bool = False,
                         entropy: bool = False, column_sums: str = "none", top_keys: int = 0, causal: bool = False,
                         scale: Optional[float] = None, top_left: bool = False, window_left: Optional[int] = None, window_right: Optional[int] = None,
                         chunk: int = 0, score: Optional[str] = None, mask: Optional[str] = None,
                         captures: Optional[Mapping[str, Any]] = None, sink: Optional[Tensor] = None) -> AttentionStatistics:
    """`attention`, and what it tells of its scores and of P (docs/statistics.md). No gradient flows through any of it.

    max_logit: "softmax" or "scaled", of each row [b, h_q, s_q], or with max_logit_by_head of each query head [h_q], as
    QK-clip needs. entropy: of each row of P, in nats, [b, h_q, s_q]. column_sums: of P over the rows, of "query_heads"
    [b, h_q, s_kv], or of "kv_heads" [b, h_kv, s_kv]. top_keys: so many keys of each of these heads, without column_sums of
    query heads, int32 [b, h, top_keys], the greatest sum first and -1 where there is no key. The others are fp32 (fp64
    for fp64). The other arguments and the errors are those of `attention`."""
    _raw.check_tensors(q, k, v, False)
    b, h_q, s_q, _ = q.shape
    float_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    new = lambda *shape: torch.empty(shape, dtype=float_dtype, device=q.device)  # noqa: E731
    o = q.new_empty(b, h_q, s_q, v.shape[3])
    lse = new(b, h_q, s_q)
    given = dict(captures or {})
    options = {"causal": causal, "scale": scale, "top_left": top_left, "window_left": window_left, "window_right": window_right,
               "chunk": chunk, "sink": sink is not None, "max_logit": max_logit, "max_logit_by_head": max_logit_by_head,
               "entropy": entropy, "column_sums": column_sums, "top_keys": top_keys}
    on_gpu = q.device.type == "cuda"
    device = (capi.DEVICE_CUDA, q.device.index or 0) if on_gpu else (capi.DEVICE_HOST, 0)
    attention = _handle(device, q.shape[3], v.shape[3], DTYPES[q.dtype], _function(score, given), _function(mask, given),
                        tuple(options.items()))
    heads = k.shape[1] if column_sums == "kv_heads" else h_q
    results = AttentionStatistics(
        o, lse, (new(h_q) if max_logit_by_head else new(b, h_q, s_q)) if max_logit != "none" else None,
        new(b, h_q, s_q) if entropy else None,
        new(b, heads, k.shape[2]) if column_sums != "none" else None,
        torch.empty((b, heads, top_keys), dtype=torch.int32, device=q.device) if top_keys > 0 else None)
    stream = torch.cuda.current_stream(q.device).cuda_stream if on_gpu else None
    attention.bind_forward(q.detach(), k.detach(), v.detach(), o, lse, stream=stream, captures=given or None, sink=sink,
                           max_logit=results.max_logit, entropy=results.entropy, column_sums=results.column_sums,
                           top_keys=results.top_keys)()
    return results
