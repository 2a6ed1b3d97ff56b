"""Attention of fa for PyTorch, with gradients: a torch.autograd.Function over the C ABI.

    import fa_torch
    o = fa_torch.attention(q, k, v, causal=True)                  # [b, h, s, d] in any memory order
    o, lse = fa_torch.attention(q, k, v, return_lse=True)         # lse is differentiable too
    o = fa_torch.attention(q, k, v, dropout=0.1)                  # seeded by torch.manual_seed
    o = fa_torch.varlen_attention(q, k, v, cu_seqlens_q, cu_seqlens_kv)  # [total, h, d]

Works on CUDA tensors (fp16, bf16, fp32; the current stream; no copies while the head dim is contiguous) and on CPU
tensors (fp64 too; the host device). Heads of k and v may be fewer than those of q (GQA). The library is libfa.so of the
build directory, or FA_LIBRARY, or what `load` was given.
"""

import contextlib
import functools
import os
import pathlib
import sys

import torch

_ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(_ROOT / "tools"))
import fa_ctypes  # noqa: E402


_library = None


def load(path=None):
    """The library at `path`; the first call decides for the process, and the first `attention` calls it if nobody did."""
    global _library
    if _library is None:
        _library = fa_ctypes.Library(path or os.environ.get("FA_LIBRARY") or _ROOT / "build/release/libfa.so")
    return _library


@functools.lru_cache(maxsize=None)
def _handle(device, head_dim, head_dim_v, dtype, causal, scale, top_left, deterministic, dropout=0.0, varlen=False):
    kind = (fa_ctypes.DEVICE_CUDA, device.index) if device.type == "cuda" else (fa_ctypes.DEVICE_HOST, 0)
    return fa_ctypes.Attention(load(), head_dim, dtype, causal, head_dim_v, scale, top_left, device=kind,
                               deterministic=deterministic, dropout=dropout, varlen=varlen, zero_padding=varlen)


def _like(t, heads, rows, head_dim):
    """An empty [b, h, s, d] tensor in the memory order of `t`, or [total, h, d] where `t` is that."""
    if t.dim() == 3:
        return t.new_empty(rows, heads, head_dim)
    if t.stride(1) < t.stride(2):
        return t.new_empty(t.shape[0], rows, heads, head_dim).transpose(1, 2)
    return t.new_empty(t.shape[0], heads, rows, head_dim)


def _readable(t):
    """`t` itself, unless its head dim is not contiguous (as in the gradient of a sum, which is expanded)."""
    return t if t.stride(-1) == 1 or t.shape[-1] <= 1 else t.contiguous()


def _current(t):
    """Makes the tensor's device the current one."""
    return torch.cuda.device(t.device) if t.is_cuda else contextlib.nullcontext()


def _stream(t):
    return torch.cuda.current_stream(t.device).cuda_stream if t.is_cuda else None


def _workspace(size, t):
    return torch.empty(size, dtype=torch.uint8, device=t.device) if size else None


class _Packing:
    """Where the sequences of a packed batch lie."""

    def __init__(self, *tensors, max_s_q, max_s_kv):
        self.tensors, self.max_s_q, self.max_s_kv = tensors, max_s_q, max_s_kv

    def sizes(self, q, k):
        return (self.tensors[0].numel() - 1, q.shape[1], k.shape[1], self.max_s_q, self.max_s_kv, q.shape[0], k.shape[0])

    def sequences(self):
        return fa_ctypes.sequences(*self.tensors, max_s_q=self.max_s_q, max_s_kv=self.max_s_kv)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, handle, packing, dropout):
        q, k, v = map(_readable, (q, k, v))
        if packing is None:
            sizes, rows = (q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2]), q.shape[:3]
        else:
            sizes, rows = packing.sizes(q, k), (q.shape[1], q.shape[0])
        o = _like(q, q.shape[1], q.shape[2 if packing is None else 0], v.shape[-1])
        lse = q.new_empty(rows, dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)
        ctx.variants = {"sequences": packing.sequences() if packing else None, "dropout": dropout}
        with _current(q):
            size = handle.workspace_size(*sizes, rows_aligned=fa_ctypes.aligned(q, k, v, o))
            handle.bind_forward(q, k, v, o, lse, _stream(q), _workspace(size, q), **ctx.variants)()
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.handle, ctx.sizes = handle, sizes
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        if dout is None and dlse is None:
            return None, None, None, None, None, None
        return *_Gradients.apply(*ctx.saved_tensors, dout, dlse, ctx.handle, ctx.sizes, ctx.variants), None, None, None


class _Gradients(torch.autograd.Function):
    """A node of its own, because only a node can refuse to be differentiated: gradients that are merely cut off from the
    graph would make second derivatives too small, without a word."""

    @staticmethod
    def forward(ctx, q, k, v, o, lse, dout, dlse, handle, sizes, variants):
        dout = torch.zeros_like(o) if dout is None else _readable(dout)
        dq, dk, dv = (_like(t, t.shape[1], t.shape[0 if t.dim() == 3 else 2], t.shape[-1]) for t in (q, k, v))
        with _current(q):
            rows_aligned = fa_ctypes.aligned(q, k, v, o, dout, dq, dk, dv)
            size = handle.backward_workspace_size(*sizes, rows_aligned=rows_aligned)
            handle.bind_backward(q, k, v, o, lse, dout, dq, dk, dv, dlse, _stream(q), _workspace(size, q), **variants)()
        return dq, dk, dv

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError("the gradients of fa_torch.attention are differentiated: accepted are first derivatives only "
                           "(where create_graph=True is meant for other parts of the graph, detach these gradients)")


_ACCEPTED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _check(axes, **tensors):
    """What the code before the library's own checks relies on. `axes`: as in the documentation, q first."""
    q = next(iter(tensors.values()))
    for (name, t), accepted in zip(tensors.items(), axes):
        if not isinstance(t, torch.Tensor):
            raise RuntimeError(f"{name} is a {type(t).__module__}.{type(t).__qualname__}: accepted is a torch.Tensor")
        if t.dim() != accepted.count(",") + 1:
            raise RuntimeError(f"{name} has shape {list(t.shape)}: accepted is {accepted}")
        if t.dtype not in _ACCEPTED:
            raise RuntimeError(f"{name} is {t.dtype}: accepted are {', '.join(map(str, _ACCEPTED))}")
        if t.dtype != q.dtype or t.device != q.device:
            raise RuntimeError(f"{name} is {t.dtype} on {t.device}: accepted is what q is, {q.dtype} on {q.device}")
    if q.device.type not in ("cpu", "cuda"):
        raise RuntimeError(f"q is on {q.device}: accepted are cpu and cuda")


def _check_integers(q, dtype, **tensors):
    for name, t in tensors.items():
        if not isinstance(t, torch.Tensor):
            raise RuntimeError(f"{name} is a {type(t).__module__}.{type(t).__qualname__}: accepted is a torch.Tensor")
        if t.dtype != dtype or t.device != q.device or not t.is_contiguous():
            raise RuntimeError(f"{name} is {t.dtype} on {t.device}: accepted is contiguous {dtype} on {q.device}")


def _dropout_state(q, dropout, rng_state):
    """Seed and offset: those given, as (seed, offset) or an int64 tensor of both on the device, else from PyTorch's CPU
    generator."""
    if dropout == 0:
        return None
    if isinstance(rng_state, torch.Tensor):
        _check_integers(q, torch.int64, rng_state=rng_state)
        return fa_ctypes.dropout_state(device=rng_state)
    pair = torch.randint(0, 2**62, (2,)).tolist() if rng_state is None else list(rng_state)
    if len(pair) != 2:
        raise RuntimeError(f"rng_state has {len(pair)} elements: accepted are (seed, offset)")
    return fa_ctypes.dropout_state(*map(int, pair))


def attention(q, k, v, *, causal=False, scale=None, top_left=False, deterministic=False, return_lse=False, dropout=0.0,
              rng_state=None):
    """softmax(scale * q k^T + mask) v.

    q [b, h_q, s_q, d_qk], k [b, h_kv, s_kv, d_qk], v [b, h_kv, s_kv, d_v], of one dtype and device; h_kv divides h_q.
    scale: 1/sqrt(d_qk) unless given. causal: row i keeps the keys up to i + s_kv - s_q, or up to i with top_left.
    deterministic: dq is bitwise repeatable too. return_lse: also the log-sum-exp [b, h_q, s_q] (natural log, fp32),
    which may take part in the loss. Only first derivatives: what differentiates dq, dk or dv raises. dropout: the probability with which an element of the softmax is dropped; rng_state:
    (seed, offset) of its mask, or an int64 tensor of both on the device, which a captured graph may advance.
    Raises RuntimeError with what is wrong and what is accepted.
    """
    _check(("[b, h_q, s_q, d_qk]", "[b, h_kv, s_kv, d_qk]", "[b, h_kv, s_kv, d_v]"), q=q, k=k, v=v)
    handle = _handle(q.device, q.shape[-1], v.shape[-1], q.dtype, causal, scale, top_left, deterministic, dropout)
    o, lse = _Attention.apply(q, k, v, handle, None, _dropout_state(q, dropout, rng_state))
    return (o, lse) if return_lse else o


def varlen_attention(q, k, v, cu_seqlens_q, cu_seqlens_kv, *, max_s_q=0, max_s_kv=0, seqused_q=None, seqused_kv=None,
                     causal=False, scale=None, top_left=False, deterministic=False, return_lse=False, dropout=0.0,
                     rng_state=None):
    """`attention` of sequences of different lengths, one after the other in q [total_q, h_q, d_qk], k [total_kv, h_kv,
    d_qk] and v [total_kv, h_kv, d_v]; the log-sum-exp is [h_q, total_q].

    Sequence i has the rows cu_seqlens_q[i] to cu_seqlens_q[i + 1] of q and the keys cu_seqlens_kv[i] to
    cu_seqlens_kv[i + 1], of int32 tensors on the device of q; seqused_q and seqused_kv: how many of these count.
    max_s_q, max_s_kv: the longest, 0 where they are not known. Rows of no sequence get 0 (lse: -inf), and so do their
    gradients.
    """
    _check(("[total_q, h_q, d_qk]", "[total_kv, h_kv, d_qk]", "[total_kv, h_kv, d_v]"), q=q, k=k, v=v)
    used = {name: t for name, t in (("seqused_q", seqused_q), ("seqused_kv", seqused_kv)) if t is not None}
    _check_integers(q, torch.int32, cu_seqlens_q=cu_seqlens_q, cu_seqlens_kv=cu_seqlens_kv, **used)
    handle = _handle(q.device, q.shape[-1], v.shape[-1], q.dtype, causal, scale, top_left, deterministic, dropout, True)
    packing = _Packing(cu_seqlens_q, cu_seqlens_kv, seqused_q, seqused_kv, max_s_q=max_s_q, max_s_kv=max_s_kv)
    o, lse = _Attention.apply(q, k, v, handle, packing, _dropout_state(q, dropout, rng_state))
    return (o, lse) if return_lse else o
