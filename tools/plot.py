#!/usr/bin/env python3
"""Draws a results file of tools/compare.py: tools/plot.py bench/results/nvidia-h200.json docs/speed.svg"""

import argparse
import json
import pathlib

import matplotlib

matplotlib.use("svg")
matplotlib.rcParams.update({"svg.hashsalt": "fa", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
import matplotlib.pyplot as plt  # noqa: E402

LABELS = {"fa2": "FlashAttention-2", "fa3": "FlashAttention-3", "cudnn": "cuDNN"}
FAMILY_COLORS = ("#1b6ca8", "#8fbfe0")
COLORS = {"fa2": "#d1495b", "fa3": "#edae49", "cudnn": "#8d96a3"}


def draw(axis, lengths, points, library, style, color, label):
    if points:
        places = [lengths.index(r["s_q"]) for r in points]
        axis.plot(places, [r["tflops"][library] for r in points], style, ms=4, color=color, label=label)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=pathlib.Path)
    parser.add_argument("output", type=pathlib.Path)
    parser.add_argument("--op", default="forward")
    parser.add_argument("--dtype", default="bf16")
    args = parser.parse_args()

    result = json.loads(args.results.read_text())
    rows = [r for r in result["attention"] if r["op"] == args.op and r["dtype"] == args.dtype and not r["variant"]
            and r["h_q"] == r["h_kv"]]
    head_dims = sorted({r["d_qk"] for r in rows})
    figure, axes = plt.subplots(2, len(head_dims), figsize=(3.4 * len(head_dims), 4.8), sharey=True, squeeze=False)
    for line, causal in zip(axes, (False, True)):
        for axis, d in zip(line, head_dims):
            points = sorted((r for r in rows if r["d_qk"] == d and r["causal"] == causal), key=lambda r: r["s_q"])
            lengths = sorted({r["s_q"] for r in points})
            families = sorted({r["family"] for r in points}, reverse=True)
            for family, color in zip(families, FAMILY_COLORS):
                draw(axis, lengths, [r for r in points if r["family"] == family], "fa", "o-", color, f"fa, {family}")
            # Every family was timed beside the peers; those of the newest stand for all.
            for peer in LABELS:
                beside = [r for r in points if r["family"] == families[0] and peer in r["tflops"]]
                draw(axis, lengths, beside, peer, "s--", COLORS[peer], LABELS[peer])
            axis.set_title(f"head dim {d}, {'causal' if causal else 'full'}")
            axis.set_xticks(range(len(lengths)), [f"{s // 1024}k" if s >= 1024 else str(s) for s in lengths])
    axes[0][0].set_ylim(0, 1.05 * max(rate for r in rows for rate in r["tflops"].values()))  # shared by all
    axes[0][0].set_ylabel("TFLOP/s")
    axes[1][0].set_ylabel("TFLOP/s")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncol=len(labels), frameon=False, fontsize=8)
    figure.suptitle(f"{args.op}, {args.dtype}, {result['gpu']}")
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    figure.savefig(args.output, metadata={"Date": None})


if __name__ == "__main__":
    main()
