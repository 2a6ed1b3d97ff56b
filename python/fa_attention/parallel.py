"""Context parallelism from Python, by ctypes alone: ranks that share the rows of each sequence (docs/context_parallel.md).

    communicator = Communicator.of_nccl(comm)                       # the address of an ncclComm_t
    parallel = ContextParallel(communicator, head_dim=128, dtype="bfloat16", causal=True)
    parallel.forward(q, k, v, o, lse, stream=stream)                # this rank's rows
    parallel.backward(q, k, v, o, lse, dout, dq, dk, dv, stream=stream)

The library is libfa_parallel.so: FA_PARALLEL_LIBRARY names it, else it lies beside libfa.so. Arrays are whatever `fa_attention`
accepts. Every rank makes the same calls in the same order. `fa_attention.torch.ContextParallel` does it with gradients.
"""

from __future__ import annotations

import ctypes
import numbers
import os
import threading
from pathlib import Path
from typing import Any, Callable, Mapping, Optional, Sequence, TypeVar

from . import _abi, _views, capi
from ._errors import type_name
from ._library import Library, load

__all__ = ["Communicator", "ContextParallel", "GRADIENTS", "LAYOUTS", "SCHEMES", "TRANSFERS", "load_parallel", "shard",
           "shard_rows", "unshard"]

LAYOUTS = {"contiguous": 0, "zigzag": 1, "striped": 2}
SCHEMES = {"automatic": 0, "ring": 1, "all_gather": 2, "ulysses": 3}
GRADIENTS = {"float32": 0, "native": 1}
TRANSFERS = {"automatic": 0, "messages": 1, "puts": 2}


class _NcclOptions(_abi.Struct):
    _fields_ = [("struct_size", ctypes.c_uint32), ("without_watch", ctypes.c_int32), ("timeout_ms", ctypes.c_int64),
                ("transfers", ctypes.c_int32), ("reserved", ctypes.c_int32)]


class _Config(_abi.Struct):
    _fields_ = [("struct_size", ctypes.c_uint32), ("layout", ctypes.c_int32), ("attention", ctypes.POINTER(_abi.Config)),
                *[(name, ctypes.c_int32) for name in ("scheme", "ulysses", "head_groups", "gradients",
                                                      "has_reserved_multiprocessors", "reserved_multiprocessors")]]


class _Shape(_abi.Struct):
    _fields_ = [("struct_size", ctypes.c_uint32), ("reserved", ctypes.c_uint32),
                *[(name, ctypes.c_int64) for name in ("b", "h_q", "h_kv", "s_q", "s_kv")]]


class _ShardCopy(_abi.Struct):
    _fields_ = [("struct_size", ctypes.c_uint32), *[(name, ctypes.c_int32) for name in ("layout", "ranks", "rank")],
                ("lengths", ctypes.POINTER(ctypes.c_int64)), ("length_count", ctypes.c_uint64), ("statistics", ctypes.c_int32),
                ("device", _abi.Device), ("reserved", ctypes.c_uint32)]


_SPEEDS = ("flops", "backward_flops", "link", "network", "latency", "launch", "memory")


class _Speeds(_abi.Struct):
    _fields_ = [("struct_size", ctypes.c_uint32), ("ranks_of_node", ctypes.c_int32), *[(name, ctypes.c_double) for name in _SPEEDS]]


class _Time(_abi.Struct):
    _fields_ = [("struct_size", ctypes.c_uint32), *[(name, ctypes.c_int32) for name in ("scheme", "ulysses", "reserved")],
                *[(name, ctypes.c_double) for name in ("forward", "backward", "single")]]


class _Memory(_abi.Struct):
    _fields_ = [("struct_size", ctypes.c_uint32), ("reserved", ctypes.c_uint32),
                *[(name, ctypes.c_uint64) for name in ("shard_kv", "kv_in_flight", "scratch")]]


_LENGTHS = [ctypes.c_void_p, ctypes.c_uint64]
_P = ctypes.c_void_p
_FUNCTIONS: dict[str, list[Any]] = {
    "fa_communicator_of_nccl": [_P, _P, _P],
    "fa_communicator_local_group": [ctypes.c_int32, ctypes.c_int64, _P],
    "fa_communicator_rank": [_P, _P, _P],
    "fa_communicator_synchronize": [_P, _P],
    "fa_communicator_check": [_P],
    "fa_communicator_abort": [_P, ctypes.c_char_p],
    "fa_parallel_create": [_P, _P, _P],
    "fa_parallel_forward": [_P, _P, _P, _P, *_LENGTHS],
    "fa_parallel_backward": [_P, _P, _P, _P, *_LENGTHS],
    "fa_parallel_prepare": [_P, _P, ctypes.c_int32, *_LENGTHS],
    "fa_parallel_check_agreement": [_P, _P],
    "fa_parallel_scheme": [_P, _P, *_LENGTHS, _P, _P],
    "fa_parallel_set_speeds": [_P, _P],
    "fa_parallel_scheme_time": [_P, _P, *_LENGTHS, _P],
    "fa_parallel_memory": [_P, _P, ctypes.c_int32, *_LENGTHS, _P],
    "fa_parallel_describe": [_P, _P, ctypes.c_int32, *_LENGTHS, _P, ctypes.c_uint64, _P],
    "fa_parallel_hash": [_P, _P],
    "fa_shard_rows": [ctypes.c_int32, ctypes.c_int32, ctypes.c_int32, *_LENGTHS, _P, ctypes.c_uint64, _P],
    "fa_shard": [_P, _P, _P, _P],
    "fa_unshard": [_P, _P, _P, _P],
}


class _ParallelLibrary:
    """libfa_parallel.so beside an opened libfa.so, which has its errors."""

    def __init__(self, library: Library) -> None:
        self.library = library
        places = [Path(library.path).resolve().parent / "libfa_parallel.so"]
        given = os.environ.get("FA_PARALLEL_LIBRARY")
        if not given and not places[0].is_file():
            raise ImportError(f"libfa_parallel.so is not found: neither FA_PARALLEL_LIBRARY names it, nor is it {places[0]}")
        self.path = given or os.fspath(places[0])
        self.functions: Any = ctypes.CDLL(self.path)
        for name, arguments in _FUNCTIONS.items():
            getattr(self.functions, name).argtypes = arguments
        for name in ("fa_communicator_destroy", "fa_parallel_destroy"):
            getattr(self.functions, name).argtypes = [_P]
            getattr(self.functions, name).restype = None

    def call(self, name: str, *arguments: Any) -> None:
        function = getattr(self.functions, name)
        status = function(*arguments)
        if status != _abi.OK:
            self.library.failed(status, lambda: int(function(*arguments)))


_lock = threading.Lock()
_opened: Optional[_ParallelLibrary] = None


def load_parallel() -> _ParallelLibrary:
    """The library of this process; it is opened once."""
    global _opened
    with _lock:
        if _opened is None:
            _opened = _ParallelLibrary(load())
        return _opened


def _number(name: str, table: Mapping[str, int], value: object) -> int:
    if str(value) not in table:
        raise ValueError(f"{name} is {value!r}: accepted are {', '.join(table)}")
    return table[str(value)]


def _lengths(lengths: Sequence[int]) -> tuple[Any, int]:
    """The array, or None, and its length."""
    for length in lengths:
        if not isinstance(length, numbers.Integral):
            raise TypeError(f"lengths has a {type_name(length)}: accepted are integers, the whole lengths of sequences")
    given = [int(length) for length in lengths]
    return ((ctypes.c_int64 * len(given))(*given) if given else None), len(given)


_Some = TypeVar("_Some", bound="Communicator")


class _Agreed:
    """Values that the threads of a local group agree on: the first to ask for one makes it, and all get it."""

    def __init__(self, size: int) -> None:
        self._size, self._lock = size, threading.Lock()
        self._values: dict[int, tuple[Any, int]] = {}

    def get(self, number: int, make: Callable[[], Any]) -> Any:
        with self._lock:
            value, left = self._values.pop(number) if number in self._values else (make(), self._size)
            if left > 1:
                self._values[number] = (value, left - 1)
            return value


class Communicator:
    """A rank of a group. A failure of one rank ends the calls of all within a bound, with `fa_attention.Error`."""

    _agreed: Optional[_Agreed] = None  # of a local group
    _agreements = 0

    def __init__(self, library: _ParallelLibrary, handle: int) -> None:
        self.lib = library
        self._destroy = library.functions.fa_communicator_destroy
        self.handle = handle
        rank, size = ctypes.c_int32(), ctypes.c_int32()
        library.call("fa_communicator_rank", handle, ctypes.addressof(rank), ctypes.addressof(size))
        self.rank, self.size = rank.value, size.value

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            self._destroy(self.handle)

    @classmethod
    def of_nccl(cls: type[_Some], comm: int, timeout: float = 60.0, watch: bool = True, transfers: str = "automatic") -> _Some:
        """Over an ncclComm_t of the application, by its address. It outlives this object, and every ContextParallel of it.
        timeout: seconds that a group of transfers may take, and ranks may be behind; watch: a thread ends what takes longer;
        transfers: "puts" by copy engines, "messages", or "automatic": puts where they can be used."""
        library = load_parallel()
        options = _NcclOptions(without_watch=int(not watch), timeout_ms=int(timeout * 1e3),
                               transfers=_number("transfers", TRANSFERS, transfers))
        handle = ctypes.c_void_p()
        library.call("fa_communicator_of_nccl", comm, ctypes.addressof(options), ctypes.addressof(handle))
        return cls(library, int(handle.value or 0))

    @classmethod
    def local_group(cls, size: int, timeout: float = 30.0) -> list[Communicator]:
        """Ranks that are threads of this process, on the host device."""
        if size < 1:
            raise ValueError(f"size is {size}: accepted are 1 and more")
        library = load_parallel()
        handles = (ctypes.c_void_p * size)()
        library.call("fa_communicator_local_group", size, int(timeout * 1e3), ctypes.addressof(handles))
        group = [cls(library, int(handle or 0)) for handle in handles]
        agreed = _Agreed(size)
        for communicator in group:
            communicator._agreed = agreed
        return group

    def agree(self, make: Callable[[], Any]) -> Any:
        """One value on all ranks of a local group, of the nth call of each: the first of them makes it. ValueError where the
        ranks are no threads of this process."""
        if self._agreed is None:
            raise ValueError("agree: accepted is a communicator of local_group")
        self._agreements += 1
        return self._agreed.get(self._agreements, make)

    def synchronize(self, stream: Optional[int] = None) -> None:
        """Returns when the stream and all transfers have run."""
        self.lib.call("fa_communicator_synchronize", self.handle, stream or 0)

    def check(self) -> None:
        """Raises where something has failed since; does not wait."""
        self.lib.call("fa_communicator_check", self.handle)

    def abort(self, problem: str) -> None:
        """Ends the calls of all ranks, with this reason."""
        self.lib.call("fa_communicator_abort", self.handle, problem.encode())


class ContextParallel:
    """One attention over rows that ranks share. `config`: what `capi.make_config` takes, of the whole attention.

    ulysses: ranks that share heads, 0 as the scheme has it; head_groups: pieces of an all_gather, 0 the library's choice;
    gradients: what dK and dV are sent in; reserved_multiprocessors: that kernels leave to transfers, None or 0: none."""

    def __init__(self, communicator: Communicator, head_dim: int, dtype: object, layout: str = "zigzag",
                 scheme: str = "automatic", ulysses: int = 0, head_groups: int = 0, gradients: str = "float32",
                 reserved_multiprocessors: Optional[int] = None, **config: Any) -> None:
        self.communicator, self.lib = communicator, communicator.lib
        self._destroy = self.lib.functions.fa_parallel_destroy
        attention = capi.make_config(head_dim, dtype, **config)
        given = _Config(layout=_number("layout", LAYOUTS, layout), attention=ctypes.pointer(attention),
                        scheme=_number("scheme", SCHEMES, scheme), ulysses=int(ulysses), head_groups=int(head_groups),
                        gradients=_number("gradients", GRADIENTS, gradients),
                        has_reserved_multiprocessors=int(reserved_multiprocessors is not None),
                        reserved_multiprocessors=int(reserved_multiprocessors or 0))
        handle = ctypes.c_void_p()
        self.lib.call("fa_parallel_create", ctypes.addressof(given), communicator.handle, ctypes.addressof(handle))
        self.handle: Optional[int] = handle.value
        self.layout = layout

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            self._destroy(self.handle)

    def _call(self, name: str, inputs: _abi.Struct, outputs: _abi.Struct, stream: Optional[int], lengths: Sequence[int]) -> None:
        array, count = _lengths(lengths)
        self.lib.call(name, self.handle, ctypes.addressof(inputs), ctypes.addressof(outputs), stream or 0, array, count)

    def _check_devices(self, **arrays: Any) -> None:
        """ValueError for an array that is not where ranks of this communicator compute."""
        kind, accepted = (_abi.DEVICE_CUDA, "a GPU's") if self.communicator._agreed is None else (_abi.DEVICE_HOST, "the host's")
        for name, array in arrays.items():
            if array is not None and _views.view(name, array).device[0] != kind:
                raise ValueError(f"{name} is in other memory than ranks of this communicator compute in: accepted is {accepted}")

    def forward(self, q: Any, k: Any, v: Any, o: Any, lse: Any = None, stream: Optional[int] = None,
                lengths: Sequence[int] = (), captures: Optional[Mapping[str, Any]] = None, sink: Any = None,
                dropout: Optional[_abi.DropoutState] = None) -> None:
        """Queues attention of this rank's rows: shards [b, h, s / n, d] in any memory order, or with varlen packed ones
        [total / n, h, d], of sequences of these whole lengths. Captures and the sink are those of the whole."""
        self._check_devices(q=q, k=k, v=v, o=o, lse=lse, sink=sink)
        inputs = _abi.ForwardInputs(**capi._pointers(q=q, k=k, v=v), **capi._variants(None, dropout, captures, sink, None))
        self._call("fa_parallel_forward", inputs, _abi.ForwardOutputs(**capi._pointers(o=o, lse=lse)), stream, lengths)

    def backward(self, q: Any, k: Any, v: Any, o: Any, lse: Any, dout: Any, dq: Any, dk: Any, dv: Any, dlse: Any = None,
                 stream: Optional[int] = None, lengths: Sequence[int] = (), captures: Optional[Mapping[str, Any]] = None,
                 sink: Any = None, dsink: Any = None, dropout: Optional[_abi.DropoutState] = None) -> None:
        """Likewise the gradients of this rank's rows and keys."""
        self._check_devices(q=q, k=k, v=v, o=o, lse=lse, dout=dout, dq=dq, dk=dk, dv=dv, dlse=dlse, sink=sink, dsink=dsink)
        inputs = _abi.BackwardInputs(**capi._pointers(q=q, k=k, v=v, o=o, lse=lse, dout=dout, dlse=dlse),
                                     **capi._variants(None, dropout, captures, sink, None))
        outputs = _abi.BackwardOutputs(**capi._pointers(dq=dq, dk=dk, dv=dv, dsink=dsink), **capi.captured(None))
        self._call("fa_parallel_backward", inputs, outputs, stream, lengths)

    def prepare(self, b: int, h_q: int, h_kv: int, s_q: int, s_kv: int, with_backward: bool = True,
                lengths: Sequence[int] = ()) -> None:
        """Plans calls of these sizes of the whole, compiles their kernels and takes their memory."""
        shape = _Shape(b=b, h_q=h_q, h_kv=h_kv, s_q=s_q, s_kv=s_kv)
        self.lib.call("fa_parallel_prepare", self.handle, ctypes.addressof(shape), int(with_backward), *_lengths(lengths))

    def check_agreement(self, stream: Optional[int] = None) -> None:
        """Raises on every rank unless configuration and layout are the same on all."""
        self.lib.call("fa_parallel_check_agreement", self.handle, stream or 0)

    def scheme(self, b: int, h_q: int, h_kv: int, s_q: int, s_kv: int, lengths: Sequence[int] = ()) -> tuple[str, int]:
        """Which scheme serves calls of these sizes, and how many ranks share heads."""
        shape = _Shape(b=b, h_q=h_q, h_kv=h_kv, s_q=s_q, s_kv=s_kv)
        scheme, ulysses = ctypes.c_int32(), ctypes.c_int32()
        self.lib.call("fa_parallel_scheme", self.handle, ctypes.addressof(shape), *_lengths(lengths),
                      ctypes.addressof(scheme), ctypes.addressof(ulysses))
        return next(name for name, number in SCHEMES.items() if number == scheme.value), ulysses.value

    def set_speeds(self, **speeds: float) -> None:
        """What schemes are chosen by, before the first call: flops, backward_flops, link, network, latency, launch, memory and
        ranks_of_node (docs/scale.md). The same on every rank."""
        known = (*_SPEEDS, "ranks_of_node")
        for name in speeds:
            if name not in known:
                raise ValueError(f"{name!r} is no speed: accepted are {', '.join(known)}")
        given = _Speeds(**speeds)
        self.lib.call("fa_parallel_set_speeds", self.handle, ctypes.addressof(given))

    def times(self, b: int, h_q: int, h_kv: int, s_q: int, s_kv: int, lengths: Sequence[int] = ()) -> dict[str, float]:
        """Seconds of forward and backward by the model, and of both on one GPU ("single")."""
        shape, time = _Shape(b=b, h_q=h_q, h_kv=h_kv, s_q=s_q, s_kv=s_kv), _Time()
        self.lib.call("fa_parallel_scheme_time", self.handle, ctypes.addressof(shape), *_lengths(lengths), ctypes.addressof(time))
        return {name: getattr(time, name) for name in ("forward", "backward", "single")}

    def memory(self, b: int, h_q: int, h_kv: int, s_q: int, s_kv: int, with_backward: bool = True,
               lengths: Sequence[int] = ()) -> dict[str, int]:
        """Bytes of a rank: its own K and V ("shard_kv"), those of other ranks ("kv_in_flight"), and all scratch ("scratch")."""
        shape, memory = _Shape(b=b, h_q=h_q, h_kv=h_kv, s_q=s_q, s_kv=s_kv), _Memory()
        self.lib.call("fa_parallel_memory", self.handle, ctypes.addressof(shape), int(with_backward), *_lengths(lengths),
                      ctypes.addressof(memory))
        return {name: getattr(memory, name) for name in ("shard_kv", "kv_in_flight", "scratch")}

    def describe(self, b: int, h_q: int, h_kv: int, s_q: int, s_kv: int, backward: bool = False,
                 lengths: Sequence[int] = ()) -> str:
        """What this rank does, one line an operation."""
        shape, length = _Shape(b=b, h_q=h_q, h_kv=h_kv, s_q=s_q, s_kv=s_kv), ctypes.c_uint64()
        arguments = (self.handle, ctypes.addressof(shape), int(backward), *_lengths(lengths))
        self.lib.call("fa_parallel_describe", *arguments, None, 0, ctypes.addressof(length))
        text = ctypes.create_string_buffer(length.value + 1)
        self.lib.call("fa_parallel_describe", *arguments, text, len(text), ctypes.addressof(length))
        return text.value.decode()

    def hash(self) -> int:
        """Of configuration, layout and speeds: what `check_agreement` compares."""
        value = ctypes.c_uint64()
        self.lib.call("fa_parallel_hash", self.handle, ctypes.addressof(value))
        return value.value


def shard_rows(ranks: int, rank: int, lengths: Sequence[int], layout: str = "zigzag") -> list[int]:
    """Which rows of sequences of these lengths a rank has, in the order of its shard."""
    library, number = load_parallel(), _number("layout", LAYOUTS, layout)
    array, count = _lengths(lengths)
    found = ctypes.c_uint64()
    arguments = (number, int(ranks), int(rank), array, count)
    library.call("fa_shard_rows", *arguments, None, 0, ctypes.addressof(found))
    rows = (ctypes.c_int64 * found.value)()
    library.call("fa_shard_rows", *arguments, rows, found.value, ctypes.addressof(found))
    return list(rows)


def _copy(name: str, first: Any, second: Any, ranks: int, rank: int, layout: str, lengths: Sequence[int], statistics: bool,
          stream: Optional[int]) -> None:
    library = load_parallel()
    array, count = _lengths(lengths)
    how = _ShardCopy(layout=_number("layout", LAYOUTS, layout), ranks=int(ranks), rank=int(rank),
                     lengths=ctypes.cast(array, ctypes.POINTER(ctypes.c_int64)) if array is not None else None,
                     length_count=count, statistics=int(statistics), device=_abi.Device(*_views.view("whole", first).device))
    tensors = [_views.tensor(which, value) for which, value in (("whole", first), ("part", second))]
    library.call(name, ctypes.addressof(how), *map(ctypes.addressof, tensors), stream or 0)


def shard(whole: Any, part: Any, ranks: int, rank: int, layout: str = "zigzag", lengths: Sequence[int] = (),
          statistics: bool = False, stream: Optional[int] = None) -> None:
    """Copies a rank's rows of `whole`, [b, h, s, d] or [b, s, d], to `part`; with lengths both are packed [total, h, d].
    statistics: [b, h, s], packed [h, total]."""
    _copy("fa_shard", whole, part, ranks, rank, layout, lengths, statistics, stream)


def unshard(part: Any, whole: Any, ranks: int, rank: int, layout: str = "zigzag", lengths: Sequence[int] = (),
            statistics: bool = False, stream: Optional[int] = None) -> None:
    """Copies them back; other rows of `whole` stay as they are."""
    _copy("fa_unshard", part, whole, ranks, rank, layout, lengths, statistics, stream)
