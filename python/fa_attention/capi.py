"""The C ABI (fa/fa.h) from Python, by ctypes alone: handles, calls with preallocated outputs, facts about kernels.

This is the layer below `fa_attention.attention`, for whoever wants to hold handles and bind calls. Arrays are whatever
`fa_attention` accepts: PyTorch tensors, NumPy arrays, and what has DLPack or the array interface.
"""

from __future__ import annotations

import ctypes
import numbers
import os
from typing import Any, Callable, Iterable, Mapping, Optional, Sequence, Union

from . import _abi, _views
from ._abi import CONTIGUOUS, DEVICE_CUDA, DEVICE_CURRENT, DEVICE_HOST
from ._errors import Error, Unsupported
from ._library import Library, load
from ._views import aligned

__all__ = ["Attention", "CACHE_MODES", "COMPILE_POLICIES", "CONTIGUOUS", "DEVICE_CUDA", "DEVICE_CURRENT", "DEVICE_HOST", "Error",
           "FAMILIES", "INVARIANCES", "Library", "TUNE_POLICIES", "Unsupported", "aligned", "append_shape", "dropout_state",
           "find_append_kernel", "find_kernel", "find_merge_kernel", "function", "load", "mask_tiles", "merge_shape",
           "paged_cache", "requests", "rotary_embedding", "schedule_memory", "sequences", "shard_place"]

FAMILIES = {"automatic": 0, "sm80": 1, "sm90": 2}
CACHE_MODES = {"disk": 0, "memory": 1}
COMPILE_POLICIES = {"allow": 0, "never": 1, "background": 2}
INVARIANCES = {"none": 0, "batch": 1, "rows": 2}
MAX_LOGITS = {"none": 0, "softmax": 1, "scaled": 2}
COLUMN_SUMS = {"none": 0, "query_heads": 1, "kv_heads": 2}
TUNE_POLICIES = {"default": 0, "off": 1, "cached": 2, "on": 3}


def _number(name: str, table: Mapping[str, int], value: object) -> int:
    if str(value) not in table:
        raise ValueError(f"{name} is {value}: accepted are {', '.join(table)}")
    return table[str(value)]


def _int32(name: str, value: Any) -> int:
    """For fields of 32 bits, which ctypes would cut."""
    if not -2**31 <= int(value) < 2**31:
        raise ValueError(f"{name} is {value}: accepted are integers of 32 bits")
    return int(value)


def _pointer(name: str, array: Any) -> Any:
    """NULL for None."""
    return ctypes.pointer(_views.tensor(name, array)) if array is not None else None


def _pointers(**arrays: Any) -> dict[str, Any]:
    return {name: _pointer(name, array) for name, array in arrays.items()}


def _reference(struct: Any) -> Any:
    return ctypes.pointer(struct) if struct is not None else None


def _dump(dump: Optional[tuple[Any, int, int]]) -> Any:
    if dump is None:
        return None
    p, b, h = dump
    return _reference(_abi.ProbabilityDump(p=_pointer("dump", p), b=int(b), h=int(h)))


def sequences(cu_seqlens_q: Any, cu_seqlens_kv: Any, seqused_q: Any = None, seqused_kv: Any = None, max_s_q: int = 0,
              max_s_kv: int = 0) -> _abi.Sequences:
    """Where the sequences of a packed batch lie, by int32 arrays on the attention's device, which it keeps alive:
    cu_seqlens_* [b + 1], seqused_* [b]. max_s_*: the longest, 0 where that is not known."""
    starts = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_kv": cu_seqlens_kv}
    fields = {name: _views.address(name, t, "int32", 1) for name, t in starts.items()}
    if None in fields.values():
        raise ValueError("cu_seqlens_q and cu_seqlens_kv: both are needed")
    counts = {name: _views.view(name, t).elements for name, t in starts.items()}
    b = counts["cu_seqlens_q"] - 1
    if counts["cu_seqlens_kv"] != b + 1:
        raise ValueError(f"cu_seqlens_kv has {counts['cu_seqlens_kv']} elements: accepted are {b + 1}, as in cu_seqlens_q")
    used = {"seqused_q": seqused_q, "seqused_kv": seqused_kv}
    fields.update({name: _views.address(name, t, "int32", b) for name, t in used.items()})
    result = _abi.Sequences(b=b, max_s_q=max_s_q, max_s_kv=max_s_kv, **fields)
    result.tensors = (cu_seqlens_q, cu_seqlens_kv, seqused_q, seqused_kv)
    return result


def requests(seqused_kv: Any, cu_seqlens_q: Any = None, seqused_q: Any = None, max_s_q: int = 0,
             max_s_kv: int = 0) -> _abi.Sequences:
    """The lengths of requests over pages, by int32 arrays on the attention's device, which it keeps alive: seqused_kv [b],
    new tokens counted, and of packed queries cu_seqlens_q [b + 1] and seqused_q [b]."""
    b = _views.view("seqused_kv", seqused_kv).elements
    result = _abi.Sequences(
        b=b, max_s_q=max_s_q, max_s_kv=max_s_kv, seqused_kv=_views.address("seqused_kv", seqused_kv, "int32", b),
        cu_seqlens_q=_views.address("cu_seqlens_q", cu_seqlens_q, "int32", b + 1),
        seqused_q=_views.address("seqused_q", seqused_q, "int32", b))
    result.tensors = (seqused_kv, cu_seqlens_q, seqused_q)
    return result


def paged_cache(block_table: Any = None, batch_index: Any = None, seq_begin: Any = None) -> _abi.PagedCache:
    """Where the pages of requests are, by int32 arrays on the attention's device, which it keeps alive: block_table [rows,
    max_pages], batch_index [b] and seq_begin [b]. Of a contiguous cache there is no block_table."""
    fields = {name: _views.address(name, t, "int32", _views.view(name, t).elements) if t is not None else None
              for name, t in {"batch_index": batch_index, "seq_begin": seq_begin}.items()}
    result = _abi.PagedCache(**_pointers(block_table=block_table), **fields)
    result.tensors = (block_table, batch_index, seq_begin)
    return result


def shared_prefix(block_table: Any, cu_rows: Any, lengths: Any, begin: Any = None, positions: Any = None, max_rows: int = 0,
                  max_length: int = 0) -> _abi.SharedPrefix:
    """A level of prefixes that requests over pages share, by int32 arrays on the attention's device, which it keeps alive:
    block_table [groups, max_pages], cu_rows [groups + 1] of rows of q, lengths [groups] and begin [groups], the positions
    where a prefix ends and begins, and with a window or chunk positions [groups, max_rows], those of the rows."""
    groups = _views.view("lengths", lengths).elements
    result = _abi.SharedPrefix(
        block_table=_pointer("block_table", block_table), cu_rows=_views.address("cu_rows", cu_rows, "int32", groups + 1),
        lengths=_views.address("lengths", lengths, "int32", groups),
        begin=_views.address("begin", begin, "int32", groups) if begin is not None else None,
        positions=_pointer("positions", positions), max_rows=max_rows, max_length=max_length)
    result.tensors = (block_table, cu_rows, lengths, begin, positions)
    return result


def _prefixes(levels: Sequence[_abi.SharedPrefix]) -> dict[str, Any]:
    return {"prefixes": (_abi.SharedPrefix * len(levels))(*levels), "prefix_count": len(levels)} if levels else {}


def _positions(name: str, array: Any) -> dict[str, Any]:
    """The two fields for an array of int32 or int64, of which it takes one."""
    if array is None:
        return {}
    wide = "int64" in str(array.dtype)
    elements = _views.view(name, array).elements
    return {f"{name}_64" if wide else name: _views.address(name, array, "int64" if wide else "int32", elements)}


def rotary_embedding(dims: int, base: float = 0.0, interleaved: bool = False, cos: Any = None, sin: Any = None,
                     positions: Any = None) -> _abi.RotaryEmbedding:
    """What `bind_append` turns keys and queries by, in their first `dims` columns: angles of `base` (0: 10000), or cos and
    sin [positions, dims / 2]. positions: int32 or int64 [rows], where each new row stands; None: as seqused_kv says. It
    keeps the arrays alive."""
    result = _abi.RotaryEmbedding(dims=_int32("dims", dims), interleaved=int(interleaved), base=float(base),
                                  **_pointers(cos=cos, sin=sin), **_positions("positions", positions))
    result.tensors = (cos, sin, positions)
    return result


def dropout_state(seed: int = 0, offset: int = 0, device: Any = None) -> _abi.DropoutState:
    """`device`: an int64 array of seed and offset on the attention's device, which counts instead of the numbers and is
    kept alive."""
    result = _abi.DropoutState(seed=seed, offset=offset, device=_views.address("device", device, "int64", 2))
    result.tensor = device
    return result


def shard_place(b: int = 0, h_q: int = 0, q: int = 0, kv: int = 0, q_step: int = 1, kv_step: int = 1, whole_b: int = 0,
                whole_h_q: int = 0, whole_s_q: int = 0, whole_s_kv: int = 0, begin: Any = None) -> _abi.ShardPlace:
    """Where the arrays of a call stand in a larger attention (docs/shards.md): its first batch entry, query head, row and key,
    the steps between rows and between keys, and the sizes of the whole; 0: it ends with the call's own. begin: an int64 array
    of b, h_q, q and kv on the attention's device, which counts instead of the numbers and is kept alive."""
    result = _abi.ShardPlace(b=b, h_q=h_q, q=q, kv=kv, q_step=q_step, kv_step=kv_step, whole_b=whole_b, whole_h_q=whole_h_q,
                             whole_s_q=whole_s_q, whole_s_kv=whole_s_kv, begin=_views.address("begin", begin, "int64", 4))
    result.tensor = begin
    return result


def _declared(name: str, dtype: object, requires_grad: bool = False) -> _abi.Capture:
    return _abi.Capture(name=name.encode(), dtype=_views.dtype_code(f"dtype of capture {name}", dtype),
                        requires_grad=int(bool(requires_grad)))


def function(expression: str, captures: Iterable[Sequence[Any]] = ()) -> _abi.Function:
    """A score or mask function (docs/variants.md). captures: (name, dtype) or (name, dtype, requires_grad), which has a
    gradient where that is true. A dtype is one of any library, or its name."""
    given = list(captures)
    for capture in given:
        if not isinstance(capture, (tuple, list)) or len(capture) not in (2, 3):
            raise ValueError(f"capture {capture!r}: accepted are (name, dtype) and (name, dtype, requires_grad)")
    declared = [_declared(*capture) for capture in given]
    return _abi.Function(expression=expression.encode(), captures=(_abi.Capture * len(declared))(*declared),
                         capture_count=len(declared))


def mask_tiles(memory: Any, filled: bool = False) -> _abi.MaskTiles:
    """Memory for the tiles of a mask function, an array, which it keeps alive."""
    data, size = _views.memory("memory", memory)
    result = _abi.MaskTiles(data=data, size=size, filled=int(filled))
    result.tensor = memory
    return result


def schedule_memory(memory: Any) -> _abi.ScheduleMemory:
    """Memory for a schedule of calls over pages, an array of `schedule_size` bytes, which it keeps alive."""
    data, size = _views.memory("memory", memory)
    result = _abi.ScheduleMemory(data=data, size=size)
    result.tensor = memory
    return result


def captured(values: Optional[Mapping[str, Any]]) -> dict[str, Any]:
    """The fields for captures, or their gradients, by name: arrays or numbers."""
    items = [_abi.Captured(name=name.encode(), number=float(value)) if isinstance(value, numbers.Real)
             else _abi.Captured(name=name.encode(), tensor=_pointer(name, value)) for name, value in (values or {}).items()]
    return {"captures": (_abi.Captured * len(items))(*items), "capture_count": len(items)}


def _variants(sequences: Optional[_abi.Sequences], dropout: Optional[_abi.DropoutState], captures: Optional[Mapping[str, Any]],
              sink: Any, tiles: Optional[_abi.MaskTiles]) -> dict[str, Any]:
    return {"sequences": _reference(sequences), "dropout": _reference(dropout), "sink": _pointer("sink", sink),
            "tiles": _reference(tiles), **captured(captures)}


def _shape(sizes: Sequence[int], rows_aligned: bool, without: Sequence[str] = (), kinds: Sequence[str] = ()) -> _abi.Shape:
    names = ("b", "h_q", "h_kv", "s_q", "s_kv", "total_q", "total_kv")
    for kind in kinds:
        if kind not in ("placed", "strided", "bounded", "place_in_memory"):
            raise ValueError(f"kinds has {kind!r}: accepted are 'placed', 'strided', 'bounded' and 'place_in_memory'")
    return _abi.Shape(unaligned=int(not rows_aligned), **dict(zip(names, sizes)), **{f"without_{name}": 1 for name in without},
                      **dict.fromkeys(kinds, 1))


def append_shape(rotary_dims: int = 0, interleaved: bool = False, table_dtype: Optional[object] = None,
                 rows_aligned: bool = True, scales_given: bool = False) -> _abi.AppendShape:
    """What of an append picks its kernel: the rotary embedding, with the dtype of its cos and sin where they are given, and
    whether scales of a cache of 8 bits are given."""
    table = {} if table_dtype is None else {"has_table": 1, "table_dtype": _views.dtype_code("table_dtype", table_dtype)}
    return _abi.AppendShape(rotary_dims=_int32("rotary_dims", rotary_dims), interleaved=int(interleaved),
                            unaligned=int(not rows_aligned), scales_given=int(scales_given), **table)


def merge_shape(states_dtype: Optional[object] = None, result_dtype: Optional[object] = None, mixed: bool = False,
                rows_aligned: bool = True, add: bool = False) -> _abi.MergeShape:
    """What of a merge picks its kernel: the dtype of all o to merge, and of the merged one; None: the attention's. mixed: some
    are float32, the others of the attention's dtype. add: sums without weights."""
    given = {"states_dtype": states_dtype, "result_dtype": result_dtype}
    fields = {name: _views.dtype_code(name, dtype) for name, dtype in given.items() if dtype is not None}
    return _abi.MergeShape(mixed=int(mixed), unaligned=int(not rows_aligned), sum=int(add), **fields,
                           **{f"has_{name}": 1 for name in fields})


def _override(family: str, text: str) -> _abi.KernelOverride:
    """What is fixed of a kernel; family: of FAMILIES, or the name of a kernel."""
    if isinstance(family, str) and family not in FAMILIES:
        return _abi.KernelOverride(kernel=family.encode(), text=text.encode())
    return _abi.KernelOverride(family=_number("family", FAMILIES, family), text=text.encode())


def make_config(head_dim: int, dtype: object, causal: bool = False, head_dim_v: int = 0, scale: Optional[float] = None,
                top_left: bool = False, family: str = "automatic", deterministic: bool = False, tune: str = "default",
                backward_family: str = "automatic", varlen: bool = False, zero_padding: bool = False,
                check_sequences: bool = False, dropout: float = 0.0, score: Optional[_abi.Function] = None,
                mask: Optional[_abi.Function] = None, window_left: Optional[int] = None, window_right: Optional[int] = None,
                chunk: int = 0, sink: bool = False, page_size: int = 0, accumulate: bool = False,
                value_in_key: int = 0, k_dtype: Optional[object] = None, v_dtype: Optional[object] = None,
                invariance: str = "none", debug: bool = False, kernel: str = "", backward_kernel: str = "",
                cache_mode: str = "disk", cache_directory: str = "", compile: str = "allow",
                host_f64: bool = False, o_dtype: Optional[object] = None, group_size: int = 0,
                key_scales: bool = False, value_scales: bool = False, precise: bool = False, max_logit: str = "none",
                max_logit_by_head: bool = False, entropy: bool = False, column_sums: str = "none",
                top_keys: int = 0, entropy_gradient: bool = False, max_logit_gradient: bool = False,
                column_sums_gradient: bool = False) -> _abi.Config:
    """The fields of fa_config; score, mask: what `function` makes; page_size: k and v are pages [pages, h_kv, page_size, d], -1:
    a contiguous cache [rows, h_kv, s_max, d]; accumulate: forward adds to what o and lse hold; value_in_key: V is the first so
    many columns of K, and v None; k_dtype, v_dtype: what K, and V, of a cache are stored as, "float8_e4m3fn", "int8" or
    "uint8", bytes of two codes of 4 bits; group_size: columns of these that share a scale and an offset; invariance ("batch",
    "rows"): what the bits of o and lse are a function of; debug: kernels that check waits and addresses, and are slow; family,
    backward_family: "sm80", "sm90" or a kernel's name, "sm80_fp8"; kernel, backward_kernel: what of a kernel is fixed, in words,
    "tile_m=192 stages=2";
    cache_mode: where compiled kernels are kept; compile: whether some may be compiled, "allow", "never", or "background",
    while another kernel serves; host_f64: the host
    device accumulates in double; o_dtype: with a dtype of "float8_e4m3fn" or "float8_e5m2", or "int8", of q and k beside a v of
    "float8_e4m3fn", what o is of; key_scales, value_scales: each key has a scale for its row of k, of v, then; precise: P and V
    of these are multiplied as f16; max_logit ("softmax", "scaled"), max_logit_by_head, entropy, column_sums ("query_heads",
    "kv_heads"), top_keys (how many of each head): what forward tells of scores and of P; entropy_gradient,
    max_logit_gradient, column_sums_gradient: backward is given gradients of these."""
    override, backward_override = _override(family, kernel), _override(backward_family, backward_kernel)
    return _abi.Config(
        head_dim=_int32("head_dim", head_dim), head_dim_v=_int32("head_dim_v", head_dim_v),
        dtype=_views.dtype_code("dtype", dtype), causal=int(causal),
        causal_align=int(top_left), has_scale=int(scale is not None), scale=float(scale or 0.0), deterministic=int(deterministic),
        tune=_number("tune", TUNE_POLICIES, tune), varlen=int(varlen), zero_padding=int(zero_padding),
        check_sequences=int(check_sequences), dropout=float(dropout), score=_reference(score), mask=_reference(mask),
        sink=int(sink), chunk=int(chunk), page_size=int(page_size), accumulate=int(accumulate),
        value_in_key=_int32("value_in_key", value_in_key),
        has_k_dtype=int(k_dtype is not None), k_dtype=0 if k_dtype is None else _views.dtype_code("k_dtype", k_dtype),
        has_v_dtype=int(v_dtype is not None), v_dtype=0 if v_dtype is None else _views.dtype_code("v_dtype", v_dtype),
        invariance=_number("invariance", INVARIANCES, invariance), debug=int(debug), host_f64=int(host_f64),
        cache_mode=_number("cache_mode", CACHE_MODES, cache_mode), compile=_number("compile", COMPILE_POLICIES, compile),
        cache_directory=os.fsencode(cache_directory),
        has_o_dtype=int(o_dtype is not None), o_dtype=0 if o_dtype is None else _views.dtype_code("o_dtype", o_dtype),
        group_size=_int32("group_size", group_size), key_scales=int(key_scales), value_scales=int(value_scales),
        precise=int(precise),
        max_logit=_number("max_logit", MAX_LOGITS, max_logit), max_logit_by_head=int(max_logit_by_head), entropy=int(entropy),
        column_sums=_number("column_sums", COLUMN_SUMS, column_sums), top_keys=_int32("top_keys", top_keys),
        entropy_gradient=int(entropy_gradient), max_logit_gradient=int(max_logit_gradient),
        column_sums_gradient=int(column_sums_gradient),
        has_window_left=int(window_left is not None), window_left=int(window_left or 0),
        has_window_right=int(window_right is not None), window_right=int(window_right or 0), kernel=ctypes.pointer(override),
        kernel_backward=ctypes.pointer(backward_override))


class Attention:
    """An fa_attention for arrays [b, h, s, d] in any memory order, or with varlen [total, h, d].

    `device` is a kind and an ordinal: (DEVICE_CURRENT, 0), (DEVICE_CUDA, n) or (DEVICE_HOST, 0). The other arguments are
    those of `make_config`. Sizes are (b, h_q, h_kv, s_q, s_kv), with varlen also (total_q, total_kv); rows_aligned is what
    `aligned` says of q, k, v, o and, for backward, their gradients. An Attention may be shared by threads.
    """

    def __init__(self, library: Library, head_dim: int, dtype: object, causal: bool = False, head_dim_v: int = 0,
                 scale: Optional[float] = None, top_left: bool = False, family: str = "automatic",
                 device: tuple[int, int] = (DEVICE_CURRENT, 0), **more: Any) -> None:
        self.lib = library
        self._destroy = library.fa.fa_destroy
        if device[0] != DEVICE_HOST:
            library.nvrtc.start()
        config = make_config(head_dim, dtype, causal, head_dim_v, scale, top_left, family, **more)
        handle = ctypes.c_void_p()
        library.call("fa_create", ctypes.addressof(config), _abi.Device(*device), ctypes.addressof(handle))
        self.handle: Optional[int] = handle.value

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            self._destroy(self.handle)

    def _bind(self, name: str, inputs: _abi.Struct, outputs: _abi.Struct, stream: Optional[int], workspace: Any,
              keep: object) -> Callable[[], None]:
        data, size = _views.memory("workspace", workspace) if workspace is not None else (0, 0)
        scratch = _abi.Workspace(data=data, size=size)
        function = getattr(self.lib.fa, name)
        arguments = (self.handle, ctypes.addressof(inputs), ctypes.addressof(outputs), stream or 0,
                     ctypes.addressof(scratch) if workspace is not None else 0)
        library = self.lib

        def run(_keep: object = (keep, workspace, inputs, outputs, scratch, self)) -> None:
            status = function(*arguments)
            if status != 0:
                library.failed(status, lambda: int(function(*arguments)))

        return run

    def bind_forward(self, q: Any, k: Any, v: Any, o: Any, lse: Any = None, stream: Optional[int] = None,
                     workspace: Any = None, sequences: Optional[_abi.Sequences] = None,
                     dropout: Optional[_abi.DropoutState] = None, captures: Optional[Mapping[str, Any]] = None,
                     sink: Any = None, tiles: Optional[_abi.MaskTiles] = None,
                     cache: Optional[_abi.PagedCache] = None, schedule: Optional[_abi.ScheduleMemory] = None,
                     prefixes: Sequence[_abi.SharedPrefix] = (), k_scale: Any = None,
                     v_scale: Any = None, q_scale: Any = None, place: Optional[_abi.ShardPlace] = None,
                     max_multiprocessors: int = 0, max_logit: Any = None, entropy: Any = None,
                     column_sums: Any = None, dump: Optional[tuple[Any, int, int]] = None,
                     row_bias: Any = None, top_keys: Any = None) -> Callable[[], None]:
        """A callable that queues the same forward again and again; it keeps the arrays alive. captures: arrays or numbers
        by name; tiles: what `mask_tiles` makes; cache: what `paged_cache` makes, with `requests` as sequences; schedule: what
        `bind_schedule` fills for the same lengths; prefixes: levels that `shared_prefix` makes; k_scale, v_scale: float32, of
        the rows of k and v without their last axis, where these are stored in 8 bits. Of 8-bit floats they are [b, h_kv], or
        with key_scales, value_scales of the rows; q_scale is [b, h_q, s_q] or [b, h_q]; row_bias, with int8, what is added to
        q k of a row, likewise. place: what `shard_place` makes, of a part of a larger attention; max_multiprocessors: how many
        the attention kernel takes at a time, 0 all; max_logit, entropy, column_sums: float32 arrays, and top_keys an int32
        one, for the statistics that the attention was made with; dump: (p, b, h), of an attention made with `debug`: p
        [s_q, s_kv], float32, gets P of that batch entry and query head."""
        inputs = _abi.ForwardInputs(**_pointers(q=q, k=k, v=v, k_scale=k_scale, v_scale=v_scale, q_scale=q_scale,
                                                row_bias=row_bias),
                                    **_variants(sequences, dropout, captures, sink, tiles), cache=_reference(cache),
                                    schedule=_reference(schedule), **_prefixes(prefixes), place=_reference(place),
                                    max_multiprocessors=_int32("max_multiprocessors", max_multiprocessors))
        outputs = _abi.ForwardOutputs(
            **_pointers(o=o, lse=lse, max_logit=max_logit, entropy=entropy, column_sums=column_sums,
                        top_keys=top_keys), dump=_dump(dump))
        keep = (q, k, dump, v, o, lse, max_logit, entropy, column_sums, top_keys,
                captures, sink, sequences, dropout, tiles, cache, schedule, list(prefixes), k_scale, v_scale,
                q_scale, place, row_bias)
        return self._bind("fa_forward", inputs, outputs, stream, workspace, keep)

    def bind_quantize(self, q: Any = None, k: Any = None, v: Any = None, q_codes: Any = None, k_codes: Any = None,
                      v_codes: Any = None, q_scale: Any = None, k_scale: Any = None, v_scale: Any = None,
                      k_mean: Any = None, row_bias: Any = None, scales_given: bool = False, mean_given: bool = False,
                      stream: Optional[int] = None) -> Callable[[], None]:
        """A callable that makes codes and scales of q, k and v of 16 or 32 bits, of an attention of int8 or float8_e4m3fn; it
        keeps the arrays alive. Scales are float32 [b, h, s]. k_mean: float32 [b, h_kv, d], the mean of k, which is
        subtracted from it; row_bias: float32 [b, h_q, s_q], q times that mean, for `bind_forward`. They are written, unless
        scales_given, or mean_given."""
        arrays = {"q": q, "k": k, "v": v, "q_codes": q_codes, "k_codes": k_codes, "v_codes": v_codes, "q_scale": q_scale,
                  "k_scale": k_scale, "v_scale": v_scale, "k_mean": k_mean, "row_bias": row_bias}
        inputs = _abi.QuantizeInputs(**_pointers(**arrays), scales_given=int(scales_given), mean_given=int(mean_given))
        return self._run("fa_quantize", (ctypes.addressof(inputs), stream or 0), (arrays, inputs))

    def bind_schedule(self, memory: _abi.ScheduleMemory, sizes: Sequence[int], requests: _abi.Sequences,
                      seq_begin: Any = None, rows_aligned: bool = True, stream: Optional[int] = None) -> Callable[[], None]:
        """A callable that shares the keys of requests out among thread blocks, once a step for all layers; it keeps the
        arrays alive. memory: what `schedule_memory` makes, for `bind_forward`. sizes: (b, h_q, h_kv, s_q, s_kv, total_q), the
        limits of the calls; requests: what `requests` makes; seq_begin: int32 [b], that of the cache."""
        limits = _shape(sizes, rows_aligned)
        begin = _views.address("seq_begin", seq_begin, "int32", limits.b) if seq_begin is not None else None
        inputs = _abi.ScheduleInputs(limits=ctypes.pointer(limits), sequences=ctypes.pointer(requests), seq_begin=begin)
        function, library = self.lib.fa.fa_schedule, self.lib
        arguments = (self.handle, ctypes.addressof(inputs), ctypes.addressof(memory), stream or 0)

        def run(_keep: object = (memory, requests, seq_begin, limits, inputs, self)) -> None:
            status = function(*arguments)
            if status != 0:
                library.failed(status, lambda: int(function(*arguments)))

        return run

    def bind_append(self, k: Any, v: Any, k_cache: Any, v_cache: Any, seqused_kv: Any = None,
                    cache: Optional[_abi.PagedCache] = None, cu_seqlens_k_new: Any = None, slots: Any = None,
                    rotary: Optional[_abi.RotaryEmbedding] = None, q: Any = None, q_out: Any = None,
                    stream: Optional[int] = None, k_scale: Any = None, v_scale: Any = None,
                    scales_given: bool = False) -> Callable[[], None]:
        """A callable that writes new keys and values [b, h_kv, s_new, d] into a cache, [b, h_kv, s_max, d] or with page_size
        [pages, h_kv, page_size, d]; it keeps the arrays alive. With cu_seqlens_k_new [b + 1] the new ones are packed,
        [total_new, h_kv, d]. seqused_kv [b]: the keys of each request with the new ones; slots, int32 or int64 [rows]:
        where each row goes instead. rotary: what `rotary_embedding` makes; q and q_out: queries that it turns too. k_scale,
        v_scale: float32, of the rows of a cache of 8 bits, written unless scales_given."""
        rows = {"cu_seqlens_k_new": cu_seqlens_k_new, "seqused_kv": seqused_kv}
        fields = {name: _views.address(name, t, "int32", _views.view(name, t).elements) for name, t in rows.items()
                  if t is not None}
        b = _views.view("cu_seqlens_k_new", cu_seqlens_k_new).elements - 1 if cu_seqlens_k_new is not None else 0
        inputs = _abi.AppendInputs(**_pointers(k=k, v=v, k_cache=k_cache, v_cache=v_cache, q=q, q_out=q_out, k_scale=k_scale,
                                               v_scale=v_scale), b=b, scales_given=int(scales_given),
                                   cache=_reference(cache), rotary=_reference(rotary), **_positions("slots", slots), **fields)
        keep = (k, v, k_cache, v_cache, seqused_kv, cache, cu_seqlens_k_new, slots, rotary, q, q_out, k_scale, v_scale, inputs)
        return self._run("fa_append", (ctypes.addressof(inputs), stream or 0), keep)

    def _run(self, name: str, arguments: tuple[Any, ...], keep: object) -> Callable[[], None]:
        """A callable that makes one call of the library with this attention, again and again."""
        function, library, handle = getattr(self.lib.fa, name), self.lib, self.handle

        def run(_keep: object = (keep, self)) -> None:
            status = function(handle, *arguments)
            if status != 0:
                library.failed(status, lambda: int(function(handle, *arguments)))

        return run

    def bind_merge(self, states: Sequence[tuple[Any, Any]], o: Any, lse: Any = None, sink: Any = None,
                   stream: Optional[int] = None, add: bool = False) -> Callable[[], None]:
        """A callable that merges partial results over different keys, pairs of o [b, h_q, s_q, d_v] and lse [b, h_q, s_q],
        into o and lse; it keeps the arrays alive. At most 16 of them. Each o is of the attention's dtype or float32. The
        results may be arrays of one of the states. sink [h_q]: a logit that joins each row of a head, once. add: o is the
        sum of all o, without weights; every lse is None then."""
        listed = (_abi.State * len(states))(*(_abi.State(**_pointers(o=part, lse=sums)) for part, sums in states))
        inputs = _abi.MergeInputs(states=listed, state_count=len(states), sink=_pointer("sink", sink), sum=int(add))
        outputs = _abi.ForwardOutputs(**_pointers(o=o, lse=lse))
        return self._run("fa_merge", (ctypes.addressof(inputs), ctypes.addressof(outputs), stream or 0),
                         (list(states), o, lse, sink, listed, inputs, outputs))

    def bind_backward(self, q: Any, k: Any, v: Any, o: Any, lse: Any, dout: Any, dq: Any, dk: Any, dv: Any,
                      dlse: Any = None, stream: Optional[int] = None, workspace: Any = None,
                      sequences: Optional[_abi.Sequences] = None, dropout: Optional[_abi.DropoutState] = None,
                      captures: Optional[Mapping[str, Any]] = None, sink: Any = None, tiles: Optional[_abi.MaskTiles] = None,
                      dcaptures: Optional[Mapping[str, Any]] = None, dsink: Any = None,
                      place: Optional[_abi.ShardPlace] = None, max_multiprocessors: int = 0, entropy: Any = None,
                      dentropy: Any = None, dmax_logit: Any = None, dcolumn_sums: Any = None) -> Callable[[], None]:
        """Likewise for backward; dcaptures: fp32 arrays for the gradients of captures, by name. Of dq, dk and dv those that
        are None are not computed. entropy, of forward, dentropy, dmax_logit and dcolumn_sums: of an attention that was made
        with entropy_gradient, max_logit_gradient, column_sums_gradient."""
        inputs = _abi.BackwardInputs(**_pointers(q=q, k=k, v=v, o=o, lse=lse, dout=dout, dlse=dlse, entropy=entropy,
                                                 dentropy=dentropy, dmax_logit=dmax_logit, dcolumn_sums=dcolumn_sums),
                                     **_variants(sequences, dropout, captures, sink, tiles), place=_reference(place),
                                     max_multiprocessors=_int32("max_multiprocessors", max_multiprocessors))
        outputs = _abi.BackwardOutputs(**_pointers(dq=dq, dk=dk, dv=dv, dsink=dsink), **captured(dcaptures))
        keep = (q, k, v, o, lse, dout, dlse, dq, dk, dv, captures, sink, sequences, dropout, tiles, dcaptures, dsink, place,
                entropy, dentropy, dmax_logit, dcolumn_sums)
        return self._bind("fa_backward", inputs, outputs, stream, workspace, keep)

    def _get(self, name: str, result: Any, sizes: Sequence[int], rows_aligned: bool, without: Sequence[str] = (),
             kinds: Sequence[str] = ()) -> Any:
        shape = _shape(sizes, rows_aligned, without, kinds)
        self.lib.call(name, self.handle, ctypes.addressof(shape), ctypes.addressof(result))
        return result

    def _size(self, name: str, sizes: Sequence[int], rows_aligned: bool, without: Sequence[str] = (),
              kinds: Sequence[str] = ()) -> int:
        return int(self._get(name, ctypes.c_size_t(), sizes, rows_aligned, without, kinds).value)

    def workspace_size(self, *sizes: int, rows_aligned: bool = True, kinds: Sequence[str] = ()) -> int:
        """kinds: "placed" of calls that have a `shard_place`, "strided" of one with steps, "bounded" of calls that have
        max_multiprocessors."""
        return self._size("fa_workspace_size", sizes, rows_aligned, (), kinds)

    def backward_workspace_size(self, *sizes: int, rows_aligned: bool = True, without: Sequence[str] = (),
                                kinds: Sequence[str] = ()) -> int:
        """without: of "dq", "dk" and "dv" those that the call does not compute."""
        return self._size("fa_backward_workspace_size", sizes, rows_aligned, without, kinds)

    def _shared(self, name: str, sizes: Sequence[int], prefixes: Sequence[tuple[int, int, int, bool]], rows_aligned: bool,
                *more: int) -> None:
        shape = _shape(sizes, rows_aligned)
        levels = (_abi.SharedPrefixShape * len(prefixes))(*(_abi.SharedPrefixShape(*map(int, level)) for level in prefixes))
        self.lib.call(name, self.handle, ctypes.addressof(shape), ctypes.addressof(levels), len(prefixes), *more)

    def prepare_shared(self, sizes: Sequence[int], prefixes: Sequence[tuple[int, int, int, bool]],
                       rows_aligned: bool = True) -> None:
        """Makes calls with shared prefixes ready, each level (groups, max_rows, s_kv, whether it has a begin)."""
        self._shared("fa_prepare_shared", sizes, prefixes, rows_aligned)

    def shared_workspace_size(self, sizes: Sequence[int], prefixes: Sequence[tuple[int, int, int, bool]],
                              rows_aligned: bool = True) -> int:
        size = ctypes.c_size_t()
        self._shared("fa_shared_workspace_size", sizes, prefixes, rows_aligned, ctypes.addressof(size))
        return int(size.value)

    def prepare(self, *sizes: int, rows_aligned: bool = True, kinds: Sequence[str] = ()) -> None:
        """Compiles and loads what a forward of these sizes needs, so that the call itself can be captured."""
        shape = _shape(sizes, rows_aligned, (), kinds)
        self.lib.call("fa_prepare", self.handle, ctypes.addressof(shape))

    def prepare_async(self, *sizes: int, rows_aligned: bool = True) -> None:
        """`prepare` on a thread of the attention's. Calls meanwhile wait for what they need of it."""
        shape = _shape(sizes, rows_aligned)
        self.lib.call("fa_prepare_async", self.handle, ctypes.addressof(shape))

    def is_ready(self, *sizes: int, rows_aligned: bool = True) -> bool:
        """Whether a forward of these sizes waits for no compiler."""
        shape, ready = _shape(sizes, rows_aligned), ctypes.c_int32()
        self.lib.call("fa_is_ready", self.handle, ctypes.addressof(shape), ctypes.addressof(ready))
        return bool(ready.value)

    def prepare_backward(self, *sizes: int, rows_aligned: bool = True, without: Sequence[str] = (),
                         kinds: Sequence[str] = ()) -> None:
        shape = _shape(sizes, rows_aligned, without, kinds)
        self.lib.call("fa_prepare_backward", self.handle, ctypes.addressof(shape))

    def prepare_append(self, shape: _abi.AppendShape) -> None:
        """Likewise for `bind_append`; shape: what `append_shape` makes."""
        self.lib.call("fa_prepare_append", self.handle, ctypes.addressof(shape))

    def prepare_merge(self, shape: _abi.MergeShape) -> None:
        """Likewise for `bind_merge`; shape: what `merge_shape` makes."""
        self.lib.call("fa_prepare_merge", self.handle, ctypes.addressof(shape))

    def append_kernel_info(self, shape: _abi.AppendShape) -> Any:
        return self._of("fa_append_kernel_info_get", shape, _abi.KernelInfo())

    def merge_kernel_info(self, shape: _abi.MergeShape) -> Any:
        return self._of("fa_merge_kernel_info_get", shape, _abi.KernelInfo())

    def cache_counters(self) -> Any:
        """Compiles and hits by layer since the attention was made."""
        counters = _abi.CacheCounters()
        self.lib.call("fa_cache_counters_get", self.handle, ctypes.addressof(counters))
        return counters

    def _of(self, name: str, shape: _abi.Struct, result: Any) -> Any:
        self.lib.call(name, self.handle, ctypes.addressof(shape), ctypes.addressof(result))
        return result

    def schedule_size(self, *sizes: int, rows_aligned: bool = True) -> int:
        return self._size("fa_schedule_size", sizes, rows_aligned)

    def mask_tiles_size(self, *sizes: int, rows_aligned: bool = True) -> int:
        return self._size("fa_mask_tiles_size", sizes, rows_aligned)

    def backward_mask_tiles_size(self, *sizes: int, rows_aligned: bool = True) -> int:
        return self._size("fa_backward_mask_tiles_size", sizes, rows_aligned)

    def kernel_info(self, *sizes: int, rows_aligned: bool = True, kinds: Sequence[str] = ()) -> Any:
        return self._get("fa_kernel_info_get", _abi.KernelInfo(), sizes, rows_aligned, (), kinds)

    def backward_kernel_info(self, *sizes: int, rows_aligned: bool = True, without: Sequence[str] = (),
                             kinds: Sequence[str] = ()) -> Any:
        return self._get("fa_backward_kernel_info_get", _abi.KernelInfo(), sizes, rows_aligned, without, kinds)


def find_kernel(library: Library, arch: str, sizes: Union[tuple[int, ...], list[int]], head_dim: int, dtype: object,
                backward: bool = False, **more: Any) -> Any:
    """The kernel that serves `sizes` on a GPU of `arch` ("sm_90a"), found in the cache or compiled; needs no GPU. `more`:
    as of `make_config`."""
    name = "fa_find_backward_kernel" if backward else "fa_find_kernel"
    return _find(library, name, arch, head_dim, dtype, _shape(sizes, True), more)


def _find(library: Library, name: str, arch: str, head_dim: int, dtype: object, shape: _abi.Struct, more: Any) -> Any:
    library.nvrtc.start()
    config, info = make_config(head_dim, dtype, **more), _abi.KernelInfo()
    library.call(name, ctypes.addressof(config), ctypes.addressof(shape), arch.encode(), ctypes.addressof(info))
    return info


def find_append_kernel(library: Library, arch: str, shape: _abi.AppendShape, head_dim: int, dtype: object, **more: Any) -> Any:
    """The same for an append; shape: what `append_shape` makes."""
    return _find(library, "fa_find_append_kernel", arch, head_dim, dtype, shape, more)


def find_merge_kernel(library: Library, arch: str, shape: _abi.MergeShape, head_dim: int, dtype: object, **more: Any) -> Any:
    """The same for a merge; shape: what `merge_shape` makes."""
    return _find(library, "fa_find_merge_kernel", arch, head_dim, dtype, shape, more)
