#!/usr/bin/env python3
"""Times fa's context parallelism beside PyTorch's in one run on the GPUs of this machine, and writes the part
context_parallel of bench/results/<gpu>.json.

fa: parallel_bench, a process a GPU (examples/context_parallel/launch.py). PyTorch: F.scaled_dot_product_attention within
torch.distributed.tensor.experimental.context_parallel, by the SDPA backend that the peer names, with its load balancing
where the attention is causal, and with its way of rotating keys, allgather, unless --rotate says otherwise. Its tensors are
shards from the beginning, as fa's: sharding is not timed. KV heads that are fewer than query heads are given with
enable_gqa; where that fails they are repeated beforehand, and the row says so.

Method: bf16, d 128, normal numbers. A round begins on all GPUs together, and times calls by CUDA events: forward, and
forward with backward. The slowest rank counts; of rounds the median. One GPU with the whole sequence is timed on all GPUs
at the same time.

--limit bounds the seconds of fa's part, --peer-limit those of PyTorch's; what is left then says so in its row. A peer that
fails leaves its reason, and the others are measured all the same. NCCL's variables are passed on as they are. fa uses the
NCCL of PyTorch, unless FA_NCCL_PATH is set.
"""

import argparse
import datetime
import importlib.util
import json
import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys
import tempfile

sys.path[:0] = [str(pathlib.Path(__file__).parent)]
import compare_parallel_rows as parallel_rows  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parent.parent
LAUNCH = ROOT / "examples/context_parallel/launch.py"
GRACE = 30  # seconds that a program may take beyond its limit: it starts, compiles, and ends what it has begun


def parse(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, help="GPUs; default: all")
    parallel_rows.add_options(parser)
    parser.add_argument("--schemes", default="all", help="of parallel_bench, as ring,all_gather:2; default: all of them")
    parser.add_argument("--layout", default="zigzag")
    parser.add_argument("--packed", action="store_true", help="a packed batch; PyTorch has none")
    parser.add_argument("--transfers", choices=("automatic", "messages", "puts"), default="automatic", help="of fa")
    parser.add_argument("--copied", action="store_true", help="K and V do not lie in memory that ranks share")
    parser.add_argument("--no-single", action="store_true", help="not one GPU alone, nor efficiencies")
    parser.add_argument("--reserved", type=int, default=0, help="multiprocessors that kernels leave to transfers")
    parser.add_argument("--peers", type=parallel_rows.names_among(parallel_rows.PEERS), default=list(parallel_rows.PEERS),
                        help="of " + ",".join(parallel_rows.PEERS) + "; '' for none")
    parser.add_argument("--rotate", type=parallel_rows.names_among(parallel_rows.ROTATIONS), default=["allgather"])
    parser.add_argument("--limit", type=float, default=0, help="seconds of fa's part; 0: none")
    parser.add_argument("--peer-limit", type=float, default=0, help="seconds of PyTorch's part; 0: none")
    parser.add_argument("--bench", type=pathlib.Path, default=ROOT / "build/release/tools/parallel/parallel_bench")
    parser.add_argument("--cli", type=pathlib.Path, default=ROOT / "build/release/tools/fa")
    parser.add_argument("--commit", help="recorded in the results; default: git's HEAD")
    parser.add_argument("--output", type=pathlib.Path, help="default: bench/results/<gpu>.json")
    parser.add_argument("--rows", type=pathlib.Path, help="folder for the lines as the programs wrote them")
    parser.add_argument("--merge", type=pathlib.Path, metavar="RESULTS", help="measure nothing: take the part of another file")
    parser.add_argument("--dry-run", action="store_true", help="print the commands, and run nothing")
    return parser.parse_args(arguments)


def gpu_count():
    done = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True)
    return len(done.stdout.splitlines()) if done.returncode == 0 else 0


def nccl_path():
    """The library of the package that PyTorch depends on; None where there is none."""
    try:
        spec = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        return None
    for folder in spec.submodule_search_locations if spec else ():
        path = pathlib.Path(folder) / "lib/libnccl.so.2"
        if path.exists():
            return str(path)
    return None


def fa_command(args, ranks, path):
    return [sys.executable, str(LAUNCH), str(ranks), str(args.bench), *parallel_rows.bench_arguments(args, path, args.limit)]


def peer_command(args, ranks, path):
    words = [sys.executable, str(LAUNCH), str(ranks), sys.executable, str(ROOT / "tools/compare_parallel_peers.py"),
             "--tokens", ",".join(map(str, args.tokens)), "--heads", ",".join(f"{a}/{b}" for a, b in args.heads),
             "--repeats", str(args.repeats), "--least", str(args.least), "--seconds", f"{args.seconds:g}",
             "--timeout", f"{args.timeout:g}", "--peers", ",".join(args.peers), "--rotate", ",".join(args.rotate),
             "--limit", f"{args.peer_limit:g}", "--json", str(path)]
    return words + (["--full"] if args.full else [])


def run(command, limit, environment):
    """Ends the command and what it has started behind its limit. The reason why it failed, or ''."""
    print("$ " + shlex.join(command), flush=True)
    try:
        process = subprocess.Popen(command, start_new_session=True, env=environment)
    except OSError as problem:
        return str(problem)
    try:
        code = process.wait(timeout=limit + GRACE if limit else None)
    except subprocess.TimeoutExpired:
        code = f"the limit of {limit:g} s and {GRACE} s more"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return "" if code == 0 else f"ended with {code}"


def commit():
    done = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else "unknown"


def info_of(cli):
    try:
        done = subprocess.run([str(cli), "info", "--json"], capture_output=True, text=True, check=True)
        return json.loads(done.stdout)
    except (OSError, subprocess.CalledProcessError, ValueError) as problem:
        print(f"note: {cli} info: {problem}", flush=True)
        return {}


def facts_of(args, machine, peer_machine, info):
    """What each row says of its run."""
    what = f"PyTorch {peer_machine['torch']}, cuDNN {peer_machine['cudnn']}: " if peer_machine else ""
    method = (f"{datetime.date.today()}, {what}median of {args.least} to {args.repeats} rounds, {args.seconds:g} s a row, "
              "tools/compare_parallel.py")
    facts = {"commit": args.commit or commit(), "templates": info.get("templates", "unknown"), "method": method}
    for key in ("link_gb_s", "group_us", "memory_mb", "nccl", "transfers", "environment"):
        if key in machine:
            facts["gpu_memory_mb" if key == "memory_mb" else key] = machine[key]
    if peer_machine:
        facts["peer_nccl"] = peer_machine.get("nccl", "unknown")
    return facts


def write(output, rows, base):
    on_disk = json.loads(output.read_text()) if output.exists() else {}
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(parallel_rows.merged(on_disk, rows, base), indent=1) + "\n")


def output_of(args, gpu):
    return args.output or ROOT / "bench/results" / (re.sub(r"[^a-z0-9]+", "-", gpu.lower()) + ".json")


def merge(args):
    other = json.loads(args.merge.read_text())
    rows = other.get(parallel_rows.PART, [])
    output = output_of(args, other["gpu"])
    base = {key: other[key] for key in ("gpu", "driver", "nvrtc", "templates", "commit", "method") if key in other}
    write(output, rows, base)
    print(f"wrote {output}: {len(rows)} rows")


def measure(args, ranks, folder):
    """Runs both programs; the rows and what is known of the machine."""
    environment = dict(os.environ)
    if "FA_NCCL_PATH" not in environment and nccl_path():
        environment["FA_NCCL_PATH"] = nccl_path()
    problems = []
    fa_path, peer_path = folder / f"fa_{ranks}.jsonl", folder / f"peers_{ranks}.jsonl"
    for path in (fa_path, peer_path):
        path.unlink(missing_ok=True)
    problem = run(fa_command(args, ranks, fa_path), args.limit, environment)
    problems += [f"fa: {problem}"] if problem else []
    if args.peers and not args.packed:
        problem = run(peer_command(args, ranks, peer_path), args.peer_limit, environment)
        problems += [f"PyTorch: {problem}"] if problem else []
    return parallel_rows.read_lines(fa_path), parallel_rows.read_lines(peer_path), problems


def main():
    args = parse()
    if args.merge:
        merge(args)
        return
    ranks = args.ranks or gpu_count()
    if args.dry_run:
        for command in (fa_command, peer_command):
            print(shlex.join(command(args, ranks, pathlib.Path("FILE"))))
        return
    if ranks < 2:
        raise SystemExit(f"{ranks} GPUs: context parallelism takes 2 or more")
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.rows or pathlib.Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        (machine, fa_rows), (peer_machine, peer_rows), problems = measure(args, ranks, folder)
    gpu = machine.get("gpu") or peer_machine.get("gpu")
    info = info_of(args.cli)
    rows = parallel_rows.combined(fa_rows, peer_rows, facts_of(args, machine, peer_machine, info))
    for row in rows:
        print("\n".join(parallel_rows.describe(row)), flush=True)
    if rows:
        output = output_of(args, gpu)
        base = {"gpu": gpu, "driver": info.get("driver", "unknown"), "nvrtc": info.get("nvrtc", {}).get("version", "unknown"),
                "templates": info.get("templates", "unknown"), "commit": args.commit or commit(), "method": ""}
        write(output, rows, base)
        print(f"wrote {output}: {len(rows)} rows")
    if problems:
        raise SystemExit("; ".join(problems))


if __name__ == "__main__":
    main()
