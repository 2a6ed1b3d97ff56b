"""Score and mask functions in wide use, as expressions (docs/variants.md has the language).

They are texts: `attention(q, k, v, score=softcap(30))`. What an expression names is given by `captures`, as in
`attention(q, k, v, score=alibi(), captures={"slope": slopes})`. Shapes of captures are in the docstrings.
"""

from __future__ import annotations

import numbers
import re
from typing import Any, Optional

from ._errors import type_name

_CAUSAL_ROW = "(q + s_kv - s_q)"


def softcap(cap: float) -> str:
    """cap * tanh(score / cap): scores stay within +-cap. ValueError for a cap that is not positive."""
    if not isinstance(cap, numbers.Real):
        raise TypeError(f"cap is a {type_name(cap)}: accepted is a positive number")
    if not 0 < cap < float("inf"):
        raise ValueError(f"cap is {cap}: accepted is a positive number")
    text = f"{float(cap):.9g}"
    text = text if any(c in text for c in ".e") else text + ".0"
    return f"{text} * tanh(score / {text})"


def alibi(batched: bool = False) -> str:
    """score - slope[h] * |i' - j|, with i' the row's place on the diagonal of the last key. Captures slope, f32 [h_q], or
    [b, h_q] if `batched`."""
    return f"score - slope[{'b, h' if batched else 'h'}] * abs(float(q + s_kv - s_q - kv))"


def bias(axes: str = "bhqk") -> str:
    """score + bias[...]. `axes` names the axes of the captured bias in their order: "bhqk" for [b, h_q, s_q, s_kv], "hqk"
    for [h_q, s_q, s_kv], "k" for [s_kv]. Axes of length 1 are broadcast. ValueError for other letters."""
    if len(axes) > 4 or any(axis not in "bhqk" for axis in axes):
        raise ValueError(f"axes is {axes!r}: accepted are up to four of b, h, q and k")
    indices = ", ".join("kv" if axis == "k" else axis for axis in axes)
    return f"score + bias[{indices}]" if indices else "score + bias"


def relative_table(distance: int) -> str:
    """score + table[h, clamp(j - i', -distance, distance) + distance]. Captures table [h_q, 2 * distance + 1]. ValueError
    for a distance below 1."""
    if not isinstance(distance, numbers.Integral):
        raise TypeError(f"distance is a {type_name(distance)}: accepted is an integer from 1 on")
    if distance < 1:
        raise ValueError(f"distance is {distance}: accepted are 1 and more")
    return f"score + table[h, clamp(kv - {_CAUSAL_ROW}, -{distance}, {distance}) + {distance}]"


def prefix_lm() -> str:
    """A mask: keys of a prefix are seen by all rows, later ones causally. Captures prefix, i32 [b]."""
    return f"kv < prefix[b] || kv <= {_CAUSAL_ROW}"


def documents(batched: bool = False) -> str:
    """A mask: doc[q] == doc[kv]. Captures doc, i32 [s], or [b, s] if `batched`."""
    return "doc[b, q] == doc[b, kv]" if batched else "doc[q] == doc[kv]"


def block_sparse(rows: int, keys: int, by_head: bool = False) -> str:
    """A mask: blocks[q / rows, kv / keys] != 0. Captures blocks, i32 [ceil(s_q / rows), ceil(s_kv / keys)], with `by_head`
    [h_q, ...]. ValueError for sizes below 1."""
    if rows < 1 or keys < 1:
        raise ValueError(f"rows and keys are {rows} and {keys}: accepted are 1 and more")
    return f"blocks[{'h, ' if by_head else ''}q / {rows}, kv / {keys}] != 0"


def tree(batched: bool = True) -> str:
    """A mask for a tree of drafts behind a context: rows are the last s_q keys, and each sees all keys before these, and of
    the drafts what its bits say. Captures tree, i32 [b, s_q, ceil(s_q / 32)], or [s_q, ceil(s_q / 32)] unless `batched`:
    bit n % 32 of tree[b, q, n / 32] is set where row q sees draft n, itself included. `tree_words` makes them."""
    place = "kv - (s_kv - s_q)"
    row = "b, q" if batched else "q"
    return f"kv < s_kv - s_q || bit(tree[{row}, clamp({place}, 0, s_q - 1) >> 5], {place})"


def tree_words(sees: Any) -> Any:
    """What `tree` captures, as a torch tensor: of a bool tensor [..., s_q, s_q] that says which drafts a row sees, itself
    included; of int64 words [..., words] with bit n % 64 of word n / 64, whose memory it shares. ValueError for others."""
    import torch

    if sees.dtype == torch.int64 and sees.dim() > 0:
        return sees.contiguous().view(torch.int32)
    if sees.dtype != torch.bool or sees.dim() < 2 or sees.shape[-1] != sees.shape[-2]:
        raise ValueError(f"sees is {sees.dtype} {tuple(sees.shape)}: accepted are bool [..., s_q, s_q] and int64 words")
    width = -(-sees.shape[-1] // 32)
    bits = torch.nn.functional.pad(sees, (0, 32 * width - sees.shape[-1])).unflatten(-1, (width, 32)).to(torch.int64)
    words = (bits << torch.arange(32, device=sees.device)).sum(-1)
    return torch.where(words < 2**31, words, words - 2**32).to(torch.int32)


def compose(first: Optional[str], second: Optional[str]) -> Optional[str]:
    """The score function `second` of what `first` makes of the score; None is no function."""
    if not first or not second:
        return first or second
    return re.sub(r"(?<![\w.])score\b", f"({first})".replace("\\", r"\\"), second)


def both(first: Optional[str], second: Optional[str]) -> Optional[str]:
    """The mask function that keeps what both keep; None is no mask."""
    return f"({first}) && ({second})" if first and second else first or second
