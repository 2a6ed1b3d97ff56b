"""The C ABI of fa (include/fa/fa.h) for PyTorch tensors: no copies, the current stream, no package to install."""

import ctypes
import os

DTYPES = {"torch.float16": 0, "torch.bfloat16": 1, "torch.float32": 2, "torch.float64": 3}
FAMILIES = {"automatic": 0, "sm80": 1}
DEVICE_CURRENT, DEVICE_CUDA, DEVICE_HOST = 0, 1, 2


class _Struct(ctypes.Structure):
    """Every struct of the ABI starts with its own size."""

    def __init__(self, **fields):
        super().__init__(struct_size=ctypes.sizeof(type(self)), **fields)


class KernelOverride(_Struct):
    _fields_ = [("struct_size", ctypes.c_uint32)] + [
        (name, ctypes.c_int32)
        for name in ("family", "tile_m", "tile_n", "warps", "stages", "q_in_registers", "loop_bodies", "pack_gqa", "splits")
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


class ForwardInputs(_Struct):
    _fields_ = [("struct_size", ctypes.c_uint32), ("reserved", ctypes.c_uint32)] + [
        (name, ctypes.POINTER(Tensor)) for name in ("q", "k", "v")
    ]


class ForwardOutputs(_Struct):
    _fields_ = [("struct_size", ctypes.c_uint32), ("reserved", ctypes.c_uint32)] + [
        (name, ctypes.POINTER(Tensor)) for name in ("o", "lse")
    ]


class Shape(_Struct):
    _fields_ = [("struct_size", ctypes.c_uint32), ("unaligned", ctypes.c_int32)] + [
        (name, ctypes.c_int64) for name in ("b", "h_q", "h_kv", "s_q", "s_kv")
    ]


class KernelInfo(_Struct):
    _fields_ = (
        [("struct_size", ctypes.c_uint32)]
        + [(name, ctypes.c_int32) for name in ("registers", "local_bytes", "shared_bytes", "threads", "reserved")]
        + [("compile_ms", ctypes.c_double), ("load_ms", ctypes.c_double)]
        + [("name", ctypes.c_char * 64), ("origin", ctypes.c_char * 16), ("spec", ctypes.c_char * 512)]
    )


class Library:
    """libfa.so, with failures as RuntimeError."""

    def __init__(self, path):
        self._fa = ctypes.CDLL(os.fspath(path))
        self._fa.fa_last_error_message.restype = ctypes.c_char_p
        self._fa.fa_version.restype = ctypes.c_char_p

    def version(self):
        return self._fa.fa_version().decode()

    def call(self, name, *arguments):
        if getattr(self._fa, name)(*arguments) != 0:
            raise RuntimeError(self._fa.fa_last_error_message().decode())


def _tensor(t):
    rank = t.dim()
    pad = [0] * (4 - rank)
    return Tensor(
        dtype=DTYPES[str(t.dtype)],
        rank=rank,
        data=t.data_ptr(),
        shape=(ctypes.c_int64 * 4)(*t.shape, *pad),
        strides=(ctypes.c_int64 * 4)(*t.stride(), *pad),
    )


class Attention:
    """fa_attention for tensors [b, h, s, d] in any memory order."""

    def __init__(self, library, head_dim, dtype, causal=False, head_dim_v=0, scale=None, top_left=False,
                 family="automatic", device=(DEVICE_CURRENT, 0)):
        self._library = library
        self._override = KernelOverride(family=FAMILIES[family])
        config = Config(head_dim=head_dim, head_dim_v=head_dim_v, dtype=DTYPES[str(dtype)], causal=int(causal),
                        causal_align=int(top_left), has_scale=int(scale is not None), scale=scale or 0.0,
                        kernel=ctypes.pointer(self._override))
        self._handle = ctypes.c_void_p()
        library.call("fa_create", ctypes.byref(config), Device(*device), ctypes.byref(self._handle))

    def __del__(self):
        if getattr(self, "_handle", None):
            self._library._fa.fa_destroy(self._handle)

    def bind_forward(self, q, k, v, o, lse=None, stream=None):
        """A callable that queues the same forward again and again; the tensors must outlive it."""
        tensors = [_tensor(t) for t in (q, k, v, o)] + ([_tensor(lse)] if lse is not None else [])
        pointers = [ctypes.pointer(t) for t in tensors]
        inputs = ForwardInputs(q=pointers[0], k=pointers[1], v=pointers[2])
        outputs = ForwardOutputs(o=pointers[3], lse=pointers[4] if lse is not None else None)
        keep = (tensors, q, k, v, o, lse)
        function, handle = self._library._fa.fa_forward, self._handle
        arguments = (handle, ctypes.byref(inputs), ctypes.byref(outputs), ctypes.c_void_p(stream or 0), None)

        def run(_keep=keep, _inputs=inputs, _outputs=outputs):
            if function(*arguments) != 0:
                raise RuntimeError(self._library._fa.fa_last_error_message().decode())

        return run

    def kernel_info(self, b, h_q, h_kv, s_q, s_kv):
        info = KernelInfo()
        shape = Shape(b=b, h_q=h_q, h_kv=h_kv, s_q=s_q, s_kv=s_kv)
        self._library.call("fa_kernel_info_get", self._handle, ctypes.byref(shape), ctypes.byref(info))
        return info
