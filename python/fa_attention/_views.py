"""What a call needs to know of somebody's array, by whichever protocol the array has."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple, Optional

from . import _abi
from ._errors import type_name

DTYPES = {"float16": _abi.F16, "bfloat16": _abi.BF16, "float32": _abi.F32, "float64": _abi.F64, "int32": _abi.I32,
          "float8_e4m3fn": _abi.E4M3, "int8": _abi.I8, "float8_e5m2": _abi.E5M2,
          "uint8": _abi.U4X2}  # bytes with two codes of a cache of 4 bits
SIZES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "int32": 4, "int64": 8, "uint8": 1, "int8": 1,
         "float8_e4m3fn": 1, "float8_e5m2": 1}
HOST = (_abi.DEVICE_HOST, 0)


class View(NamedTuple):
    """An array of somebody else's memory. Strides count elements; `device` is a kind and an ordinal; `owner` keeps the
    memory alive."""

    data: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    device: tuple[int, int]
    read_only: bool
    owner: object

    @property
    def contiguous(self) -> bool:
        return self.strides == row_major(self.shape) or 0 in self.shape

    @property
    def elements(self) -> int:
        count = 1
        for n in self.shape:
            count *= n
        return count


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))


class _DlTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32), ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


_DL_NAMES = {(2, 16): "float16", (4, 16): "bfloat16", (2, 32): "float32", (2, 64): "float64", (0, 32): "int32",
             (0, 64): "int64", (1, 8): "uint8"}
_DL_HOST, _DL_CUDA = (1, 3), (2, 13)  # with pinned and managed memory


def _of_dlpack(name: str, array: Any, stream: Optional[int]) -> View:
    kind, ordinal = array.__dlpack_device__()
    if kind not in _DL_HOST + _DL_CUDA:
        raise TypeError(f"{name} is on a device of DLPack's type {int(kind)}: accepted are host memory and CUDA")
    on_cuda = kind in _DL_CUDA
    capsule = array.__dlpack__(stream=stream or 1) if on_cuda else array.__dlpack__()
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    tensor = _DlTensor.from_address(get(capsule, b"dltensor"))
    dtype = _DL_NAMES.get((tensor.code, tensor.bits))
    if dtype is None or tensor.lanes != 1:
        raise TypeError(f"{name} has DLPack's dtype {tensor.code} of {tensor.bits} bits: accepted are {', '.join(DTYPES)}")
    shape = tuple(tensor.shape[: tensor.ndim])
    strides = tuple(tensor.strides[: tensor.ndim]) if tensor.strides else row_major(shape)
    device = (_abi.DEVICE_CUDA, int(ordinal)) if on_cuda else HOST
    return View((tensor.data or 0) + tensor.byte_offset, dtype, shape, strides, device, False, (array, capsule))


def _of_interface(name: str, array: Any, fields: dict[str, Any], device: tuple[int, int]) -> View:
    dtype = str(array.dtype)
    if dtype not in SIZES:
        raise TypeError(f"{name} is {dtype}: accepted are {', '.join(DTYPES)}")
    shape = tuple(fields["shape"])
    in_bytes, size = fields.get("strides"), SIZES[dtype]
    if in_bytes is not None and any(step % size for n, step in zip(shape, in_bytes) if n > 1):
        raise ValueError(f"{name} has strides of {tuple(in_bytes)} bytes: accepted are whole elements of {size}")
    strides = tuple(step // size for step in in_bytes) if in_bytes is not None else row_major(shape)
    pointer, read_only = fields["data"]
    return View(pointer or 0, dtype, shape, strides, device, bool(read_only), array)


def _of_tensor(array: Any) -> View:
    """A torch.Tensor, or what has its methods."""
    device = getattr(array, "device", None)
    kind = getattr(device, "type", "cpu")
    place = (_abi.DEVICE_CUDA, int(device.index or 0)) if kind == "cuda" and device is not None else HOST
    return View(array.data_ptr(), str(array.dtype).removeprefix("torch."), tuple(array.shape), tuple(array.stride()), place,
                False, array)


_TENSOR = ("data_ptr", "dim", "stride", "is_contiguous")


def view(name: str, array: Any, stream: Optional[int] = None) -> View:
    """`array` by PyTorch's methods, the array interface, CUDA's, or DLPack. TypeError for what has none of them, and for
    dtypes that the library does not know."""
    if isinstance(array, View):
        return array
    if all(hasattr(array, method) for method in _TENSOR):
        return _of_tensor(array)
    if hasattr(array, "__array_interface__") and hasattr(array, "dtype"):
        return _of_interface(name, array, array.__array_interface__, HOST)
    if hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__"):
        return _of_dlpack(name, array, stream)
    if hasattr(array, "__cuda_array_interface__"):
        return _of_interface(name, array, array.__cuda_array_interface__, (_abi.DEVICE_CUDA, 0))
    raise TypeError(f"{name} is a {type_name(array)}: accepted are a torch.Tensor, a NumPy array, and what has __dlpack__ or "
                    "the array interface")


def dtype_code(name: str, dtype: object) -> int:
    """The ABI's number of a dtype of any library, by its name; TypeError for one that it has none of."""
    code = DTYPES.get(str(dtype).removeprefix("torch."))
    if code is None:
        raise TypeError(f"{name} is {dtype}: accepted are {', '.join(DTYPES)}")
    return code


def tensor(name: str, array: Any) -> _abi.Tensor:
    """The ABI's struct of an array of at most 4 axes."""
    seen = view(name, array)
    rank = len(seen.shape)
    if rank > 4:
        raise ValueError(f"{name} has {rank} axes: accepted are at most 4")
    pad = (0,) * (4 - rank)
    return _abi.Tensor(dtype=dtype_code(f"dtype of {name}", seen.dtype), rank=rank, data=seen.data,
                       flags=_abi.TENSOR_READ_ONLY if seen.read_only else 0,
                       shape=(ctypes.c_int64 * 4)(*seen.shape, *pad), strides=(ctypes.c_int64 * 4)(*seen.strides, *pad))


def address(name: str, array: Any, dtype: str, least: int = 0) -> Optional[int]:
    """Where an array is that the library reads as a plain one of at least `least` elements; None for None."""
    if array is None:
        return None
    seen = view(name, array)
    if seen.dtype != dtype or not _contiguous(array, seen) or seen.elements < least:
        gaps = "" if _contiguous(array, seen) else " with gaps"
        kind = TypeError if seen.dtype != dtype else ValueError
        raise kind(f"{name} is {seen.dtype} of {seen.elements} elements{gaps}: accepted is a contiguous array of {dtype}"
                   + (f" and at least {least} elements" if least else ""))
    return seen.data


def memory(name: str, array: Any) -> tuple[int, int]:
    """Address and size in bytes of an array without gaps."""
    seen = view(name, array)
    if not _contiguous(array, seen):
        raise ValueError(f"{name} has gaps: accepted is a contiguous array")
    size = array.element_size() if hasattr(array, "element_size") else SIZES[seen.dtype]
    return seen.data, seen.elements * int(size)


def _contiguous(array: Any, seen: View) -> bool:
    return bool(array.is_contiguous()) if hasattr(array, "is_contiguous") else seen.contiguous


def aligned(*arrays: Any) -> bool:
    """Whether all their rows start at multiples of 16 bytes."""
    for seen in (view("array", array) for array in arrays):
        size = SIZES[seen.dtype]
        if seen.data % 16 or any(n > 1 and step * size % 16 for n, step in zip(seen.shape[:-1], seen.strides)):
            return False
    return True
