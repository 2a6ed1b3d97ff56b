#!/usr/bin/env python3
"""Context parallelism of PyTorch tensors over the GPUs of a machine, a process each, against one GPU with the whole:

    torchrun --nproc-per-node 2 examples/context_parallel/pytorch.py
    examples/context_parallel/launch.py 2 python examples/context_parallel/pytorch.py

The package is installed, or PYTHONPATH names `python` of the checkout."""

import os
import sys

import torch
import torch.distributed as dist

from fa_attention.torch import ContextParallel, attention

TOKENS, HEADS, KV_HEADS, COLUMNS = 8192, 16, 4, 128


def main() -> int:
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local = int(os.environ.get("LOCAL_RANK", rank))
    if torch.cuda.device_count() <= local:
        print(f"rank {rank} has no GPU {local}")
        return 77
    torch.cuda.set_device(local)
    rendezvous = os.environ.get("FA_RENDEZVOUS")
    where = {"init_method": f"file://{rendezvous}.torch", "rank": rank, "world_size": size} if rendezvous else {}
    dist.init_process_group("nccl", device_id=torch.device("cuda", local), **where)

    generator = torch.Generator("cuda").manual_seed(1)  # the same tensors on every rank
    make = lambda heads: torch.randn(1, heads, TOKENS, COLUMNS, device="cuda", dtype=torch.bfloat16, generator=generator)  # noqa: E731
    q, k, v, dout = make(HEADS), make(KV_HEADS), make(KV_HEADS), make(HEADS)
    whole = [t.clone().requires_grad_() for t in (q, k, v)]
    expected = attention(*whole, causal=True)
    wanted = torch.autograd.grad(expected, whole, dout)

    worst = 0.0
    for scheme in ("ring", "all_gather", "ulysses"):
        parallel = ContextParallel(scheme=scheme, causal=True)
        if scheme == "ulysses" and KV_HEADS % size != 0:
            continue
        mine = [parallel.shard(t).requires_grad_() for t in (q, k, v)]
        o = parallel(*mine)
        results = (o.detach(), *torch.autograd.grad(o, mine, parallel.shard(dout)))
        parallel.communicator.synchronize(torch.cuda.current_stream().cuda_stream)
        off = [((is_ - parallel.shard(one)).abs().max() / one.abs().max()).item()
               for is_, one in zip(results, (expected, *wanted))]
        print(f"rank {rank} of {size}, {scheme}: o, dq, dk and dv differ by " + ", ".join(f"{x:.4f}" for x in off), flush=True)
        worst = max(worst, *off)
    dist.destroy_process_group()
    return 0 if worst < 0.02 else 1


if __name__ == "__main__":
    sys.exit(main())
