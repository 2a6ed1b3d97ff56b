"""Forward over a KV cache in pages and appends to a cache, of PyTorch tensors: layouts are worked out once, then kept."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple, Optional, Sequence

import torch
from torch import Tensor

from .. import _abi
from .._errors import type_name
from .._options import HandleKey, Options, handle
from .._options import check_kinds as check_option_kinds
from .._prepared import Layout, PreparedCall, Spec
from .._prepared_append import AppendLayout, Lengths, PreparedAppend
from . import _raw
from ._raw import CAPTURE_DTYPES, CODED_RESULTS, CODES, DTYPES

LAYOUTS = {"NHD": "[pages, page_size, h_kv, d]", "HND": "[pages, h_kv, page_size, d]"}
STORED = {torch.float8_e4m3fn: "float8_e4m3fn", torch.int8: "int8"}  # of a cache, with a scale a row
CACHED_CODES = {**STORED, torch.uint8: "uint8"}  # with two codes of 4 bits in a byte, and pairs of a scale and an offset
LATENT = (576, 512, 656)  # columns of k, those that are v too, and bytes of a row of torch.float8_e4m3fn
_CACHED = {**DTYPES, **CODES, **CACHED_CODES}
_QUERY_NAMES = {**DTYPES, **CODES}
_QUERIES = (torch.float16, torch.bfloat16)  # over these
_MOST_PLANS = 1024
_MOST_POSITIONS = 2**31 - 65536


class PagedCall(NamedTuple):
    """What a call has besides q, the pages, a sink and captured tensors. `options` without a page_size."""

    options: Options
    layout: str
    block_table: Optional[Tensor]  # None: the cache is contiguous
    seqused_kv: Tensor
    cu_seqlens_q: Optional[Tensor] = None
    seqused_q: Optional[Tensor] = None
    batch_index: Optional[Tensor] = None
    seq_begin: Optional[Tensor] = None
    max_s_q: int = 0
    max_s_kv: int = 0
    numbers: tuple[float, ...] = ()
    k_scale: Optional[Tensor] = None
    v_scale: Optional[Tensor] = None
    q_scale: Optional[Tensor] = None  # this and the rest of a q of 8 bits
    row_bias: Optional[Tensor] = None
    dtype: Optional[torch.dtype] = None  # of o
    precise: bool = False
    value_in_key: int = 0
    schedule: Optional[Tensor] = None

    def arrays(self) -> tuple[Optional[Tensor], ...]:
        return self[2:8]


ARRAYS = PagedCall._fields[2:8]


class AppendCall(NamedTuple):
    """What an append has besides new keys and values, the cache and queries."""

    layout: str
    block_table: Optional[Tensor] = None
    seqused_kv: Optional[Tensor] = None
    cu_seqlens_k_new: Optional[Tensor] = None
    batch_index: Optional[Tensor] = None
    slots: Optional[Tensor] = None
    rotary_cos: Optional[Tensor] = None
    rotary_sin: Optional[Tensor] = None
    positions: Optional[Tensor] = None
    k_scale: Optional[Tensor] = None
    v_scale: Optional[Tensor] = None
    rotary_dims: int = 0
    rotary_base: float = 0.0
    rotary_interleaved: bool = False
    scales_given: bool = False


def address(t: Optional[Tensor]) -> Optional[int]:
    return None if t is None else t.data_ptr()


def _facts(t: Optional[Tensor]) -> Any:
    return None if t is None else (t.dtype, t.device, t.shape, t.stride())


def _cache_spec(t: Tensor, layout: str) -> Spec:
    """By meaning [pages, h_kv, page_size, d]."""
    shape, strides = tuple(t.shape), tuple(t.stride())
    if layout == "NHD":
        shape, strides = (shape[0], shape[2], shape[1], shape[3]), (strides[0], strides[2], strides[1], strides[3])
    return Spec(_CACHED[t.dtype], shape, strides)


def _scale_specs(call: Any) -> list[tuple[str, Spec]]:
    """By meaning [pages, h_kv, page_size]; of a q of 8 bits also [b, h_kv]."""
    result = []
    for name, t in (("k_scale", call.k_scale), ("v_scale", call.v_scale)):
        if t is not None and t.dim() == 2:
            result.append((name, _raw.spec(t)))
        elif t is not None:
            axes = [0, 2, 1, 3][:t.dim()] if call.layout == "NHD" else range(t.dim())
            result.append((name, Spec(DTYPES[t.dtype], tuple(t.shape[n] for n in axes), tuple(t.stride(n) for n in axes))))
    return result


def _of_rows(t: Optional[Tensor]) -> bool:
    return t is not None and t.dim() == 3


def _kinds(q: Tensor, k: Tensor, v: Optional[Tensor], call: PagedCall) -> dict[str, Any]:
    """The options that dtypes fix."""
    if q.dtype not in CODES:
        return {**stored_kinds(q, k, v, call), "value_in_key": call.value_in_key}
    return {"key_scales": _of_rows(call.k_scale), "value_scales": _of_rows(call.v_scale), "precise": call.precise,
            "o_dtype": CODED_RESULTS[result_dtype(q, call)]}


def result_dtype(q: Tensor, call: PagedCall) -> torch.dtype:
    """Of o."""
    return q.dtype if q.dtype not in CODES else torch.bfloat16 if call.dtype is None else call.dtype


def _columns(cache: Tensor) -> Any:
    """The head dim of a cache."""
    return cache.shape[-1] * 2 if cache.dtype == torch.uint8 else cache.shape[-1]


def d_v_of(v: Optional[Tensor], call: PagedCall) -> Any:
    return call.value_in_key if v is None else _columns(v)


def _group_size(d_qk: int, k: Tensor, v: Optional[Tensor], call: Any) -> int:
    """What the pairs of a cache of 4 bits say; 0 of others."""
    for cache, d, pairs in ((k, d_qk, call.k_scale), (v, 0 if v is None else _columns(v), call.v_scale)):
        if cache is not None and cache.dtype == torch.uint8 and pairs.shape[-1] > 0:
            return int(2 * d // pairs.shape[-1])
    return 0


def stored_kinds(q: Tensor, k: Tensor, v: Optional[Tensor], call: Any) -> dict[str, Any]:
    """q: of the head dim of k."""
    return {"k_dtype": CACHED_CODES.get(k.dtype), "v_dtype": None if v is None else CACHED_CODES.get(v.dtype),
            "group_size": _group_size(q.shape[-1], k, v, call)}


def _handle(q: Tensor, d_v: int, options: Options, sink: bool, captures: Sequence[Tensor]) -> Any:
    index = q.device.index or 0 if q.is_cuda else -1
    device = (_abi.DEVICE_CUDA, index) if q.is_cuda else (_abi.DEVICE_HOST, 0)
    dtypes = tuple(CAPTURE_DTYPES[t.dtype] for t in captures)
    return handle(HandleKey(options, device, _QUERY_NAMES[q.dtype], q.shape[-1], d_v, sink, dtypes, (False,) * len(dtypes)))


class PagedPlan:
    """All that is known about the forwards of one layout."""

    def __init__(self, q: Tensor, k: Tensor, v: Optional[Tensor], sink: Optional[Tensor], captures: Sequence[Tensor],
                 call: PagedCall) -> None:
        self.k, d_v = _cache_spec(k, call.layout), d_v_of(v, call)
        table, page_size, h_kv = call.block_table, self.k.shape[2], self.k.shape[1]
        options = self.options = call.options._replace(page_size=page_size if table is not None else _abi.CONTIGUOUS,
                                                       **_kinds(q, k, v, call))
        self.attention = _handle(q, d_v, options, sink is not None, captures)
        self.index, self.device = q.device.index or 0 if q.is_cuda else -1, q.device
        self.b = b = call.seqused_kv.shape[0] if options.varlen else q.shape[0]
        longest = min((table.shape[1] if table is not None else 1) * page_size, _MOST_POSITIONS)
        longest = min(longest, call.max_s_kv) if call.max_s_kv > 0 else longest
        if options.varlen:
            heads, rows = q.shape[1], q.shape[0]
            self.sizes: tuple[int, ...] = (b, heads, h_kv, call.max_s_q, longest, rows, 0)
            lse_shape: tuple[int, ...] = (heads, rows)
        else:
            heads, rows = q.shape[1], q.shape[2]
            self.sizes = (b, heads, h_kv, rows, longest)
            lse_shape = (b, heads, rows)
        meta = torch.empty_strided(q.shape, q.stride(), dtype=q.dtype, device="meta")
        self.o = _raw.output_of(_raw.like(meta, heads, rows, d_v, result_dtype(q, call)))
        self.lse = _raw.dense(lse_shape, _raw.lse_dtype(q.dtype))
        self.read = [("q", _raw.spec(q)), ("k", self.k)] + ([("v", _cache_spec(v, call.layout))] if v is not None else [])
        self.read += [(name, _raw.spec(t)) for name, t in (("q_scale", call.q_scale), ("row_bias", call.row_bias)) if t is not None]
        self.read += _scale_specs(call) + ([("sink", _raw.spec(sink))] if sink is not None else [])
        self.read += [("block_table", _raw.spec(table))] if table is not None else []
        self.captures = [(name, _raw.spec(t)) for name, t in zip(options.tensors, captures)]
        self._calls: dict[bool, PreparedCall] = {}

    def forward(self, want_lse: bool) -> PreparedCall:
        found = self._calls.get(want_lse)
        if found is None:
            written = [("o", self.o.spec())] + ([("lse", self.lse.spec())] if want_lse else [])
            options = self.options
            layout = Layout(self.read, written, self.captures, [], options.numbers, options.varlen, False, True)
            found = self._calls[want_lse] = PreparedCall(self.attention, layout, self.sizes)
        return found


class AppendPlan:
    """All that is known about the appends of one layout."""

    def __init__(self, k: Tensor, v: Optional[Tensor], k_cache: Tensor, v_cache: Optional[Tensor], q: Optional[Tensor],
                 call: AppendCall) -> None:
        caches = [("k_cache", _cache_spec(k_cache, call.layout))]
        caches += [("v_cache", _cache_spec(v_cache, call.layout))] if v_cache is not None else []
        contiguous = _abi.CONTIGUOUS if v is None else 0
        options = Options(page_size=caches[0][1].shape[2] if call.block_table is not None else contiguous,
                          value_in_key=LATENT[1] if v is None else 0, **stored_kinds(k, k_cache, v_cache, call))
        self.attention = _handle(k, v.shape[-1] if v is not None else LATENT[1], options, False, ())
        self.index, self.device = k.device.index or 0 if k.is_cuda else -1, k.device
        tensors = [("k", _raw.spec(k)), *([("v", _raw.spec(v))] if v is not None else []), *caches, *_scale_specs(call)]
        self.q_out: Optional[_raw.Output] = None
        if q is not None:
            meta = torch.empty_strided(q.shape, q.stride(), dtype=q.dtype, device="meta")
            self.q_out = _raw.output_of(q_like(meta))
            tensors += [("q", _raw.spec(q)), ("q_out", self.q_out.spec())]
        for name, t in (("cos", call.rotary_cos), ("sin", call.rotary_sin), ("block_table", call.block_table)):
            tensors += [(name, _raw.spec(t))] if t is not None else []
        rotary = (call.rotary_dims, call.rotary_interleaved, call.rotary_base) if call.rotary_dims else None
        wide = [t is not None and t.dtype == torch.int64 for t in (call.slots, call.positions)]
        self.b = 0
        if k.dim() == 3 and call.cu_seqlens_k_new is not None:
            self.b = call.cu_seqlens_k_new.shape[0] - 1
        self.prepared = PreparedAppend(self.attention, AppendLayout(tensors, rotary, wide[0], wide[1], call.scales_given))


def q_like(q: Tensor) -> Tensor:
    """An empty tensor for queries that are turned."""
    return _raw.like(q, q.shape[1], q.shape[0 if q.dim() == 3 else 2], q.shape[-1])


_plans: dict[Any, Any] = {}
_lock = threading.Lock()


def _keep(key: Any, plan: Any) -> None:
    with _lock:
        if len(_plans) >= _MOST_PLANS:
            _plans.clear()
        _plans[key] = plan


def on_device(index: int, function: Any, *arguments: Any) -> None:
    """Calls `function` with the stream behind its arguments."""
    if index < 0:
        function(*arguments, 0)
    elif torch._C._cuda_getDevice() != index:
        with torch.cuda.device(index):
            function(*arguments, _raw.current_stream(index))
    else:
        function(*arguments, _raw.current_stream(index))


def _launch(plan: PagedPlan, prepared: PreparedCall, addresses: list[int], call: PagedCall, stream: int) -> None:
    size = prepared.scratch_size(addresses)
    scratch = torch.empty(size, dtype=torch.uint8, device=plan.device) if size else None
    sequences = (plan.b, address(call.cu_seqlens_q), None, address(call.seqused_q), call.seqused_kv.data_ptr(), call.max_s_q,
                 call.max_s_kv)
    prepared(addresses, stream, scratch.data_ptr() if scratch is not None else 0, size, call.numbers, sequences, None,
             (address(call.batch_index), address(call.seq_begin), *memory_of(call.schedule)))


def find_plan(q: Tensor, k: Tensor, v: Optional[Tensor], sink: Optional[Tensor], captures: Sequence[Tensor],
              call: PagedCall) -> PagedPlan:
    """The plan for tensors like these. q is `readable`."""
    key = (call.options, call.layout, call.max_s_q, call.max_s_kv, _facts(q), _facts(k), _facts(v), _facts(sink),
           *map(_facts, call.arrays()), *call[15:18], *map(_facts, call[11:15]), *map(_facts, captures))
    plan: Optional[PagedPlan] = _plans.get(key)
    if plan is None:
        check_forward(q, k, v, sink, captures, call)
        plan = PagedPlan(q, k, v, sink, captures, call)
        _keep(key, plan)
    return plan


def memory_of(schedule: Optional[Tensor]) -> tuple[Optional[int], int]:
    """Where a schedule is, and its bytes; None for calls that take none."""
    return (None, 0) if schedule is None or schedule.numel() == 0 else (schedule.data_ptr(), schedule.numel())


def forward(q: Tensor, k: Tensor, v: Optional[Tensor], sink: Optional[Tensor], captures: Sequence[Tensor], call: PagedCall,
            want_lse: bool = True) -> tuple[Tensor, Optional[Tensor]]:
    """o and lse. q is `readable`."""
    plan = find_plan(q, k, v, sink, captures, call)
    if call.schedule is not None:
        check_schedule(call.schedule, q)
    shape, strides, dtype = plan.o
    o = torch.empty_strided(shape, strides, dtype=dtype, device=plan.device)
    padded = dtype == torch.float8_e4m3fn and call.options.varlen  # else the library does it, of rows of no request
    if padded:
        o.view(torch.uint8).zero_()
    addresses = [t.data_ptr() for t in (q, k, v) if t is not None]
    beside = (call.q_scale, call.row_bias, call.k_scale, call.v_scale, sink, call.block_table)
    addresses += [t.data_ptr() for t in beside if t is not None]
    addresses.append(o.data_ptr())
    lse = None
    if want_lse:
        shape, strides, dtype = plan.lse
        lse = torch.empty_strided(shape, strides, dtype=dtype, device=plan.device)
        if padded:
            lse.fill_(float("-inf"))
        addresses.append(lse.data_ptr())
    addresses += [t.data_ptr() for t in captures]
    on_device(plan.index, _launch, plan, plan.forward(want_lse), addresses, call)
    return o, lse


def append(k: Tensor, v: Optional[Tensor], k_cache: Tensor, v_cache: Optional[Tensor], q: Optional[Tensor],
           call: AppendCall) -> Optional[Tensor]:
    """The turned q, or None. k, v and q are `readable`."""
    key = ("append", call.layout, call[11:], _facts(k), _facts(v), _facts(k_cache), _facts(v_cache), _facts(q),
           *map(_facts, call[1:11]))
    plan: Optional[AppendPlan] = _plans.get(key)
    if plan is None:
        check_append(k, v, k_cache, v_cache, q, call)
        plan = AppendPlan(k, v, k_cache, v_cache, q, call)
        _keep(key, plan)
    addresses = [t.data_ptr() for t in (k, v, k_cache, v_cache) if t is not None]
    addresses += [t.data_ptr() for t in (call.k_scale, call.v_scale) if t is not None]
    q_out = None
    if q is not None:
        shape, strides, dtype = plan.q_out or (q.shape, q.stride(), q.dtype)
        q_out = torch.empty_strided(shape, strides, dtype=dtype, device=plan.device)
        addresses += [q.data_ptr(), q_out.data_ptr()]
    addresses += [t.data_ptr() for t in (call.rotary_cos, call.rotary_sin, call.block_table) if t is not None]
    lengths = Lengths(plan.b, address(call.cu_seqlens_k_new), address(call.seqused_kv), address(call.batch_index),
                      address(call.slots), address(call.positions))
    on_device(plan.index, plan.prepared, addresses, lengths)
    return q_out


def check_strided(name: str, t: Any, like: Optional[Tensor] = None, of: str = "q") -> None:
    if not isinstance(t, Tensor):
        raise TypeError(f"{name} is a {type_name(t)}: accepted is a torch.Tensor")
    if t.is_nested:
        raise TypeError(f"{name} is a nested tensor: accepted is a strided one")
    if t.layout != torch.strided:
        raise TypeError(f"{name} is of {t.layout}: accepted is torch.strided")
    if like is not None and t.device != like.device:
        raise ValueError(f"{name} is on {t.device}: accepted is where {of} is, {like.device}")


def _check_main(name: str, t: Any, axes: Sequence[str], like: Optional[Tensor] = None, of: str = "q") -> None:
    """A tensor of one of the shapes `axes`, and of the dtype and device of `like`."""
    check_strided(name, t)
    if t.dim() not in [text.count(",") + 1 for text in axes]:
        raise ValueError(f"{name} has shape {list(t.shape)}: accepted is {' or '.join(axes)}")
    if t.dtype not in DTYPES:
        raise TypeError(f"{name} is {t.dtype}: accepted are {', '.join(map(str, DTYPES))}")
    if like is not None and t.dtype != like.dtype:
        raise TypeError(f"{name} is {t.dtype}: accepted is what {of} is, {like.dtype}")
    check_strided(name, t, like, of)


def _check_cache(name: str, t: Any, layout: str, like: Tensor, of: str) -> None:
    check_strided(name, t)
    if t.dtype not in CACHED_CODES:
        _check_main(name, t, (LAYOUTS[layout],), like, of)
    elif t.dim() != 4:
        raise ValueError(f"{name} has shape {list(t.shape)}: accepted is {LAYOUTS[layout]}")
    elif like.dtype not in _QUERIES:
        raise TypeError(f"{of} is {like.dtype}: accepted with {name} of {t.dtype} are {' and '.join(map(str, _QUERIES))}")
    check_strided(name, t, like, of)
    if not isinstance(t.shape[-1], int) or t.shape[-1] <= 1:
        return
    if t.stride(-1) != 1:
        raise ValueError(f"{name} has strides {list(t.stride())}: accepted is a head dim without gaps, a stride of 1")


def _check_numbers(name: str, t: Any, like: Tensor, axes: int = 1, dtypes: tuple[torch.dtype, ...] = (torch.int32,)) -> None:
    if t is None:
        return
    check_strided(name, t)
    if t.dtype not in dtypes:
        raise TypeError(f"{name} is {t.dtype}: accepted is {' or '.join(map(str, dtypes))}")
    if t.dim() != axes:
        raise ValueError(f"{name} has shape {list(t.shape)}: accepted is {('one axis', 'two axes, [rows, max_pages]')[axes - 1]}")
    check_strided(name, t, like)
    if axes == 1 and not t.is_contiguous():
        raise ValueError(f"{name} has strides {list(t.stride())}: accepted is a contiguous tensor")


def _check_count(name: str, t: Optional[Tensor], count: Any, why: str) -> None:
    if t is not None and t.shape[0] != count:
        raise ValueError(f"{name} has {t.shape[0]} elements: accepted are {count}, {why}")


def _check_scales(k: Tensor, v: Optional[Tensor], names: Sequence[str], call: Any, like: Tensor, of: str) -> None:
    """Of the caches `names`: scales where these have 8 bits, and none where they have not."""
    for name, scale, cache, t in (("k_scale", call.k_scale, names[0], k), ("v_scale", call.v_scale, names[1], v)):
        dtype, axes = (like.dtype, 4) if t is not None and t.dtype == torch.uint8 else (torch.float32, 3)
        accepted = f"{dtype} {LAYOUTS[call.layout][:-4]}{', pairs' if axes == 4 else ''}], the rows of {cache}"
        if t is None or t.dtype not in CACHED_CODES or v is None:
            if scale is not None:
                raise ValueError(f"{name} is given: accepted is None with {cache} of {'None' if t is None else t.dtype}"
                                 f"{', which has its scales in its rows' if t is not None and t.dtype in STORED else ''}")
            continue
        if scale is None:
            raise TypeError(f"{name} is None: accepted with {cache} of {t.dtype} is a torch.Tensor, {accepted}")
        check_strided(name, scale, like, of)
        if scale.dtype != dtype:
            raise TypeError(f"{name} is {scale.dtype}: accepted is {accepted}")
        if scale.dim() != axes:
            raise ValueError(f"{name} has shape {list(scale.shape)}: accepted is {accepted}")


def _check_scale_shapes(k: Tensor, v: Optional[Tensor], names: Sequence[str], call: Any) -> None:
    for name, scale, cache, t in (("k_scale", call.k_scale, names[0], k), ("v_scale", call.v_scale, names[1], v)):
        if scale is not None and t is not None and scale.dim() > 2 and scale.shape[:3] != t.shape[:-1]:
            raise ValueError(f"{name} has shape {list(scale.shape)}: accepted is {list(t.shape[:-1])}, the rows of {cache}")


def _check_coded(q: Tensor, k: Tensor, v: Tensor, axes: str, call: PagedCall) -> None:
    """Of a q of 8 bits, over pages of 8 bits."""
    if q.dim() != axes.count(",") + 1:
        raise ValueError(f"q has shape {list(q.shape)}: accepted is {axes}")
    for name, t in (("k_pages", k), ("v_pages", v)):
        check_strided(name, t, q)
        if t.dim() != 4:
            raise ValueError(f"{name} has shape {list(t.shape)}: accepted is {LAYOUTS[call.layout]}")
        if isinstance(t.shape[-1], int) and t.shape[-1] > 1 and t.stride(-1) != 1:
            raise ValueError(f"{name} has strides {list(t.stride())}: accepted is a head dim without gaps, a stride of 1")
    _raw.check_codes(q, k, v, ("q", *_PAGES))
    _raw.check_result(torch.bfloat16 if call.dtype is None else call.dtype)
    of_rows = (2,) if call.options.varlen else (2, 3)
    _raw.check_scale("q_scale", call.q_scale, of_rows, q)
    _raw.check_scale("row_bias", call.row_bias, of_rows, q)
    _raw.check_scale("k_scale", call.k_scale, (2, 3), q)
    _raw.check_scale("v_scale", call.v_scale, (2, 3), q)
    if call.seq_begin is not None:
        raise ValueError(f"seq_begin is given: accepted with q of {q.dtype} is None")


def check_schedule(memory: Any, q: Tensor, name: str = "schedule") -> None:
    """TypeError and ValueError for what is no memory of a schedule."""
    check_strided(name, memory)
    if memory.dtype != torch.uint8:
        raise TypeError(f"{name} is {memory.dtype}: accepted is torch.uint8, what `schedule` returns")
    check_strided(name, memory, q)
    if memory.dim() != 1 or not memory.is_contiguous():
        raise ValueError(f"{name} has shape {list(memory.shape)} and strides {list(memory.stride())}: accepted is one contiguous "
                         "axis, what `schedule` returns")


_PAGES, _CACHES = ("k_pages", "v_pages"), ("k_cache", "v_cache")


def check_layout(layout: Any) -> None:
    if layout not in LAYOUTS:
        raise ValueError(f"layout is {layout!r}: accepted are {', '.join(f'{name} {axes}' for name, axes in LAYOUTS.items())}")


def _check_values(v: Optional[Tensor], call: PagedCall, q: Tensor) -> None:
    """That V is a tensor, or the first columns of K."""
    if isinstance(call.value_in_key, (str, float)):
        raise TypeError(f"value_in_key is a {type_name(call.value_in_key)}: accepted is an integer")
    if (v is None) != (call.value_in_key != 0):
        raise ValueError(f"v_pages is {'None' if v is None else 'given'} and value_in_key {call.value_in_key}: accepted are a "
                         "torch.Tensor with value_in_key 0, and None with the columns of K that are V")
    if v is not None:
        _check_cache("v_pages", v, call.layout, q, "q")


def check_kinds(q: Tensor, k: Tensor, v: Optional[Tensor], sink: Optional[Tensor], captures: Sequence[Tensor],
                call: PagedCall) -> None:
    """Of a forward: TypeError and ValueError for what needs no sizes."""
    check_layout(call.layout)
    packed = call.options.varlen
    axes = ("[total_q, h_q, d_qk] with cu_seqlens_q",) if packed else ("[b, h_q, s_q, d_qk]",)
    if isinstance(q, Tensor) and q.dtype in CODES:
        if v is None or call.value_in_key:
            raise ValueError(f"value_in_key is {call.value_in_key}: accepted with q of {q.dtype} are 0 and a v_pages")
        _check_coded(q, k, v, axes[0], call)
    else:
        _check_main("q", q, axes)
        _check_cache("k_pages", k, call.layout, q, "q")
        _check_values(v, call, q)
        _check_scales(k, v, _PAGES, call, q, "q")
        for name, given in (("q_scale", call.q_scale), ("row_bias", call.row_bias), ("dtype", call.dtype),
                            ("precise", call.precise or None)):
            if given is not None:
                raise ValueError(f"{name} is given: accepted with q of {q.dtype} is none, and with q of 8 bits one")
    if q.device.type not in ("cpu", "cuda", "meta"):
        raise ValueError(f"q is on {q.device}: accepted are cpu and cuda")
    for name, t in zip(ARRAYS, call.arrays()):
        if t is None and name == "seqused_kv":
            raise TypeError(f"{name} is None: accepted is a torch.Tensor of torch.int32")
        _check_numbers(name, t, q, 2 if name == "block_table" else 1)
    if call.schedule is not None:
        check_schedule(call.schedule, q)
    if call.seqused_q is not None and not packed:
        raise ValueError("seqused_q is given: accepted is None without cu_seqlens_q")
    others = [*zip(call.options.tensors, captures)] + ([("sink", sink)] if sink is not None else [])
    for name, t in others:
        check_strided(name, t, q)
        if t.dtype not in CAPTURE_DTYPES:
            raise TypeError(f"{name} is {t.dtype}: accepted are {', '.join(map(str, CAPTURE_DTYPES))}")
        if t.dim() > 4:
            raise ValueError(f"{name} has shape {list(t.shape)}: accepted are at most 4 axes")


def check_forward(q: Tensor, k: Tensor, v: Optional[Tensor], sink: Optional[Tensor], captures: Sequence[Tensor],
                  call: PagedCall) -> None:
    """TypeError and ValueError for what the library cannot see, or relies on."""
    check_kinds(q, k, v, sink, captures, call)
    check_option_kinds({"max_s_q": call.max_s_q, "max_s_kv": call.max_s_kv})
    if v is not None and k.shape[:-1] != v.shape[:-1]:
        raise ValueError(f"v_pages has shape {list(v.shape)}: accepted is that of k_pages, {list(k.shape)}, but for d_v")
    _check_scale_shapes(k, v, _PAGES, call)
    if call.block_table is not None and k.shape[1 if call.layout == "NHD" else 2] == 0:
        raise ValueError(f"k_pages has shape {list(k.shape)}: accepted is a page_size from 1 on")
    b = call.seqused_kv.shape[0]
    if call.cu_seqlens_q is None:
        _check_count("seqused_kv", call.seqused_kv, q.shape[0], "the b of q")
    else:
        _check_count("cu_seqlens_q", call.cu_seqlens_q, b + 1, "one more than in seqused_kv")
    for name, t in (("seqused_q", call.seqused_q), ("batch_index", call.batch_index), ("seq_begin", call.seq_begin)):
        _check_count(name, t, b, "as in seqused_kv")
    if call.block_table is None and call.batch_index is None and k.shape[0] != b:
        raise ValueError(f"k_pages has {k.shape[0]} rows: accepted without block_table and batch_index are {b}, as in seqused_kv")


_NEW = ("[b, h_kv, s_new, d]", "[total_new, h_kv, d] with cu_seqlens_k_new")
_WIDE = (torch.int32, torch.int64)


def _check_new_values(k: Tensor, v: Optional[Tensor], k_cache: Tensor, v_cache: Optional[Tensor], call: AppendCall) -> None:
    """That there is a v, or that rows of the cache have it."""
    latent = isinstance(k_cache, Tensor) and k_cache.dtype == torch.float8_e4m3fn and k_cache.shape[-1] == LATENT[2]
    if latent and v is None and v_cache is None:
        if k.shape[-1] != LATENT[0]:
            raise ValueError(f"k has shape {list(k.shape)}: accepted for rows of {LATENT[2]} bytes are {LATENT[0]} columns")
        return
    for name, t in (("v", v), ("v_cache", v_cache)):
        if t is None:
            raise TypeError(f"{name} is None: accepted is a torch.Tensor; for None k_cache has rows of {LATENT[2]} bytes, of "
                            "torch.float8_e4m3fn, and v and v_cache are None")
    assert v is not None and v_cache is not None
    _check_main("v", v, (_NEW[4 - k.dim()],), k, "k")
    _check_cache("v_cache", v_cache, call.layout, k, "k")


def check_append_kinds(k: Tensor, v: Optional[Tensor], k_cache: Tensor, v_cache: Optional[Tensor], q: Optional[Tensor],
                       call: AppendCall) -> None:
    """Of an append: TypeError and ValueError for what needs no sizes."""
    check_layout(call.layout)
    _check_main("k", k, _NEW)
    _check_cache("k_cache", k_cache, call.layout, k, "k")
    _check_new_values(k, v, k_cache, v_cache, call)
    _check_scales(k_cache, v_cache, _CACHES, call, k, "k")
    if call.scales_given and call.k_scale is None and call.v_scale is None and v is not None:
        raise ValueError("scales_given is True: accepted is False without a cache of 8 bits")
    if k.device.type not in ("cpu", "cuda", "meta"):
        raise ValueError(f"k is on {k.device}: accepted are cpu and cuda")
    if q is not None:
        _check_main("q", q, (_NEW[4 - k.dim()].replace("kv", "q"),), k, "k")
        if not call.rotary_dims:
            raise ValueError("q is given: accepted is None without a rotary embedding, which alone changes q")
    for name, t in (("seqused_kv", call.seqused_kv), ("cu_seqlens_k_new", call.cu_seqlens_k_new),
                    ("batch_index", call.batch_index)):
        _check_numbers(name, t, k)
    _check_numbers("block_table", call.block_table, k, 2)
    _check_numbers("slots", call.slots, k, dtypes=_WIDE)
    _check_numbers("positions", call.positions, k, dtypes=_WIDE)
    if call.positions is not None and not call.rotary_dims:
        raise ValueError("positions is given: accepted is None without a rotary embedding")
    if (call.rotary_cos is None) != (call.rotary_sin is None):
        raise ValueError("rotary_cos and rotary_sin: accepted are both or none")
    for name, t in (("rotary_cos", call.rotary_cos), ("rotary_sin", call.rotary_sin)):
        if t is None:
            continue
        check_strided(name, t)
        if t.dtype not in {torch.float32, k.dtype}:
            raise TypeError(f"{name} is {t.dtype}: accepted are torch.float32 and what k is, {k.dtype}")
        if t.dim() != 2 or not t.is_contiguous():
            raise ValueError(f"{name} has shape {list(t.shape)} and strides {list(t.stride())}: accepted is a contiguous "
                             "[positions, rotary_dims / 2]")
        check_strided(name, t, k, "k")


def check_append(k: Tensor, v: Optional[Tensor], k_cache: Tensor, v_cache: Optional[Tensor], q: Optional[Tensor],
                 call: AppendCall) -> None:
    """TypeError and ValueError for what the library cannot see, or relies on."""
    check_append_kinds(k, v, k_cache, v_cache, q, call)
    _check_scale_shapes(k_cache, v_cache, _CACHES, call)
    packed = k.dim() == 3
    rows = k.shape[0] if packed else k.shape[0] * k.shape[2]
    if call.cu_seqlens_k_new is not None and not packed:
        raise ValueError("cu_seqlens_k_new is given: accepted is None with a k of [b, h_kv, s_new, d]")
    reads_lengths = call.slots is None or (call.rotary_dims > 0 and call.positions is None)
    if reads_lengths and call.seqused_kv is None:
        raise ValueError("seqused_kv is None: accepted is a torch.Tensor, unless slots say where rows go, and positions where "
                         "they stand")
    if reads_lengths and packed and call.cu_seqlens_k_new is None:
        raise ValueError("cu_seqlens_k_new is None: accepted is a torch.Tensor with a k of [total_new, h_kv, d]")
    b = k.shape[0] if not packed else call.cu_seqlens_k_new.shape[0] - 1 if call.cu_seqlens_k_new is not None else None
    if b is not None:
        _check_count("seqused_kv", call.seqused_kv, b, "the number of requests")
        _check_count("batch_index", call.batch_index, b, "the number of requests")
    _check_count("slots", call.slots, rows, "the new rows")
    _check_count("positions", call.positions, rows, "the new rows")
