#!/usr/bin/env python3
"""What docs/scale.md shows of the model and of measurements: the part context_parallel of files in bench/results, which
tools/compare_parallel.py writes.

    tools/scale.py table                 writes the model's tables and the section "Measured" of docs/scale.md anew
    tools/scale.py plot                  draws docs/scale.svg: the model by GPUs and tokens, and what was measured

The model is asked by build/release/tools/parallel/parallel_model; `plot` needs matplotlib.
"""

import argparse
import json
import pathlib
import subprocess
import sys

sys.path[:0] = [str(pathlib.Path(__file__).parent)]
import compare_parallel_rows as parallel_rows  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parent.parent
MODEL, MEASURED = (tuple(f"<!-- {edge} of {what}, which tools/scale.py table writes -->" for edge in ("begin", "end"))
                   for what in ("the model's tables", "measurements"))
KEYS = ("forward", "forward_backward")
HEADS = ((16, 16), (32, 8))
SHORT = {"ring": "R", "all_gather": "G", "ulysses": "U"}


def parse(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("table", "plot"))
    parser.add_argument("results", type=pathlib.Path, nargs="*", help="default: all of bench/results")
    parser.add_argument("--page", type=pathlib.Path, default=ROOT / "docs/scale.md")
    parser.add_argument("--output", type=pathlib.Path, default=ROOT / "docs/scale.svg")
    parser.add_argument("--model", type=pathlib.Path, default=ROOT / "build/release/tools/parallel/parallel_model")
    return parser.parse_args(arguments)


def tokens_text(tokens):
    for shift, unit in ((20, "M"), (10, "k")):
        if tokens >= 1 << shift and tokens % (1 << shift) == 0:
            return f"{tokens >> shift}{unit}"
    return str(tokens)


def rows_of(paths):
    """(gpu, row) of all results, in the order of GPUs, ranks, heads and tokens."""
    found = []
    for path in paths:
        result = json.loads(path.read_text())
        found += [(result["gpu"], row) for row in result.get(parallel_rows.PART, [])]
    return sorted(found, key=lambda pair: (pair[0], pair[1]["ranks"], pair[1]["packed"], pair[1]["h_q"], pair[1]["tokens"]))


def best_choice(row):
    """(name, what was measured) of the scheme that is the fastest forward and backward; None without any."""
    named = {name: what for name, what in row["fa"].items() if name != "automatic"}
    found = parallel_rows.best(named, "forward_backward") or parallel_rows.best(row["fa"], "forward_backward")
    return (found[0], row["fa"][found[0]]) if found else None


def pair(values, digits):
    if not values or any(values.get(key) is None for key in KEYS):
        return "–"
    return " / ".join(f"{values[key]:.{digits}f}" for key in KEYS)


def over(numerator, denominator):
    if not numerator or not denominator:
        return None
    return {key: numerator[key] / denominator[key] for key in KEYS if numerator.get(key) and denominator.get(key)}


def model_efficiency(row, measured):
    """By the speeds of this machine."""
    quotient = over(row["one_ms"], measured.get("model_ms"))
    return {key: value / row["ranks"] for key, value in quotient.items()} if quotient else None


def label(row):
    notes = ["packed"] if row["packed"] else []
    notes += [] if row["causal"] else ["full"]
    notes += [] if row["layout"] == "zigzag" else [row["layout"]]
    return f"{tokens_text(row['tokens'])} | {row['h_q']} / {row['h_kv']}{', ' + ', '.join(notes) if notes else ''}"


def table(header, lines):
    return ["| " + " | ".join(header) + " |", "|" + "---|" * len(header), *("| " + line + " |" for line in lines), ""]


def by_size(rows, ranks):
    """Best schemes beside one GPU, the model and PyTorch."""
    peers = [peer for peer in parallel_rows.PEERS if any("ms" in row["peers"].get(peer, {}) for row in rows)]
    lines = []
    for row in rows:
        best = best_choice(row)
        if best is None:
            continue
        name, measured = best
        cells = [label(row), pair(row["one_ms"], 1), pair(measured["ms"], 1), name, pair(measured.get("efficiency"), 3),
                 pair(model_efficiency(row, measured), 3)]
        cells += [pair(over(measured["ms"], row["peers"].get(peer, {}).get("ms")), 2) for peer in peers]
        lines.append(" | ".join(cells))
    header = ["Tokens", "Heads", "1 GPU, ms", f"{ranks} GPUs, ms", "Scheme", "Efficiency", "The model's",
              *(f"Time by PyTorch's, {'cuDNN' if peer == 'cudnn' else peer}" for peer in peers)]
    return table(header, lines)


def by_scheme(rows):
    names = []
    for row in rows:
        names += [name for name, what in row["fa"].items() if "ms" in what and name not in names and name != "automatic"]
    lines = [" | ".join([label(row), *(pair(row["fa"].get(name, {}).get("efficiency"), 3) for name in names)]) for row in rows]
    return table(["Tokens", "Heads", *(f"`{name}`" for name in names)], lines)


def links(row):
    speeds = row.get("link_gb_s")
    if not speeds:
        return []
    return [f"A GPU sends {speeds['one_way']:.0f} GB/s to its neighbour, {speeds['both_ways']:.0f} while it receives as much, and "
            f"{speeds['all_to_all']:.0f} to all others at once.", f"A group of 4 bytes takes {row['group_us']:.0f} us.", ""]


def section(rows):
    """Markdown of (gpu, row) pairs."""
    if not rows:
        return "Nothing yet: `bench/results` has no rows of context parallelism.\n"
    text = ["Each cell is forward / forward and backward. bf16, d 128, causal and zigzag where nothing else is said. `ring:2` is a ring",
            "of groups of two ranks, which share heads. The model's efficiency is that of this page's formulas with the speeds of",
            "the machine: of one GPU with these sizes, and of its links.", ""]
    for gpu, ranks in dict.fromkeys((gpu, row["ranks"]) for gpu, row in rows):
        chosen = [row for of_gpu, row in rows if of_gpu == gpu and row["ranks"] == ranks]
        text += [f"### {ranks} × {gpu}", "", *links(chosen[-1]), *by_size(chosen, ranks), "Efficiency of each scheme:", "",
                 *by_scheme(chosen)]
    return "\n".join(text)


def replaced(page, lines, text):
    """The page with a text between two lines of it."""
    begin, end = lines
    if page.count(begin) != 1 or page.count(end) != 1 or page.index(begin) > page.index(end):
        raise SystemExit(f"the page has not once each, and in this order: {begin} and {end}")
    return f"{page[: page.index(begin)]}{begin}\n\n{text.rstrip()}\n\n{page[page.index(end) :]}"


def ask(program, *arguments):
    return subprocess.run([str(program), *map(str, arguments)], check=True, capture_output=True, text=True).stdout


def write_table(args, paths):
    page = args.page.read_text()
    rows = rows_of(paths)
    page = replaced(page, MEASURED, section(rows))
    if args.model.exists():
        tables = [f"{h_q} query heads and {h_kv} KV heads:\n\n{ask(args.model, 1, h_q, h_kv)}" for h_q, h_kv in HEADS]
        page = replaced(page, MODEL, "\n".join(tables))
    else:
        print(f"note: {args.model} is not built, and the model's tables stay as they are")
    args.page.write_text(page)
    print(f"wrote {args.page}: {len(rows)} rows")


def ask_model(program, h_q, h_kv):
    return [json.loads(line) for line in ask(program, 1, h_q, h_kv, "--json").splitlines()]


def choice_text(point):
    short = SHORT[point["scheme"]]
    return short if point["ulysses"] == 1 or short == "U" else f"{point['ulysses']}{short}"


def draw_map(axis, points):
    """Tokens by GPUs: the choice in letters, its efficiency in grey, and where it is under 90 %."""
    tokens, ranks = (sorted({point[key] for point in points}) for key in ("tokens", "ranks"))
    grid = [[next(p for p in points if p["tokens"] == t and p["ranks"] == n) for n in ranks] for t in tokens]
    axis.imshow([[p["efficiency"] for p in line] for line in grid], cmap="Blues", vmin=0, vmax=1.4, origin="lower", aspect="auto")
    for y, line in enumerate(grid):
        for x, p in enumerate(line):
            good = p["efficiency"] >= 0.9
            axis.text(x, y, f"{choice_text(p)}\n{p['efficiency']:.2f}", ha="center", va="center", fontsize=7,
                      weight="bold" if good else "normal", color="#10202c" if good else "#8a2c2c")
    axis.set_xticks(range(len(ranks)), [str(n) for n in ranks])
    axis.set_yticks(range(len(tokens)), [tokens_text(t) for t in tokens])
    axis.set_xlabel("GPUs")


def draw_lines(axis, points, measured, pyplot):
    """Efficiency by GPUs, a line for each number of tokens; measured ones are rings of the same color."""
    tokens, ranks = (sorted({point[key] for point in points}) for key in ("tokens", "ranks"))
    for index, t in enumerate(tokens):
        color = pyplot.get_cmap("viridis")(index / len(tokens))
        line = sorted((p["ranks"], p["efficiency"]) for p in points if p["tokens"] == t)
        axis.plot([ranks.index(n) for n, _ in line], [e for _, e in line], "-", lw=1.2, color=color, label=tokens_text(t))
        for row in measured:
            best = best_choice(row)
            value = (best[1].get("efficiency") or {}).get("forward_backward") if best else None
            if row["tokens"] == t and row["ranks"] in ranks and value is not None:
                axis.plot(ranks.index(row["ranks"]), value, "o", ms=6, mfc="none", mew=1.6, color=color)
    axis.axhline(0.9, color="#8a2c2c", lw=0.8, ls=":")
    axis.set_xticks(range(len(ranks)), [str(n) for n in ranks])
    axis.set_ylim(0, 1.05)
    axis.set_xlabel("GPUs")


def write_plot(args, paths):
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "fa", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    import matplotlib.pyplot as pyplot

    rows = [row for _, row in rows_of(paths) if row["causal"] and not row["packed"]]
    figure, axes = pyplot.subplots(2, len(HEADS), figsize=(10, 7.6))
    for column, (h_q, h_kv) in enumerate(HEADS):
        points = ask_model(args.model, h_q, h_kv)
        measured = [row for row in rows if (row["h_q"], row["h_kv"]) == (h_q, h_kv)]
        draw_lines(axes[0][column], points, measured, pyplot)
        axes[0][column].set_title(f"{h_q} query heads, {h_kv} KV heads")
        draw_map(axes[1][column], points)
    axes[0][0].set_ylabel("efficiency, forward and backward")
    axes[1][0].set_ylabel("tokens")
    handles, names = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, names, loc="upper center", bbox_to_anchor=(0.5, 0.965), ncol=len(names), frameon=False, fontsize=8)
    figure.suptitle("The model of time, causal, bf16, d 128; rings: measured", fontsize=10)
    figure.tight_layout(rect=(0, 0, 1, 0.95))
    figure.savefig(args.output, metadata={"Date": None})
    print(f"wrote {args.output}: {len(rows)} measured rows")


def main():
    args = parse()
    paths = args.results or sorted((ROOT / "bench/results").glob("*.json"))
    write_table(args, paths) if args.what == "table" else write_plot(args, paths)


if __name__ == "__main__":
    main()
