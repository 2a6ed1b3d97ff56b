#!/usr/bin/env python3
"""Times fa beside its peers in one run on one GPU, and writes bench/results/<gpu>.json.

Method: 16384 tokens a row, model width 2048, bf16, standard normal inputs, [b, s, h, d] memory, the same tensors and
stream for everyone. Before a row is timed, fa's output is held to float64. A round times every library once, with CUDA
events around enough calls for --ms milliseconds after a warm-up; rounds are interleaved and the median of --rounds counts.
TFLOP/s = 2 b h_q s_q s_kv (d_qk + d_v) / time, half of that when causal, 2.5 times that for backward. A backward is all of
its kernels and nothing else: the peers' by torch.autograd.grad of one graph that is kept, fa's with its workspace at hand.

--variants adds rows that are checked and timed in the same way, of what a call computes besides (or, without `plain`,
instead). Beside them runs fa's own plain attention as fa_plain, where that is of interest.
  window    causal, the last 1024 keys, s 16k, d 128; TFLOP/s count unmasked pairs here and with documents
  alibi     as a score function, s 8k, d 128
  softcap   as a score function, s 4k, d 128 and 256; with the errors of both
  document  a mask function over 16 documents of random lengths in 16k rows, d 128: 10 calls that share what is found out
            about tiles of the mask (FlexAttention: its BlockMask), and the finding out
  bias      [h, s, s] with its gradient, s 2k and 4k, d 64 and 128
  varlen    64 sequences of lengths uniform in [1, 4096], d 64 and 128; fa_plain is a dense batch of the mean length, by
            its own count. With --seqs: lengths in [1, 2 s], as many sequences as 16384 rows or --packed-batch give
  dropout   0.1, s 4k or --seqs, d 64 and 128; also as varlen+dropout
  grouped   fewer KV heads than query heads: GROUPED, as far as --head-dims, --seqs and --causal leave it
  bytes     forward of e4m3 and of i8, plain and precise, s 8k, d 64, 128 and 256, with errors of all that codes lose on three
            kinds of inputs; `_quantize` makes the codes, by the count of the forward (tools/compare_bytes.py)

Only what is asked for is measured (--ops, --families, --head-dims, --seqs, --causal, --variants); other rows of the
results file are kept while the templates are the same.

--decode measures decodes over a KV cache instead (tools/compare_decode.py): TB/s of K, V, Q and O by graph replay. They have a
part of the results file of their own, and leave the rest of it as it is. --mla measures those of multi-head latent attention,
beside FlashMLA, in the same way (tools/compare_mla.py).

Clocks, power and temperature are sampled by nvidia-smi while rows are timed: least, median and greatest.

Needs PyTorch with CUDA (cuDNN and FlashAttention-2 are its backends; FlashAttention-3 is timed if it can be imported).
"""

import argparse
import datetime
import json
import os
import pathlib
import re
import signal
import statistics
import subprocess
import sys

import torch

sys.path[:0] = [str(pathlib.Path(__file__).parent), str(pathlib.Path(__file__).resolve().parent.parent / "python")]
import compare_bytes  # noqa: E402
import compare_decode  # noqa: E402
import compare_decode_rows as decode_rows  # noqa: E402
import compare_mla  # noqa: E402
import compare_mla_rows as mla_rows  # noqa: E402
import compare_parallel_rows as parallel_rows  # noqa: E402
import compare_variants  # noqa: E402
from fa_attention import capi  # noqa: E402
from compare_rows import (  # noqa: E402
    DROPOUT, DTYPE_NAMES, F32_BOUND, GRADIENTS, TOKENS, WIDTH, PackedRow, Row, errors, fa3, milliseconds, peer_attention,
    reference, reference_gradients, time_row)

ROOT = pathlib.Path(__file__).resolve().parent.parent
F32_FAMILIES = ("automatic", "sm80")
# Bounds on fa's error in units of FlashAttention-2's on the same inputs; fp32 and the log-sum-exp have absolute ones.
MEAN_RATIO, MAX_RATIO, LSE_BOUND, LSE_BOUND_F32 = 1.02, 1.5, 1e-3, 1e-5
F32_GRADIENT_BOUND = 2e-5
VARIANTS = ("plain", "dropout", "varlen", "varlen+dropout", "grouped", "bytes", *compare_variants.KINDS)
# b, h_q, h_kv, s, d, causal
GROUPED = [(b, *heads, s, 128, True) for heads in ((16, 1), (16, 2), (16, 4), (32, 4), (32, 8), (40, 8), (64, 4), (64, 8))
           for b, s in ((4, 4096), (1, 4096), (1, 16384), (1, 32768))]
GROUPED += [(b, h_q, 8, s, d, causal) for h_q in (32, 64) for d, causal in ((64, True), (64, False), (128, False), (256, True), (256, False))
            for b, s in ((4, 4096), (1, 16384))]
SEQS, HEAD_DIMS = (512, 1024, 2048, 4096, 8192, 16384), (64, 128, 256)
# Rows of dropout and of packed batches, unless they are asked for: lengths, head dims, sequences of a packed batch.
DROPOUT_SEQS, PACKED_SEQS, VARIANT_HEAD_DIMS, PACKED_BATCH = (4096,), (2048,), (64, 128), 64


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
    parser.add_argument("--families", "--family", type=a_list(among=list(capi.FAMILIES)), default=["sm80"])
    parser.add_argument("--head-dims", type=a_list(int), help="default: 64,128,256; of variants theirs")
    parser.add_argument("--seqs", type=a_list(int), help="default: 512 to 16384; of variants theirs")
    parser.add_argument("--causal", type=a_list(among=["no", "yes"]), default=["no", "yes"])
    parser.add_argument("--variants", type=a_list(among=VARIANTS), default=["plain"])
    parser.add_argument("--packed-batch", type=int, default=0, help="sequences of a packed batch (default: 64; with --seqs 16384 / s)")
    parser.add_argument("--deterministic", action="store_true", help="backward rows also as the variant deterministic")
    parser.add_argument("--no-f32", action="store_true", help="leave out the fp32 rows")
    parser.add_argument("--no-accuracy", action="store_true", help="leave out the comparison of errors")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ms", type=float, default=20)
    parser.add_argument("--commit", help="recorded in the results; default: git's HEAD")
    parser.add_argument("--output", type=pathlib.Path, help="default: bench/results/<gpu>.json")
    parser.add_argument("--no-latency", action="store_true", help="leave out compile time and host cost")
    decode_rows.add_options(parser)
    mla_rows.add_options(parser)
    return parser.parse_args()


def ceilings(target_ms):
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    matmul = statistics.median(milliseconds(lambda: a @ b, target_ms) for _ in range(5))
    source, target = (torch.empty(1 << 31, device="cuda", dtype=torch.uint8) for _ in range(2))
    copy = statistics.median(milliseconds(lambda: target.copy_(source), target_ms) for _ in range(5))
    return round(2 * 8192**3 / matmul / 1e9, 1), round(2 * source.numel() / copy / 1e9, 2)


def read_tbps(cli):
    """What a kernel that only reads gets, over 2 GB: the one that stands beside the decodes of `fa bench`. None without."""
    options = ["--op", "decode", "--batch", "64", "--seq-kv", "8192", "--page-size", "0", "--rounds", "5"]
    try:
        rows = cli_json(cli, "bench", *options)
    except subprocess.CalledProcessError as problem:
        print(f"the read-only ceiling is not known: {problem.stderr.strip() or problem.stdout[-200:]}", flush=True)
        return None
    return round(rows["decode"][0]["cold"]["read_tbps"], 2)


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


def cli_json(cli, *arguments, environment=None):
    done = subprocess.run([cli, *arguments, "--json"], check=True, capture_output=True, text=True,
                          env={**os.environ, **(environment or {})})
    return json.loads(done.stdout)


def tree_templates(cli):
    """The digest of the templates in the tree; the library may have others."""
    folder = ROOT / "templates"
    return cli_json(cli, "info", environment={"FA_TEMPLATE_DIR": str(folder)})["templates"] if folder.exists() else ""


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
    for family, key in (("automatic", ""), ("sm80", "_sm80")):
        cost = cli_json(cli, "bench", "--host-cost", "--family", family)
        figures["forward_host_us" + key] = round(cost["median_us"], 2)
    return figures


def commit():
    done = subprocess.run(["git", "-C", ROOT, "rev-parse", "HEAD"], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else "unknown"


def earlier_results(path, digest):
    """A results file with the same templates, or an empty one."""
    if path.exists():
        old = json.loads(path.read_text())
        if old["templates"] == digest:
            return old
    return {"attention": [], "accuracy": [], "latency": {}}


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
    if entry["h_q"] != entry["h_kv"]:
        size += f" b {entry['b']} {entry['h_q']}/{entry['h_kv']}"
    rates = "  ".join(f"{name} {rate:7.1f}" for name, rate in entry["tflops"].items())
    peer = entry["tflops"].get("fa2") or entry["tflops"].get("mem_efficient")
    ratio = f"  ratio {entry['tflops']['fa'] / peer:.3f}" if peer else ""
    error = "  errors of fa2's: " + ", ".join(f"{n} {mean:.2f} {most:.2f}" for n, (mean, most) in worst.items()) if worst else ""
    print(f"{size} {rates}{ratio}{error} {entry['variant']}".rstrip(), flush=True)


def measure(library, args, op, family, b, h, s, d, dtype, causal, peers, deterministic=False, dropout=0.0, packed=False,
            h_kv=None):
    """One row of the results; nothing where the family does not do it."""
    try:
        if packed:
            row = PackedRow(library, op, family, b, h, s, d, dtype, causal, peers, dropout)
        else:
            row = Row(library, op, family, b, h, s, s, d, d, dtype, causal, peers, deterministic, dropout, h_kv)
        if packed or dropout:  # beside a dense batch of the mean length, and without dropout
            row.beside_plain(Row(library, op, family, b, h, s, s, d, d, dtype, causal, []))
    except capi.Unsupported as refusal:
        print(f"{op:<8} {family} {DTYPE_NAMES[dtype]} d {d} s {s}: {refusal}", flush=True)
        return []
    worst = row.check()
    entry = row.entry(time_row(row, args.rounds, args.ms))
    print_row(entry, worst)
    return [entry]


def measure_plain(library, args, op, family, d, causal, s, peers):
    size = (TOKENS // s, WIDTH // d, s, d, torch.bfloat16, causal)
    rows = measure(library, args, op, family, *size, peers) if "plain" in args.variants else []
    if op == "backward" and args.deterministic:
        rows += measure(library, args, op, family, *size, ["fa2"], deterministic=True)
    return rows


def measure_packed_and_dropout(library, args, op, family, d, causal):
    """Of the peers, FlashAttention-2 does all of them, FlashAttention-3 packed batches without dropout."""
    rows = []
    for variant in args.variants:
        packed, dropout = "varlen" in variant, DROPOUT if "dropout" in variant else 0.0
        if not packed and not dropout:
            continue
        beside = ["fa2"] + (["fa3"] if packed and not dropout and hasattr(fa3, "flash_attn_varlen_func") else [])
        for s in args.seqs or (PACKED_SEQS if packed else DROPOUT_SEQS):
            b = TOKENS // s if not packed or args.seqs else PACKED_BATCH
            if packed and args.packed_batch:
                b = args.packed_batch
            rows += measure(library, args, op, family, b, WIDTH // d, s, d, torch.bfloat16, causal, beside, dropout=dropout,
                            packed=packed)
    return rows


def measure_all(library, args, op, family, peers, rows):
    """Adds to `rows`, one by one."""
    causals = [name == "yes" for name in args.causal]
    for d in args.head_dims or HEAD_DIMS:
        for causal in causals:
            for s in args.seqs or SEQS:
                rows += measure_plain(library, args, op, family, d, causal, s, peers)
    for d in args.head_dims or VARIANT_HEAD_DIMS:
        for causal in causals:
            rows += measure_packed_and_dropout(library, args, op, family, d, causal)
    for b, h_q, h_kv, s, d, causal in GROUPED if "grouped" in args.variants else ():
        if d in (args.head_dims or [d]) and s in (args.seqs or [s]) and causal in causals:
            rows += measure(library, args, op, family, b, h_q, s, d, torch.bfloat16, causal, peers, h_kv=h_kv)
    if "bytes" in args.variants:
        rows += compare_bytes.measure(library, args, op, family)
    for kind in args.variants:
        if kind in compare_variants.KINDS:
            rows += compare_variants.measure(library, args, op, family, kind)
    if "plain" in args.variants and not args.no_f32 and family in F32_FAMILIES:
        for causal in causals:
            rows += measure(library, args, op, family, 4, 32, 4096, 64, torch.float32, causal, ["mem_efficient"])


def stop(*_):
    raise SystemExit("stopped; what was measured is written")


def write_results(output, result):
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(result, indent=1) + "\n")


def method(args, what):
    return (f"{datetime.date.today()}, PyTorch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}: "
            f"median of {args.rounds} interleaved rounds of {args.ms:g} ms, {what}")


def decode_specs(args):
    return mla_rows.selected(args) if args.mla else decode_rows.selected(decode_rows.all_rows(args.page_sizes), args)


def compare_decodes(library, args, facts, ceilings, earlier, tree, output):
    """Of --decode, or of --mla: each has its part of the results."""
    specs, entries = decode_specs(args), []
    part, how = "decode", {}
    if args.mla:
        part, how = mla_rows.PART, {"measure": compare_mla.measure, "print_entry": mla_rows.print_entry}
    watch = compare_decode.Watch()
    try:
        compare_decode.measure_all(library, specs, args, entries, **how)
    finally:
        watch.stop()
        now = {"gpu": facts["gpu"], "driver": facts["driver"], "nvrtc": facts["nvrtc"], "read_tbps": facts["read_tbps"],
               f"{part}_commit": facts["commit"], f"{part}_method": method(args, f"graph replay, tools/compare.py --{part}"),
               f"{part}_conditions": watch.conditions()}
        base = {**ceilings, "commit": facts["commit"], "method": ""}
        earlier.pop("templates_of_tree", None)
        write_results(output, {**decode_rows.merged(earlier, entries, facts["templates"], base, now, part), **tree})
    mean = decode_rows.summary(entries)
    print(f"wrote {output}: {len(entries)} of {len(specs)} rows" + (f", geometric mean {mean:.3f} of the best peer" if mean else ""))


def main():
    args = parse()
    if args.list:
        print("\n".join(spec.name() for spec in decode_specs(args)))
        return
    library = capi.Library(args.lib)
    gpu = torch.cuda.get_device_name()
    output = args.output or ROOT / "bench/results" / (re.sub(r"[^a-z0-9]+", "-", gpu.lower()) + ".json")
    info = cli_json(args.cli, "info")
    earlier = earlier_results(output, info["templates"])
    on_disk = json.loads(output.read_text()) if output.exists() else {}
    of_tree = tree_templates(args.cli)
    for warning in decode_rows.warnings(info["templates"], of_tree, on_disk):
        print(f"note: {warning}", flush=True)
    tree = {"templates_of_tree": of_tree} if of_tree not in ("", info["templates"]) else {}
    peers = ["cudnn", "fa2"] + (["fa3"] if fa3 else [])

    matmul_tflops, copy_tbps = ceilings(args.ms)
    reading = read_tbps(args.cli)
    print(f"{gpu}: matmul {matmul_tflops} TFLOP/s, copy {copy_tbps} TB/s, read {reading} TB/s", flush=True)
    if args.decode or args.mla:
        facts = {"gpu": gpu, "driver": info["driver"], "nvrtc": info["nvrtc"]["version"], "templates": info["templates"],
                 "commit": args.commit or commit(), "read_tbps": reading}
        signal.signal(signal.SIGTERM, stop)
        compare_decodes(library, args, facts, {"matmul_tflops": matmul_tflops, "copy_tbps": copy_tbps}, on_disk, tree, output)
        return
    table, failed, rows, figures = [], [], [], dict(earlier["latency"])

    def write():
        result = {
            "gpu": gpu,
            "driver": info["driver"],
            "nvrtc": info["nvrtc"]["version"],
            "templates": info["templates"],
            "commit": args.commit or commit(),
            "method": method(args, "tools/compare.py"),
            "matmul_tflops": matmul_tflops,
            "copy_tbps": copy_tbps,
            "read_tbps": reading,
            "conditions": watch.conditions(),
            **tree,
            **{key: on_disk[key] for key in (*decode_rows.DECODE_KEYS, *mla_rows.KEYS, parallel_rows.PART) if key in on_disk},
            "attention": decode_rows.kept(earlier["attention"], rows),
            "accuracy": decode_rows.kept(earlier["accuracy"], table),
            "latency": figures,
        }
        write_results(output, result)

    signal.signal(signal.SIGTERM, stop)  # what a time limit sends
    watch = compare_decode.Watch()
    try:
        for op in args.ops:
            for family in args.families:
                if not args.no_accuracy:
                    entries, broken = accuracy(library, op, family)
                    table += entries
                    failed += broken
                measure_all(library, args, op, family, peers, rows)
        if not args.no_latency:
            figures.update(latency(args.cli))
        if not args.no_latency and compare_variants.SCORED.intersection(args.variants):
            figures["score_function_compile_s"] = compare_variants.compile_times(args.cli)
    finally:
        watch.stop()
        write()
    compare_variants.print_table([row for row in rows if row["variant"]])
    print(f"wrote {output}; latency {figures}")
    if failed:
        raise SystemExit(f"accuracy bounds broken by {len(failed)} of {len(table)} shapes: {failed}")


if __name__ == "__main__":
    main()
