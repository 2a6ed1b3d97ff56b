#!/usr/bin/env python3
"""Times fa beside its peers in one run on one GPU, and writes bench/results/<gpu>.json.

Method: 16384 tokens a row, model width 2048, bf16, standard normal inputs, [b, s, h, d] memory, the same tensors and
stream for everyone. Before a row is timed, fa's output is held to float64. A round times every library once, with CUDA
events around enough calls for --ms milliseconds after a warm-up; rounds are interleaved and the median of --rounds counts.
TFLOP/s = 2 b h_q s_q s_kv (d_qk + d_v) / time, half of that when causal.

Needs PyTorch with CUDA (cuDNN and FlashAttention-2 are its backends; FlashAttention-3 is timed if it can be imported).
"""

import argparse
import datetime
import json
import pathlib
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
DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}
# Bounds on fa's error in units of FlashAttention-2's on the same inputs; fp32 and the log-sum-exp have absolute ones.
MEAN_RATIO, MAX_RATIO, F32_BOUND, LSE_BOUND, LSE_BOUND_F32 = 1.02, 1.5, 1e-5, 1e-3, 1e-5


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lib", type=pathlib.Path, default=ROOT / "build/release/libfa.so")
    parser.add_argument("--cli", type=pathlib.Path, default=ROOT / "build/release/tools/fa")
    parser.add_argument("--family", default="sm80", choices=["automatic", "sm80"])
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


def reference(q, k, v, causal):
    """float64 O and LSE of one head at a time; the causal mask is aligned bottom-right."""
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
            o[b, h] = scores.softmax(1) @ v[b, h].double()
    return o, lse


def errors(actual, expected):
    difference = (actual.double() - expected).abs()
    if not torch.isfinite(difference).all():
        raise SystemExit("an output is not finite")
    return difference.mean().item(), difference.max().item()


def sdpa(backend, q, k, v, causal, square=True):
    mask = None if square or not causal else causal_lower_right(q.shape[2], k.shape[2])
    with sdpa_kernel(BACKENDS[backend]):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal and square)


class Row:
    """One problem: its tensors, and a callable for each library."""

    def __init__(self, library, family, b, h, s_q, s_kv, d_qk, d_v, dtype, causal, peers, lse=False):
        self.size = dict(b=b, h_q=h, h_kv=h, s_q=s_q, s_kv=s_kv, d_qk=d_qk, d_v=d_v)
        self.causal, self.dtype = causal, dtype
        self.q, self.k, self.v = make_inputs(b, h, h, s_q, s_kv, d_qk, d_v, dtype)
        self.o = torch.full((b, s_q, h, d_v), float("nan"), device="cuda", dtype=dtype).transpose(1, 2)
        self.lse = torch.full((b, h, s_q), float("nan"), device="cuda") if lse else None
        self.attention = fa_ctypes.Attention(library, d_qk, dtype, causal, d_v, family=family)
        stream = torch.cuda.current_stream().cuda_stream
        self.calls = {"fa": self.attention.bind_forward(self.q, self.k, self.v, self.o, self.lse, stream)}
        for peer in peers:
            self.calls[peer] = self._peer(peer)

    def _peer(self, peer):
        q, k, v, causal = self.q, self.k, self.v, self.causal
        if peer == "fa3":
            from flash_attn_interface import flash_attn_func

            bshd = [t.transpose(1, 2) for t in (q, k, v)]
            return lambda: flash_attn_func(*bshd, causal=causal)
        return lambda: sdpa(peer, q, k, v, causal)

    def flops(self):
        s = self.size
        return 2 * s["b"] * s["h_q"] * s["s_q"] * s["s_kv"] * (s["d_qk"] + s["d_v"]) / (2 if self.causal else 1)

    def check(self):
        """The first and the last head of the batch against float64."""
        self.calls["fa"]()
        bound = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: F32_BOUND}[self.dtype]
        for b, h in {(0, 0), (self.size["b"] - 1, self.size["h_q"] - 1)}:
            cut = [t[b : b + 1, h : h + 1] for t in (self.q, self.k, self.v)]
            expected, _ = reference(*cut, self.causal)
            _, largest = errors(self.o[b : b + 1, h : h + 1], expected)
            if largest > bound * expected.abs().max().item():
                raise SystemExit(f"fa is wrong on {self.size}: max abs error {largest}")


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
    for _ in range(rounds):
        for name, call in row.calls.items():
            times[name].append(milliseconds(call, target_ms))
    return {name: round(row.flops() / statistics.median(t) / 1e9, 1) for name, t in times.items()}


def ceilings(target_ms):
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    matmul = statistics.median(milliseconds(lambda: a @ b, target_ms) for _ in range(5))
    source, target = (torch.empty(1 << 31, device="cuda", dtype=torch.uint8) for _ in range(2))
    copy = statistics.median(milliseconds(lambda: target.copy_(source), target_ms) for _ in range(5))
    return round(2 * 8192**3 / matmul / 1e9, 1), round(2 * source.numel() / copy / 1e9, 2)


def accuracy(library, family):
    """fa and FlashAttention-2 against float64 on the same inputs; the shapes that every library is first tried on."""
    table, failed = [], []
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for b, s_q, s_kv in ((32, 128, 128), (32, 500, 500), (32, 1024, 1024), (32, 1024, 4096)):
            for causal in (False, True):
                row = Row(library, family, b, 8, s_q, s_kv, 128, 128, dtype, causal, [], lse=True)
                row.calls["fa"]()
                expected, lse = reference(row.q, row.k, row.v, causal)
                entry = {"dtype": DTYPE_NAMES[dtype], **row.size, "causal": causal}
                entry["fa"] = dict(zip(("mean_abs", "max_abs"), errors(row.o, expected)))
                entry["lse_max_abs"] = errors(row.lse, lse)[1]
                if dtype == torch.float32:
                    entry["max_abs_over_max_ref"] = entry["fa"]["max_abs"] / expected.abs().max().item()
                    good = entry["max_abs_over_max_ref"] <= F32_BOUND and entry["lse_max_abs"] <= LSE_BOUND_F32
                else:
                    peer = sdpa("fa2", row.q, row.k, row.v, causal, s_q == s_kv)
                    entry["fa2"] = dict(zip(("mean_abs", "max_abs"), errors(peer, expected)))
                    good = (
                        entry["fa"]["mean_abs"] <= MEAN_RATIO * entry["fa2"]["mean_abs"]
                        and entry["fa"]["max_abs"] <= MAX_RATIO * entry["fa2"]["max_abs"]
                        and entry["lse_max_abs"] <= LSE_BOUND
                    )
                table.append(entry)
                if not good:
                    failed.append(entry)
    return table, failed


def grid():
    for d in (64, 128, 256):
        for causal in (False, True):
            for s in (512, 1024, 2048, 4096, 8192, 16384):
                yield d, causal, s


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


def kept_rows(path, digest, replaced):
    """Rows of an earlier run with the same templates that this run does not measure again."""
    if not path.exists():
        return []
    old = json.loads(path.read_text())
    return [row for row in old["attention"] if old["templates"] == digest and (row["op"], row["family"]) not in replaced]


def print_accuracy(entry):
    size = f"{entry['dtype']:<5} s {entry['s_q']}x{entry['s_kv']} {'causal' if entry['causal'] else 'full'}"
    error, peer = entry["fa"], entry.get("fa2")
    beside = (
        f"of FlashAttention-2's: mean {error['mean_abs'] / peer['mean_abs']:.3f}, max {error['max_abs'] / peer['max_abs']:.3f}"
        if peer
        else f"over max |O|: {entry['max_abs_over_max_ref']:.2e}"
    )
    print(f"accuracy {size:<24} {beside}, lse {entry['lse_max_abs']:.2e}", flush=True)


def print_row(entry):
    size = f"{entry['op']:<8} {entry['dtype']:<5} d {entry['d_qk']:<3} {'causal' if entry['causal'] else 'full  '} s {entry['s_q']:<6}"
    rates = "  ".join(f"{name} {rate:7.1f}" for name, rate in entry["tflops"].items())
    peer = entry["tflops"].get("fa2") or entry["tflops"].get("mem_efficient")
    print(f"{size} {rates}  ratio {entry['tflops']['fa'] / peer:.3f}", flush=True)


def main():
    args = parse()
    library = fa_ctypes.Library(args.lib)
    gpu = torch.cuda.get_device_name()
    output = args.output or ROOT / "bench/results" / (re.sub(r"[^a-z0-9]+", "-", gpu.lower()) + ".json")
    info = cli_json(args.cli, "info")
    peers = ["cudnn", "fa2"] + (["fa3"] if fa3_importable() else [])

    table, failed = accuracy(library, args.family)
    for entry in table:
        print_accuracy(entry)
    matmul_tflops, copy_tbps = ceilings(args.ms)
    print(f"{gpu}: matmul {matmul_tflops} TFLOP/s, copy {copy_tbps} TB/s", flush=True)

    rows = []

    def measure(b, h, s, d, dtype, causal, names):
        row = Row(library, args.family, b, h, s, s, d, d, dtype, causal, names)
        row.check()
        entry = {"op": "forward", "family": args.family, "dtype": DTYPE_NAMES[dtype], **row.size, "causal": causal,
                 "variant": "", "tflops": time_row(row, args.rounds, args.ms)}
        rows.append(entry)
        print_row(entry)

    for d, causal, s in grid():
        measure(TOKENS // s, WIDTH // d, s, d, torch.bfloat16, causal, peers)
    for causal in (False, True):
        measure(4, 32, 4096, 64, torch.float32, causal, ["mem_efficient"])

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
        "attention": kept_rows(output, info["templates"], {("forward", args.family)}) + rows,
        "accuracy": table,
        "latency": {} if args.no_latency else latency(args.cli),
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(result, indent=1) + "\n")
    print(f"wrote {output}; latency {result['latency']}")
    if failed:
        raise SystemExit(f"accuracy bounds broken by {len(failed)} of {len(table)} shapes: {failed}")


if __name__ == "__main__":
    main()
