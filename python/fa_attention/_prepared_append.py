"""Appends to a cache whose structs are prepared: a call sets the addresses alone."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple, Optional, Sequence

from . import _abi
from ._prepared import Named
from .capi import Attention

Rotary = tuple[int, bool, float]  # dims, interleaved, base


class AppendLayout(NamedTuple):
    """What a call reads and writes. `tensors`: k, v, k_cache, v_cache and, where they are given, k_scale, v_scale, q,
    q_out, cos, sin and block_table."""

    tensors: Named
    rotary: Optional[Rotary]
    wide_slots: bool  # int64
    wide_positions: bool
    scales_given: bool = False


class Lengths(NamedTuple):
    """Addresses of the arrays of numbers; `b` of a packed batch."""

    b: int
    cu_seqlens_k_new: Optional[int]
    seqused_kv: Optional[int]
    batch_index: Optional[int]
    slots: Optional[int]
    positions: Optional[int]


class AppendFrame:
    """The structs of one call at a time."""

    __slots__ = ("tensors", "cache", "rotary", "inputs", "keep")

    def __init__(self, layout: AppendLayout) -> None:
        structs = {name: spec.struct() for name, spec in layout.tensors}
        self.tensors = list(structs.values())
        pointers = {name: ctypes.pointer(struct) for name, struct in structs.items()}
        table, turned = pointers.pop("block_table", None), {name: pointers.pop(name, None) for name in ("cos", "sin")}
        self.cache = _abi.PagedCache(block_table=table)
        self.rotary = None
        if layout.rotary is not None:
            dims, interleaved, base = layout.rotary
            self.rotary = _abi.RotaryEmbedding(dims=dims, interleaved=int(interleaved), base=base, **turned)
        self.inputs = _abi.AppendInputs(**pointers, cache=ctypes.pointer(self.cache), scales_given=int(layout.scales_given),
                                        rotary=ctypes.pointer(self.rotary) if self.rotary is not None else None)
        self.keep = structs


class PreparedAppend:
    """fa_append of an Attention for arrays of one layout. Threads may share it: a frame serves one call at a time."""

    def __init__(self, attention: Attention, layout: AppendLayout) -> None:
        self.attention, self._layout = attention, layout
        self._function: Any = attention.lib.fa.fa_append
        self._frames = [AppendFrame(layout)]
        self._slots = "slots_64" if layout.wide_slots else "slots"
        self._positions = "positions_64" if layout.wide_positions else "positions"

    def __call__(self, addresses: Sequence[int], lengths: Lengths, stream: int) -> None:
        """addresses: of the tensors, in the layout's order."""
        frames = self._frames
        try:
            frame = frames.pop()
        except IndexError:
            frame = AppendFrame(self._layout)
        for struct, address in zip(frame.tensors, addresses):
            struct.data = address
        inputs = frame.inputs
        inputs.b, inputs.cu_seqlens_k_new, inputs.seqused_kv, frame.cache.batch_index, slots, positions = lengths
        setattr(inputs, self._slots, slots)
        if frame.rotary is not None:
            setattr(frame.rotary, self._positions, positions)
        arguments = (self.attention.handle, ctypes.addressof(inputs), stream)
        status = self._function(*arguments)
        if status:
            self.attention.lib.failed(status, lambda: int(self._function(*arguments)))
        frames.append(frame)
