"""The structs of the C ABI (fa/fa.h), field by field."""

from __future__ import annotations

import ctypes
from typing import Any

OK, INVALID_ARGUMENT, UNSUPPORTED, NO_DRIVER, NO_COMPILER = 0, 1, 2, 3, 4
COMPILE_FAILED, CUDA, OUT_OF_MEMORY, IO, CACHE_MISS, INTERNAL, NOT_FINITE = 5, 6, 7, 8, 9, 10, 11

F16, BF16, F32, F64, I32, E4M3, I8, E5M2, U4X2 = range(9)
DEVICE_CURRENT, DEVICE_CUDA, DEVICE_HOST = 0, 1, 2
CONTIGUOUS = -1  # the page_size of a KV cache that is not in pages

_Pointer = ctypes.POINTER


class Struct(ctypes.Structure):
    """Every struct that may grow begins with its own size."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(struct_size=ctypes.sizeof(type(self)), **fields)


def _many(names: str, kind: Any) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class KernelOverride(Struct):
    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        *_many("family tile_m tile_n warps stages q_in_registers loop_bodies pack_gqa splits q_buffers take_turns warps_n "
               "affine_product exact_max affine_reach", ctypes.c_int32),
        *_many("kernel text", ctypes.c_char_p),  # "sm90", "tile_m=192": what new fields are fixed by
    ]


class Capture(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("dtype", ctypes.c_int32), ("requires_grad", ctypes.c_int32)]


class Function(Struct):
    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("capture_count", ctypes.c_uint32),
        ("expression", ctypes.c_char_p),
        ("captures", _Pointer(Capture)),
    ]


class Config(Struct):
    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        *_many("head_dim head_dim_v dtype has_scale", ctypes.c_int32),
        ("scale", ctypes.c_float),
        *_many("causal causal_align deterministic cache_mode compile host_f64", ctypes.c_int32),
        ("cache_directory", ctypes.c_char_p),
        ("kernel", _Pointer(KernelOverride)),
        ("kernel_backward", _Pointer(KernelOverride)),
        ("cache_packs", _Pointer(ctypes.c_char_p)),
        ("cache_pack_count", ctypes.c_uint64),
        *_many("cache_max_bytes cache_max_entries", ctypes.c_int64),
        ("cache_compilers", ctypes.c_char_p),
        *_many("on_compile on_compile_user", ctypes.c_void_p),
        *_many("cache_keep_source tune varlen zero_padding check_sequences", ctypes.c_int32),
        ("dropout", ctypes.c_float),
        ("sink", ctypes.c_int32),
        ("score", _Pointer(Function)),
        ("mask", _Pointer(Function)),
        *_many("has_window_left has_window_right", ctypes.c_int32),
        *_many("window_left window_right chunk", ctypes.c_int64),
        ("cache_pack_sha256", _Pointer(ctypes.c_char_p)),
        ("page_size", ctypes.c_int64),
        *_many("accumulate value_in_key", ctypes.c_int32),
        *_many("has_k_dtype k_dtype has_v_dtype v_dtype", ctypes.c_int32),
        *_many("invariance debug has_o_dtype o_dtype group_size key_scales value_scales precise", ctypes.c_int32),
        *_many("max_logit max_logit_by_head entropy column_sums top_keys reserved entropy_gradient max_logit_gradient "
               "column_sums_gradient reserved_2", ctypes.c_int32),
    ]


class Device(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int32), ("ordinal", ctypes.c_int32)]


class Tensor(Struct):
    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("dtype", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("flags", ctypes.c_uint32),
        ("data", ctypes.c_void_p),
        ("shape", ctypes.c_int64 * 4),
        ("strides", ctypes.c_int64 * 4),
    ]


TENSOR_READ_ONLY = 1


class Sequences(Struct):
    _fields_ = [
        *_many("struct_size reserved", ctypes.c_uint32),
        ("b", ctypes.c_int64),
        *_many("cu_seqlens_q cu_seqlens_kv seqused_q seqused_kv", ctypes.c_void_p),
        *_many("max_s_q max_s_kv", ctypes.c_int64),
    ]


class PagedCache(Struct):
    _fields_ = [
        *_many("struct_size reserved", ctypes.c_uint32),
        ("block_table", _Pointer(Tensor)),
        *_many("batch_index seq_begin", ctypes.c_void_p),
    ]


class DropoutState(Struct):
    _fields_ = [
        *_many("struct_size reserved", ctypes.c_uint32),
        *_many("seed offset", ctypes.c_uint64),
        ("device", ctypes.c_void_p),
    ]


class ShardPlace(Struct):
    _fields_ = [
        *_many("struct_size reserved", ctypes.c_uint32),
        *_many("b h_q q kv q_step kv_step whole_b whole_h_q whole_s_q whole_s_kv", ctypes.c_int64),
        ("begin", ctypes.c_void_p),
    ]


class Captured(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("tensor", _Pointer(Tensor)), ("number", ctypes.c_double)]


class MaskTiles(Struct):
    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("filled", ctypes.c_int32),
        ("data", ctypes.c_void_p),
        ("size", ctypes.c_size_t),
    ]


_CAPTURES: list[tuple[str, Any]] = [("captures", _Pointer(Captured)), ("capture_count", ctypes.c_uint64)]
_VARIANTS: list[tuple[str, Any]] = [
    ("sequences", _Pointer(Sequences)),
    ("dropout", _Pointer(DropoutState)),
    *_CAPTURES,
    ("sink", _Pointer(Tensor)),
    ("tiles", _Pointer(MaskTiles)),
]
_HEAD: list[tuple[str, Any]] = _many("struct_size reserved", ctypes.c_uint32)
_SHARD: list[tuple[str, Any]] = [("place", _Pointer(ShardPlace)), ("max_multiprocessors", ctypes.c_int32),
                                 ("reserved_2", ctypes.c_uint32)]


class ScheduleMemory(Struct):
    _fields_ = [*_HEAD, ("data", ctypes.c_void_p), ("size", ctypes.c_size_t)]


class SharedPrefix(ctypes.Structure):
    _fields_ = [("block_table", _Pointer(Tensor)), *_many("cu_rows lengths begin", ctypes.c_void_p),
                ("positions", _Pointer(Tensor)), *_many("max_rows max_length", ctypes.c_int64)]


class SharedPrefixShape(ctypes.Structure):
    _fields_ = _many("groups max_rows s_kv begin", ctypes.c_int64)


class ForwardInputs(Struct):
    _fields_ = [*_HEAD, *_many("q k v", _Pointer(Tensor)), *_VARIANTS, ("cache", _Pointer(PagedCache)),
                ("schedule", _Pointer(ScheduleMemory)), ("prefixes", _Pointer(SharedPrefix)),
                ("prefix_count", ctypes.c_uint64), *_many("k_scale v_scale q_scale", _Pointer(Tensor)), *_SHARD,
                ("row_bias", _Pointer(Tensor))]


class ProbabilityDump(Struct):
    _fields_ = [*_HEAD, ("p", _Pointer(Tensor)), *_many("b h", ctypes.c_int64)]


class ForwardOutputs(Struct):
    _fields_ = [*_HEAD, *_many("o lse max_logit entropy column_sums", _Pointer(Tensor)), ("dump", _Pointer(ProbabilityDump)),
                ("top_keys", _Pointer(Tensor))]


class ErrorLocation(Struct):
    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("index_count", ctypes.c_int32),
        *_many("tensor result", ctypes.c_char_p),
        ("value", ctypes.c_double),
        *_many("b h q kv d", ctypes.c_int64),
        ("index", ctypes.c_int64 * 4),
    ]


class BackwardInputs(Struct):
    _fields_ = [*_HEAD, *_many("q k v o lse dout dlse", _Pointer(Tensor)), *_VARIANTS, *_SHARD,
                *_many("entropy dentropy dmax_logit dcolumn_sums", _Pointer(Tensor))]


class BackwardOutputs(Struct):
    _fields_ = [*_HEAD, *_many("dq dk dv", _Pointer(Tensor)), *_CAPTURES, ("dsink", _Pointer(Tensor))]


class RotaryEmbedding(Struct):
    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        *_many("dims interleaved", ctypes.c_int32),
        ("reserved", ctypes.c_uint32),
        ("base", ctypes.c_double),
        *_many("cos sin", _Pointer(Tensor)),
        *_many("positions positions_64", ctypes.c_void_p),
    ]


class AppendInputs(Struct):
    _fields_ = [
        *_HEAD,
        *_many("k v k_cache v_cache", _Pointer(Tensor)),
        ("cache", _Pointer(PagedCache)),
        ("b", ctypes.c_int64),
        *_many("cu_seqlens_k_new seqused_kv slots slots_64", ctypes.c_void_p),
        ("rotary", _Pointer(RotaryEmbedding)),
        *_many("q q_out k_scale v_scale", _Pointer(Tensor)),
        *_many("scales_given reserved_after_scales_given", ctypes.c_int32),
    ]


class AppendShape(Struct):
    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        *_many("rotary_dims interleaved has_table table_dtype unaligned scales_given reserved", ctypes.c_int32),
    ]


class State(ctypes.Structure):
    _fields_ = [*_many("o lse", _Pointer(Tensor))]


class QuantizeInputs(Struct):
    _fields_ = [*_HEAD,
                *_many("q k v q_codes k_codes v_codes q_scale k_scale v_scale k_mean row_bias", _Pointer(Tensor)),
                *_many("scales_given mean_given", ctypes.c_int32)]


class MergeInputs(Struct):
    _fields_ = [
        *_many("struct_size sum", ctypes.c_uint32),
        ("states", _Pointer(State)),
        ("state_count", ctypes.c_uint64),
        *_many("stacked stride_o stride_lse", ctypes.c_int64),
        ("sink", _Pointer(Tensor)),
    ]


class MergeShape(Struct):
    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        *_many("has_states_dtype states_dtype mixed has_result_dtype result_dtype unaligned sum", ctypes.c_int32),
    ]


class Workspace(Struct):
    _fields_ = [*_HEAD, ("data", ctypes.c_void_p), ("size", ctypes.c_size_t)]


class Shape(Struct):
    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("unaligned", ctypes.c_int32),
        *_many("b h_q h_kv s_q s_kv total_q total_kv", ctypes.c_int64),
        *_many("without_dq without_dk without_dv placed strided bounded place_in_memory", ctypes.c_int32),
        ("reserved", ctypes.c_uint32),
    ]


class KernelInfo(Struct):
    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        *_many("registers local_bytes shared_bytes threads reserved", ctypes.c_int32),
        *_many("compile_ms load_ms", ctypes.c_double),
        ("name", ctypes.c_char * 64),
        ("origin", ctypes.c_char * 16),
        ("spec", ctypes.c_char * 512),
        ("chosen_by", ctypes.c_char * 16),
    ]


class CacheCounters(Struct):
    _fields_ = [
        *_HEAD,
        *_many("memory_hits pack_hits disk_hits compiles damaged unaccepted publish_failures evictions", ctypes.c_uint64),
    ]


class ScheduleInputs(Struct):
    _fields_ = [
        *_HEAD,
        ("limits", _Pointer(Shape)),
        ("sequences", _Pointer(Sequences)),
        ("seq_begin", ctypes.c_void_p),
    ]
