"""Plots of a results file of tools/compare.py, for pages that are light or dark; told apart by more than color."""

import pathlib

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt  # noqa: E402

# Luminance, dash and marker differ, so that lines stay apart in grey.
STYLES = {
    "fa": {"label": "fa", "light": "#0b3d66", "dark": "#9fd0ff", "dash": "-", "marker": "o"},
    "cudnn": {"label": "cuDNN", "light": "#b07a00", "dark": "#d9a53a", "dash": "--", "marker": "s"},
    "fa3": {"label": "FlashAttention-3", "light": "#c2557a", "dark": "#e58ab0", "dash": "-.", "marker": "^"},
    "fa2": {"label": "FlashAttention-2", "light": "#7a8088", "dark": "#8d959e", "dash": ":", "marker": "D"},
    "flashinfer": {"label": "FlashInfer", "light": "#5a8f29", "dark": "#a3d977", "dash": (0, (5, 1, 1, 1, 1, 1)), "marker": "v"},
}
INK = {"light": "#1c2126", "dark": "#dfe3e8"}


def settings(theme: str) -> dict:
    ink = INK[theme]
    inked = ("text.color", "axes.labelcolor", "axes.edgecolor", "axes.titlecolor", "xtick.color", "ytick.color", "grid.color")
    return {"svg.hashsalt": "fa", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
            "grid.alpha": 0.25, **dict.fromkeys(inked, ink)}


def length_label(length: int) -> str:
    return f"{length // 1024}k" if length >= 1024 else str(length)


def draw_panel(axis, rows: list[dict], theme: str) -> None:
    lengths = sorted({row["s_q"] for row in rows})
    for library, style in STYLES.items():
        points = sorted((row["s_q"], row["tflops"][library]) for row in rows if library in row["tflops"])
        if not points:
            continue
        axis.plot([lengths.index(s) for s, _ in points], [rate for _, rate in points], linestyle=style["dash"],
                  marker=style["marker"], ms=4.5, lw=1.8 if library == "fa" else 1.3, color=style[theme],
                  label=style["label"])
    axis.set_xticks(range(len(lengths)), [length_label(s) for s in lengths])


def grid(rows: list[dict], title: str, theme: str, file: pathlib.Path) -> None:
    """Head dims across, full and causal below each other."""
    head_dims = sorted({row["d_qk"] for row in rows})
    with matplotlib.rc_context(settings(theme)):
        figure, axes = plt.subplots(2, len(head_dims), figsize=(3.3 * len(head_dims), 5.2), sharey=True, squeeze=False)
        handles = {}
        for line, causal in zip(axes, (False, True)):
            for axis, d in zip(line, head_dims):
                draw_panel(axis, [r for r in rows if r["d_qk"] == d and r["causal"] == causal], theme)
                axis.set_title(f"head dim {d}, {'causal' if causal else 'full'}", fontsize=9)
                axis.set_xlabel("sequence length")
                handles.update({label: handle for handle, label in zip(*axis.get_legend_handles_labels())})
            line[0].set_ylabel("TFLOP/s")
        axes[0][0].set_ylim(0, None)
        figure.legend(handles.values(), handles.keys(), loc="lower center", ncol=len(handles), frameon=False, fontsize=9)
        figure.suptitle(title, fontsize=10)
        figure.tight_layout(rect=(0, 0.06, 1, 1))
        figure.savefig(file, transparent=True, metadata={"Date": None})
        plt.close(figure)


def draw_decodes(rows: list[dict], title: str, theme: str, file: pathlib.Path) -> None:
    """One panel a number of requests; TB/s over the keys of a request."""
    batches = sorted({row["b"] for row in rows})
    with matplotlib.rc_context(settings(theme)):
        figure, axes = plt.subplots(1, len(batches), figsize=(2.8 * len(batches), 3.2), sharey=True, squeeze=False)
        handles = {}
        for axis, batch in zip(axes[0], batches):
            chosen = [r for r in rows if r["b"] == batch]
            lengths = sorted({r["s_kv"] for r in chosen})
            for library, style in STYLES.items():
                points = sorted((r["s_kv"], r["tbps"][library]) for r in chosen if library in r["tbps"])
                axis.plot([lengths.index(s) for s, _ in points], [rate for _, rate in points], linestyle=style["dash"],
                          marker=style["marker"], ms=4.5, color=style[theme], label=style["label"] if points else None)
            axis.set_xticks(range(len(lengths)), [length_label(s) for s in lengths])
            axis.set_title(f"{batch} requests", fontsize=9)
            axis.set_xlabel("keys of a request")
            handles.update({label: handle for handle, label in zip(*axis.get_legend_handles_labels())})
        axes[0][0].set_ylabel("TB/s")
        axes[0][0].set_ylim(0, None)
        figure.legend(handles.values(), handles.keys(), loc="lower center", ncol=len(handles), frameon=False, fontsize=9)
        figure.suptitle(title, fontsize=10)
        figure.tight_layout(rect=(0, 0.1, 1, 1))
        figure.savefig(file, transparent=True, metadata={"Date": None})
        plt.close(figure)
