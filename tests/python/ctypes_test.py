#!/usr/bin/env python3
"""tools/fa_ctypes.py on the host device, without PyTorch: ctypes_test.py LIBRARY. Tensors are stand-ins."""

import ctypes
import pathlib
import struct
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent.parent / "tools"))
import fa_ctypes  # noqa: E402

SIZES = {"torch.float32": 4, "torch.float64": 8, "torch.int32": 4, "torch.int64": 8, "torch.uint8": 1}
FORMATS = {"torch.float32": "f", "torch.float64": "d", "torch.int32": "i", "torch.int64": "q", "torch.uint8": "B"}
failures = []


class Tensor:
    """What fa_ctypes asks of a torch.Tensor."""

    def __init__(self, shape, values=None, dtype="torch.float32", contiguous=True):
        self.shape, self.dtype, self._contiguous = tuple(shape), dtype, contiguous
        count = self.numel()
        self.memory = bytearray(struct.pack(f"{count}{FORMATS[dtype]}", *(values or [0] * count))) or bytearray(1)
        self._address = ctypes.addressof((ctypes.c_char * len(self.memory)).from_buffer(self.memory))

    def numel(self):
        count = 1
        for n in self.shape:
            count *= n
        return count

    def dim(self):
        return len(self.shape)

    def stride(self):
        steps = [1]
        for n in reversed(self.shape[1:]):
            steps.insert(0, steps[0] * n)
        return tuple(steps[: self.dim()])

    def element_size(self):
        return SIZES[self.dtype]

    def is_contiguous(self):
        return self._contiguous

    def data_ptr(self):
        return self._address

    def values(self):
        return struct.unpack(f"{self.numel()}{FORMATS[self.dtype]}", self.memory)


def check(condition, text):
    if not condition:
        failures.append(text)
        print(f"FAILED: {text}")


def refused(call, *words):
    try:
        call()
        check(False, f"refused, naming {words}")
    except RuntimeError as error:
        check(all(word in str(error) for word in words), f"{words} are named: {error}")


def test_function():
    flags = [fa_ctypes.function("score + bias[kv]", [("bias", "torch.float32", *flag)]).captures[0].requires_grad
             for flag in ((), (False,), (True,))]
    check(flags == [0, 0, 1], f"requires_grad is what was given: {flags}")
    refused(lambda: fa_ctypes.function("score", [("bias", "torch.int64")]), "capture bias", "torch.int64", "torch.float32")
    refused(lambda: fa_ctypes.function("score", ["bias"]), "'bias'", "(name, dtype")
    refused(lambda: fa_ctypes.function("score", [("bias",)]), "('bias',)", "(name, dtype")


def test_arguments(library):
    host = {"device": (fa_ctypes.DEVICE_HOST, 0)}
    attention = fa_ctypes.Attention(library, 8, "torch.float32", **host)
    q = Tensor((1, 1, 2, 8))
    refused(lambda: attention.bind_forward(q.values(), q, q, q), "q is a builtins.tuple", "torch.Tensor")
    refused(lambda: attention.bind_forward(q, q, Tensor((1, 8), dtype="torch.int64"), q), "dtype of v", "torch.int64")
    refused(lambda: attention.bind_forward(q, Tensor((1, 1, 1, 2, 8)), q, q), "k has 5 axes")
    refused(attention.bind_forward(Tensor((2, 8)), q, q, q), "q", "rank")
    refused(lambda: attention.bind_forward(q, q, q, q, captures={"bias": "1"}), "bias is a builtins.str")
    refused(lambda: fa_ctypes.Attention(library, 8, "torch.int64", **host), "dtype is torch.int64", "torch.bfloat16")
    refused(lambda: fa_ctypes.Attention(library, 8, "torch.float32", family="sm70", **host), "family is sm70", "sm90")
    refused(lambda: fa_ctypes.Attention(library, 8, "torch.float32", tune="maybe", **host), "tune is maybe", "cached")
    gaps = Tensor((4,), dtype="torch.uint8", contiguous=False)
    refused(lambda: attention.bind_forward(q, q, q, q, workspace=gaps), "workspace has gaps")
    check(fa_ctypes.mask_tiles(Tensor((4,))).size == 16, "sizes of memory are in bytes")


def test_arrays():
    cu, long_cu = Tensor((3,), [0, 2, 4], "torch.int32"), Tensor((3,), [0, 2, 4], "torch.int64")
    check(fa_ctypes.sequences(cu, cu).b == 2, "sequences are counted")
    refused(lambda: fa_ctypes.sequences(cu, long_cu), "cu_seqlens_kv is torch.int64", "torch.int32")
    refused(lambda: fa_ctypes.sequences(cu, None), "both are needed")
    refused(lambda: fa_ctypes.sequences(cu, Tensor((2,), dtype="torch.int32")), "cu_seqlens_kv has 2 elements", "3")
    refused(lambda: fa_ctypes.sequences(Tensor((0,), dtype="torch.int32"), cu), "cu_seqlens_q", "at least 1")
    refused(lambda: fa_ctypes.sequences(cu, cu, Tensor((1,), dtype="torch.int32")), "seqused_q", "at least 2")
    refused(lambda: fa_ctypes.dropout_state(device=cu), "device is torch.int32", "torch.int64")
    refused(lambda: fa_ctypes.dropout_state(device=Tensor((1,), dtype="torch.int64")), "at least 2")


def test_forward(library):
    """Rows of ones stay ones, and the gradient of a bias is 0 then."""
    bias = fa_ctypes.function("score + bias[kv] * gain", [("bias", "torch.float32", True), ("gain", "torch.float32", False)])
    attention = fa_ctypes.Attention(library, 8, "torch.float32", score=bias, device=(fa_ctypes.DEVICE_HOST, 0))
    q, k, v = Tensor((1, 2, 3, 8)), Tensor((1, 1, 5, 8)), Tensor((1, 1, 5, 8), [1.0] * 40)
    o, lse, dbias = Tensor((1, 2, 3, 8)), Tensor((1, 2, 3)), Tensor((5,), [7.0] * 5)
    captures = {"bias": Tensor((5,), [0.0, 1.0, 2.0, 3.0, 4.0]), "gain": 0.5}
    attention.bind_forward(q, k, v, o, lse, captures=captures)()
    check(all(abs(x - 1) < 1e-6 for x in o.values()), f"o is 1: {o.values()}")
    dq, dk, dv = Tensor((1, 2, 3, 8)), Tensor((1, 1, 5, 8)), Tensor((1, 1, 5, 8))
    attention.bind_backward(q, k, v, o, lse, o, dq, dk, dv, captures=captures, dcaptures={"bias": dbias})()
    check(all(abs(x) < 1e-5 for x in dbias.values()), f"dbias is 0: {dbias.values()}")
    refused(attention.bind_backward(q, k, v, o, lse, o, dq, dk, dv, captures=captures, dcaptures={"gain": Tensor((1,))}),
            "gain")


def main():
    library = fa_ctypes.Library(sys.argv[1])
    check(library.version().count(".") == 2, "a version")
    test_function()
    test_arguments(library)
    test_arrays()
    test_forward(library)
    print("ctypes: " + (f"{len(failures)} checks failed" if failures else "all checks passed"))
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
