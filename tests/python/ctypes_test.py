#!/usr/bin/env python3
"""The base layer, fa_attention.capi, on the host device without any package: ctypes_test.py. FA_LIBRARY names the library.
Arrays are stand-ins for those of PyTorch, of the array interface and of DLPack."""

import ctypes
import os
import pathlib
import struct
import sys
import tempfile
import threading

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent.parent / "python"))
import fa_attention  # noqa: E402
from fa_attention import _nvrtc, capi, parallel  # noqa: E402

SIZES = {"torch.float16": 2, "torch.float32": 4, "torch.float64": 8, "torch.int32": 4, "torch.int64": 8, "torch.uint8": 1, "torch.int8": 1,
         "torch.float8_e4m3fn": 1}
FORMATS = {"torch.float16": "e", "torch.float32": "f", "torch.float64": "d", "torch.int32": "i", "torch.int64": "q", "torch.uint8": "B",
           "torch.int8": "b", "torch.float8_e4m3fn": "B"}
failures = []


class Tensor:
    """What capi asks of a torch.Tensor."""

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


class InterfaceArray:
    """An array of fp32 of which the array interface alone is known."""

    dtype = "float32"

    def __init__(self, tensor, strides=None):
        self.tensor, self.strides = tensor, strides

    @property
    def __array_interface__(self):
        return {"shape": self.tensor.shape, "typestr": "<f4", "data": (self.tensor.data_ptr(), False), "version": 3,
                "strides": self.strides}


class DlpackArray:
    """An array of fp32 of which DLPack alone is known; the capsule has no deleter."""

    def __init__(self, tensor, bits=32):
        from fa_attention._views import _DlTensor

        self.tensor = tensor
        self.shape = (ctypes.c_int64 * tensor.dim())(*tensor.shape)
        self.struct = _DlTensor(data=tensor.data_ptr(), device_type=1, ndim=tensor.dim(), code=2, bits=bits, lanes=1,
                                shape=self.shape)

    def __dlpack_device__(self):
        return (1, 0)

    def __dlpack__(self):
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return new(ctypes.addressof(self.struct), b"dltensor", None)


def check(condition, text):
    if not condition:
        failures.append(text)
        print(f"FAILED: {text}")


def refused(kinds, call, *words):
    try:
        call()
        check(False, f"refused, naming {words}")
    except kinds as error:
        check(all(word in str(error) for word in words), f"{words} are named: {error}")


def test_function():
    flags = [capi.function("score + bias[kv]", [("bias", "torch.float32", *flag)]).captures[0].requires_grad
             for flag in ((), (False,), (True,))]
    check(flags == [0, 0, 1], f"requires_grad is what was given: {flags}")
    refused(TypeError, lambda: capi.function("score", [("bias", "torch.int64")]), "capture bias", "torch.int64", "float32")
    refused(ValueError, lambda: capi.function("score", ["bias"]), "'bias'", "(name, dtype")
    refused(ValueError, lambda: capi.function("score", [("bias",)]), "('bias',)", "(name, dtype")


def test_arguments(library):
    host = {"device": (capi.DEVICE_HOST, 0)}
    attention = capi.Attention(library, 8, "torch.float32", **host)
    q = Tensor((1, 1, 2, 8))
    refused(TypeError, lambda: attention.bind_forward(q.values(), q, q, q), "q is a builtins.tuple", "torch.Tensor")
    refused(TypeError, lambda: attention.bind_forward(q, q, Tensor((1, 8), dtype="torch.int64"), q), "dtype of v", "int64")
    refused(ValueError, lambda: attention.bind_forward(q, Tensor((1, 1, 1, 2, 8)), q, q), "k has 5 axes")
    refused(ValueError, attention.bind_forward(Tensor((2, 8)), q, q, q), "q", "rank")
    refused(TypeError, lambda: attention.bind_forward(q, q, q, q, captures={"bias": "1"}), "bias is a builtins.str")
    refused(TypeError, lambda: capi.Attention(library, 8, "torch.int64", **host), "dtype is torch.int64", "bfloat16")
    refused(ValueError, lambda: capi.Attention(library, 8, "torch.float32", family="sm70", **host), "kernel = sm70", "sm90")
    refused(ValueError, lambda: capi.Attention(library, 8, "torch.float32", tune="maybe", **host), "tune is maybe", "cached")
    refused(RuntimeError, lambda: capi.Attention(library, 12, "torch.float32", **host), "head_dim", "12")
    gaps = Tensor((4,), dtype="torch.uint8", contiguous=False)
    refused(ValueError, lambda: attention.bind_forward(q, q, q, q, workspace=gaps), "workspace has gaps")
    check(capi.mask_tiles(Tensor((4,))).size == 16, "sizes of memory are in bytes")


def test_fields_of_errors(library):
    try:
        capi.Attention(library, 12, "float32", device=(capi.DEVICE_HOST, 0))
        check(False, "refused")
    except fa_attention.InvalidArgument as error:
        check(error.code == 1 and error.fields["argument"] == "head_dim" and error.fields["value"] == "12",
              f"a failure has its fields: {error.fields}")


def test_arrays():
    cu, long_cu = Tensor((3,), [0, 2, 4], "torch.int32"), Tensor((3,), [0, 2, 4], "torch.int64")
    check(capi.sequences(cu, cu).b == 2, "sequences are counted")
    refused(TypeError, lambda: capi.sequences(cu, long_cu), "cu_seqlens_kv is int64", "int32")
    refused(ValueError, lambda: capi.sequences(cu, None), "both are needed")
    refused(ValueError, lambda: capi.sequences(cu, Tensor((2,), dtype="torch.int32")), "cu_seqlens_kv has 2 elements", "3")
    refused(ValueError, lambda: capi.sequences(Tensor((0,), dtype="torch.int32"), cu), "cu_seqlens_q", "at least 1")
    refused(ValueError, lambda: capi.sequences(cu, cu, Tensor((1,), dtype="torch.int32")), "seqused_q", "at least 2")
    refused(TypeError, lambda: capi.dropout_state(device=cu), "device is int32", "int64")
    refused(ValueError, lambda: capi.dropout_state(device=Tensor((1,), dtype="torch.int64")), "at least 2")


def test_forward(library):
    """Rows of ones stay ones, and the gradient of a bias is 0 then."""
    bias = capi.function("score + bias[kv] * gain", [("bias", "torch.float32", True), ("gain", "torch.float32", False)])
    attention = capi.Attention(library, 8, "torch.float32", score=bias, device=(capi.DEVICE_HOST, 0))
    q, k, v = Tensor((1, 2, 3, 8)), Tensor((1, 1, 5, 8)), Tensor((1, 1, 5, 8), [1.0] * 40)
    o, lse, dbias = Tensor((1, 2, 3, 8)), Tensor((1, 2, 3)), Tensor((5,), [7.0] * 5)
    captures = {"bias": Tensor((5,), [0.0, 1.0, 2.0, 3.0, 4.0]), "gain": 0.5}
    attention.bind_forward(q, k, v, o, lse, captures=captures)()
    check(all(abs(x - 1) < 1e-6 for x in o.values()), f"o is 1: {o.values()}")
    dq, dk, dv = Tensor((1, 2, 3, 8)), Tensor((1, 1, 5, 8)), Tensor((1, 1, 5, 8))
    attention.bind_backward(q, k, v, o, lse, o, dq, dk, dv, captures=captures, dcaptures={"bias": dbias})()
    check(all(abs(x) < 1e-5 for x in dbias.values()), f"dbias is 0: {dbias.values()}")
    refused(ValueError, attention.bind_backward(q, k, v, o, lse, o, dq, dk, dv, captures=captures,
                                                dcaptures={"gain": Tensor((1,))}), "gain")


def test_protocols():
    """The same values by each protocol give the same."""
    values = [[((n * 7 + shift) % 11) / 5 - 1 for n in range(32)] for shift in range(3)]
    q, k, v = (Tensor((1, 2, 2, 8), x) for x in values)
    expected = None
    for kind in (lambda t: t, InterfaceArray, DlpackArray):
        o = Tensor((1, 2, 2, 8))
        returned = fa_attention.attention(*map(kind, (q, k, v)), out=kind(o), causal=True)
        expected = expected or o.values()
        check(o.values() == expected and isinstance(returned, (Tensor, InterfaceArray, DlpackArray)), f"o by {kind}")
    check(len(set(expected)) > 8, "values differ")
    refused(TypeError, lambda: fa_attention.attention(DlpackArray(q, 8), k, v, out=q), "q has DLPack's dtype", "8 bits")
    refused(ValueError, lambda: fa_attention.attention(InterfaceArray(q, (1, 2, 3, 5)), k, v, out=q), "q has strides of")
    apart = InterfaceArray(q, (128, 64, 4, 8))
    refused(ValueError, lambda: fa_attention.attention(apart, k, v, out=Tensor((1, 2, 2, 8))), "q", "strid")
    refused(TypeError, lambda: fa_attention.attention([1.0], k, v), "q is a builtins.list", "__dlpack__")


def test_nvrtc_places():
    """One place after the other, and a report of all."""
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        for part in ("nvidia/cu13/lib/libnvrtc.so.13", "torch/lib/libnvrtc-1234.so.12", "torch/lib/libnvrtc-builtins.so.12.8"):
            (root / part).parent.mkdir(parents=True, exist_ok=True)
            (root / part).touch()
        (root / "torch/__init__.py").touch()
        sys.path.insert(0, folder)
        used = []
        os.environ.pop("FA_NVRTC_PATH", None)
        places = _nvrtc.Places(used.append)
        places.start()
        places.start()
        check(used == [os.fsencode(root / "nvidia/cu13/lib/libnvrtc.so.13")], f"the wheel goes first: {used}")
        check(places.next("is broken") and used[-1].endswith(b"libnvrtc-1234.so.12"), f"then PyTorch's own: {used}")
        check(places.next("") and used[-1] == b"", f"then the system's: {used}")
        check(not places.next(""), "then none")
        text = _nvrtc.explain("no NVRTC", places.report)
        check("is broken" in text and "PyTorch's own" in text and "pip install" in text, f"all are told of: {text}")
        used.clear()
        os.environ["FA_NVRTC_PATH"] = "/somewhere"
        places = _nvrtc.Places(used.append)
        places.start()
        check(used == [] and not places.next(""), "the environment ends the search")
        places.order(b"/here")
        places.start()
        check(used == [b"/here"] and not places.next(""), "so does a path of the user's")
        del os.environ["FA_NVRTC_PATH"]
        sys.path.remove(folder)


def test_no_nvrtc(library):
    """A kernel that cannot be compiled: the reason tells of the user's path."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["FA_CACHE_DIR"] = folder
        fa_attention.set_nvrtc_path("/nowhere/libnvrtc.so.13")
        refused(fa_attention.NoCompiler, lambda: capi.find_kernel(library, "sm_80", (1, 1, 1, 64, 64), 64, "float16"),
                "/nowhere/libnvrtc.so.13")
        fa_attention.set_nvrtc_path(None)


def test_pages(library):
    """Values of ones on the pages that the table names, and of sevens elsewhere."""
    attention = capi.Attention(library, 8, "torch.float32", causal=True, page_size=2,
                                    device=(capi.DEVICE_HOST, 0))
    q, o = Tensor((2, 2, 1, 8)), Tensor((2, 2, 1, 8))
    k, v = Tensor((4, 1, 2, 8)), Tensor((4, 1, 2, 8), [7.0] * 16 + [1.0] * 32 + [7.0] * 16)
    table = Tensor((2, 3), [1, -1, -1, -1, 2, 1], "torch.int32")
    lengths, begin = Tensor((2,), [1, 5], "torch.int32"), Tensor((2,), [0, 2], "torch.int32")
    cache = capi.paged_cache(table, seq_begin=begin)
    attention.bind_forward(q, k, v, o, sequences=capi.requests(lengths), cache=cache)()
    check(all(abs(x - 1) < 1e-6 for x in o.values()), f"o is 1: {o.values()}")
    refused(ValueError, attention.bind_forward(q, k, v, o, sequences=capi.requests(lengths)), "cache.block_table")
    refused(TypeError, lambda: capi.paged_cache(table, batch_index=Tensor((2,))), "batch_index", "int32")
    limits = (2, 2, 1, 1, 6)
    check(attention.schedule_size(*limits) == 0, "the host device needs no schedule")
    schedule = capi.schedule_memory(Tensor((64,)))
    attention.bind_schedule(schedule, limits, capi.requests(lengths), seq_begin=begin)()
    attention.bind_forward(q, k, v, o, sequences=capi.requests(lengths), cache=cache, schedule=schedule)()
    check(all(abs(x - 1) < 1e-6 for x in o.values()), f"o is 1: {o.values()}")
    refused(ValueError, attention.bind_schedule(schedule, (3, 2, 1, 1, 6), capi.requests(lengths)), "sequences.b", "2")


def test_contiguous_cache(library):
    """Values of ones in the rows that the requests have, up to their lengths, and of sevens elsewhere."""
    attention = capi.Attention(library, 8, "torch.float32", causal=True, page_size=capi.CONTIGUOUS,
                               device=(capi.DEVICE_HOST, 0))
    q, o = Tensor((2, 2, 1, 8)), Tensor((2, 2, 1, 8))
    ones, sevens = [1.0] * 8, [7.0] * 8
    k = Tensor((3, 1, 4, 8))
    v = Tensor((3, 1, 4, 8), ones * 3 + sevens + sevens * 4 + sevens + ones + sevens * 2)
    lengths, begin, rows = (Tensor((2,), numbers, "torch.int32") for numbers in ([2, 3], [1, 0], [2, 0]))
    cache = capi.paged_cache(batch_index=rows, seq_begin=begin)
    attention.bind_forward(q, k, v, o, sequences=capi.requests(lengths), cache=cache)()
    check(all(abs(x - 1) < 1e-6 for x in o.values()), f"o is 1: {o.values()}")
    refused(ValueError, attention.bind_forward(q, k, v, o, sequences=capi.requests(lengths)), "k", "3 rows", "b = 2")
    refused(ValueError, attention.bind_forward(q, k, v, o, sequences=capi.requests(Tensor((2,), [2, 5], "torch.int32")),
                                               cache=cache), "seqused_kv[1]", "5")
    table = capi.paged_cache(Tensor((2, 1), [0, 1], "torch.int32"))
    refused(ValueError, attention.bind_forward(q, k, v, o, sequences=capi.requests(lengths), cache=table), "cache.block_table")
    limits = (2, 2, 1, 1, 4)
    schedule = capi.schedule_memory(Tensor((64,)))
    attention.bind_schedule(schedule, limits, capi.requests(lengths), seq_begin=begin)()
    attention.bind_forward(q, k, v, o, sequences=capi.requests(lengths), cache=cache, schedule=schedule)()
    check(all(abs(x - 1) < 1e-6 for x in o.values()), f"o is 1: {o.values()}")


def test_shared_prefixes(library):
    """Two keys of ones that two requests share, and two of threes that each has."""
    attention = capi.Attention(library, 8, "torch.float32", causal=True, page_size=2, device=(capi.DEVICE_HOST, 0))
    q, o = Tensor((2, 2, 1, 8)), Tensor((2, 2, 1, 8))
    k, v = Tensor((4, 1, 2, 8)), Tensor((4, 1, 2, 8), [1.0] * 16 + [3.0] * 32 + [7.0] * 16)
    table = Tensor((2, 2), [-1, 1, -1, 2], "torch.int32")
    lengths, begin = Tensor((2,), [4, 4], "torch.int32"), Tensor((2,), [2, 2], "torch.int32")
    level = capi.shared_prefix(Tensor((1, 1), [0], "torch.int32"), Tensor((2,), [0, 2], "torch.int32"),
                               Tensor((1,), [2], "torch.int32"))
    options = {"sequences": capi.requests(lengths), "cache": capi.paged_cache(table, seq_begin=begin)}
    attention.bind_forward(q, k, v, o, **options, prefixes=[level])()
    check(all(abs(x - 2) < 1e-6 for x in o.values()), f"o is 2: {o.values()}")
    attention.prepare_shared((2, 2, 1, 1, 4), [(1, 0, 2, False)])
    check(attention.shared_workspace_size((2, 2, 1, 1, 4), [(1, 0, 2, False)]) > 0, "partial results take memory")
    refused(TypeError, lambda: capi.shared_prefix(table, begin, Tensor((1,))), "lengths", "int32")
    refused(ValueError, attention.bind_forward(q, k, v, o, **options, prefixes=[level] * 9), "prefix_count", "8")


def test_append(library):
    """Rows of ones and twos go to the positions that the lengths end with; a row of another slot goes there."""
    attention = capi.Attention(library, 8, "torch.float32", page_size=2, device=(capi.DEVICE_HOST, 0))
    k, v = Tensor((2, 1, 1, 8), [1.0] * 8 + [2.0] * 8), Tensor((2, 1, 1, 8), [3.0] * 8 + [4.0] * 8)
    k_cache, v_cache = Tensor((4, 1, 2, 8)), Tensor((4, 1, 2, 8))
    table, lengths = Tensor((2, 2), [3, -1, 0, 2], "torch.int32"), Tensor((2,), [1, 4], "torch.int32")
    bind = lambda **more: attention.bind_append(k, v, k_cache, v_cache, cache=capi.paged_cache(table), **more)  # noqa: E731
    bind(seqused_kv=lengths)()
    check(rows_of(k_cache) == {6: 1.0, 5: 2.0} and rows_of(v_cache) == {6: 3.0, 5: 4.0}, f"rows {rows_of(k_cache)}")
    bind(slots=Tensor((2,), [-1, 1], "torch.int64"))()
    check(rows_of(k_cache) == {6: 1.0, 5: 2.0, 1: 2.0}, f"rows {rows_of(k_cache)}")
    turned = Tensor((2, 1, 1, 8))
    quarter = capi.rotary_embedding(2, cos=Tensor((4, 1), [0.0] * 4), sin=Tensor((4, 1), [1.0] * 4))
    bind(seqused_kv=lengths, rotary=quarter, q=k, q_out=turned)()
    check(turned.values()[:3] == (-1.0, 1.0, 1.0), f"a quarter turn: {turned.values()[:3]}")
    refused(ValueError, bind(seqused_kv=lengths, rotary=capi.rotary_embedding(3)), "dims", "3")


def test_merge(library):
    """Two rows of equal weight are averaged, in place; one without keys takes no part; a forward adds to a state."""
    attention = capi.Attention(library, 8, "torch.float32", device=(capi.DEVICE_HOST, 0))
    o, lse = Tensor((1, 1, 2, 8), [1.0] * 8 + [5.0] * 8), Tensor((1, 1, 2), [2.0, 1.0])
    other, other_lse = Tensor((1, 1, 2, 8), [3.0] * 8 + [float("nan")] * 8), Tensor((1, 1, 2), [2.0, float("-inf")])
    merge = attention.bind_merge([(o, lse), (other, other_lse)], o, lse)
    merge()
    check(o.values() == (2.0,) * 8 + (5.0,) * 8, f"merged {o.values()}")
    check(abs(lse.values()[0] - 2.6931472) < 1e-6 and lse.values()[1] == 1.0, f"merged {lse.values()}")
    merged = Tensor((1, 1, 2, 8))
    attention.bind_merge([(o, lse)], merged, sink=Tensor((1,), [1.0]))()
    check(merged.values()[8:] == (2.5,) * 8, f"with a sink {merged.values()}")
    accumulating = capi.Attention(library, 8, "torch.float32", device=(capi.DEVICE_HOST, 0), accumulate=True)
    q, k, v = Tensor((1, 1, 2, 8)), Tensor((1, 1, 1, 8)), Tensor((1, 1, 1, 8), [9.0] * 8)  # one key of score 0
    state, state_lse = Tensor((1, 1, 2, 8), [1.0] * 16), Tensor((1, 1, 2), [0.0, float("-inf")])
    accumulating.bind_forward(q, k, v, state, state_lse)()
    check(state.values() == (5.0,) * 8 + (9.0,) * 8, f"accumulated {state.values()}")
    total = Tensor((1, 1, 2, 8))
    attention.bind_merge([(o, None), (o, None), (merged, None)], total, add=True)()
    expected = tuple(2 * a + c for a, c in zip(o.values(), merged.values()))
    check(max(abs(a - c) for a, c in zip(total.values(), expected)) < 1e-5, f"summed {total.values()}")
    refused(ValueError, attention.bind_merge([(o, lse)] * 17, o, lse), "state_count", "17")
    refused(ValueError, attention.bind_merge([(o, None)], o, lse), "states[0].lse")


def test_quantize(library):
    """Codes, scales and means of keys, and the biases that a forward of them is given: two keys around a mean."""
    attention = capi.Attention(library, 16, "torch.int8", device=(capi.DEVICE_HOST, 0), key_scales=True, o_dtype="torch.float16")
    q, k = Tensor((1, 1, 1, 16), [2.0] + [1.0] * 15), Tensor((1, 1, 2, 16), [5.0] * 16 + [3.0] * 16)
    codes, keys = Tensor((1, 1, 1, 16), dtype="torch.int8"), Tensor((1, 1, 2, 16), dtype="torch.int8")
    scale, scales, mean, bias = Tensor((1, 1, 1)), Tensor((1, 1, 2)), Tensor((1, 1, 16)), Tensor((1, 1, 1))
    attention.bind_quantize(q=q, k=k, q_codes=codes, k_codes=keys, q_scale=scale, k_scale=scales, k_mean=mean, row_bias=bias)()
    check(mean.values() == (4.0,) * 16 and bias.values() == (68.0,), f"means {mean.values()}, bias {bias.values()}")
    check(codes.values() == (127,) + (64,) * 15, f"codes of q {codes.values()}")
    check(keys.values() == (127,) * 16 + (-127,) * 16, f"codes of k {keys.values()}")
    v, o, lse = Tensor((1, 1, 2, 16), [0x38] * 32, "torch.float8_e4m3fn"), Tensor((1, 1, 1, 16), dtype="torch.float16"), Tensor((1, 1, 1))
    forward = dict(q_scale=scale, k_scale=scales)
    attention.bind_forward(codes, keys, v, o, lse, row_bias=bias, **forward)()
    with_bias = lse.values()[0]
    attention.bind_forward(codes, keys, v, o, lse, **forward)()
    check(abs(with_bias - lse.values()[0] - 17) < 1e-5 and o.values() == (1.0,) * 16, f"{with_bias} {lse.values()} {o.values()}")
    refused(ValueError, attention.bind_quantize(k=k, k_codes=keys, k_scale=scales, row_bias=bias), "row_bias")


def test_places(library):
    """Rows of zeros average the keys that they keep. As the second row of three, of four keys, a row keeps three; of a part of
    the keys that is behind it, none."""
    attention = capi.Attention(library, 8, "torch.float32", causal=True, device=(capi.DEVICE_HOST, 0))
    q, k, o, lse = Tensor((1, 1, 1, 8)), Tensor((1, 1, 4, 8)), Tensor((1, 1, 1, 8)), Tensor((1, 1, 1))
    v = Tensor((1, 1, 4, 8), [float(n // 8) for n in range(32)])
    whole = {"whole_s_q": 3, "whole_s_kv": 4}
    attention.bind_forward(q, k, v, o, lse, place=capi.shard_place(q=1, **whole), max_multiprocessors=2)()
    check(o.values() == (1.0,) * 8, f"of three keys {o.values()}")
    dq, dk, dv = Tensor((1, 1, 1, 8)), Tensor((1, 1, 4, 8)), Tensor((1, 1, 4, 8))
    attention.bind_backward(q, k, v, o, lse, o, dq, dk, dv, place=capi.shard_place(q=1, **whole))()
    check(abs(dv.values()[16] - 1 / 3) < 1e-6 and dv.values()[24] == 0.0, f"of three keys {dv.values()}")
    attention.bind_forward(q, k, v, o, lse, place=capi.shard_place(kv=8, whole_s_q=12, whole_s_kv=12))()
    check(lse.values() == (float("-inf"),), f"behind all {lse.values()}")
    begin = Tensor((4,), [0, 0, 1, 0], dtype="torch.int64")
    sizes = {"whole_b": 1, "whole_h_q": 1, **whole}
    read = attention.bind_forward(q, k, v, o, lse, place=capi.shard_place(begin=begin, **sizes))
    read()
    check(o.values() == (1.0,) * 8, f"of three keys {o.values()}")
    begin.memory[16] = 2
    read()
    check(o.values() == (1.5,) * 8, f"of four keys {o.values()}")
    refused(ValueError, attention.bind_forward(q, k, v, o, place=capi.shard_place(q=1, begin=begin, **sizes)), "place.q = 1")
    refused(ValueError, attention.bind_forward(q, k, v, o, place=capi.shard_place(begin=begin, **whole)), "place.whole_b")
    refused(TypeError, lambda: capi.shard_place(begin=q, **sizes), "begin")
    refused(ValueError, attention.bind_forward(q, k, v, o, place=capi.shard_place(q=3, **whole)), "place.q = 3")
    two = Tensor((1, 1, 2, 8))
    refused(capi.Unsupported, attention.bind_forward(two, k, v, two, place=capi.shard_place(kv_step=2)), "place.q_step")
    attention.prepare(1, 1, 1, 8, 8, kinds=("placed", "bounded", "place_in_memory"))
    check(attention.backward_workspace_size(1, 1, 1, 8, 8, kinds=("strided",)) == 0, "the host needs no workspace")
    refused(ValueError, lambda: attention.workspace_size(1, 1, 1, 8, 8, kinds=("moved",)), "'moved'", "'placed'")


def test_ranks(library):
    """Two threads share four rows: forward and backward of each come to its rows of the whole."""
    if not os.environ.get("FA_PARALLEL_LIBRARY") and not (pathlib.Path(library.path).parent / "libfa_parallel.so").is_file():
        print("not tested, because it is not there: libfa_parallel.so")
        return
    numbers = [((7 * n) % 11) / 11 - 0.5 for n in range(32)]
    q, k, v = (Tensor((1, 1, 4, 8), numbers[n:] + numbers[:n]) for n in (0, 3, 5))
    o, lse, dq, dk, dv = Tensor(q.shape), Tensor((1, 1, 4)), Tensor(q.shape), Tensor(q.shape), Tensor(q.shape)
    one = capi.Attention(library, 8, "float32", causal=True, device=(capi.DEVICE_HOST, 0))
    one.bind_forward(q, k, v, o, lse)()
    one.bind_backward(q, k, v, o, lse, v, dq, dk, dv)()
    group, together = parallel.Communicator.local_group(2), [Tensor(q.shape) for _ in range(4)]

    def work(communicator):
        try:
            shared = parallel.ContextParallel(communicator, 8, "float32", scheme="ring", causal=True)
            shared.check_agreement()
            shared.prepare(1, 1, 1, 4, 4)
            new = lambda: Tensor((1, 1, 2, 8))  # noqa: E731
            mine, results, own_lse = [new() for _ in "qkv"], [new() for _ in together], Tensor((1, 1, 2))
            for whole, part in zip((q, k, v), mine):
                parallel.shard(whole, part, 2, communicator.rank)
            shared.forward(*mine, results[0], own_lse)
            shared.backward(*mine, results[0], own_lse, mine[2], *results[1:])
            for whole, part in zip(together, results):
                parallel.unshard(part, whole, 2, communicator.rank)
            check(shared.scheme(1, 1, 1, 4, 4) == ("ring", 1), "the scheme is the one that was asked for")
        except Exception as problem:
            check(False, f"rank {communicator.rank}: {problem}")
            communicator.abort(str(problem))

    threads = [threading.Thread(target=work, args=(communicator,)) for communicator in group]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name, whole, expected in zip(("o", "dq", "dk", "dv"), together, (o, dq, dk, dv)):
        off = max(abs(x - y) for x, y in zip(whole.values(), expected.values()))
        check(off < 1e-6 and any(expected.values()), f"{name} of ranks differs by {off}")
    refused(ValueError, lambda: parallel.ContextParallel(group[0], 8, "float32", layout="spiral"), "spiral", "zigzag")
    group[0].abort("the data are at an end")
    refused(fa_attention.Error, group[1].check, "the data are at an end")


def test_value_in_key(library):
    """V is the first columns of K: keys of equal scores are averaged, and a v of its own is refused."""
    attention = capi.Attention(library, 16, "torch.float32", device=(capi.DEVICE_HOST, 0), value_in_key=8)
    q, k, o = Tensor((1, 2, 1, 16)), Tensor((1, 1, 2, 16), [1.0] * 8 + [7.0] * 8 + [3.0] * 8 + [9.0] * 8), Tensor((1, 2, 1, 8))
    attention.bind_forward(q, k, None, o)()
    check(o.values() == (2.0,) * 16, f"averaged {o.values()}")
    refused(ValueError, attention.bind_forward(q, k, Tensor((1, 1, 2, 8)), o), "v = given", "value_in_key")


def rows_of(cache):
    """The rows of a cache that are not 0, and their first elements."""
    first = cache.values()[::8]
    return {row: value for row, value in enumerate(first) if value != 0}


def test_debug(library):
    """P of a head sums to 1, and a broken number is named."""
    attention = capi.Attention(library, 8, "torch.float32", debug=True, device=(capi.DEVICE_HOST, 0))
    q, k = Tensor((1, 2, 3, 8)), Tensor((1, 1, 5, 8))
    o, lse, p = Tensor((1, 2, 3, 8)), Tensor((1, 2, 3)), Tensor((3, 5))
    attention.bind_forward(q, k, Tensor((1, 1, 5, 8)), o, lse, dump=(p, 0, 1))()
    check(all(abs(x - 0.2) < 1e-6 for x in p.values()), f"P is equal weights: {p.values()}")
    broken = Tensor((1, 1, 5, 8), [0.0] * 19 + [float("nan")] + [0.0] * 20)
    try:
        attention.bind_forward(q, k, broken, o, lse)()
        check(False, "a NaN is refused")
    except fa_attention.NotFinite as error:
        at = error.location
        check((at.tensor, at.b, at.h, at.q, at.kv, at.d, at.index, at.result) == ("v", 0, 0, -1, 2, 3, (), "o"),
              f"it is named: {at}")
        check(error.fields["kv"] == "2" and error.fields["tensor"] == "v", f"its fields, too: {error.fields}")
    refused(fa_attention.InvalidArgument, attention.bind_forward(q, k, k, o, lse, dump=(p, 0, 2)), "dump.h")


def main():
    library = capi.load()
    check(library.version() == fa_attention.__version__, "the version of the package is that of the library")
    test_no_nvrtc(library)
    test_function()
    test_arguments(library)
    test_fields_of_errors(library)
    test_arrays()
    test_forward(library)
    test_protocols()
    test_nvrtc_places()
    test_pages(library)
    test_shared_prefixes(library)
    test_append(library)
    test_merge(library)
    test_quantize(library)
    test_places(library)
    test_value_in_key(library)
    test_debug(library)
    test_ranks(library)
    print("ctypes: " + (f"{len(failures)} checks failed" if failures else "all checks passed"))
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
