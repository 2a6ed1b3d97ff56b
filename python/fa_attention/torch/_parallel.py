"""Attention of rows that ranks share, with gradients: ranks of torch.distributed over NCCL, or threads on the CPU."""

from __future__ import annotations

import ctypes
import os
from typing import Any, Optional, Sequence

import torch
from torch import Tensor

from .. import capi
from .. import parallel as base
from .._errors import Error
from . import _ops, _raw
from ._attention import RngState, _dropout_state

_ID_BYTES = 128


class _UniqueId(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_byte * _ID_BYTES)]


class NcclCommunicator(base.Communicator):
    """A communicator of its own over the ranks of a process group: what ends it leaves PyTorch's alone."""

    @classmethod
    def of_group(cls, group: Any = None, timeout: float = 60.0) -> NcclCommunicator:
        """Collective: every rank of the group calls it, with its GPU as the current device."""
        import torch.distributed as dist

        nccl = ctypes.CDLL(os.environ.get("FA_NCCL_PATH", "libnccl.so.2"))
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        unique = _UniqueId()
        if rank == 0:
            cls._check(nccl.ncclGetUniqueId(ctypes.byref(unique)), "ncclGetUniqueId")
        told = [bytes(unique.bytes)]
        dist.broadcast_object_list(told, src=dist.get_global_rank(group, 0) if group is not None else 0, group=group)
        ctypes.memmove(ctypes.addressof(unique), told[0], _ID_BYTES)
        comm = ctypes.c_void_p()
        nccl.ncclCommInitRank.argtypes = [ctypes.c_void_p, ctypes.c_int, _UniqueId, ctypes.c_int]
        cls._check(nccl.ncclCommInitRank(ctypes.addressof(comm), size, unique, rank), "ncclCommInitRank")
        made = cls.of_nccl(int(comm.value or 0), timeout)
        made._nccl, made._comm, made._group = nccl, comm, group
        return made

    _nccl: Any = None
    _comm: Any = None
    _group: Any = None

    def broadcast(self, tensor: Tensor) -> None:
        """What rank 0 has, on every rank: queued on the current stream."""
        import torch.distributed as dist

        dist.broadcast(tensor, src=dist.get_global_rank(self._group, 0) if self._group is not None else 0, group=self._group)

    @staticmethod
    def _check(result: int, call: str) -> None:
        if result != 0:
            raise RuntimeError(f"{call} failed with {result}")

    def __del__(self) -> None:
        if not getattr(self, "handle", None):
            return
        try:
            self.check()
        except Error:
            self._comm = None  # an abort has ended it
        super().__del__()
        if self._comm is not None:
            self._nccl.ncclCommDestroy(self._comm)


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sink: Optional[Tensor], parallel: ContextParallel,
                lengths: Sequence[int], rng: Optional[Tensor], pair: Optional[tuple[int, int]]) -> Any:
        made = parallel._made(q, k, v, sink is not None)
        heads, rows = (q.shape[1], q.shape[0]) if lengths else (q.shape[1], q.shape[2])
        o = torch.empty_strided(_sizes(q, v), _strides(q, v), dtype=q.dtype, device=q.device)
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        lse = torch.empty((heads, rows) if lengths else (q.shape[0], heads, rows), dtype=wide, device=q.device)
        made.forward(q, k, v, o, lse, stream=_stream(q), lengths=lengths, sink=sink, dropout=_state(rng, pair))
        ctx.save_for_backward(q, k, v, o, lse, sink, rng)
        ctx.call = (made, lengths, pair)
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(ctx: Any, dout: Optional[Tensor], dlse: Optional[Tensor]) -> Any:
        made, lengths, pair = ctx.call
        with_dsink = ctx.needs_input_grad[3]

        def compute(dout: Optional[Tensor], dlse: Optional[Tensor], q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
                    sink: Optional[Tensor], rng: Optional[Tensor]) -> Any:
            # Other ranks wait for what this one sends, whether it has a gradient or not.
            dout = torch.zeros_like(o) if dout is None else _raw.readable(dout)
            gradients = [torch.empty_like(t) for t in (q, k, v)]
            dsink = torch.empty_like(sink) if sink is not None and with_dsink else None
            made.backward(q, k, v, o, lse, dout, *gradients, dlse=_raw.resolved(dlse).contiguous() if dlse is not None else None,
                          stream=_stream(q), lengths=lengths, sink=sink, dsink=dsink, dropout=_state(rng, pair))
            return (*gradients, dsink)

        return (*_ops.Once.apply(compute, dout, dlse, *ctx.saved_tensors), None, None, None, None)


def _state(rng: Optional[Tensor], pair: Optional[tuple[int, int]]) -> Any:
    """Seed and offset for the library; None without dropout."""
    if rng is None and pair is None:
        return None
    seed, offset = pair or (0, 0)
    return capi.dropout_state(seed, offset, rng)


def _sizes(q: Tensor, v: Tensor) -> tuple[int, ...]:
    return (*q.shape[:-1], v.shape[-1])


def _strides(q: Tensor, v: Tensor) -> tuple[int, ...]:
    """Those of q's memory order."""
    order = sorted(range(q.dim()), key=lambda axis: (q.stride(axis), -axis))
    order.remove(q.dim() - 1)
    strides, step = [0] * q.dim(), 1
    for axis in [q.dim() - 1, *order]:
        strides[axis] = step
        step *= _sizes(q, v)[axis]
    return tuple(strides)


def _stream(q: Tensor) -> Optional[int]:
    return int(torch.cuda.current_stream(q.device).cuda_stream) if q.is_cuda else None


class ContextParallel:
    """Attention over sequences whose rows the ranks of a process group share.

        parallel = ContextParallel(causal=True)           # on every rank of the default group, over NCCL
        q, k, v = (parallel.shard(t) for t in (q, k, v))  # from whole tensors; or what a rank has from the beginning
        o = parallel(q, k, v)                             # [b, h, s / n, d], differentiable

    group: a process group whose ranks have a GPU each. communicator: instead of a group, a rank of
    `fa_attention.parallel.Communicator.local_group`, for threads on the CPU. The other arguments are those of
    `fa_attention.parallel.ContextParallel`: layout, scheme, causal, scale, window_left, and so on. Every rank makes the same
    calls in the same order, backward too. Calls of one object run one after the other.

    With dropout all ranks need one mask. Unless `rng_state` is given, seed and offset of each call are drawn from PyTorch's
    generator: those of rank 0, which a broadcast of the group sends, and among threads those of whichever comes first."""

    def __init__(self, group: Any = None, communicator: Optional[base.Communicator] = None, layout: str = "zigzag",
                 timeout: float = 60.0, **config: Any) -> None:
        self.communicator = communicator if communicator is not None else NcclCommunicator.of_group(group, timeout)
        self.layout, self.config = layout, config
        self._of: dict[tuple[int, int, str, bool, bool], base.ContextParallel] = {}

    @property
    def rank(self) -> int:
        return self.communicator.rank

    @property
    def size(self) -> int:
        return self.communicator.size

    def _made(self, q: Tensor, k: Tensor, v: Tensor, sink: bool) -> base.ContextParallel:
        packed = q.dim() == 3
        key = (q.shape[-1], v.shape[-1], str(q.dtype), sink, packed)
        made = self._of.get(key)
        if made is None:
            made = base.ContextParallel(self.communicator, q.shape[-1], q.dtype, layout=self.layout, head_dim_v=v.shape[-1],
                                        sink=sink, varlen=packed, **self.config)
            made.check_agreement(_stream(q))
            self._of[key] = made
        return made

    def _dropout(self, q: Tensor, rng_state: RngState) -> tuple[Optional[Tensor], Optional[tuple[int, int]]]:
        """An int64 tensor of seed and offset on the device, or both as numbers, the same on every rank."""
        if not self.config.get("dropout"):
            return None, None
        if rng_state is not None:
            rng, *pair = _dropout_state(q, rng_state, True)
        elif isinstance(self.communicator, NcclCommunicator) and self.communicator._nccl is not None:
            rng = torch.randint(0, 2**62, (2,), device=q.device)
            self.communicator.broadcast(rng)
        elif self.communicator._agreed is not None:
            rng, *pair = self.communicator.agree(lambda: _dropout_state(q, None, True))
        else:
            raise ValueError("rng_state is None: accepted with dropout and a communicator without a group is (seed, offset)")
        return (rng, None) if rng is not None else (None, (pair[0], pair[1]))

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, sink: Optional[Tensor] = None, lengths: Sequence[int] = (),
                 return_lse: bool = False, rng_state: RngState = None) -> Any:
        """o of this rank's rows. Shards [b, h, s / n, d] in any memory order; with `lengths`, the whole lengths of the
        sequences of a packed batch, [total / n, h, d]. sink: [h_q], of the whole. rng_state: with dropout, (seed, offset) of its
        mask or an int64 tensor of both on the device, the same on every rank; it is that of `attention` of the whole.

        Raises TypeError for what is no tensor or of another dtype, ValueError for sizes and values, naming the argument."""
        _raw.check_tensors(q, k, v, bool(lengths))
        if sink is not None:
            sink = _raw.resolved(_raw.sink_like(sink, q)).contiguous()
        rng, pair = self._dropout(q, rng_state)
        q, k, v = (_raw.readable(t) for t in (q, k, v))
        o, lse = _Shared.apply(q, k, v, sink, self, tuple(lengths), rng, pair)
        return (o, lse) if return_lse else o

    def shard(self, whole: Tensor, lengths: Sequence[int] = ()) -> Tensor:
        """This rank's rows of [b, h, s, d], [b, s, d] or packed [total, h, d]. No gradients."""
        axis = 0 if lengths else whole.dim() - 2
        sizes = list(whole.shape)
        sizes[axis] //= self.size
        part = torch.empty(sizes, dtype=whole.dtype, device=whole.device)
        base.shard(whole.detach(), part, self.size, self.rank, self.layout, lengths, stream=_stream(whole))
        return part
