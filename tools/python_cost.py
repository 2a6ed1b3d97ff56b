#!/usr/bin/env python3
"""What a call from Python costs the host, beside PyTorch's own attention and the bound call of the C ABI.

    tools/python_cost.py --lib build/release/libfa.so              # on the host device, where tiny problems take no time
    tools/python_cost.py --lib build/release/libfa.so --device cuda

Prints microseconds: the smallest mean of a number of rounds. On a GPU the queue is emptied between rounds and never full, and
PyTorch's figure is that of its faster backend, FlashAttention-2 or cuDNN.
"""

import argparse
import contextlib
import pathlib
import sys
import time

import torch
import torch.nn.functional as functional
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "python"))
import fa_attention  # noqa: E402
from fa_attention import capi  # noqa: E402
from fa_attention.flash_attn import flash_attn_with_kvcache  # noqa: E402
from fa_attention.torch import append, attention, paged_attention  # noqa: E402


def microseconds(call, device, rounds, calls):
    best = float("inf")
    for _ in range(rounds):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, (time.perf_counter() - start) / calls)
    return best * 1e6


def backward_too(function, *tensors):
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    dout = torch.ones_like(function(*leaves))

    def run():
        torch.autograd.grad(function(*leaves), leaves, dout)

    return run


def bound(q, k, v):
    place = (capi.DEVICE_CUDA, q.device.index or 0) if q.is_cuda else (capi.DEVICE_HOST, 0)
    handle = capi.Attention(fa_attention.load(), q.shape[-1], q.dtype, causal=True, device=place)
    o, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
    stream = torch.cuda.current_stream().cuda_stream if q.is_cuda else None
    gradients, scratch = [torch.empty_like(t) for t in (q, k, v)], None
    size = handle.backward_workspace_size(*q.shape[:2], k.shape[1], q.shape[2], k.shape[2])
    if size:
        scratch = torch.empty(size, dtype=torch.uint8, device=q.device)
    forward = handle.bind_forward(q, k, v, o, lse, stream)
    backward = handle.bind_backward(q, k, v, o, lse, torch.ones_like(o), *gradients, None, stream, scratch)

    def both():
        forward()
        backward()

    return forward, both


def decodes(q, k, v):
    """Names and calls of one step over pages, and over a contiguous cache."""
    place = (capi.DEVICE_CUDA, q.device.index or 0) if q.is_cuda else (capi.DEVICE_HOST, 0)
    q, k, v = (t[:, :, :1].transpose(1, 2).contiguous() for t in (q, k, v))
    k_pages, v_pages = k.new_zeros(2, 4, 16, *k.shape[2:])
    table, used = (torch.ones(*shape, dtype=torch.int32, device=q.device) for shape in ((1, 1), (1,)))
    before, heads_first = used - 1, [t.transpose(1, 2) for t in (q, k, v)]
    pools = [t.transpose(1, 2) for t in (k_pages, v_pages)]
    handle = capi.Attention(fa_attention.load(), q.shape[-1], q.dtype, causal=True, device=place, page_size=16)
    stream = torch.cuda.current_stream().cuda_stream if q.is_cuda else None
    cache, o = capi.paged_cache(table), torch.empty_like(heads_first[0])
    yield "bound C append", handle.bind_append(*heads_first[1:], *pools, used, cache, stream=stream)
    yield "append", lambda: append(*heads_first[1:], k_pages, v_pages, used, block_table=table)
    yield "bound C call over pages", handle.bind_forward(heads_first[0], *pools, o, None, stream,
                                                         sequences=capi.requests(used), cache=cache)
    yield "paged_attention", lambda: paged_attention(heads_first[0], k_pages, v_pages, table, used, causal=True)
    yield "with_kvcache, pages", lambda: flash_attn_with_kvcache(q, k_pages, v_pages, k, v, cache_seqlens=before,
                                                                 block_table=table, causal=True)
    yield "with_kvcache, contiguous", lambda: flash_attn_with_kvcache(q, k_pages, v_pages, k, v, cache_seqlens=before, causal=True)


def backends(device):
    if device == "cpu":
        return {"PyTorch": contextlib.nullcontext}
    return {f"PyTorch, {name}": lambda kind=kind: sdpa_kernel(kind)
            for name, kind in (("flash", SDPBackend.FLASH_ATTENTION), ("cuDNN", SDPBackend.CUDNN_ATTENTION))}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lib", type=pathlib.Path)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--calls", type=int, default=20)
    args = parser.parse_args()
    fa_attention.load(args.lib)
    shape, dtype = ((1, 1, 1, 8), torch.float32) if args.device == "cpu" else ((1, 4, 128, 64), torch.bfloat16)
    q, k, v = (torch.randn(shape, device=args.device, dtype=dtype) for _ in range(3))
    ours = lambda q, k, v: attention(q, k, v, causal=True)  # noqa: E731
    own = lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, is_causal=True)  # noqa: E731
    compiled = torch.compile(ours, fullgraph=True)
    columns = "forward", "forward, graph", "forward + backward"
    print(f"{'microseconds':<28}" + "".join(f"{name:>20}" for name in columns))

    def row(name, *calls):
        cells = [microseconds(call, args.device, args.rounds, args.calls) if call else None for call in calls]
        print(f"{name:<28}" + "".join(f"{cell:>20.1f}" if cell is not None else f"{'':>20}" for cell in cells), flush=True)

    with torch.no_grad():
        forward, both = bound(q, k, v)
    row("bound C call", forward, None, both)
    leaf = q.clone().requires_grad_()
    for name, function in (("fa_attention", ours), ("fa_attention, compiled", compiled)):
        row(name, lambda: function(q, k, v), lambda: function(leaf, k, v), backward_too(function, q, k, v))
    operator = (None, [], *[None] * 5, 0, 0, 0, 0, [], True, None, False, None, None, 0, 0.0, False, None, None, [], [])
    op = lambda q, k, v: torch.ops.fa_attention.forward(q, k, v, *operator)[0]  # noqa: E731
    with torch.no_grad():
        for name, call in decodes(q, k, v):
            row(name, call)
    row("its operator", lambda: op(q, k, v), lambda: op(leaf, k, v), backward_too(op, q, k, v))
    for name, context in backends(args.device).items():
        with context():
            for text, function in ((name, own), (f"{name}, compiled", torch.compile(own, fullgraph=True))):
                row(text, lambda: function(q, k, v), lambda: function(leaf, k, v), backward_too(function, q, k, v))


if __name__ == "__main__":
    main()
