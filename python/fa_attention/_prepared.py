"""Calls whose structs are prepared: of everything that is fixed by shapes and options a call sets the addresses alone."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple, Optional, Sequence

from . import _abi, _views
from .capi import Attention


class Spec(NamedTuple):
    """What is fixed about an array."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def rows_aligned(self) -> bool:
        """Whether all rows start at multiples of 16 bytes if the first one does."""
        size = _views.SIZES[self.dtype]
        return all(n <= 1 or step * size % 16 == 0 for n, step in zip(self.shape[:-1], self.strides))

    def struct(self) -> _abi.Tensor:
        pad = (0,) * (4 - len(self.shape))
        return _abi.Tensor(dtype=_views.DTYPES[self.dtype], rank=len(self.shape), shape=(ctypes.c_int64 * 4)(*self.shape, *pad),
                           strides=(ctypes.c_int64 * 4)(*self.strides, *pad))


Named = Sequence[tuple[str, Spec]]


class Frame:
    """The structs of one call at a time."""

    __slots__ = ("tensors", "numbers", "sequences", "dropout", "cache", "schedule", "scratch", "inputs", "outputs",
                 "scratch_at", "keep")

    def __init__(self, layout: "Layout") -> None:
        structs = {name: spec.struct() for name, spec in (*layout.read, *layout.written)}
        given = [spec.struct() for _, spec in layout.captures]
        gradients = [spec.struct() for _, spec in layout.gradients]
        self.tensors = [*structs.values(), *given, *gradients]
        count = len(given) + len(layout.numbers)
        captures, dcaptures = (_abi.Captured * count)(), (_abi.Captured * len(gradients))()
        names = [name.encode() for name, _ in layout.captures] + [name.encode() for name in layout.numbers]
        for item, name in zip(captures, names):
            item.name = name
        for item, struct in zip(captures, given):
            item.tensor = ctypes.pointer(struct)
        for item, struct, (written_name, _) in zip(dcaptures, gradients, layout.gradients):
            item.name, item.tensor = written_name.encode(), ctypes.pointer(struct)
        self.numbers = list(captures)[len(given):]
        self.sequences = _abi.Sequences() if layout.varlen or layout.paged else None
        self.dropout = _abi.DropoutState() if layout.dropout else None
        table = {"block_table": ctypes.pointer(structs["block_table"])} if "block_table" in structs else {}
        self.cache = _abi.PagedCache(**table) if layout.paged else None
        self.schedule = _abi.ScheduleMemory() if layout.paged else None
        self.scratch = _abi.Workspace()
        self.keep = (names, captures, dcaptures, structs)
        read = {name: ctypes.pointer(structs[name]) for name, _ in layout.read if name != "block_table"}
        written = {name: ctypes.pointer(structs[name]) for name, _ in layout.written}
        more = {name: ctypes.pointer(struct) for name, struct in (
            ("sequences", self.sequences), ("dropout", self.dropout), ("cache", self.cache), ("schedule", self.schedule))
                if struct is not None}
        backward = "dout" in structs
        outputs = {"captures": dcaptures, "capture_count": len(gradients)} if backward else {}
        self.inputs = (_abi.BackwardInputs if backward else _abi.ForwardInputs)(
            **read, **more, captures=captures, capture_count=count)
        self.outputs = (_abi.BackwardOutputs if backward else _abi.ForwardOutputs)(**written, **outputs)
        self.scratch_at = ctypes.addressof(self.scratch)


class Layout(NamedTuple):
    """What a call reads and writes."""

    read: Named
    written: Named
    captures: Named
    gradients: Named
    numbers: tuple[str, ...]
    varlen: bool
    dropout: bool
    paged: bool = False  # k and v are a KV cache; of pages the last of `read` is the block_table


# b, cu_seqlens_q, cu_seqlens_kv, seqused_q, seqused_kv, max_s_q, max_s_kv
Sequences = tuple[int, Optional[int], Optional[int], Optional[int], Optional[int], int, int]
DropoutState = tuple[int, int, Optional[int]]  # seed, offset, address of both
Cache = tuple[Optional[int], Optional[int], Optional[int], int]  # batch_index, seq_begin, a schedule and its bytes


class PreparedCall:
    """fa_forward or fa_backward of an Attention for arrays of one layout. Threads may share it: a frame serves one call at a
    time."""

    def __init__(self, attention: Attention, layout: Layout, sizes: Sequence[int]) -> None:
        self.attention, self._layout, self._sizes = attention, layout, sizes
        self._backward = any(name == "dout" for name, _ in layout.read)
        given = {name for name, _ in layout.written}
        self._without = tuple(name for name in ("dq", "dk", "dv") if name not in given)
        self._function: Any = attention.lib.fa.fa_backward if self._backward else attention.lib.fa.fa_forward
        self._frames = [Frame(layout)]
        main = ("q", "k", "v", "o", "dout", "dq", "dk", "dv")
        self._rows_aligned = all(spec.rows_aligned() for name, spec in (*layout.read, *layout.written) if name in main)
        names = [name for name, _ in (*layout.read, *layout.written)]
        self.main = [n for n, name in enumerate(names) if name in main]
        self._scratch: list[Optional[int]] = [None, None]

    def is_aligned(self, main: Sequence[int]) -> bool:
        """Whether all rows start at multiples of 16 bytes, with q, k, v, o and gradients at the addresses `main`."""
        bits = 0
        for address in main:
            bits |= address
        return self._rows_aligned and bits & 15 == 0

    def scratch_size(self, addresses: Sequence[int]) -> int:
        """Bytes of scratch that the call needs."""
        aligned = self._rows_aligned
        if aligned:
            bits = 0
            for n in self.main:
                bits |= addresses[n]
            aligned = bits & 15 == 0
        size = self._scratch[aligned]
        if size is None:
            if self._backward:
                size = self.attention.backward_workspace_size(*self._sizes, rows_aligned=aligned, without=self._without)
            else:
                size = self.attention.workspace_size(*self._sizes, rows_aligned=aligned)
            self._scratch[aligned] = size
        return size

    def __call__(self, addresses: Sequence[int], stream: int, scratch: int, scratch_size: int, numbers: Sequence[float] = (),
                 sequences: Optional[Sequences] = None, dropout: Optional[DropoutState] = None,
                 cache: Optional[Cache] = None) -> None:
        """addresses: of what is read, what is written, captured tensors and their gradients, in the layout's order."""
        frames = self._frames
        try:
            frame = frames.pop()
        except IndexError:
            frame = Frame(self._layout)
        for struct, address in zip(frame.tensors, addresses):
            struct.data = address
        for item, number in zip(frame.numbers, numbers):
            item.number = number
        if frame.sequences is not None and sequences is not None:
            s = frame.sequences
            (s.b, s.cu_seqlens_q, s.cu_seqlens_kv, s.seqused_q, s.seqused_kv, s.max_s_q, s.max_s_kv) = sequences
        if frame.dropout is not None and dropout is not None:
            frame.dropout.seed, frame.dropout.offset, frame.dropout.device = dropout
        if frame.cache is not None and frame.schedule is not None and cache is not None:
            frame.cache.batch_index, frame.cache.seq_begin, frame.schedule.data, frame.schedule.size = cache
        if scratch_size:
            frame.scratch.data, frame.scratch.size = scratch, scratch_size
        arguments = (self.attention.handle, ctypes.addressof(frame.inputs), ctypes.addressof(frame.outputs), stream,
                     frame.scratch_at if scratch_size else 0)
        status = self._function(*arguments)
        if status:
            self.attention.lib.failed(status, lambda: int(self._function(*arguments)))
        frames.append(frame)
