"""What tools/compare_parallel.py measures and writes, without the measuring."""

import argparse
import json
import re

PEERS = ("cudnn", "flash")
ROTATIONS = ("allgather", "alltoall")
PART = "context_parallel"
# What makes two rows the same.
PROBLEM = ("ranks", "tokens", "h_q", "h_kv", "d", "dtype", "causal", "packed", "layout")


def head_pairs(text):
    pairs = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)/(\d+)", part)
        if not match or not int(match[2]) or int(match[1]) % int(match[2]):
            raise argparse.ArgumentTypeError(f"{part!r}: accepted is query heads / KV heads that divide them, as 32/8")
        pairs.append((int(match[1]), int(match[2])))
    return pairs


def names_among(accepted):
    def parse(text):
        names = [name for name in text.split(",") if name]
        for name in names:
            if name not in accepted:
                raise argparse.ArgumentTypeError(f"{name!r}: accepted are {', '.join(accepted)}")
        return names

    return parse


def numbers(text):
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: accepted are whole numbers, with commas between them") from None


def add_options(parser):
    parser.add_argument("--tokens", type=numbers, default=[65536, 262144])
    parser.add_argument("--heads", type=head_pairs, default=[(16, 16), (32, 8)], help="h_q/h_kv, default: 16/16,32/8")
    parser.add_argument("--full", action="store_true", help="no causal mask")
    parser.add_argument("--repeats", type=int, default=10, help="rounds of a row at most")
    parser.add_argument("--least", type=int, default=3, help="rounds of a row at least")
    parser.add_argument("--seconds", type=float, default=2, help="behind so many of a row no round begins")
    parser.add_argument("--timeout", type=float, default=120, help="seconds that a rank waits for another one")


def bench_arguments(args, json_path, limit):
    """Of parallel_bench."""
    heads = ",".join(f"{h_q}/{h_kv}" for h_q, h_kv in args.heads)
    words = ["--tokens", ",".join(map(str, args.tokens)), "--heads", heads, "--schemes", args.schemes, "--layout", args.layout,
             "--repeats", str(args.repeats), "--least", str(args.least), "--seconds", f"{args.seconds:g}",
             "--reserved", str(args.reserved), "--timeout", f"{args.timeout:g}", "--json", str(json_path)]
    if limit:
        words += ["--limit", f"{limit:g}"]
    if args.transfers != "automatic":
        words += ["--transfers", args.transfers]
    for option in ("full", "packed", "copied", "no_single"):
        if getattr(args, option):
            words.append("--" + option.replace("_", "-"))
    return words


def read_lines(path):
    """The machine's line (or {}) and the rows of a file of JSON lines; a line that a killed program has not ended counts not."""
    machine, rows = {}, []
    try:
        lines = path.read_text().splitlines()
    except FileNotFoundError:
        lines = []
    for line in lines:
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if entry.get("kind") == "machine":
            machine = entry
        elif entry.get("kind") == "row":
            rows.append(entry)
    return machine, rows


def problem(row):
    return tuple(row[key] for key in PROBLEM)


def combined(fa_rows, peer_rows, facts):
    """Rows of the results: a problem each, with all schemes and peers that were tried."""
    results = {}
    for row in [*fa_rows, *peer_rows]:
        head = {"dtype": "bf16", "packed": False, "layout": "zigzag", **row}
        entry = results.setdefault(problem(head), {**{key: head[key] for key in PROBLEM}, "one_ms": None, "fa": {}, "peers": {}})
        what = {key: row[key] for key in ("ms", "efficiency", "chosen", "ulysses", "model", "model_ms", "rounds", "calls",
                                          "memory_mb", "reserved_multiprocessors", "kv_heads", "reason") if key in row}
        if "peer" in row:
            entry["peers"][row["peer"]] = what
        else:
            if "reason" in what:
                what = {"reason": what["reason"]}
            entry["fa"][row["scheme"]] = what
            entry["one_ms"] = row.get("one_ms", entry["one_ms"])
    return [{**entry, **facts} for entry in results.values()]


def kept(old, new):
    """Rows of earlier runs that this run did not measure again, before those that it did."""
    replaced = {problem(row) for row in new}
    return [row for row in old if problem(row) not in replaced] + new


def merged(results, rows, base):
    """A results file with these rows; its other parts stay as they are. `base`: what a file that is new says besides."""
    return {**base, "attention": [], "accuracy": [], "latency": {}, **results, PART: kept(results.get(PART, []), rows)}


def best(schemes, key):
    """(name, milliseconds) of the fastest scheme; None where none was measured."""
    times = [(what["ms"][key], name) for name, what in schemes.items() if "ms" in what]
    return min(times)[::-1] if times else None


def describe(row):
    """Lines of text: a row's schemes and peers, and fa's best time by each peer's."""
    size = f"{row['ranks']} GPUs, {row['tokens']} tokens, {row['h_q']}/{row['h_kv']} heads"
    lines = []
    for kind in ("fa", "peers"):
        for name, what in row[kind].items():
            text = f"{size}, {'fa ' if kind == 'fa' else ''}{name}: "
            if "ms" not in what:
                lines.append(text + f"not measured: {what['reason']}")
                continue
            parts = []
            for key, title in (("forward", "forward"), ("forward_backward", "both")):
                part = f"{title} {what['ms'][key]:.3f} ms"
                efficiency = what.get("efficiency", {}).get(key)
                if efficiency is not None:
                    part += f", efficiency {efficiency:.3f}"
                fastest = best(row["fa"], key)
                if kind == "peers" and fastest:
                    part += f", fa {fastest[0]} {fastest[1] / what['ms'][key]:.3f} of it"
                parts.append(part)
            lines.append(text + "; ".join(parts) + (f" ({what['kv_heads']})" if what.get("kv_heads") else ""))
    return lines
