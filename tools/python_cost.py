#!/usr/bin/env python3
"""What a call from Python costs the host, beside PyTorch's own attention: eager and under torch.compile, without a graph, with
one, and with backward.

    tools/python_cost.py --lib build/release/libfa.so              # on the host device, where tiny problems take no time
    tools/python_cost.py --lib build/release/libfa.so --device cuda
    tools/python_cost.py --lib build/release/libfa.so --more       # operators, calls over a KV cache and bound C calls, too
    tools/python_cost.py --lib build/release/libfa.so --kernels    # time on the GPU of long calls, beside bound C calls, instead

Prints microseconds of the same tensors in one process: the least mean of a round, and the median of all rounds in brackets. A round
calls one function a number of times and empties the queue, which is never full; rounds of all functions alternate. Ratios are to
PyTorch's faster backend, FlashAttention-2 or cuDNN. --limit 1.15 ends with 1 where a ratio of the least is above. What a compiled
function of PyTorch's calls is looked up in a profile.
"""

import argparse
import contextlib
import pathlib
import statistics
import sys
import time
import types

import torch
import torch.nn.functional as functional
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "python"))
import fa_attention  # noqa: E402
from fa_attention import capi  # noqa: E402
from fa_attention.flash_attn import flash_attn_with_kvcache  # noqa: E402
from fa_attention.torch import _native, append, attention, paged_attention  # noqa: E402

COLUMNS = "forward", "forward, graph", "forward + backward"
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}


def mean_of_round(call, device, calls):
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls * 1e6


def in_turns(cases, device, rounds, calls):
    """Least and median of each case's rounds. cases: name -> (context, call)."""
    times = {name: [] for name in cases}
    for turn in range(rounds + 1):
        for name, (context, call) in cases.items():
            with context():
                for _ in range(3):  # what other cases have pushed out of caches
                    call()
                times[name].append(mean_of_round(call, device, calls))
        if turn == 0:
            times = {name: [] for name in cases}  # the first round compiles
    return {name: (min(each), statistics.median(each)) for name, each in times.items()}


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


def ours(q, k, v):
    return attention(q, k, v, causal=True)


def pytorchs(q, k, v):
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def operator(q, k, v):
    rest = (None, [], *[None] * 5, 0, 0, 0, 0, [], True, None, False, None, None, 0, 0.0, False, None, None, [], [])
    return torch.ops.fa_attention.forward(q, k, v, *rest)[0]


def compiled(function):
    """Of a copy, and without caches: the compiler keeps what it has compiled by code objects, and finds it by graphs, under
    whichever backend that was."""
    torch.compiler.config.force_disable_caches = True
    copy = types.FunctionType(function.__code__.replace(), function.__globals__)
    return torch.compile(copy, fullgraph=True)


def check_backend(name, context, call):
    """That what PyTorch runs is the backend that was measured. Afterwards: a profiler may leave something behind."""
    with context(), torch.autograd.profiler.profile() as profile:
        call()
    seen = {event.key for event in profile.key_averages() if "_scaled_dot_product_" in event.key}
    if not any(name.lower() in key for key in seen):
        raise SystemExit(f"PyTorch's {name} was to be measured, and {seen or 'another attention'} ran")


def peers(device, names):
    if device == "cpu":
        return {"PyTorch": contextlib.nullcontext}
    return {f"PyTorch, {name}": lambda kind=BACKENDS[name]: sdpa_kernel(kind) for name in names}


def cell(least, median):
    return f"{least:.1f} ({median:.1f})"


def compare(args, q, k, v, is_compiled):
    """Prints the rows of a table, and returns the ratios of the least, and what PyTorch's backends are to be checked by."""
    contexts = {"fa_attention": contextlib.nullcontext, **peers(args.device, args.backends)}
    leaves = [t.detach().clone().requires_grad_() for t in (q, k, v)]
    columns, checks = [], []
    for column in COLUMNS:
        cases = {}
        for name, context in contexts.items():
            function = ours if name == "fa_attention" else pytorchs
            function = compiled(function) if is_compiled else function
            with context():
                if column == "forward + backward":
                    call = backward_too(function, q, k, v)
                else:
                    given = (q, k, v) if column == "forward" else leaves
                    call = lambda function=function, given=given: function(*given)  # noqa: E731
                call()
            if ", " in name:
                checks.append((name.split(", ")[1], context, call))
            cases[name] = (context, call)
        columns.append(in_turns(cases, args.device, args.rounds, args.calls))
    suffix = ", compiled" if is_compiled else ""
    for name in contexts:
        print(f"{name + suffix:<28}" + "".join(f"{cell(*column[name]):>22}" for column in columns))
    ratios = []
    for column in columns:
        own, others = column["fa_attention"], [column[name] for name in contexts if name != "fa_attention"]
        ratios.append(tuple(own[n] / min(other[n] for other in others) for n in range(2)))
    print(f"{'  ratio' + suffix:<28}" + "".join(f"{f'{least:.2f} ({median:.2f})':>22}" for least, median in ratios), flush=True)
    return [least for least, _ in ratios], checks


def more(args, q, k, v):
    def row(name, *calls):
        found = [in_turns({name: (contextlib.nullcontext, call)}, args.device, args.rounds, args.calls)[name] if call else None
                 for call in calls]
        print(f"{name:<28}" + "".join(f"{cell(*each) if each else '':>22}" for each in found), flush=True)

    leaves = [t.detach().clone().requires_grad_() for t in (q, k, v)]
    row("its operator", lambda: operator(q, k, v), lambda: operator(*leaves), backward_too(operator, q, k, v))
    with torch.no_grad():
        forward, both = bound(q, k, v)
        row("bound C call", forward, None, both)
        for name, call in decodes(q, k, v):
            row(name, call)


LONG = (4, 16, 2048, 128), (4, 16, 4096, 64), (2, 16, 8192, 128)  # b, h, s, d: above 100 us each


def on_the_gpu(call, calls):
    """Microseconds of a call between events around several, all of which are in the queue before the GPU comes to them."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(20_000_000)  # cycles, some 10 ms
    begin.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / calls * 1e3


def kernels(rounds):
    """Prints medians of the same calls through Python and through the C ABI, and their ratios."""
    print(f"{'microseconds on the GPU':<28}{'through Python':>18}{'bound C call':>18}{'ratio':>10}")
    for shape in LONG:
        q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        forward, both = bound(q, k, v)
        for name, pair in (("forward", (lambda: ours(q, k, v), forward)), ("with backward", (backward_too(ours, q, k, v), both))):
            times = [], []
            for turn in range(rounds + 2):
                for kept, call in zip(times, pair):
                    kept.append(on_the_gpu(call, 10))
            python, c = (statistics.median(each[2:]) for each in times)
            print(f"{name + ' ' + 'x'.join(map(str, shape)):<28}{python:>18.1f}{c:>18.1f}{python / c:>10.4f}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lib", type=pathlib.Path)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--backends", type=lambda text: text.split(","), default=list(BACKENDS), help="of PyTorch: flash,cuDNN")
    parser.add_argument("--more", action="store_true", help="operators, calls over a KV cache and bound C calls, too")
    parser.add_argument("--kernels", action="store_true", help="time on the GPU of long calls, beside bound C calls, instead")
    parser.add_argument("--limit", type=float, help="the largest ratio that is well")
    args = parser.parse_args()
    fa_attention.load(args.lib)
    shape, dtype = ((1, 1, 1, 8), torch.float32) if args.device == "cpu" else ((1, 4, 128, 64), torch.bfloat16)
    q, k, v = (torch.randn(shape, device=args.device, dtype=dtype) for _ in range(3))
    where = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    print(f"PyTorch {torch.__version__}, {where}, {list(shape)} {dtype}, causal; compiled operators: {_native.path or _native.problem}")
    if args.kernels:
        kernels(args.rounds // 10)
        return
    print(f"{'microseconds':<28}" + "".join(f"{name:>22}" for name in COLUMNS))
    eager, graphs = (compare(args, q, k, v, is_compiled) for is_compiled in (False, True))
    if args.more:
        more(args, q, k, v)
    for check in (*eager[1], *graphs[1]):
        check_backend(*check)
    if args.limit and max(*eager[0], *graphs[0]) > args.limit:
        raise SystemExit(f"a ratio is above {args.limit}")


if __name__ == "__main__":
    main()
