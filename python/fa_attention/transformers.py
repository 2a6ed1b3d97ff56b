"""fa as an attention implementation of Hugging Face transformers.

    from fa_attention.transformers import register
    register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="fa")
"""

from __future__ import annotations

import functools
from typing import Any, Callable, Optional

import torch
from torch import Tensor

from . import functions
from .capi import INVARIANCES
from .torch import attention
from .torch._padding import padded_heads
from .torch._sdpa import mask_options

_PADDING = "keep[b, kv] != 0"  # a mask of [b, s_kv], beside a causal one
_WINDOW = "q + s_kv - s_q - kv < keep[b, kv]"  # likewise, with a window where a key is kept
_HINT = "_fa_window"  # of a mask with a window: its size, and whether there is padding


def _mask(mask: Optional[Tensor], dtype: torch.dtype) -> dict[str, Any]:
    """A mask as `fa_mask` makes it, or one of the user's, [b, 1 or h, s_q, s_kv]."""
    if mask is not None and mask.dim() == 2:
        if mask.dtype == torch.int32:
            # Whoever copies a mask, to another device for example, drops the attribute and keeps what the mask says.
            window, padded = (0, True) if torch.compiler.is_compiling() else getattr(mask, _HINT, (0, True))
            options: dict[str, Any] = {"window_left": window - 1} if window else {}
            if padded:
                options.update({"mask": _PADDING if window else _WINDOW, "captures": {"keep": mask}})
            return options
        return {"mask": _PADDING, "captures": {"keep": mask.to(torch.int32)}}
    return mask_options(mask, dtype)


def fa_attention_forward(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Optional[Tensor],
                         dropout: float = 0.0, scaling: Optional[float] = None, is_causal: Optional[bool] = None,
                         softcap: Optional[float] = None, s_aux: Optional[Tensor] = None,
                         position_bias: Optional[Tensor] = None, invariance: str = "none", **_: Any) -> tuple[Tensor, None]:
    """What transformers' AttentionInterface calls: o [b, s_q, h_q, d_v] of query [b, h_q, s_q, d_qk], key [b, h_kv, s_kv, d_qk]
    and value [b, h_kv, s_kv, d_v]. s_aux: sinks [h_q]. position_bias broadcasts to [b, h_q, s_q, s_kv]. A window is part of
    attention_mask, as `fa_mask` makes it, or None is given because it hides nothing. No weights are returned."""
    if is_causal is None:
        is_causal = bool(getattr(module, "is_causal", True))
    causal = is_causal and (attention_mask is None or attention_mask.dim() == 2)
    options = _mask(attention_mask, query.dtype)
    captures = dict(options.pop("captures", {}))
    score = functions.softcap(softcap) if softcap else None
    score = functions.compose(score, options.pop("score", None))
    if position_bias is not None:
        score = functions.compose(score, "score + position[b, h, q, kv]")
        captures["position"] = position_bias[(None,) * (4 - position_bias.dim())]
    d_v = value.shape[-1]
    query, key, value, scaling = padded_heads(query, key, value, scaling)
    o: Tensor = attention(query, key, value, causal=causal, scale=scaling, dropout=dropout, sink=s_aux, score=score,
                          captures=captures, invariance=invariance, **options)
    return o[..., :d_v].transpose(1, 2).contiguous(), None


def _parts(function: Any, like: Any) -> Any:
    """What `function` closes over, if it is of the same code as `like`; None else."""
    cells = getattr(function, "__closure__", None)
    if not cells or len(cells) != 1 or getattr(function, "__code__", None) is not like.__code__:
        return None
    return cells[0].cell_contents


def _window_of(mask_function: Any) -> Optional[int]:
    """The size of transformers' own causal window, which keeps so many keys up to a row's own; None for any other mask."""
    from transformers import masking_utils as known

    try:
        example, overlay = known.sliding_window_causal_mask_function(2), known.sliding_window_overlay(2)
    except AttributeError:
        return None
    parts = _parts(mask_function, example)
    if not isinstance(parts, tuple) or len(parts) != 2 or parts[1] is not known.causal_mask_function:
        return None
    window = _parts(parts[0], overlay)
    return window if isinstance(window, int) and window > 0 else None


def _windowed(window: int, padding: Optional[Tensor], batch_size: int, kv_length: int, device: Any) -> Tensor:
    """int32 [b, s_kv]: the window where a key is kept, else 0. Without padding it is one element, expanded."""
    if padding is None:
        mask = torch.full((1, 1), window, dtype=torch.int32, device=device).expand(batch_size, kv_length)
    else:
        mask = padding.to(torch.int32) * window
    setattr(mask, _HINT, (window, padding is not None))
    return mask


def fa_mask(batch_size: int, q_length: int, kv_length: int, q_offset: Any = 0, kv_offset: int = 0,
            mask_function: Optional[Callable[..., Any]] = None, attention_mask: Optional[Tensor] = None,
            **more: Any) -> Optional[Tensor]:
    """What transformers' AttentionMaskInterface calls. None where causal attention, or all of it, is meant; the padding
    [b, s_kv] where it is causal besides, as torch.bool, or with a window as torch.int32; else whatever `sdpa` has."""
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    compiling = torch.compiler.is_compiling()
    window = None if compiling else _window_of(mask_function)
    end = kv_offset + kv_length
    whole = isinstance(q_offset, int) and q_offset + q_length == end  # the last row is that of the last key
    if whole and (mask_function is causal_mask_function or window is not None):
        padding = None
        if attention_mask is not None and attention_mask.shape[-1] == end:
            padding = attention_mask[:, kv_offset:].to(torch.bool)
            padding = None if not compiling and bool(padding.all()) else padding
        if attention_mask is None or attention_mask.shape[-1] == end:
            if window is None or window >= kv_length:
                return padding
            return _windowed(window, padding, batch_size, kv_length, more.get("device", "cpu"))
    if mask_function is not None:
        more["mask_function"] = mask_function
    more["allow_is_causal_skip"] = False  # what it takes for causal is so by the first row, where rows and keys differ
    mask: Optional[Tensor] = sdpa_mask(batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset,
                                       kv_offset=kv_offset, attention_mask=attention_mask, **more)
    return mask


def register(name: str = "fa", invariance: str = "none") -> str:
    """Makes `attn_implementation=name` attention by fa, in this process, and returns the name. invariance: as in
    `fa_attention.torch.attention`; ValueError for what is none of "none", "batch" and "rows". ImportError where transformers
    is missing or has no AttentionInterface and AttentionMaskInterface (before 4.53)."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    if invariance not in INVARIANCES:
        raise ValueError(f"invariance is {invariance!r}: accepted are {', '.join(INVARIANCES)}")
    forward = fa_attention_forward
    if invariance != "none":
        forward = functools.partial(fa_attention_forward, invariance=invariance)
    AttentionInterface.register(name, forward)
    AttentionMaskInterface.register(name, fa_mask)
    return name
