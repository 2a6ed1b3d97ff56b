"""The C ABI of fa (include/fa/fa.h) for PyTorch tensors: no copies, the current stream, no package to install."""

import ctypes
import numbers
import os

DTYPES = {"torch.float16": 0, "torch.bfloat16": 1, "torch.float32": 2, "torch.float64": 3, "torch.int32": 4}
FAMILIES = {"automatic": 0, "sm80": 1, "sm90": 2}
TUNE_POLICIES = {"default": 0, "off": 1, "cached": 2, "on": 3}
DEVICE_CURRENT, DEVICE_CUDA, DEVICE_HOST = 0, 1, 2


class _Struct(ctypes.Structure):
    """Every struct of the ABI starts with its own size."""

    def __init__(self, **fields):
        super().__init__(struct_size=ctypes.sizeof(type(self)), **fields)


class KernelOverride(_Struct):
    _fields_ = [("struct_size", ctypes.c_uint32)] + [
        (name, ctypes.c_int32)
        for name in ("family", "tile_m", "tile_n", "warps", "stages", "q_in_registers", "loop_bodies", "pack_gqa", "splits",
                     "q_buffers", "take_turns", "warps_n", "affine_product", "exact_max", "affine_reach")
    ] + [("kernel", ctypes.c_char_p), ("text", ctypes.c_char_p)]  # "sm90", "tile_m=192": what new fields are fixed by


class Capture(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("dtype", ctypes.c_int32), ("requires_grad", ctypes.c_int32)]


class Function(_Struct):
    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("capture_count", ctypes.c_uint32),
        ("expression", ctypes.c_char_p),
        ("captures", ctypes.POINTER(Capture)),
    ]


class Config(_Struct):
    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("head_dim", ctypes.c_int32),
        ("head_dim_v", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("has_scale", ctypes.c_int32),
        ("scale", ctypes.c_float),
        ("causal", ctypes.c_int32),
        ("causal_align", ctypes.c_int32),
        ("deterministic", ctypes.c_int32),
        ("cache_mode", ctypes.c_int32),
        ("compile", ctypes.c_int32),
        ("host_f64", ctypes.c_int32),
        ("cache_directory", ctypes.c_char_p),
        ("kernel", ctypes.POINTER(KernelOverride)),
        ("kernel_backward", ctypes.POINTER(KernelOverride)),
        ("cache_packs", ctypes.POINTER(ctypes.c_char_p)),
        ("cache_pack_count", ctypes.c_uint64),
        ("cache_max_bytes", ctypes.c_int64),
        ("cache_max_entries", ctypes.c_int64),
        ("cache_compilers", ctypes.c_char_p),
        ("on_compile", ctypes.c_void_p),
        ("on_compile_user", ctypes.c_void_p),
        ("cache_keep_source", ctypes.c_int32),
        ("tune", ctypes.c_int32),
        ("varlen", ctypes.c_int32),
        ("zero_padding", ctypes.c_int32),
        ("check_sequences", ctypes.c_int32),
        ("dropout", ctypes.c_float),
        ("sink", ctypes.c_int32),
        ("score", ctypes.POINTER(Function)),
        ("mask", ctypes.POINTER(Function)),
        ("has_window_left", ctypes.c_int32),
        ("has_window_right", ctypes.c_int32),
        ("window_left", ctypes.c_int64),
        ("window_right", ctypes.c_int64),
        ("chunk", ctypes.c_int64),
        ("cache_pack_sha256", ctypes.POINTER(ctypes.c_char_p)),
    ]


class Device(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int32), ("ordinal", ctypes.c_int32)]


class Tensor(_Struct):
    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("dtype", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("flags", ctypes.c_uint32),
        ("data", ctypes.c_void_p),
        ("shape", ctypes.c_int64 * 4),
        ("strides", ctypes.c_int64 * 4),
    ]


class Sequences(_Struct):
    _fields_ = (
        [("struct_size", ctypes.c_uint32), ("reserved", ctypes.c_uint32), ("b", ctypes.c_int64)]
        + [(name, ctypes.c_void_p) for name in ("cu_seqlens_q", "cu_seqlens_kv", "seqused_q", "seqused_kv")]
        + [("max_s_q", ctypes.c_int64), ("max_s_kv", ctypes.c_int64)]
    )


class DropoutState(_Struct):
    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
        ("seed", ctypes.c_uint64),
        ("offset", ctypes.c_uint64),
        ("device", ctypes.c_void_p),
    ]


class Captured(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("tensor", ctypes.POINTER(Tensor)), ("number", ctypes.c_double)]


class MaskTiles(_Struct):
    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("filled", ctypes.c_int32),
        ("data", ctypes.c_void_p),
        ("size", ctypes.c_size_t),
    ]


_CAPTURES = [("captures", ctypes.POINTER(Captured)), ("capture_count", ctypes.c_uint64)]
_VARIANTS = (
    [("sequences", ctypes.POINTER(Sequences)), ("dropout", ctypes.POINTER(DropoutState))]
    + _CAPTURES
    + [("sink", ctypes.POINTER(Tensor)), ("tiles", ctypes.POINTER(MaskTiles))]
)


class ForwardInputs(_Struct):
    _fields_ = (
        [("struct_size", ctypes.c_uint32), ("reserved", ctypes.c_uint32)]
        + [(name, ctypes.POINTER(Tensor)) for name in ("q", "k", "v")]
        + _VARIANTS
    )


class ForwardOutputs(_Struct):
    _fields_ = [("struct_size", ctypes.c_uint32), ("reserved", ctypes.c_uint32)] + [
        (name, ctypes.POINTER(Tensor)) for name in ("o", "lse")
    ]


class BackwardInputs(_Struct):
    _fields_ = (
        [("struct_size", ctypes.c_uint32), ("reserved", ctypes.c_uint32)]
        + [(name, ctypes.POINTER(Tensor)) for name in ("q", "k", "v", "o", "lse", "dout", "dlse")]
        + _VARIANTS
    )


class BackwardOutputs(_Struct):
    _fields_ = (
        [("struct_size", ctypes.c_uint32), ("reserved", ctypes.c_uint32)]
        + [(name, ctypes.POINTER(Tensor)) for name in ("dq", "dk", "dv")]
        + _CAPTURES
        + [("dsink", ctypes.POINTER(Tensor))]
    )


class Workspace(_Struct):
    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
        ("data", ctypes.c_void_p),
        ("size", ctypes.c_size_t),
    ]


class Shape(_Struct):
    _fields_ = [("struct_size", ctypes.c_uint32), ("unaligned", ctypes.c_int32)] + [
        (name, ctypes.c_int64) for name in ("b", "h_q", "h_kv", "s_q", "s_kv", "total_q", "total_kv")
    ]


class KernelInfo(_Struct):
    _fields_ = (
        [("struct_size", ctypes.c_uint32)]
        + [(name, ctypes.c_int32) for name in ("registers", "local_bytes", "shared_bytes", "threads", "reserved")]
        + [("compile_ms", ctypes.c_double), ("load_ms", ctypes.c_double)]
        + [("name", ctypes.c_char * 64), ("origin", ctypes.c_char * 16), ("spec", ctypes.c_char * 512),
           ("chosen_by", ctypes.c_char * 16)]
    )


class Unsupported(RuntimeError):
    """FA_UNSUPPORTED: valid, but no kernel of this library or GPU can do it."""


class Library:
    """libfa.so, with failures as RuntimeError."""

    def __init__(self, path):
        self._fa = ctypes.CDLL(os.fspath(path))
        self._fa.fa_last_error_message.restype = ctypes.c_char_p
        self._fa.fa_version.restype = ctypes.c_char_p

    def version(self):
        return self._fa.fa_version().decode()

    def check(self, status):
        if status != 0:
            raise (Unsupported if status == 2 else RuntimeError)(self._fa.fa_last_error_message().decode())

    def call(self, name, *arguments):
        self.check(getattr(self._fa, name)(*arguments))

    def dropout_mask(self, state, probability, b, h_q, s_q, s_kv):
        """keep, the bytes of [b, h_q, s_q, s_kv]: 1 for a kept element."""
        keep = bytearray(b * h_q * s_q * s_kv)
        memory = (ctypes.c_uint8 * len(keep)).from_buffer(keep) if keep else None
        sizes = [ctypes.c_int64(n) for n in (b, h_q, s_q, s_kv)]
        self.call("fa_dropout_mask", ctypes.byref(state), ctypes.c_float(probability), *sizes, memory)
        return keep


def _number(name, table, value):
    """The ABI's number of `value`, which `name` is; RuntimeError for one that it has none of."""
    if str(value) not in table:
        raise RuntimeError(f"{name} is {value}: accepted are {', '.join(table)}")
    return table[str(value)]


def _check_tensor(name, t):
    if not all(hasattr(t, method) for method in ("data_ptr", "dim", "stride", "is_contiguous")):
        raise RuntimeError(f"{name} is a {type(t).__module__}.{type(t).__qualname__}: accepted is a torch.Tensor")


def _tensor(name, t):
    _check_tensor(name, t)
    rank = t.dim()
    if rank > 4:
        raise RuntimeError(f"{name} has {rank} axes: accepted are at most 4")
    pad = [0] * (4 - rank)
    return Tensor(
        dtype=_number(f"dtype of {name}", DTYPES, t.dtype),
        rank=rank,
        data=t.data_ptr(),
        shape=(ctypes.c_int64 * 4)(*t.shape, *pad),
        strides=(ctypes.c_int64 * 4)(*t.stride(), *pad),
    )


def _pointer(name, t):
    """NULL for None."""
    return ctypes.pointer(_tensor(name, t)) if t is not None else None


def _pointers(**tensors):
    return {name: _pointer(name, t) for name, t in tensors.items()}


def _array(name, t, dtype, least=0):
    """The address of a tensor that the library reads as a plain array; NULL for None."""
    if t is None:
        return None
    _check_tensor(name, t)
    if str(t.dtype) != dtype or not t.is_contiguous() or t.numel() < least:
        raise RuntimeError(f"{name} is {t.dtype} of {t.numel()} elements{'' if t.is_contiguous() else ' with gaps'}: accepted "
                           f"is a contiguous tensor of {dtype}" + (f" and at least {least} elements" if least else ""))
    return t.data_ptr()


def _memory(name, t):
    """Address and size in bytes."""
    _check_tensor(name, t)
    if not t.is_contiguous():
        raise RuntimeError(f"{name} has gaps: accepted is a contiguous tensor")
    return {"data": t.data_ptr(), "size": t.numel() * t.element_size()}


def aligned(*tensors):
    """Whether all their rows start at multiples of 16 bytes."""
    return all(
        t.data_ptr() % 16 == 0 and all(n <= 1 or step * t.element_size() % 16 == 0 for n, step in zip(t.shape[:-1], t.stride()))
        for t in tensors
    )


def _shape(sizes, rows_aligned):
    names = ("b", "h_q", "h_kv", "s_q", "s_kv", "total_q", "total_kv")
    return Shape(unaligned=int(not rows_aligned), **dict(zip(names, sizes)))


def sequences(cu_seqlens_q, cu_seqlens_kv, seqused_q=None, seqused_kv=None, max_s_q=0, max_s_kv=0):
    """Where the sequences of a packed batch lie, by int32 tensors on the attention's device, which it keeps alive."""
    starts = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_kv": cu_seqlens_kv}
    fields = {name: _array(name, t, "torch.int32", 1) for name, t in starts.items()}
    if None in fields.values():
        raise RuntimeError("cu_seqlens_q and cu_seqlens_kv: both are needed")
    b = cu_seqlens_q.numel() - 1
    if cu_seqlens_kv.numel() != b + 1:
        raise RuntimeError(f"cu_seqlens_kv has {cu_seqlens_kv.numel()} elements: accepted are {b + 1}, as in cu_seqlens_q")
    used = {"seqused_q": seqused_q, "seqused_kv": seqused_kv}
    fields.update({name: _array(name, t, "torch.int32", b) for name, t in used.items()})
    result = Sequences(b=b, max_s_q=max_s_q, max_s_kv=max_s_kv, **fields)
    result.tensors = (cu_seqlens_q, cu_seqlens_kv, seqused_q, seqused_kv)
    return result


def dropout_state(seed=0, offset=0, device=None):
    """`device`: an int64 tensor of seed and offset on the attention's device, which counts instead of the numbers
    and is kept alive."""
    result = DropoutState(seed=seed, offset=offset, device=_array("device", device, "torch.int64", 2))
    result.tensor = device
    return result


def _declared(name, dtype, requires_grad=False):
    return Capture(name=name.encode(), dtype=_number(f"dtype of capture {name}", DTYPES, dtype),
                   requires_grad=int(bool(requires_grad)))


def function(expression, captures=()):
    """A score or mask function (docs/variants.md); captures: (name, torch dtype) or (name, torch dtype, requires_grad),
    which has a gradient where that is true."""
    for capture in captures:
        if not isinstance(capture, (tuple, list)) or len(capture) not in (2, 3):
            raise RuntimeError(f"capture {capture!r}: accepted are (name, dtype) and (name, dtype, requires_grad)")
    declared = [_declared(*capture) for capture in captures]
    return Function(expression=expression.encode(), captures=(Capture * len(declared))(*declared),
                    capture_count=len(declared))


def mask_tiles(memory, filled=False):
    """Memory for the tiles of a mask function, a tensor, which it keeps alive."""
    result = MaskTiles(**_memory("memory", memory), filled=int(filled))
    result.tensor = memory
    return result


def _captured(values):
    """The fields for captures, or their gradients, by name: tensors or numbers."""
    items = [Captured(name=name.encode(), number=float(value)) if isinstance(value, numbers.Real)
             else Captured(name=name.encode(), tensor=_pointer(name, value)) for name, value in (values or {}).items()]
    return {"captures": (Captured * len(items))(*items), "capture_count": len(items)}


def _reference(struct):
    return ctypes.pointer(struct) if struct is not None else None


def _variants(sequences, dropout, captures, sink, tiles):
    return {"sequences": _reference(sequences), "dropout": _reference(dropout), "sink": _pointer("sink", sink),
            "tiles": _reference(tiles), **_captured(captures)}


class Attention:
    """fa_attention for tensors [b, h, s, d] in any memory order, or with varlen [total, h, d]. Sizes are (b, h_q, h_kv,
    s_q, s_kv), with varlen also (total_q, total_kv); rows_aligned is what `aligned` says of q, k, v, o and, for backward,
    their gradients."""

    def __init__(self, library, head_dim, dtype, causal=False, head_dim_v=0, scale=None, top_left=False,
                 family="automatic", device=(DEVICE_CURRENT, 0), deterministic=False, tune="default",
                 backward_family="automatic", varlen=False, zero_padding=False, check_sequences=False, dropout=0.0,
                 score=None, mask=None, window_left=None, window_right=None, chunk=0, sink=False):
        """score, mask: what `function` makes."""
        self._library = library
        self._override = KernelOverride(family=_number("family", FAMILIES, family))
        self._backward_override = KernelOverride(family=_number("backward_family", FAMILIES, backward_family))
        config = Config(head_dim=head_dim, head_dim_v=head_dim_v, dtype=_number("dtype", DTYPES, dtype), causal=int(causal),
                        causal_align=int(top_left), has_scale=int(scale is not None), scale=scale or 0.0,
                        deterministic=int(deterministic), tune=_number("tune", TUNE_POLICIES, tune), varlen=int(varlen),
                        zero_padding=int(zero_padding), check_sequences=int(check_sequences), dropout=dropout,
                        score=_reference(score), mask=_reference(mask), sink=int(sink), chunk=chunk,
                        has_window_left=int(window_left is not None), window_left=window_left or 0,
                        has_window_right=int(window_right is not None), window_right=window_right or 0,
                        kernel=ctypes.pointer(self._override),
                        kernel_backward=ctypes.pointer(self._backward_override))
        self._handle = ctypes.c_void_p()
        library.call("fa_create", ctypes.byref(config), Device(*device), ctypes.byref(self._handle))

    def __del__(self):
        if getattr(self, "_handle", None):
            self._library._fa.fa_destroy(self._handle)

    def _bind(self, name, inputs, outputs, stream, workspace, keep):
        """A callable that queues the same call again and again. `workspace`: a tensor, or None."""
        scratch = Workspace(**_memory("workspace", workspace)) if workspace is not None else None
        function = getattr(self._library._fa, name)
        arguments = (self._handle, ctypes.byref(inputs), ctypes.byref(outputs), ctypes.c_void_p(stream or 0),
                     ctypes.byref(scratch) if scratch is not None else None)

        def run(_keep=(keep, workspace, self)):
            status = function(*arguments)
            if status != 0:
                self._library.check(status)

        return run

    def bind_forward(self, q, k, v, o, lse=None, stream=None, workspace=None, sequences=None, dropout=None,
                     captures=None, sink=None, tiles=None):
        """A callable that queues the same forward again and again; it keeps the tensors alive. captures: tensors or
        numbers by name; tiles: what `mask_tiles` makes."""
        inputs = ForwardInputs(**_pointers(q=q, k=k, v=v), **_variants(sequences, dropout, captures, sink, tiles))
        outputs = ForwardOutputs(**_pointers(o=o, lse=lse))
        return self._bind("fa_forward", inputs, outputs, stream, workspace, (q, k, v, o, lse, captures, sink))

    def bind_backward(self, q, k, v, o, lse, dout, dq, dk, dv, dlse=None, stream=None, workspace=None, sequences=None,
                      dropout=None, captures=None, sink=None, tiles=None, dcaptures=None, dsink=None):
        """Likewise for backward; dcaptures: fp32 tensors for the gradients of captures, by name."""
        read, written = (q, k, v, o, lse, dout, dlse), (dq, dk, dv)
        inputs = BackwardInputs(**_pointers(q=q, k=k, v=v, o=o, lse=lse, dout=dout, dlse=dlse),
                                **_variants(sequences, dropout, captures, sink, tiles))
        outputs = BackwardOutputs(**_pointers(dq=dq, dk=dk, dv=dv, dsink=dsink), **_captured(dcaptures))
        return self._bind("fa_backward", inputs, outputs, stream, workspace,
                          (read, written, captures, sink, dcaptures, dsink))

    def _get(self, name, result, sizes, rows_aligned):
        self._library.call(name, self._handle, ctypes.byref(_shape(sizes, rows_aligned)), ctypes.byref(result))
        return result

    def workspace_size(self, *sizes, rows_aligned=True):
        return self._get("fa_workspace_size", ctypes.c_size_t(), sizes, rows_aligned).value

    def backward_workspace_size(self, *sizes, rows_aligned=True):
        return self._get("fa_backward_workspace_size", ctypes.c_size_t(), sizes, rows_aligned).value

    def mask_tiles_size(self, *sizes, rows_aligned=True):
        return self._get("fa_mask_tiles_size", ctypes.c_size_t(), sizes, rows_aligned).value

    def backward_mask_tiles_size(self, *sizes, rows_aligned=True):
        return self._get("fa_backward_mask_tiles_size", ctypes.c_size_t(), sizes, rows_aligned).value

    def kernel_info(self, *sizes, rows_aligned=True):
        return self._get("fa_kernel_info_get", KernelInfo(), sizes, rows_aligned)

    def backward_kernel_info(self, *sizes, rows_aligned=True):
        return self._get("fa_backward_kernel_info_get", KernelInfo(), sizes, rows_aligned)
