"""Score and mask functions in wide use, as expressions (docs/variants.md has the language).

They are texts: `attention(q, k, v, score=softcap(30))`. What an expression names is given by `captures`, as in
`attention(q, k, v, score=alibi(), captures={"slope": slopes})`. Shapes of captures are in the docstrings.
"""

from __future__ import annotations

import re
from typing import Optional

_CAUSAL_ROW = "(q + s_kv - s_q)"


def softcap(cap: float) -> str:
    """cap * tanh(score / cap): scores stay within +-cap. ValueError for a cap that is not positive."""
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


def compose(first: Optional[str], second: Optional[str]) -> Optional[str]:
    """The score function `second` of what `first` makes of the score; None is no function."""
    if not first or not second:
        return first or second
    return re.sub(r"(?<![\w.])score\b", f"({first})".replace("\\", r"\\"), second)


def both(first: Optional[str], second: Optional[str]) -> Optional[str]:
    """The mask function that keeps what both keep; None is no mask."""
    return f"({first}) && ({second})" if first and second else first or second
