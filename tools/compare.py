#!/usr/bin/env python3
"""Times fa beside its peers in one run on one GPU, and writes bench/results/<gpu>.json.

Method: 16384 tokens a row, model width 2048, bf16, standard normal inputs, [b, s, h, d] memory, the same tensors and
stream for everyone. Before a row is timed, fa's output is held to float64. A round times every library once, with CUDA
events around enough calls for --ms milliseconds after a warm-up; rounds are interleaved and the median of --rounds counts.
TFLOP/s = 2 b h_q s_q s_kv (d_qk + d_v) / time, half of that when causal, 2.5 times that for backward. A backward is all of
its kernels and nothing else: the peers' by torch.autograd.grad of one graph that is kept, fa's with its workspace at hand.

--variants adds rows with dropout of 0.1, and of packed batches: as many tokens, or 64 sequences with --packed-batch 64, of
lengths uniform in [1, 2 s]; their TFLOP/s count the lengths that they have.

Only what is asked for is measured (--ops, --families, --head-dims, --seqs, --causal, --variants); other rows of the results file are
kept while the templates are the same.

Needs PyTorch with CUDA (cuDNN and FlashAttention-2 are its backends; FlashAttention-3 is timed if it can be imported).
"""

import argparse
import datetime
import json
import pathlib
import random
import re
import statistics
import subprocess
import sys

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import fa_ctypes  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parent.parent
TOKENS, WIDTH = 16384, 2048
BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "fa2": SDPBackend.FLASH_ATTENTION,
    "mem_efficient": SDPBackend.EFFICIENT_ATTENTION,
}
F32_FAMILIES = ("automatic", "sm80")
DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}
# Bounds on fa's error in units of FlashAttention-2's on the same inputs; fp32 and the log-sum-exp have absolute ones.
MEAN_RATIO, MAX_RATIO, F32_BOUND, LSE_BOUND, LSE_BOUND_F32 = 1.02, 1.5, 1e-5, 1e-3, 1e-5
F32_GRADIENT_BOUND = 2e-5
GRADIENTS = ("dq", "dk", "dv")
VARIANTS = ("plain", "dropout", "varlen", "varlen+dropout")
DROPOUT, RNG = 0.1, fa_ctypes.dropout_state(seed=1234, offset=5678)
SEQS, HEAD_DIMS = (512, 1024, 2048, 4096, 8192, 16384), (64, 128, 256)


def a_list(kind=str, among=None):
    """The type of an option that takes a comma-separated list."""

    def parse_list(text):
        values = [kind(part) for part in text.split(",") if part]
        for value in values:
            if among is not None and value not in among:
                raise argparse.ArgumentTypeError(f"{value!r}: accepted are {', '.join(map(str, among))}")
        return values

    return parse_list


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lib", type=pathlib.Path, default=ROOT / "build/release/libfa.so")
    parser.add_argument("--cli", type=pathlib.Path, default=ROOT / "build/release/tools/fa")
    parser.add_argument("--ops", type=a_list(among=["forward", "backward"]), default=["forward", "backward"])
    parser.add_argument("--families", "--family", type=a_list(among=list(fa_ctypes.FAMILIES)), default=["sm80"])
    parser.add_argument("--head-dims", type=a_list(int), default=list(HEAD_DIMS))
    parser.add_argument("--seqs", type=a_list(int), default=list(SEQS))
    parser.add_argument("--causal", type=a_list(among=["no", "yes"]), default=["no", "yes"])
    parser.add_argument("--variants", type=a_list(among=VARIANTS), default=["plain"])
    parser.add_argument("--packed-batch", type=int, default=0, help="sequences of a packed batch (default: 16384 / s)")
    parser.add_argument("--deterministic", action="store_true", help="backward rows also as the variant deterministic")
    parser.add_argument("--no-f32", action="store_true", help="leave out the fp32 rows")
    parser.add_argument("--no-accuracy", action="store_true", help="leave out the comparison of errors")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ms", type=float, default=20)
    parser.add_argument("--commit", help="recorded in the results; default: git's HEAD")
    parser.add_argument("--output", type=pathlib.Path, help="default: bench/results/<gpu>.json")
    parser.add_argument("--no-latency", action="store_true", help="leave out compile time and host cost")
    return parser.parse_args()


def make_inputs(b, h_q, h_kv, s_q, s_kv, d_qk, d_v, dtype, seed=0):
    """q, k, v as [b, h, s, d] views of [b, s, h, d] memory."""
    generator = torch.Generator("cuda").manual_seed(seed)
    shapes = [(b, s_q, h_q, d_qk), (b, s_kv, h_kv, d_qk), (b, s_kv, h_kv, d_v)]
    return [torch.randn(s, device="cuda", dtype=torch.float32, generator=generator).to(dtype).transpose(1, 2) for s in shapes]


def reference(q, k, v, causal, keep=None):
    """float64 O and LSE of one head at a time; the causal mask is aligned bottom-right. `keep`: what dropout leaves of P, and
    its factor, [s_q, s_kv]."""
    s_q, s_kv = q.shape[2], k.shape[2]
    o = torch.empty(*q.shape[:3], v.shape[3], dtype=torch.float64, device="cuda")
    lse = torch.empty(q.shape[:3], dtype=torch.float64, device="cuda")
    hidden = torch.ones(s_q, s_kv, dtype=torch.bool, device="cuda").tril(s_kv - s_q).logical_not_() if causal else None
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            scores = q[b, h].double() @ k[b, h].double().T / q.shape[3] ** 0.5
            if causal:
                scores.masked_fill_(hidden, float("-inf"))
            lse[b, h] = scores.logsumexp(1)
            o[b, h] = (scores.softmax(1) if keep is None else scores.softmax(1) * keep) @ v[b, h].double()
    return o, lse


def reference_gradients(q, k, v, dout, causal, keep=None):
    """float64 dq, dk and dv, one head at a time, by the derivative of the softmax itself."""
    s_q, s_kv, scale = q.shape[2], k.shape[2], q.shape[3] ** -0.5
    gradients = [torch.empty(t.shape, dtype=torch.float64, device="cuda") for t in (q, k, v)]
    hidden = torch.ones(s_q, s_kv, dtype=torch.bool, device="cuda").tril(s_kv - s_q).logical_not_() if causal else None
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            q1, k1, v1, dout1 = (t[b, h].double() for t in (q, k, v, dout))
            p = q1 @ k1.T * scale
            if causal:
                p.masked_fill_(hidden, float("-inf"))
            p = p.softmax(1)
            gradients[2][b, h] = (p if keep is None else p * keep).T @ dout1
            ds = dout1 @ v1.T
            if keep is not None:
                ds *= keep
            ds = p * (ds - (p * ds).sum(1, keepdim=True)) * scale
            gradients[0][b, h] = ds @ k1
            gradients[1][b, h] = ds.T @ q1
    return gradients


def errors(actual, expected):
    difference = (actual.double() - expected).abs()
    if not torch.isfinite(difference).all():
        raise SystemExit("an output is not finite")
    return difference.mean().item(), difference.max().item()


def sdpa(backend, q, k, v, causal, square=True, dropout=0.0):
    mask = None if square or not causal else causal_lower_right(q.shape[2], k.shape[2])
    with sdpa_kernel(BACKENDS[backend]):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal and square)


def peer_attention(peer, q, k, v, causal, dropout=0.0):
    """A peer's o [b, h, s, d]."""
    if peer == "fa3":
        from flash_attn_interface import flash_attn_func

        result = flash_attn_func(*(t.transpose(1, 2) for t in (q, k, v)), causal=causal)
        return (result[0] if isinstance(result, tuple) else result).transpose(1, 2)
    return sdpa(peer, q, k, v, causal, q.shape[2] == k.shape[2], dropout)


def peer_packed(q, k, v, cumulative, longest, causal, dropout):
    """FlashAttention-2's o [total, h, d]."""
    return torch.ops.aten._flash_attention_forward(q, k, v, cumulative, cumulative, longest, longest, dropout, causal, False)[0]


def scratch(size):
    return torch.empty(size, device="cuda", dtype=torch.uint8) if size else None


def nan_like(t):
    return torch.full_like(t, float("nan"))


class Row:
    """One problem: its tensors, and a callable for each library."""

    def __init__(self, library, op, family, b, h, s_q, s_kv, d_qk, d_v, dtype, causal, peers, deterministic=False,
                 dropout=0.0):
        self.size = dict(b=b, h_q=h, h_kv=h, s_q=s_q, s_kv=s_kv, d_qk=d_qk, d_v=d_v)
        self.op, self.family, self.causal, self.dtype = op, family, causal, dtype
        self.variant = "deterministic" if deterministic else f"dropout={dropout:g}" if dropout else ""
        self.fa, self.dropout = library, dropout
        self.q, self.k, self.v = make_inputs(b, h, h, s_q, s_kv, d_qk, d_v, dtype)
        self.o = torch.full((b, s_q, h, d_v), float("nan"), device="cuda", dtype=dtype).transpose(1, 2)
        self.lse = torch.full((b, h, s_q), float("nan"), device="cuda")
        self.attention = fa_ctypes.Attention(library, d_qk, dtype, causal, d_v, deterministic=deterministic, tune="cached",
                                              dropout=dropout,
                                              **{("family" if op == "forward" else "backward_family"): family})
        self.stream = torch.cuda.current_stream().cuda_stream
        self.variants = {"dropout": RNG if dropout else None}
        self._bind(peers)

    def _bind(self, peers):
        self.calls = {"fa": self._forward(peers) if self.op == "forward" else self._backward()}
        for peer in peers:
            self.calls[peer] = self._peer(peer)

    def _sizes(self):
        return [self.size[name] for name in ("b", "h_q", "h_kv", "s_q", "s_kv")]

    def _forward(self, peers):
        memory = scratch(self.attention.workspace_size(*self._sizes()))
        lse = None if peers else self.lse  # the peers are asked for none
        return self.attention.bind_forward(self.q, self.k, self.v, self.o, lse, self.stream, memory, **self.variants)

    def _backward(self):
        self._forward([])()
        self.dout = self._make_dout()
        self.gradients = [nan_like(t) for t in (self.q, self.k, self.v)]
        memory = scratch(self.attention.backward_workspace_size(*self._sizes()))
        return self.attention.bind_backward(self.q, self.k, self.v, self.o, self.lse, self.dout, *self.gradients,
                                            stream=self.stream, workspace=memory, **self.variants)

    def _make_dout(self):
        return make_inputs(*self._sizes()[:2], 1, self.size["s_q"], 1, self.size["d_v"], 1, self.dtype, seed=1)[0]

    def _attend(self, peer, q, k, v):
        return peer_attention(peer, q, k, v, self.causal, self.dropout)

    def _peer(self, peer):
        q, k, v = self.q, self.k, self.v
        if self.op == "forward":
            return lambda: self._attend(peer, q, k, v)
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        o, dout = self._attend(peer, *leaves), self.dout
        return lambda: torch.autograd.grad(o, leaves, dout, retain_graph=True)

    def flops(self):
        s = self.size
        products = 2 * s["b"] * s["h_q"] * s["s_q"] * s["s_kv"] * (s["d_qk"] + s["d_v"])
        return products * (2.5 if self.op == "backward" else 1) / (2 if self.causal else 1)

    def check(self):
        """The first and the last head of the batch against float64. Returns the greatest ratios (mean, max) of fa's errors to
        FlashAttention-2's, by the name of the gradient."""
        self.calls["fa"]()
        bound = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: F32_BOUND}[self.dtype]
        comparable = self.op == "backward" and "fa2" in self.calls and not self.dropout  # masks differ
        peer = self.calls["fa2"]() if comparable else None
        worst = {}
        for b, h in {(0, 0), (self.size["b"] - 1, self.size["h_q"] - 1)}:
            head = lambda t: self._head(t, b, h)  # noqa: E731, B023
            cut = [head(t) for t in (self.q, self.k, self.v)]
            keep = self._keep(b, h, cut[0].shape[2], cut[1].shape[2])
            if self.op == "forward":
                named = {"o": (self.o, reference(*cut, self.causal, keep)[0])}
            else:
                wanted = reference_gradients(*cut, head(self.dout), self.causal, keep)
                named = dict(zip(GRADIENTS, zip(self.gradients, wanted)))
            for n, (name, (actual, expected)) in enumerate(named.items()):
                mean, largest = errors(head(actual), expected)
                bound_here = bound / (1 - self.dropout)
                # A gradient is made of o, P and dS, each rounded once, and is rounded itself: twice as much as o.
                if largest > (1 if self.op == "forward" else 2) * bound_here * expected.abs().max().item():
                    raise SystemExit(f"fa is wrong on {self.size}: max abs error of {name} {largest}")
                if peer is not None:
                    peer_mean, peer_largest = errors(head(peer[n]), expected)
                    worst[name] = max(worst.get(name, (0, 0)), (mean / peer_mean, largest / peer_largest))
        return worst

    def _head(self, t, b, h):
        return t[b : b + 1, h : h + 1]

    def _keep(self, b, h, s_q, s_kv):
        """The mask of a head times its factor, or None."""
        if not self.dropout:
            return None
        state = fa_ctypes.dropout_state(RNG.seed, RNG.offset + b * self.size["h_q"] + h)
        mask = self.fa.dropout_mask(state, self.dropout, 1, 1, s_q, s_kv)
        factor = 65536 / (65536 - round(self.dropout * 65536))
        return torch.frombuffer(mask, dtype=torch.uint8).view(s_q, s_kv).cuda().double() * factor

    def entry(self, rates):
        return {"op": self.op, "family": self.family, "dtype": DTYPE_NAMES[self.dtype], **self.size, "causal": self.causal,
                "variant": self.variant, "tflops": rates}


class PackedRow(Row):
    """`b` sequences of lengths uniform in [1, 2 s], one after the other."""

    def __init__(self, library, op, family, b, h, s, d, dtype, causal, peers, dropout=0.0):
        generator = torch.Generator().manual_seed(64)
        self.lengths = torch.randint(1, 2 * s + 1, (b,), generator=generator)
        self.starts = torch.cat((torch.zeros(1, dtype=torch.int64), self.lengths.cumsum(0)))
        self.cumulative, self.longest = self.starts.int().cuda(), 2 * s
        self.total = int(self.starts[-1])
        self.size = dict(b=b, h_q=h, h_kv=h, s_q=s, s_kv=s, d_qk=d, d_v=d)
        self.op, self.family, self.causal, self.dtype, self.fa, self.dropout = op, family, causal, dtype, library, dropout
        self.variant = "varlen" + (f"+dropout={dropout:g}" if dropout else "")
        self.q, self.k, self.v = (t[0].transpose(0, 1) for t in make_inputs(1, h, h, self.total, self.total, d, d, dtype))
        self.o = torch.full((self.total, h, d), float("nan"), device="cuda", dtype=dtype)
        self.lse = torch.full((h, self.total), float("nan"), device="cuda")
        self.attention = fa_ctypes.Attention(library, d, dtype, causal, varlen=True, dropout=dropout,
                                              **{("family" if op == "forward" else "backward_family"): family})
        self.stream = torch.cuda.current_stream().cuda_stream
        lengths = fa_ctypes.sequences(self.cumulative, self.cumulative, max_s_q=self.longest, max_s_kv=self.longest)
        self.variants = {"sequences": lengths, "dropout": RNG if dropout else None}
        self._bind(peers)

    def _sizes(self):
        h = self.size["h_q"]
        return [self.size["b"], h, h, self.longest, self.longest, self.total, self.total]

    def _make_dout(self):
        return make_inputs(1, self.size["h_q"], 1, self.total, 1, self.size["d_v"], 1, self.dtype, seed=1)[0][0].transpose(0, 1)

    def _attend(self, peer, q, k, v):
        return peer_packed(q, k, v, self.cumulative, self.longest, self.causal, self.dropout)

    def _head(self, t, b, h):
        return t[self.starts[b] : self.starts[b + 1], h][None, None]

    def flops(self):
        pairs = int((self.lengths**2).sum())
        products = 2 * self.size["h_q"] * pairs * (self.size["d_qk"] + self.size["d_v"])
        return products * (2.5 if self.op == "backward" else 1) / (2 if self.causal else 1)


def milliseconds(call, target_ms):
    call()
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    stop.record()
    torch.cuda.synchronize()
    repeat = max(1, min(1000, round(target_ms / max(start.elapsed_time(stop), 1e-3))))
    start.record()
    for _ in range(repeat):
        call()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / repeat


def time_row(row, rounds, target_ms):
    for call in row.calls.values():
        call()
    times = {name: [] for name in row.calls}
    # The GPU is limited by its power: what ran just before decides how fast it is for a while. So nobody has a fixed place.
    order, shuffle = list(row.calls), random.Random(0).shuffle
    for _ in range(rounds):
        shuffle(order)
        for name in order:
            times[name].append(milliseconds(row.calls[name], target_ms))
    return {name: round(row.flops() / statistics.median(t) / 1e9, 1) for name, t in times.items()}


def ceilings(target_ms):
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    matmul = statistics.median(milliseconds(lambda: a @ b, target_ms) for _ in range(5))
    source, target = (torch.empty(1 << 31, device="cuda", dtype=torch.uint8) for _ in range(2))
    copy = statistics.median(milliseconds(lambda: target.copy_(source), target_ms) for _ in range(5))
    return round(2 * 8192**3 / matmul / 1e9, 1), round(2 * source.numel() / copy / 1e9, 2)


def deviations(actual, expected):
    return dict(zip(("mean_abs", "max_abs"), errors(actual, expected)))


def within_peer(error, peer):
    return error["mean_abs"] <= MEAN_RATIO * peer["mean_abs"] and error["max_abs"] <= MAX_RATIO * peer["max_abs"]


def forward_accuracy(row, entry):
    """Adds fa's and FlashAttention-2's errors to `entry`; whether fa keeps its bounds."""
    row.calls["fa"]()
    expected, lse = reference(row.q, row.k, row.v, row.causal)
    entry["fa"] = deviations(row.o, expected)
    entry["lse_max_abs"] = errors(row.lse, lse)[1]
    if row.dtype == torch.float32:
        entry["max_abs_over_max_ref"] = entry["fa"]["max_abs"] / expected.abs().max().item()
        return entry["max_abs_over_max_ref"] <= F32_BOUND and entry["lse_max_abs"] <= LSE_BOUND_F32
    entry["fa2"] = deviations(peer_attention("fa2", row.q, row.k, row.v, row.causal), expected)
    return within_peer(entry["fa"], entry["fa2"]) and entry["lse_max_abs"] <= LSE_BOUND


def backward_accuracy(row, entry):
    """Likewise of each gradient."""
    row.calls["fa"]()
    expected = reference_gradients(row.q, row.k, row.v, row.dout, row.causal)
    entry["fa"] = {name: deviations(*pair) for name, pair in zip(GRADIENTS, zip(row.gradients, expected))}
    if row.dtype == torch.float32:
        largest = {name: wanted.abs().max().item() for name, wanted in zip(GRADIENTS, expected)}
        entry["max_abs_over_max_ref"] = max(entry["fa"][name]["max_abs"] / largest[name] for name in GRADIENTS)
        return entry["max_abs_over_max_ref"] <= F32_GRADIENT_BOUND
    entry["fa2"] = {name: deviations(*pair) for name, pair in zip(GRADIENTS, zip(row._peer("fa2")(), expected))}
    return all(within_peer(entry["fa"][name], entry["fa2"][name]) for name in GRADIENTS)


def accuracy(library, op, family):
    """fa and FlashAttention-2 against float64 on the same inputs; the shapes that every library is first tried on."""
    table, failed = [], []
    for dtype in (torch.bfloat16, torch.float16) + ((torch.float32,) if family in F32_FAMILIES else ()):
        for b, s_q, s_kv in ((32, 128, 128), (32, 500, 500), (32, 1024, 1024), (32, 1024, 4096)):
            for causal in (False, True):
                row = Row(library, op, family, b, 8, s_q, s_kv, 128, 128, dtype, causal, [])
                entry = {"op": op, "family": family, "dtype": DTYPE_NAMES[dtype], **row.size, "causal": causal}
                good = (forward_accuracy if op == "forward" else backward_accuracy)(row, entry)
                table.append(entry)
                print_accuracy(entry)
                if not good:
                    failed.append(entry)
    return table, failed


def fa3_importable():
    try:
        import flash_attn_interface  # noqa: F401

        return True
    except ImportError:
        return False


def cli_json(cli, *arguments):
    return json.loads(subprocess.run([cli, *arguments, "--json"], check=True, capture_output=True, text=True).stdout)


def latency(cli):
    """Cold compiles of the whole head-dim x causal grid, one after the other, then first calls from the cache; a warm call."""
    grid_of = ["--head-dim", ",".join(str(d) for d in range(8, 257, 8)), "--causal", "both"]
    figures = {}
    for dtype, key in (("bf16", ""), ("f32", "_f32")):
        results = cli_json(cli, "bench", "--latency", "--dtype", dtype, *grid_of)["results"]
        seconds = [r["compile_ms"] / 1e3 for r in results]
        figures["compile_s_median" + key] = round(statistics.median(seconds), 3)
        figures["compile_s_max" + key] = round(max(seconds), 3)
        figures["warm_create_ms" + key] = round(max(r["warm_ms"] for r in results), 2)
    figures["forward_host_us"] = round(cli_json(cli, "bench", "--host-cost")["median_us"], 2)
    return figures


def commit():
    done = subprocess.run(["git", "-C", ROOT, "rev-parse", "HEAD"], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else "unknown"


def problem(row):
    """What makes two rows the same."""
    return tuple(sorted((key, value) for key, value in row.items() if isinstance(value, (str, int, bool))))


def earlier_results(path, digest):
    """A results file with the same templates, or an empty one."""
    if path.exists():
        old = json.loads(path.read_text())
        if old["templates"] == digest:
            return old
    return {"attention": [], "accuracy": [], "latency": {}}


def kept(old, new):
    """Rows of an earlier run that this run did not measure again, before those that it did."""
    replaced = {problem(row) for row in new}
    return [row for row in old if problem(row) not in replaced] + new


def print_accuracy(entry):
    shape = f"s {entry['s_q']}x{entry['s_kv']} {'causal' if entry['causal'] else 'full'}"
    if "max_abs_over_max_ref" in entry:
        beside = f"over the largest element: {entry['max_abs_over_max_ref']:.2e}"
    else:
        pairs = {"o": (entry["fa"], entry["fa2"])} if entry["op"] == "forward" else {
            name: (entry["fa"][name], entry["fa2"][name]) for name in GRADIENTS}
        beside = "of FlashAttention-2's: " + ", ".join(
            f"{name} mean {error['mean_abs'] / peer['mean_abs']:.3f} max {error['max_abs'] / peer['max_abs']:.3f}"
            for name, (error, peer) in pairs.items())
    lse = f", lse {entry['lse_max_abs']:.2e}" if "lse_max_abs" in entry else ""
    print(f"accuracy {entry['op']:<8} {entry['family']} {entry['dtype']:<5} {shape:<18} {beside}{lse}", flush=True)


def print_row(entry, worst):
    size = (f"{entry['op']:<8} {entry['family']} {entry['dtype']:<5} d {entry['d_qk']:<3} "
            f"{'causal' if entry['causal'] else 'full  '} s {entry['s_q']:<6}")
    rates = "  ".join(f"{name} {rate:7.1f}" for name, rate in entry["tflops"].items())
    peer = entry["tflops"].get("fa2") or entry["tflops"].get("mem_efficient")
    ratio = f"  ratio {entry['tflops']['fa'] / peer:.3f}" if peer else ""
    error = "  errors of fa2's: " + ", ".join(f"{n} {mean:.2f} {most:.2f}" for n, (mean, most) in worst.items()) if worst else ""
    print(f"{size} {rates}{ratio}{error} {entry['variant']}".rstrip(), flush=True)


def measure(library, args, op, family, b, h, s, d, dtype, causal, peers, deterministic=False, dropout=0.0, packed=False):
    """One row of the results; nothing where the family does not do it."""
    try:
        if packed:
            row = PackedRow(library, op, family, b, h, s, d, dtype, causal, peers, dropout)
        else:
            row = Row(library, op, family, b, h, s, s, d, d, dtype, causal, peers, deterministic, dropout)
    except fa_ctypes.Unsupported as refusal:
        print(f"{op:<8} {family} {DTYPE_NAMES[dtype]} d {d} s {s}: {refusal}", flush=True)
        return []
    worst = row.check()
    entry = row.entry(time_row(row, args.rounds, args.ms))
    print_row(entry, worst)
    return [entry]


def measure_all(library, args, op, family, peers):
    rows = []
    for d in args.head_dims:
        for causal in [name == "yes" for name in args.causal]:
            for s in args.seqs:
                size = (TOKENS // s, WIDTH // d, s, d, torch.bfloat16, causal)
                for variant in args.variants:
                    dropout = DROPOUT if "dropout" in variant else 0.0
                    # Of the peers, FlashAttention-2 does all of them.
                    beside = peers if variant == "plain" else ["fa2"]
                    if "varlen" in variant:
                        packed = (args.packed_batch or TOKENS // s, *size[1:])
                        rows += measure(library, args, op, family, *packed, beside, dropout=dropout, packed=True)
                    else:
                        rows += measure(library, args, op, family, *size, beside, dropout=dropout)
                if op == "backward" and args.deterministic:
                    rows += measure(library, args, op, family, *size, ["fa2"], deterministic=True)
    if not args.no_f32 and family in F32_FAMILIES:
        for causal in [name == "yes" for name in args.causal]:
            rows += measure(library, args, op, family, 4, 32, 4096, 64, torch.float32, causal, ["mem_efficient"])
    return rows


def main():
    args = parse()
    library = fa_ctypes.Library(args.lib)
    gpu = torch.cuda.get_device_name()
    output = args.output or ROOT / "bench/results" / (re.sub(r"[^a-z0-9]+", "-", gpu.lower()) + ".json")
    info = cli_json(args.cli, "info")
    earlier = earlier_results(output, info["templates"])
    peers = ["cudnn", "fa2"] + (["fa3"] if fa3_importable() else [])

    matmul_tflops, copy_tbps = ceilings(args.ms)
    print(f"{gpu}: matmul {matmul_tflops} TFLOP/s, copy {copy_tbps} TB/s", flush=True)
    table, failed, rows = [], [], []
    for op in args.ops:
        for family in args.families:
            if not args.no_accuracy:
                entries, broken = accuracy(library, op, family)
                table += entries
                failed += broken
            rows += measure_all(library, args, op, family, peers)

    result = {
        "gpu": gpu,
        "driver": info["driver"],
        "nvrtc": info["nvrtc"]["version"],
        "templates": info["templates"],
        "commit": args.commit or commit(),
        "method": f"{datetime.date.today()}, PyTorch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}: "
        f"median of {args.rounds} interleaved rounds of {args.ms:g} ms, tools/compare.py",
        "matmul_tflops": matmul_tflops,
        "copy_tbps": copy_tbps,
        "attention": kept(earlier["attention"], rows),
        "accuracy": kept(earlier["accuracy"], table),
        "latency": earlier["latency"] if args.no_latency else latency(args.cli),
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(result, indent=1) + "\n")
    print(f"wrote {output}; latency {result['latency']}")
    if failed:
        raise SystemExit(f"accuracy bounds broken by {len(failed)} of {len(table)} shapes: {failed}")


if __name__ == "__main__":
    main()
