"""What is fixed about a call, and the handles of the library that are made of it: one for each, kept."""

from __future__ import annotations

import numbers
import re
from functools import lru_cache
from typing import Any, Iterable, Mapping, NamedTuple, Optional, SupportsIndex

from . import capi
from ._errors import type_name
from ._library import load

_WORD = re.compile(r"[A-Za-z_]\w*")


class Options(NamedTuple):
    """The arguments of `attention` that are no arrays. `tensors` and `numbers` name the captures, in the order in which
    calls give them."""

    causal: bool = False
    scale: Optional[float] = None
    top_left: bool = False
    window_left: Optional[int] = None
    window_right: Optional[int] = None
    chunk: int = 0
    dropout: float = 0.0
    deterministic: bool = False
    score: Optional[str] = None
    mask: Optional[str] = None
    tensors: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()
    varlen: bool = False
    page_size: int = 0
    k_dtype: Optional[str] = None  # of a cache of 8 or 4 bits
    v_dtype: Optional[str] = None
    accumulate: bool = False  # forward adds to what o and lse hold
    o_dtype: Optional[str] = None  # of q, k and v of 8 bits
    key_scales: bool = False
    value_scales: bool = False
    precise: bool = False
    value_in_key: int = 0  # V is the first so many columns of K
    group_size: int = 0  # columns with a scale and an offset, of a cache of 4 bits
    invariance: str = "none"

    @property
    def reads_batch(self) -> bool:
        """Whether a function depends on the index of the batch."""
        return "b" in words(self.score) | words(self.mask)


_KINDS: tuple[tuple[str, Any, str], ...] = (
    ("scale", numbers.Real, "a number"), ("window_left", numbers.Integral, "an integer"),
    ("window_right", numbers.Integral, "an integer"), ("chunk", numbers.Integral, "an integer"),
    ("top_keys", numbers.Integral, "an integer"), ("max_s_q", SupportsIndex, "an integer"),
    ("max_s_kv", SupportsIndex, "an integer"),
    ("dropout", numbers.Real, "a number"), ("score", str, "an expression, as text"), ("mask", str, "an expression, as text"))


def check_kinds(named: Mapping[str, Any]) -> None:
    """TypeError for an argument that is neither a number nor a text where one is accepted."""
    for name, kind, accepted in _KINDS:
        value = named.get(name)
        if value is not None and not isinstance(value, kind):
            raise TypeError(f"{name} is a {type_name(value)}: accepted is {accepted}")
    for name in ("causal", "top_left", "deterministic"):
        value = named.get(name, False)
        if not isinstance(value, numbers.Integral) and type(value).__name__ not in ("bool", "bool_"):  # NumPy's, too
            raise TypeError(f"{name} is a {type_name(value)}: accepted is a bool")


@lru_cache(maxsize=4096)
def _kept_options(invariance: str, *fields: Any) -> Options:
    options = Options(*fields)._replace(invariance=invariance)
    check_kinds(options._asdict())
    check_names(options.score, options.mask, options.tensors + options.numbers)
    return options


def make_options(*fields: Any, invariance: str = "none") -> Options:
    """One Options for equal fields, the last of which has its name. TypeError for what is neither a number nor a text where one
    is accepted, ValueError for a capture that no function names."""
    try:
        return _kept_options(invariance, *fields)
    except TypeError:
        check_kinds(Options(*fields)._asdict())  # what has no hash
        raise


@lru_cache(maxsize=4096)
def words(expression: Optional[str]) -> frozenset[str]:
    """The identifiers in an expression."""
    return frozenset(_WORD.findall(expression or ""))


class HandleKey(NamedTuple):
    """What an Attention is made of. `grads`: which captured tensors have their gradient computed."""

    options: Options
    device: tuple[int, int]
    dtype: str
    d_qk: int
    d_v: int
    sink: bool
    dtypes: tuple[str, ...]
    grads: tuple[bool, ...]


def _function(key: HandleKey, expression: Optional[str]) -> Any:
    if not expression:
        return None
    named = words(expression)
    declared = [(name, dtype, grad) for name, dtype, grad in zip(key.options.tensors, key.dtypes, key.grads) if name in named]
    declared += [(name, "float32", False) for name in key.options.numbers if name in named]
    return capi.function(expression, declared)


def check_names(score: Optional[str], mask: Optional[str], names: Iterable[str]) -> None:
    """ValueError for a capture that no function names."""
    known = words(score) | words(mask)
    for name in names:
        if name not in known:
            raise ValueError(f"captures has {name!r}: accepted is what score or mask names, {score!r} and {mask!r}")


def check_gradients(score: Optional[str], grads: Iterable[tuple[str, bool]]) -> None:
    """ValueError for a capture whose gradient is asked for, and which the score function does not name."""
    for name, grad in grads:
        if grad and name not in words(score):
            raise ValueError(f"captures[{name!r}] requires a gradient: accepted is that of a capture of the score function; "
                             "a mask has none")


@lru_cache(maxsize=1024)
def handle(key: HandleKey) -> capi.Attention:
    options = key.options
    check_gradients(options.score, zip(options.tensors, key.grads))
    d_v = 0 if options.value_in_key else key.d_v
    padded = options.varlen and not options.accumulate and options.o_dtype != "float8_e4m3fn"
    return capi.Attention(
        load(), key.d_qk, key.dtype, options.causal, d_v, options.scale, options.top_left, device=key.device,
        deterministic=options.deterministic, varlen=options.varlen, zero_padding=padded, dropout=options.dropout,
        score=_function(key, options.score), mask=_function(key, options.mask), window_left=options.window_left,
        window_right=options.window_right, chunk=options.chunk, sink=key.sink, page_size=options.page_size,
        k_dtype=options.k_dtype, v_dtype=options.v_dtype, accumulate=options.accumulate, o_dtype=options.o_dtype,
        key_scales=options.key_scales, value_scales=options.value_scales, precise=options.precise,
        value_in_key=options.value_in_key, group_size=options.group_size, invariance=options.invariance)
