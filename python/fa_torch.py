"""Attention of fa for PyTorch, with gradients: a torch.autograd.Function over the C ABI.

    import fa_torch
    o = fa_torch.attention(q, k, v, causal=True)                  # [b, h, s, d] in any memory order
    o, lse = fa_torch.attention(q, k, v, return_lse=True)         # lse is differentiable too

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
def _handle(device, head_dim, head_dim_v, dtype, causal, scale, top_left, deterministic):
    kind = (fa_ctypes.DEVICE_CUDA, device.index) if device.type == "cuda" else (fa_ctypes.DEVICE_HOST, 0)
    return fa_ctypes.Attention(load(), head_dim, dtype, causal, head_dim_v, scale, top_left, device=kind,
                               deterministic=deterministic)


def _like(t, heads, rows, head_dim):
    """An empty [b, h, s, d] tensor in the memory order of `t`."""
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


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, handle):
        q, k, v = map(_readable, (q, k, v))
        sizes = (q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2])
        o = _like(q, q.shape[1], q.shape[2], v.shape[3])
        lse = q.new_empty(q.shape[:3], dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)
        with _current(q):
            size = handle.workspace_size(*sizes, rows_aligned=fa_ctypes.aligned(q, k, v, o))
            handle.bind_forward(q, k, v, o, lse, _stream(q), _workspace(size, q))()
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.handle, ctx.sizes = handle, sizes
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout, dlse):
        if dout is None and dlse is None:
            return None, None, None, None
        q, k, v, o, lse = ctx.saved_tensors
        dout = torch.zeros_like(o) if dout is None else _readable(dout)
        dq, dk, dv = (_like(t, *t.shape[1:]) for t in (q, k, v))
        with _current(q):
            rows_aligned = fa_ctypes.aligned(q, k, v, o, dout, dq, dk, dv)
            size = ctx.handle.backward_workspace_size(*ctx.sizes, rows_aligned=rows_aligned)
            ctx.handle.bind_backward(q, k, v, o, lse, dout, dq, dk, dv, dlse, _stream(q), _workspace(size, q))()
        return dq, dk, dv, None


def attention(q, k, v, *, causal=False, scale=None, top_left=False, deterministic=False, return_lse=False):
    """softmax(scale * q k^T + mask) v.

    q [b, h_q, s_q, d_qk], k [b, h_kv, s_kv, d_qk], v [b, h_kv, s_kv, d_v], of one dtype and device; h_kv divides h_q.
    scale: 1/sqrt(d_qk) unless given. causal: row i keeps the keys up to i + s_kv - s_q, or up to i with top_left.
    deterministic: dq is bitwise repeatable too. return_lse: also the log-sum-exp [b, h_q, s_q] (natural log, fp32),
    which may take part in the loss. Raises RuntimeError with what is wrong and what is accepted.
    """
    for name, tensor in (("k", k), ("v", v)):
        if tensor.device != q.device:
            raise RuntimeError(f"{name} is on {tensor.device}: accepted is the device of q, {q.device}")
    handle = _handle(q.device, q.shape[-1], v.shape[-1], q.dtype, causal, scale, top_left, deterministic)
    o, lse = _Attention.apply(q, k, v, handle)
    return (o, lse) if return_lse else o
