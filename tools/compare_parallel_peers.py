"""One rank of PyTorch's context parallelism for tools/compare_parallel.py, which starts it once a GPU. Rank 0 writes a line
of JSON for the machine and for each row."""

import argparse
import contextlib
import datetime
import json
import os
import pathlib
import statistics
import sys
import time
import traceback

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental import _attention as torch_ring
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path[:0] = [str(pathlib.Path(__file__).parent)]
import compare_parallel_rows as parallel_rows  # noqa: E402

COLUMNS = 128
BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
ROUND_MS, MOST_CALLS = 20, 50  # as parallel_bench
GQA, REPEATED = "enable_gqa", "KV heads repeated beforehand"


class Ranks:
    """The process group, and what ranks agree on."""

    def __init__(self, device, timeout):
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        local = int(os.environ.get("LOCAL_RANK", self.rank))
        self.device = torch.device(device, local) if device == "cuda" else torch.device(device)
        options = {}
        if device == "cuda":
            torch.cuda.set_device(self.device)
            options["device_id"] = self.device
        dist.init_process_group("nccl" if device == "cuda" else "gloo", rank=self.rank, world_size=self.size,
                                init_method="file://" + os.environ["FA_RENDEZVOUS"] + ".torch",
                                timeout=datetime.timedelta(seconds=timeout), **options)
        self.mesh = init_device_mesh(device, (self.size,), mesh_dim_names=("cp",))
        self.numbers = torch.zeros(1, device=self.device)

    def greatest(self, *values):
        agreed = torch.tensor(values, device=self.device, dtype=torch.float32)
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
        return agreed.tolist()

    def barrier(self):
        """In the order of the stream, as calls are."""
        dist.all_reduce(self.numbers)

    def synchronize(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()


class Clock:
    """Marks on the stream; on the CPU, on the clock."""

    def __init__(self, device):
        self.device, self.marks = device, []

    def mark(self):
        if self.device.type == "cuda":
            self.marks.append(torch.cuda.Event(enable_timing=True))
            self.marks[-1].record()
        else:
            self.marks.append(time.perf_counter() * 1e3)

    def between(self, first, last):
        a, b = self.marks[first], self.marks[last]
        return a.elapsed_time(b) if self.device.type == "cuda" else b - a


class Shards:
    """q, k, v and dout of this rank, [1, h, s / n, d]."""

    def __init__(self, ranks, tokens, h_q, h_kv):
        generator = torch.Generator(ranks.device).manual_seed(ranks.rank)
        make = lambda heads: torch.randn(1, heads, tokens // ranks.size, COLUMNS, device=ranks.device,  # noqa: E731
                                         dtype=torch.bfloat16, generator=generator)
        self.q, self.k, self.v, self.dout = make(h_q), make(h_kv), make(h_kv), make(h_q)
        for tensor in (self.q, self.k, self.v):
            tensor.requires_grad_()


@contextlib.contextmanager
def parallel_attention(ranks, peer, rotate, causal):
    """F.scaled_dot_product_attention of shards within PyTorch's context parallelism. It shards the tensors that it is given,
    and needs one: this one is not used."""
    torch_ring.set_rotate_method(rotate)
    torch_ring._cp_options.enable_load_balance = causal
    unused = torch.zeros(1, 2 * ranks.size, device=ranks.device)
    with sdpa_kernel(BACKENDS[peer]), context_parallel(ranks.mesh, buffers=[unused], buffer_seq_dims=[1]):
        yield


def time_calls(ranks, args, shards, causal, repeated):
    """Milliseconds of forward, and of forward with backward; how many rounds and calls a round."""
    q, k, v = shards.q, shards.k, shards.v
    options = {"is_causal": causal}
    if q.shape[1] != k.shape[1]:
        if repeated:
            k, v = (t.detach().repeat_interleave(q.shape[1] // t.shape[1], dim=1).requires_grad_() for t in (k, v))
        else:
            options["enable_gqa"] = True

    def one_round(calls):
        clock = Clock(ranks.device)
        ranks.synchronize()
        ranks.barrier()
        clock.mark()
        for _ in range(calls):
            o = F.scaled_dot_product_attention(q, k, v, **options)
            clock.mark()
            torch.autograd.grad(o, (q, k, v), shards.dout)
            clock.mark()
        ranks.synchronize()
        forward = sum(clock.between(2 * i, 2 * i + 1) for i in range(calls))
        return ranks.greatest(forward / calls, clock.between(0, 2 * calls) / calls)

    first, calls, rounds, spent = one_round(1), 1, [], 0.0
    if first[1] > 1e3 * args.seconds:  # no warm-up then
        rounds.append(first)
        spent += first[1] / 1e3
    else:
        if first[1] < 1e3:
            first = one_round(1)
        calls = max(1, min(int(ROUND_MS / first[1]), MOST_CALLS))
    while len(rounds) < args.least or (spent < args.seconds and len(rounds) < args.repeats):
        rounds.append(one_round(calls))
        spent += rounds[-1][1] * calls / 1e3
    forward, both = (statistics.median(column) for column in zip(*rounds))
    return {"ms": {"forward": forward, "forward_backward": both}, "rounds": len(rounds), "calls": calls}


def short(problem):
    text = f"{type(problem).__name__}: {problem}".strip().splitlines()
    return text[0][:300] if text else type(problem).__name__


def measure(ranks, args, peer, rotate, tokens, h_q, h_kv):
    """A row's times, or the reason why there are none."""
    causal = not args.full
    reason = ""
    for repeated in (False, True) if h_q != h_kv else (False,):
        try:
            shards = Shards(ranks, tokens, h_q, h_kv)
            with parallel_attention(ranks, peer, rotate, causal):
                times = time_calls(ranks, args, shards, causal, repeated)
            note = {"kv_heads": REPEATED if repeated else GQA} if h_q != h_kv else {}
            return {**times, **note, **({"gqa_reason": reason} if reason else {})}
        except Exception as problem:  # whatever a peer fails with, the others are measured
            if ranks.rank == 0 and args.verbose:
                traceback.print_exc()
            reason = (reason + "; repeated: " if repeated else "") + short(problem)
        finally:
            shards = None
            if ranks.device.type == "cuda":
                torch.cuda.empty_cache()
    return {"reason": reason}


def parse(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parallel_rows.add_options(parser)
    parser.add_argument("--peers", type=parallel_rows.names_among(parallel_rows.PEERS), default=list(parallel_rows.PEERS))
    parser.add_argument("--rotate", type=parallel_rows.names_among(parallel_rows.ROTATIONS), default=["allgather"])
    parser.add_argument("--limit", type=float, default=0)
    parser.add_argument("--json", type=pathlib.Path, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--verbose", action="store_true", help="print where a peer fails")
    return parser.parse_args(arguments)


def machine_of(device):
    facts = {"kind": "machine", "torch": torch.__version__, "cudnn": torch.backends.cudnn.version()}
    if device == "cuda":
        facts["gpu"] = torch.cuda.get_device_name()
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return facts


def main():
    args, begun = parse(), time.monotonic()
    ranks = Ranks(args.device, args.timeout)
    lines = args.json.open("w") if ranks.rank == 0 else None

    def write(entry):
        if lines:
            lines.write(json.dumps(entry) + "\n")
            lines.flush()

    write(machine_of(args.device))
    for tokens in args.tokens:
        for h_q, h_kv in args.heads:
            for rotate in args.rotate:
                for peer in args.peers:
                    name = peer if rotate == "allgather" else f"{peer}, {rotate}"
                    if args.limit and ranks.greatest(time.monotonic() - begun)[0] > args.limit:
                        times = {"reason": f"the time limit of {args.limit:g} s"}
                    else:
                        times = measure(ranks, args, peer, rotate, tokens, h_q, h_kv)
                    write({"kind": "row", "peer": name, "ranks": ranks.size, "tokens": tokens, "h_q": h_q, "h_kv": h_kv,
                           "d": COLUMNS, "causal": not args.full, **times})
                    if ranks.rank == 0:
                        print(f"{tokens} tokens, {h_q}/{h_kv} heads, {name}: {times}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
