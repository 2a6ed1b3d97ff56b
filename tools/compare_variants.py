"""Rows of tools/compare.py with score functions, mask functions and windows, beside FlexAttention and whoever else does
them. What a row computes is said once for each library, and once in float64, which all of them are held to."""

import dataclasses
import json
import statistics
import subprocess
import tempfile

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from fa_attention import capi
from compare_rows import (
    BOUNDS, DEVICE, DTYPE_NAMES, GRADIENTS, TOKENS, WIDTH, errors, fa3, make_inputs, nan_like, output_of, scratch,
    time_row)

DTYPE = torch.bfloat16
WINDOW, CAP, DOCUMENTS, SHARED_CALLS = 1024, 30.0, 16, 10
CHECKED_ROWS = 1024  # of a head's scores in float64 at a time
COMPILE_ROUNDS = 5
ACCEPTED_COMPILE_S = 0.3  # more than without a score function


@dataclasses.dataclass
class Kind:
    """What a row computes besides plain attention, where rows and keys are equally many."""

    text: str
    fa: dict = dataclasses.field(default_factory=dict)  # arguments of capi.Attention
    captures: dict = dataclasses.field(default_factory=dict)  # tensors by the names that functions have for them
    learned: str = ""  # the capture that backward computes the gradient of
    score: object = None  # (scores, h, rows, keys) -> scores, of tensors that broadcast; also FlexAttention's score_mod
    keep: object = None  # (rows, keys) -> bool, likewise; what the causal mask hides besides is not said here
    pairs: object = None  # scores of one head that count; None: all, or half of them
    peers: dict = dataclasses.field(default_factory=dict)  # (q, k, v) -> o by name; with `learned` that comes last
    calls: int = 1  # that share what is known of the mask
    slack: float = 1.0  # of the bounds: a fast tanh
    plain: bool = False  # timed beside
    keeps_errors: bool = False


# ---- what there is to measure ----


def window(s, h, causal):
    def fa2(q, k, v):
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return torch.ops.aten._flash_attention_forward(q, k, v, None, None, s, s, 0.0, True, False, window_size_left=WINDOW,
                                                       window_size_right=0)[0].transpose(1, 2)

    def with_fa3(q, k, v):
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return output_of(fa3.flash_attn_func(q, k, v, causal=True, window_size=(WINDOW, 0))).transpose(1, 2)

    pairs = sum(min(row, WINDOW) + 1 for row in range(s))
    return Kind(f"window_left={WINDOW}", {"window_left": WINDOW}, keep=lambda rows, keys: rows - keys <= WINDOW, pairs=pairs,
                peers={"fa2": fa2, **({"fa3": with_fa3} if fa3 else {})})


def alibi(s, h, causal):
    slope = torch.exp2(-8 * torch.arange(1, h + 1, device=DEVICE, dtype=torch.float32) / h)
    function = capi.function("score - slope[h] * abs(float(q + s_kv - s_q - kv))", [("slope", torch.float32)])
    return Kind("alibi", {"score": function}, {"slope": slope}, plain=True,
                score=lambda score, h, rows, keys: score - slope[h] * (rows - keys).abs())


def softcap(s, h, causal):
    def with_fa3(q, k, v):
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return output_of(fa3.flash_attn_func(q, k, v, causal=causal, softcap=CAP)).transpose(1, 2)

    function = capi.function(f"{CAP:.1f} * tanh(score / {CAP:.1f})")
    return Kind(f"softcap={CAP:g}", {"score": function}, plain=True, slack=3.0, keeps_errors=True,
                score=lambda score, h, rows, keys: CAP * torch.tanh(score / CAP), peers={"fa3": with_fa3} if fa3 else {})


def document(s, h, causal):
    generator = torch.Generator().manual_seed(16)
    starts = torch.randperm(s - 1, generator=generator)[: DOCUMENTS - 1].sort().values + 1
    lengths = torch.diff(torch.cat((torch.tensor([0]), starts, torch.tensor([s]))))
    doc = torch.repeat_interleave(torch.arange(DOCUMENTS), lengths).to(DEVICE, torch.int32)
    pairs = int((lengths * (lengths + 1) // 2 if causal else lengths**2).sum())
    function = capi.function("doc[q] == doc[kv]", [("doc", torch.int32)])
    return Kind(f"documents={DOCUMENTS}, {SHARED_CALLS} calls", {"mask": function}, {"doc": doc},
                keep=lambda rows, keys: doc[rows] == doc[keys], pairs=pairs, calls=SHARED_CALLS)


def bias(s, h, causal):
    values = torch.randn(h, s, s, device=DEVICE, dtype=DTYPE, generator=torch.Generator(DEVICE).manual_seed(7))
    function = capi.function("score + bias[h, q, kv]", [("bias", DTYPE, True)])

    def mem_efficient(q, k, v, mask=values):
        with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask.expand(q.shape[0], -1, -1, -1))

    return Kind("bias=hqk", {"score": function}, {"bias": values}, "bias", peers={"mem_efficient": mem_efficient})


# What makes a kind, and the head dims and lengths that it is measured at; `causal` where it says so, else both.
KINDS = {
    "window": (window, [(128, 16384)], [True]),
    "alibi": (alibi, [(128, 8192)], [False, True]),
    "softcap": (softcap, [(128, 4096), (256, 4096)], [False, True]),
    "document": (document, [(128, 16384)], [False, True]),
    "bias": (bias, [(64, 2048), (64, 4096), (128, 2048), (128, 4096)], [False]),
}
FLEX = ("window", "alibi", "document")
SCORED = {"alibi", "softcap", "bias"}


# ---- float64 ----


def exact(kind, q, k, v, h, causal, learned=None, dout=None):
    """float64 o [s, d] of one head, or with `dout` the gradients of q, k, v and, where it is given, `learned` [s, s]. Some
    rows at a time: the scores of 16k rows do not fit."""
    q, k, v = (t.double() for t in (q, k, v))
    keys = torch.arange(k.shape[0], device=q.device)[None, :]
    o, sums = [], [torch.zeros_like(k), torch.zeros_like(v)]
    by_row = [[], []]
    for first in range(0, q.shape[0], CHECKED_ROWS):
        part = slice(first, first + CHECKED_ROWS)
        leaves = [q[part], k, v] + ([learned[part].double()] if learned is not None else [])
        leaves = [t.detach().requires_grad_(dout is not None) for t in leaves]
        rows = torch.arange(first, first + leaves[0].shape[0], device=q.device)[:, None]
        scores = leaves[0] @ leaves[1].T * q.shape[1] ** -0.5
        if learned is not None:
            scores = scores + leaves[3]
        if kind.score is not None:
            scores = kind.score(scores, h, rows, keys)
        hidden = rows < keys if causal else torch.zeros_like(rows < keys)
        if kind.keep is not None:
            hidden = hidden | ~kind.keep(rows, keys)
        o.append(scores.masked_fill(hidden, float("-inf")).softmax(1) @ leaves[2])
        if dout is None:
            continue
        gradients = torch.autograd.grad(o.pop(), leaves, dout[part].double())
        by_row[0].append(gradients[0])
        by_row[1] += gradients[3:]
        sums = [total + gradient for total, gradient in zip(sums, gradients[1:3])]
    if dout is None:
        return [torch.cat(o)]
    return [torch.cat(by_row[0]), *sums] + ([torch.cat(by_row[1])] if learned is not None else [])


# ---- rows ----


class VariantRow:
    """One problem of a kind: [b, h, s, d] tensors in [b, s, h, d] memory, and a callable for each library."""

    def __init__(self, library, op, family, kind, s, d, causal):
        h, b = WIDTH // d, TOKENS // s
        self.fa_library, self.op, self.family = library, op, family
        self.kind, self.causal = kind, causal
        self.size = dict(b=b, h_q=h, h_kv=h, s_q=s, s_kv=s, d_qk=d, d_v=d)
        self.q, self.k, self.v = make_inputs(b, h, h, s, s, d, d, DTYPE)
        self.dout = make_inputs(b, h, 1, s, 1, d, 1, DTYPE, seed=1)[0]
        self.o = nan_like(self.q)
        self.lse = torch.full((b, h, s), float("nan"), device=DEVICE)
        self.gradients = [nan_like(t) for t in (self.q, self.k, self.v)] if op == "backward" else []
        self.learned = kind.captures.get(kind.learned)
        if self.gradients and self.learned is not None:
            self.gradients.append(torch.full(self.learned.shape, float("nan"), device=DEVICE))
        self.attention = capi.Attention(library, d, DTYPE, causal, d, tune="cached", **kind.fa,
                                             **{("family" if op == "forward" else "backward_family"): family})
        self.stream = torch.cuda.current_stream().cuda_stream
        self.calls = {"fa": self._shared(self._fa(op))}
        self.worst = {}  # errors by library and tensor, of the heads that were checked

    def _fa(self, op, with_lse=False):
        """tiles -> a call of fa. The workspace has no room for tiles where these are given."""
        sizes = [self.size[name] for name in ("b", "h_q", "h_kv", "s_q", "s_kv")]
        if op == "forward":
            memory = scratch(self.attention.workspace_size(*sizes))
            lse = self.lse if with_lse else None
            return lambda tiles: self.attention.bind_forward(self.q, self.k, self.v, self.o, lse, self.stream, memory,
                                                             captures=self.kind.captures, tiles=tiles)
        self._fa("forward", True)(None)()
        memory = scratch(self.attention.backward_workspace_size(*sizes))
        learned = {self.kind.learned: self.gradients[3]} if self.learned is not None else None
        return lambda tiles: self.attention.bind_backward(
            self.q, self.k, self.v, self.o, self.lse, self.dout, *self.gradients[:3], stream=self.stream, workspace=memory,
            captures=self.kind.captures, tiles=tiles, dcaptures=learned)

    def _shared(self, bind):
        """Calls that share their tiles, of which the first finds out about them."""
        if self.kind.calls == 1:
            return bind(None)
        sizes = [self.size[name] for name in ("b", "h_q", "h_kv", "s_q", "s_kv")]
        bytes_of = self.attention.mask_tiles_size if self.op == "forward" else self.attention.backward_mask_tiles_size
        memory = scratch(bytes_of(*sizes))
        first, others = bind(capi.mask_tiles(memory)), bind(capi.mask_tiles(memory, filled=True))

        def run():
            first()
            for _ in range(self.kind.calls - 1):
                others()

        return run

    def add_plain(self):
        """fa without anything besides, in the same run."""
        self.plain = VariantRow(self.fa_library, self.op, self.family, Kind("plain"), self.size["s_q"], self.size["d_qk"],
                                self.causal)
        self.plain.check()
        self.calls["fa_plain"] = self.plain.calls["fa"]
        self.worst["fa_plain"] = self.plain.worst["fa"]

    def add_peer(self, name, attend, prepare=None):
        """A peer that fails or is wrong is left out, saying so. prepare: what calls that share something do first."""
        try:
            call, results = self._peer(attend)
            error = self._deviations(name, results())
        except (Exception, SystemExit) as failure:  # noqa: BLE001: whatever a peer cannot do
            print(f"{name} is left out: {type(failure).__name__}: {str(failure)[:300]}", flush=True)
            return
        if error > 2:
            print(f"{name} is left out: its error is {error:.1f} times fa's bound", flush=True)
            return
        if self.kind.calls == 1:
            self.calls[name] = call
            return

        def run():
            if prepare is not None:
                prepare()
            for _ in range(self.kind.calls):
                call()

        self.calls[name] = run

    def _peer(self, attend):
        """A call of a peer, and what gives its results."""
        q, k, v = self.q, self.k, self.v
        if self.op == "forward":
            return lambda: attend(q, k, v), lambda: [attend(q, k, v)]
        tensors = (q, k, v) if self.learned is None else (q, k, v, self.learned)
        leaves = [t.detach().requires_grad_() for t in tensors]
        o = attend(*leaves)
        call = lambda: torch.autograd.grad(o, leaves, self.dout, retain_graph=True)  # noqa: E731
        return call, call

    def flops_of(self, name):
        s = self.size
        pairs = s["s_q"] * s["s_kv"] / (2 if self.causal else 1)
        if name != "fa_plain" and self.kind.pairs is not None:
            pairs = self.kind.pairs
        calls = 1 if name == "fa_plain" else self.kind.calls
        products = 2 * s["b"] * s["h_q"] * pairs * (s["d_qk"] + s["d_v"])
        return calls * products * (2.5 if self.op == "backward" else 1)

    def check(self):
        self.calls["fa"]()
        error = self._deviations("fa", self.gradients or [self.o])
        if not error <= 1:
            raise SystemExit(f"fa is wrong on {self.kind.text} {self.size}: {error:.2f} of its bound; {self.worst['fa']}")

    def _deviations(self, name, results):
        """The greatest error of some heads, in units of fa's bound; keeps the errors."""
        b, h = self.size["b"], self.size["h_q"]
        named = dict(zip((*GRADIENTS, "d" + self.kind.learned) if self.op == "backward" else ("o",), results))
        worst = self.worst.setdefault(name, {})
        share = 0.0
        shared = self.learned is not None
        for head, batches in ((0, range(b) if shared else [0]), (h - 1, range(b) if shared else [b - 1])):
            sums = None  # of the gradient that batches share
            for batch in batches:
                wanted = self._exact_head(batch, head)
                if len(named) > 3:
                    sums = wanted.pop() if sums is None else sums + wanted.pop()
                for (tensor, result), expected in zip(named.items(), wanted):
                    share = max(share, self._share(worst, tensor, result[batch, head], expected))
            if sums is not None:
                share = max(share, self._share(worst, "d" + self.kind.learned, results[3][head], sums))
        return share

    def _exact_head(self, batch, head):
        cut = [t[batch, head] for t in (self.q, self.k, self.v)]
        return exact(self.kind, *cut, head, self.causal, None if self.learned is None else self.learned[head],
                     self.dout[batch, head] if self.op == "backward" else None)

    def _share(self, worst, tensor, result, expected):
        mean, largest = errors(result, expected)
        known = worst.get(tensor, {"mean_abs": 0.0, "max_abs": 0.0})
        worst[tensor] = {"mean_abs": max(mean, known["mean_abs"]), "max_abs": max(largest, known["max_abs"])}
        bound = BOUNDS[DTYPE] * self.kind.slack * (2 if self.op == "backward" else 1)
        return largest / (bound * expected.abs().max().item())

    def entry(self, rates):
        entry = {"op": self.op, "family": self.family, "dtype": DTYPE_NAMES[DTYPE], **self.size, "causal": self.causal,
                 "variant": self.kind.text, "tflops": rates}
        if self.kind.keeps_errors:
            entry["errors"] = {name: errors_of for name, errors_of in self.worst.items() if name in self.calls}
        return entry


# ---- FlexAttention ----


def add_flex(row):
    """FlexAttention, compiled anew for each row: more than a few versions of one function are not compiled at all."""
    import torch._dynamo
    import torch._functorch.config
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()
    if hasattr(torch._functorch.config, "donated_buffer"):
        torch._functorch.config.donated_buffer = False  # the graph of a backward is kept
    keep, score, causal, s = row.kind.keep, row.kind.score, row.causal, row.size["s_q"]
    compiled, make = torch.compile(flex_attention, dynamic=False), torch.compile(create_block_mask, dynamic=False)

    def mask_mod(b, h, rows, keys):
        if keep is None:
            return rows >= keys
        return (rows >= keys) & keep(rows, keys) if causal else keep(rows, keys)

    def score_mod(value, b, h, rows, keys):
        return score(value, h, rows, keys)

    def prepare():
        return make(mask_mod, None, None, s, s, device=DEVICE)

    options = {"score_mod": score_mod} if score is not None else {}
    if causal or keep is not None:
        try:
            options["block_mask"] = prepare()
        except Exception as failure:  # noqa: BLE001: it works without being compiled, and more slowly
            print(f"create_block_mask is not compiled: {type(failure).__name__}", flush=True)
            make = create_block_mask
            options["block_mask"] = prepare()
    row.add_peer("flex", lambda q, k, v: compiled(q, k, v, **options), prepare)


# ---- what tools/compare.py calls ----


def measure(library, args, op, family, name):
    """The rows of a kind; nothing where the family does not do it."""
    make, problems, causals = KINDS[name]
    entries = []
    for d, s in problems:
        for causal in causals:
            wanted = ("yes" if causal else "no") in args.causal or len(causals) == 1
            if not wanted or (args.head_dims and d not in args.head_dims) or (args.seqs and s not in args.seqs):
                continue
            try:
                row = VariantRow(library, op, family, make(s, WIDTH // d, causal), s, d, causal)
            except RuntimeError as refusal:
                if not isinstance(refusal, capi.Unsupported) and "family" not in str(refusal):
                    raise
                print(f"{op:<8} {family} {name} d {d} s {s}: {refusal}", flush=True)
                continue
            row.check()
            if row.kind.plain:
                row.add_plain()
            for peer, attend in row.kind.peers.items():
                row.add_peer(peer, attend)
            if name in FLEX:
                add_flex(row)
            entries.append(row.entry(time_row(row, args.rounds, args.ms)))
            print_entry(entries[-1])
            del row
            torch.cuda.empty_cache()
    return entries


def print_entry(entry):
    rates = "  ".join(f"{name} {rate:7.1f}" for name, rate in entry["tflops"].items())
    print(f"{entry['op']:<8} {entry['family']} {entry['dtype']:<5} d {entry['d_qk']:<3} "
          f"{'causal' if entry['causal'] else 'full  '} s {entry['s_q']:<6} {rates} {entry['variant']}", flush=True)
    for name, tensors in entry.get("errors", {}).items():
        shown = ", ".join(f"{tensor} mean {e['mean_abs']:.2e} max {e['max_abs']:.2e}" for tensor, e in tensors.items())
        print(f"  errors of {name}: {shown}", flush=True)


def print_table(entries):
    """Rows with variants beside each other: fa's TFLOP/s, its share of plain's, and of the fastest peer's."""
    if not entries:
        return
    print(f"\n{'variant':<28} {'op':<8} {'family':<9} {'d':>3} {'mask':<6} {'s':>6} {'fa':>7} {'of plain':>8} "
          f"{'of best peer':>19}")
    for entry in entries:
        rates = dict(entry["tflops"])
        own, plain = rates.pop("fa"), rates.pop("fa_plain", None)
        best = max(rates, key=rates.get, default=None)
        print(f"{entry['variant']:<28} {entry['op']:<8} {entry['family']:<9} {entry['d_qk']:>3} "
              f"{'causal' if entry['causal'] else 'full':<6} {entry['s_q']:>6} {own:>7.1f} "
              f"{f'{own / plain:.3f}' if plain else '':>8} {f'{own / rates[best]:.3f} {best}' if best else '':>19}")
    print(flush=True)


def compile_s(cli, op, options):
    """Seconds into an empty cache: of the attention kernel, and with those that are compiled before it and passed over, since
    they spill."""
    with tempfile.TemporaryDirectory() as directory:
        def run(*command):
            done = subprocess.run([cli, *command, "--directory", directory, "--json"], check=True, capture_output=True, text=True)
            return json.loads(done.stdout)

        compiled = run("compile", "--op", op, "--head-dim", "128", "--causal", "yes", "--family", "sm80", "--jobs", "1", *options)
        entries = run("cache", "list")["entries"]
    one, all_of_them = ([k["compile_ms"] for k in kernels if k["kernel"].endswith("_" + op)]
                        for kernels in (compiled["kernels"], entries))
    return sum(one) / 1e3, sum(all_of_them) / 1e3


def compile_times(cli, arch=None):
    """What attention kernels take to compile, without and with score functions: medians of rounds in which they take turns;
    and what a score function adds at most."""
    functions = {"plain": [], "softcap": ["--softcap", f"{CAP:g}"], "alibi": ["--alibi"],
                 "bias": ["--bias", "hqk", "--gradients"]}
    kernels = [(op, name) for op in ("forward", "backward") for name in functions]
    times = {kernel: [] for kernel in kernels}
    for _ in range(COMPILE_ROUNDS):
        for op, name in kernels:
            times[op, name].append(compile_s(cli, op, functions[name] + (["--arch", arch] if arch else [])))
    figures = {}
    for place, what in enumerate(("kernel", "with_passed_over")):
        median = {kernel: statistics.median(pair[place] for pair in times[kernel]) for kernel in kernels}
        added = max(median[op, name] - median[op, "plain"] for op, name in kernels if name != "plain")
        figures[what] = {**{"_".join(kernel): round(value, 3) for kernel, value in median.items()}, "added_most": round(added, 3)}
        print(f"compiling d 128, {what}: a score function adds {added:.3f} s at most; {ACCEPTED_COMPILE_S} s are accepted"
              f"{'' if added <= ACCEPTED_COMPILE_S else ': MORE'}", flush=True)
    return figures
