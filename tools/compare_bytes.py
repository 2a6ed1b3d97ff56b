"""Rows of tools/compare.py whose products are of 8 bits: fa's e4m3 and i8, plain and precise, beside its bf16 and
FlashAttention-3's e4m3 where it is. Codes are made by fa; errors are those beside float64 of what was there before."""

import torch

from fa_attention import capi
from compare_rows import DEVICE, TOKENS, WIDTH, fa3, make_inputs, output_of, reference, scratch, time_row

PROBLEMS = [(64, 8192), (128, 8192), (256, 8192)]
OUTLIERS, MEAN = 1000, 12.0  # one of so many elements is ten times as great; of four columns of K
KINDS = ("normal", "outliers", "means")


def change(kind, q, k):
    """Inputs that codes find hard."""
    generator = torch.Generator(DEVICE).manual_seed(9)
    if kind == "outliers":
        for t in (q, k):
            t[torch.rand(t.shape, device=DEVICE, generator=generator) < 1 / OUTLIERS] *= 10
    if kind == "means":
        k[..., 7::max(k.shape[-1] // 4, 8)] += MEAN


class BytesRow:
    def __init__(self, library, s, d, causal):
        b, h = TOKENS // s, WIDTH // d
        self.size = {"b": b, "h_q": h, "h_kv": h, "s_q": s, "s_kv": s, "d_qk": d, "d_v": d}
        self.causal, self.calls, self.errors, self.keep = causal, {}, {}, []
        for kind in KINDS:
            q, k, v = make_inputs(b, h, h, s, s, d, d, torch.bfloat16)
            change(kind, q, k)
            head = [t[:1, :1] for t in (q, k, v)]
            exact = reference(*head, causal)[0]
            for name, (o, calls) in self._attend(library, q, k, v, d).items():
                for call in calls:
                    call()
                error = (o[:1, :1].double() - exact).square().mean().sqrt() / exact.square().mean().sqrt()
                self.errors.setdefault(name, {})[kind] = float(error)
                if kind == "normal":
                    self.calls[name] = calls[-1]
                    if len(calls) > 1 and not name.endswith("precise"):
                        self.calls[name + "_quantize"] = calls[0]

    def _attend(self, library, q, k, v, d):
        """By name an output, and the calls that make it: of codes the first makes these."""
        made = {}
        for name, dtype, precise in (("fa", "bfloat16", False), ("fa_e4m3", "float8_e4m3fn", False), ("fa_i8", "int8", False),
                                     ("fa_e4m3_precise", "float8_e4m3fn", True), ("fa_i8_precise", "int8", True)):
            bytes_of = {} if dtype == "bfloat16" else {"key_scales": True, "value_scales": True, "precise": precise}
            attention = capi.Attention(library, d, dtype, self.causal, family="automatic", **bytes_of)
            o = torch.empty_like(q)
            workspace = scratch(attention.workspace_size(*(self.size[n] for n in ("b", "h_q", "h_kv", "s_q", "s_kv"))))
            if dtype == "bfloat16":
                made[name] = (o, [attention.bind_forward(q, k, v, o, workspace=workspace)])
                continue
            own = getattr(torch, dtype)
            codes = [torch.empty_like(t, dtype=of) for t, of in zip((q, k, v), (own, own, torch.float8_e4m3fn))]
            scales = [torch.empty(t.shape[:3], device=DEVICE) for t in (q, k, v)]
            smooth = {}
            if dtype == "int8":
                smooth = {"k_mean": torch.empty(*k.shape[:2], d, device=DEVICE), "row_bias": torch.empty(q.shape[:3], device=DEVICE)}
            quantize = attention.bind_quantize(q, k, v, *codes, *scales, **smooth)
            forward = attention.bind_forward(*codes, o, workspace=workspace, q_scale=scales[0], k_scale=scales[1],
                                             v_scale=scales[2], row_bias=smooth.get("row_bias"))
            made[name] = (o, [quantize, forward])
        if fa3:
            of_heads = [t.abs().amax((2, 3)).float() / 448 for t in (q, k, v)]
            codes = [(t.float() / scale[..., None, None]).to(torch.float8_e4m3fn).transpose(1, 2)
                     for t, scale in zip((q, k, v), of_heads)]
            o = torch.empty_like(q)
            self.keep.append(codes)

            def attend():
                descale = dict(zip(("q_descale", "k_descale", "v_descale"), of_heads))
                o.copy_(output_of(fa3.flash_attn_func(*codes, causal=self.causal, **descale)).transpose(1, 2))

            try:
                attend()
                made["fa3_e4m3"] = (o, [attend])
            except (RuntimeError, TypeError) as refusal:
                print(f"fa3_e4m3: {refusal}", flush=True)
        return made

    def flops_of(self, name):
        n = self.size
        return 2 * n["b"] * n["h_q"] * n["s_q"] * n["s_kv"] * (n["d_qk"] + n["d_v"]) / (2 if self.causal else 1)


def measure(library, args, op, family):
    """The rows; of forward alone, once for all families."""
    entries = []
    if op != "forward" or family != args.families[0] or torch.cuda.get_device_capability()[0] != 9:
        return entries
    for d, s in PROBLEMS:
        for causal in (False, True):
            if ("yes" if causal else "no") not in args.causal or (args.head_dims and d not in args.head_dims):
                continue
            row = BytesRow(library, s, d, causal)
            entry = {"op": op, "family": family, "dtype": "bytes", **row.size, "causal": causal, "variant": "bytes",
                     "tflops": time_row(row, args.rounds, args.ms), "errors_of_kinds": row.errors}
            entries.append(entry)
            rates = "  ".join(f"{name} {rate:.1f}" for name, rate in entry["tflops"].items())
            print(f"forward  bytes d {d:<3} {'causal' if causal else 'full  '} s {s:<6} {rates}", flush=True)
            for name, of_kinds in row.errors.items():
                print(f"  {name}: " + ", ".join(f"{kind} {error:.2%}" for kind, error in of_kinds.items()), flush=True)
            del row
            torch.cuda.empty_cache()
    return entries
