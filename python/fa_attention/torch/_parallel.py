"""Attention of rows that ranks share, with gradients: ranks of torch.distributed over NCCL, or threads on the CPU."""

from __future__ import annotations

import ctypes
import inspect
import os
from typing import Any, Mapping, NamedTuple, Optional, Sequence

import torch
from torch import Tensor

from .. import capi
from .. import parallel as base
from .._errors import Error, type_name
from .._options import check_names, words
from . import _native, _ops, _raw
from ._attention import Captures, RngState, _dropout_state, cast_for_autocast, split_captures

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


class _Call(NamedTuple):
    """What a call has besides q, k, v and a sink."""

    lengths: Sequence[int]
    rng: Optional[Tensor]
    pair: Optional[tuple[int, int]]
    captures: Mapping[str, Any]


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sink: Optional[Tensor], parallel: ContextParallel, call: _Call) -> Any:
        lengths, rng, pair, captures = call
        made = parallel._made(q, k, v, sink is not None, captures)
        heads, rows = (q.shape[1], q.shape[0]) if lengths else (q.shape[1], q.shape[2])
        o = torch.empty_strided(_sizes(q, v), _strides(q, v), dtype=q.dtype, device=q.device)
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        lse = torch.empty((heads, rows) if lengths else (q.shape[0], heads, rows), dtype=wide, device=q.device)
        made.forward(q, k, v, o, lse, stream=_stream(q), lengths=lengths, sink=sink, dropout=_state(rng, pair),
                     captures=captures or None)
        tensors = {name: t for name, t in captures.items() if isinstance(t, Tensor)}  # watched: what changes them is told
        ctx.save_for_backward(q, k, v, o, lse, sink, rng, *tensors.values())
        ctx.call = (made, call._replace(rng=None, captures={n: x for n, x in captures.items() if n not in tensors}), tuple(tensors))
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(ctx: Any, dout: Optional[Tensor], dlse: Optional[Tensor]) -> Any:
        (made, call, names), needed = ctx.call, ctx.needs_input_grad

        def compute(dout: Optional[Tensor], dlse: Optional[Tensor], q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
                    sink: Optional[Tensor], rng: Optional[Tensor], *tensors: Tensor) -> Any:
            # Other ranks wait for what this one sends, whether it has a gradient or not.
            dout = torch.zeros_like(o) if dout is None else _raw.readable(dout)
            gradients = [torch.empty_like(t) for t in (q, k, v)]
            dsink = torch.empty_like(sink) if sink is not None and needed[3] else None
            made.backward(q, k, v, o, lse, dout, *gradients, dlse=_raw.resolved(dlse).contiguous() if dlse is not None else None,
                          stream=_stream(q), lengths=call.lengths, sink=sink, dsink=dsink, dropout=_state(rng, call.pair),
                          captures={**call.captures, **dict(zip(names, tensors))} or None)
            return (*(t if need else None for t, need in zip(gradients, needed)), dsink)

        return (*_ops.Once.apply(compute, dout, dlse, *ctx.saved_tensors), None, None)


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


_FIXED = ("self", "communicator", "head_dim", "dtype", "layout", "config", "head_dim_v", "sink", "varlen")  # by the tensors
_CONFIG = [name for function in (base.ContextParallel.__init__, capi.make_config) for name in inspect.signature(function).parameters
           if name not in _FIXED]

_UNSEEN = ("ContextParallel is no operator: a compiler may reorder calls or leave some out, and ranks would wait for each other; a "
           "graph without fullgraph=True breaks around it")


def _uncompiled(function: Any) -> Any:
    """torch.compiler.disable with a reason, which older versions do not take."""
    try:
        return torch.compiler.disable(function, reason=_UNSEEN)
    except TypeError:
        return torch.compiler.disable(function)


class ContextParallel:
    """Attention over sequences whose rows the ranks of a process group share.

        parallel = ContextParallel(causal=True)           # on every rank of the default group, over NCCL
        q, k, v = (parallel.shard(t) for t in (q, k, v))  # from whole tensors; or what a rank has from the beginning
        o = parallel(q, k, v)                             # [b, h, s / n, d], differentiable

    group: a process group whose ranks have a GPU each. communicator: instead of a group, a rank of
    `fa_attention.parallel.Communicator.local_group`, for threads on the CPU. The other arguments are those of
    `fa_attention.parallel.ContextParallel`: layout, scheme, causal, scale, window_left, and so on; score and mask are texts, as of
    `attention`. Every rank makes the same calls in the same order, backward too: where one rank's tensors require gradients, those
    of all do. Calls of one object run one after the other.

    A call is no operator of PyTorch. torch.compile breaks its graph around it, and with fullgraph=True refuses it; transforms of
    torch.func, fake tensors and other subclasses of tensors are refused. Under torch.autocast q, k and v are cast.

    With dropout all ranks need one mask. Unless `rng_state` is given, seed and offset of each call are drawn from PyTorch's
    generator: those of rank 0, which a broadcast of the group sends, and among threads those of whichever comes first."""

    def __init__(self, group: Any = None, communicator: Optional[base.Communicator] = None, layout: str = "zigzag",
                 timeout: float = 60.0, **config: Any) -> None:
        for name in config:
            if name not in _CONFIG:
                raise TypeError(f"ContextParallel has no argument {name!r}: accepted are {', '.join(_CONFIG)}")
        if communicator is not None and not isinstance(communicator, base.Communicator):
            raise TypeError(f"communicator is a {type_name(communicator)}: accepted is a fa_attention.parallel.Communicator")
        self.communicator = communicator if communicator is not None else NcclCommunicator.of_group(group, timeout)
        self.layout, self.config = layout, config
        self._of: dict[Any, base.ContextParallel] = {}

    @property
    def rank(self) -> int:
        return self.communicator.rank

    @property
    def size(self) -> int:
        return self.communicator.size

    def _made(self, q: Tensor, k: Tensor, v: Tensor, sink: bool, captures: Mapping[str, Any]) -> base.ContextParallel:
        packed = q.dim() == 3
        dtypes = {name: _raw.CAPTURE_DTYPES[x.dtype] if isinstance(x, Tensor) else "float32" for name, x in captures.items()}
        key = (q.shape[-1], v.shape[-1], str(q.dtype), sink, packed, tuple(dtypes.items()))
        made = self._of.get(key)
        if made is None:
            config = dict(self.config)
            for name in ("score", "mask"):
                text = config.get(name)
                if isinstance(text, str):
                    config[name] = capi.function(text, [item for item in dtypes.items() if item[0] in words(text)])
            made = base.ContextParallel(self.communicator, q.shape[-1], q.dtype, layout=self.layout, head_dim_v=v.shape[-1],
                                        sink=sink, varlen=packed, **config)
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

    def _check(self, q: Any, k: Any, v: Any, sink: Any, captures: Mapping[str, Any], packed: bool) -> None:
        _raw.check_tensors(q, k, v, packed)
        tensors = [(name, t) for name, t in captures.items() if isinstance(t, Tensor)]
        for name, t in (("q", q), ("k", k), ("v", v), ("sink", sink), *tensors):
            if t is not None and type(t) not in _native.PLAIN:
                raise TypeError(f"{name} is a {type_name(t)}: accepted is a torch.Tensor that is computed at once, because "
                                "ContextParallel is no operator")
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise RuntimeError("ContextParallel under torch.func: accepted is a call without transforms, because it is no operator")
        kind = "cuda" if self.communicator._agreed is None else "cpu"
        if q.device.type != kind:
            raise ValueError(f"q is on {q.device}: accepted is {kind}, where ranks of this communicator compute")
        _raw.check_captures(captures, sink, q)
        texts = [self.config.get("score"), self.config.get("mask")]
        if all(text is None or isinstance(text, str) for text in texts):
            check_names(texts[0], texts[1], captures)
        for name, t in tensors:
            if torch.is_grad_enabled() and t.requires_grad:
                raise ValueError(f"captures[{name!r}] requires a gradient: accepted with ContextParallel is a tensor without")

    @_uncompiled
    def __call__(self, q: Tensor, k: Tensor, v: Tensor, sink: Optional[Tensor] = None, lengths: Sequence[int] = (),
                 return_lse: bool = False, rng_state: RngState = None, captures: Captures = None) -> Any:
        """o of this rank's rows. Shards [b, h, s / n, d] in any memory order; with `lengths`, the whole lengths of the
        sequences of a packed batch, [total / n, h, d]. sink: [h_q], of the whole. rng_state: with dropout, (seed, offset) of its
        mask or an int64 tensor of both on the device, the same on every rank; it is that of `attention` of the whole. captures:
        what score and mask name, of the whole, on every rank; they have no gradients.

        Differentiable in q, k, v and the sink, once. Those that require no gradient get none; dk and dv are computed all the same,
        since other ranks wait for them. Raises TypeError for what is no tensor or of another dtype, ValueError for sizes and
        values, RuntimeError (fa_attention.Error) where ranks differ or fail, naming the argument."""
        q, k, v = cast_for_autocast(q, k, v)
        names, tensors, scalars, values = split_captures(captures)
        given = {**dict(zip(names, tensors)), **dict(zip(scalars, values))}
        self._check(q, k, v, sink if isinstance(sink, Tensor) else None, given, bool(lengths))
        if sink is not None:
            sink = _raw.resolved(_raw.sink_like(sink, q)).contiguous()
        rng, pair = self._dropout(q, rng_state)
        q, k, v = (_raw.readable(t) for t in (q, k, v))
        given = {name: _raw.resolved(x) if isinstance(x, Tensor) else x for name, x in given.items()}
        o, lse = _Shared.apply(q, k, v, sink, self, _Call(tuple(lengths), rng, pair, given))
        return (o, lse) if return_lse else o

    def shard(self, whole: Tensor, lengths: Sequence[int] = ()) -> Tensor:
        """This rank's rows of [b, h, s, d], [b, s, d] or packed [total, h, d]. No gradients."""
        if not isinstance(whole, Tensor):
            raise TypeError(f"whole is a {type_name(whole)}: accepted is a torch.Tensor")
        axis = 0 if lengths else whole.dim() - 2
        sizes = list(whole.shape)
        sizes[axis] //= self.size
        part = torch.empty(sizes, dtype=whole.dtype, device=whole.device)
        base.shard(whole.detach(), part, self.size, self.rank, self.layout, lengths, stream=_stream(whole))
        return part
