"""One row of tools/compare.py: a problem, a callable for each library, its proof against float64, its time."""

import random
import statistics

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from fa_attention import capi

try:
    import flash_attn_interface as fa3
except ImportError:
    fa3 = None

DEVICE, TOKENS, WIDTH = "cuda", 16384, 2048
BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "fa2": SDPBackend.FLASH_ATTENTION,
    "mem_efficient": SDPBackend.EFFICIENT_ATTENTION,
}
DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}
# What the greatest error of o may be of its greatest element; of a gradient, which is made of o, P and dS, each rounded
# once, and is rounded itself, twice as much.
F32_BOUND = 1e-5
BOUNDS = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: F32_BOUND}
GRADIENTS = ("dq", "dk", "dv")
DROPOUT, RNG = 0.1, capi.dropout_state(seed=1234, offset=5678)


def make_inputs(b, h_q, h_kv, s_q, s_kv, d_qk, d_v, dtype, seed=0):
    """q, k, v as [b, h, s, d] views of [b, s, h, d] memory."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    shapes = [(b, s_q, h_q, d_qk), (b, s_kv, h_kv, d_qk), (b, s_kv, h_kv, d_v)]
    return [torch.randn(s, device=DEVICE, dtype=torch.float32, generator=generator).to(dtype).transpose(1, 2) for s in shapes]


def reference(q, k, v, causal, keep=None):
    """float64 O and LSE of one head at a time; the causal mask is aligned bottom-right. `keep`: what dropout leaves of P, and
    its factor, [s_q, s_kv]."""
    s_q, s_kv = q.shape[2], k.shape[2]
    o = torch.empty(*q.shape[:3], v.shape[3], dtype=torch.float64, device=DEVICE)
    lse = torch.empty(q.shape[:3], dtype=torch.float64, device=DEVICE)
    hidden = torch.ones(s_q, s_kv, dtype=torch.bool, device=DEVICE).tril(s_kv - s_q).logical_not_() if causal else None
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
    gradients = [torch.empty(t.shape, dtype=torch.float64, device=DEVICE) for t in (q, k, v)]
    hidden = torch.ones(s_q, s_kv, dtype=torch.bool, device=DEVICE).tril(s_kv - s_q).logical_not_() if causal else None
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
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal and square,
                                              enable_gqa=q.shape[1] != k.shape[1])


def output_of(result):
    """FlashAttention-3's o, whether it gives more or not."""
    return result[0] if isinstance(result, tuple) else result


def peer_attention(peer, q, k, v, causal, dropout=0.0):
    """A peer's o [b, h, s, d]."""
    if peer == "fa3":
        return output_of(fa3.flash_attn_func(*(t.transpose(1, 2) for t in (q, k, v)), causal=causal)).transpose(1, 2)
    return sdpa(peer, q, k, v, causal, q.shape[2] == k.shape[2], dropout)


def peer_packed(peer, q, k, v, cumulative, longest, causal, dropout):
    """A peer's o [total, h, d]."""
    if peer == "fa3":
        return output_of(fa3.flash_attn_varlen_func(q, k, v, cumulative, cumulative, longest, longest, causal=causal))
    return torch.ops.aten._flash_attention_forward(q, k, v, cumulative, cumulative, longest, longest, dropout, causal, False)[0]


def scratch(size):
    return torch.empty(size, device=DEVICE, dtype=torch.uint8) if size else None


def nan_like(t):
    return torch.full_like(t, float("nan"))


class Row:
    """One problem: its tensors, and a callable for each library."""

    def __init__(self, library, op, family, b, h, s_q, s_kv, d_qk, d_v, dtype, causal, peers, deterministic=False,
                 dropout=0.0, h_kv=None):
        h_kv = h_kv or h
        self.size = dict(b=b, h_q=h, h_kv=h_kv, s_q=s_q, s_kv=s_kv, d_qk=d_qk, d_v=d_v)
        self.op, self.family, self.causal, self.dtype = op, family, causal, dtype
        self.variant = "deterministic" if deterministic else f"dropout={dropout:g}" if dropout else ""
        self.fa, self.dropout = library, dropout
        self.q, self.k, self.v = make_inputs(b, h, h_kv, s_q, s_kv, d_qk, d_v, dtype)
        self.o = torch.full((b, s_q, h, d_v), float("nan"), device=DEVICE, dtype=dtype).transpose(1, 2)
        self.lse = torch.full((b, h, s_q), float("nan"), device=DEVICE)
        self.attention = capi.Attention(library, d_qk, dtype, causal, d_v, deterministic=deterministic, tune="cached",
                                              dropout=dropout,
                                              **{("family" if op == "forward" else "backward_family"): family})
        self.stream = torch.cuda.current_stream().cuda_stream
        self.variants = {"dropout": RNG if dropout else None}
        self._bind(peers)

    def _bind(self, peers):
        # The peers are asked for no log-sum-exp.
        self.calls = {"fa": self._forward(not peers) if self.op == "forward" else self._backward()}
        for peer in peers:
            call = self._peer(peer)
            if call is None:
                print(f"{peer} gives no gradients here and is left out", flush=True)
            else:
                self.calls[peer] = call

    def beside_plain(self, plain):
        """Times fa's plain attention, which a row of its own knows, beside this one."""
        plain.check()
        self.plain = plain
        self.calls["fa_plain"] = plain._forward(False) if self.op == "forward" else plain.calls["fa"]
        return self

    def _sizes(self):
        return [self.size[name] for name in ("b", "h_q", "h_kv", "s_q", "s_kv")]

    def _forward(self, with_lse):
        memory = scratch(self.attention.workspace_size(*self._sizes()))
        lse = self.lse if with_lse else None
        return self.attention.bind_forward(self.q, self.k, self.v, self.o, lse, self.stream, memory, **self.variants)

    def _backward(self):
        self._forward(True)()
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
        if not o.requires_grad:
            return None
        return lambda: torch.autograd.grad(o, leaves, dout, retain_graph=True)

    def flops(self):
        s = self.size
        products = 2 * s["b"] * s["h_q"] * s["s_q"] * s["s_kv"] * (s["d_qk"] + s["d_v"])
        return products * (2.5 if self.op == "backward" else 1) / (2 if self.causal else 1)

    def flops_of(self, name):
        """Of one of the calls."""
        return self.plain.flops() if name == "fa_plain" else self.flops()

    def check(self):
        """The first and the last query head of the batch, and their KV heads, against float64. Returns the greatest ratios (mean, max) of fa's errors to
        FlashAttention-2's, by the name of the gradient."""
        self.calls["fa"]()
        bound = BOUNDS[self.dtype]
        comparable = self.op == "backward" and "fa2" in self.calls and not self.dropout  # masks differ
        peer = self.calls["fa2"]() if comparable else None
        worst = {}
        group = self.size["h_q"] // self.size["h_kv"]
        for b, h in {(0, 0), (self.size["b"] - 1, self.size["h_q"] - 1)}:
            head = lambda t: self._head(t, b, h * t.shape[1] // self.size["h_q"] if group > 1 else h)  # noqa: E731, B023
            cut = [head(t) for t in (self.q, self.k, self.v)]
            keep = self._keep(b, h, cut[0].shape[2], cut[1].shape[2])
            if self.op == "forward":
                named = {"o": (self.o, reference(*cut, self.causal, keep)[0])}
            else:
                wanted = reference_gradients(*cut, head(self.dout), self.causal, keep)
                for other in range(h // group * group, h // group * group + group):
                    if other == h:
                        continue
                    q, dout = self._head(self.q, b, other), self._head(self.dout, b, other)
                    for sum_of, more in zip(wanted[1:], reference_gradients(q, *cut[1:], dout, self.causal)[1:]):
                        sum_of += more
                named = dict(zip(GRADIENTS, zip(self.gradients, wanted)))
            for n, (name, (actual, expected)) in enumerate(named.items()):
                mean, largest = errors(head(actual), expected)
                bound_here = bound / (1 - self.dropout)
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
        state = capi.dropout_state(RNG.seed, RNG.offset + b * self.size["h_q"] + h)
        mask = self.fa.dropout_mask(state, self.dropout, 1, 1, s_q, s_kv)
        factor = 65536 / (65536 - round(self.dropout * 65536))
        return torch.frombuffer(mask, dtype=torch.uint8).view(s_q, s_kv).to(DEVICE).double() * factor

    def entry(self, rates):
        return {"op": self.op, "family": self.family, "dtype": DTYPE_NAMES[self.dtype], **self.size, "causal": self.causal,
                "variant": self.variant, "tflops": rates}


class PackedRow(Row):
    """`b` sequences of lengths uniform in [1, 2 s], one after the other."""

    def __init__(self, library, op, family, b, h, s, d, dtype, causal, peers, dropout=0.0):
        generator = torch.Generator().manual_seed(64)
        self.lengths = torch.randint(1, 2 * s + 1, (b,), generator=generator)
        self.starts = torch.cat((torch.zeros(1, dtype=torch.int64), self.lengths.cumsum(0)))
        self.cumulative, self.longest = self.starts.int().to(DEVICE), 2 * s
        self.total = int(self.starts[-1])
        self.size = dict(b=b, h_q=h, h_kv=h, s_q=s, s_kv=s, d_qk=d, d_v=d)
        self.op, self.family, self.causal, self.dtype, self.fa, self.dropout = op, family, causal, dtype, library, dropout
        self.variant = "varlen" + (f"+dropout={dropout:g}" if dropout else "")
        self.q, self.k, self.v = (t[0].transpose(0, 1) for t in make_inputs(1, h, h, self.total, self.total, d, d, dtype))
        self.o = torch.full((self.total, h, d), float("nan"), device=DEVICE, dtype=dtype)
        self.lse = torch.full((h, self.total), float("nan"), device=DEVICE)
        self.attention = capi.Attention(library, d, dtype, causal, varlen=True, dropout=dropout,
                                              **{("family" if op == "forward" else "backward_family"): family})
        self.stream = torch.cuda.current_stream().cuda_stream
        lengths = capi.sequences(self.cumulative, self.cumulative, max_s_q=self.longest, max_s_kv=self.longest)
        self.variants = {"sequences": lengths, "dropout": RNG if dropout else None}
        self._bind(peers)

    def _sizes(self):
        h = self.size["h_q"]
        return [self.size["b"], h, h, self.longest, self.longest, self.total, self.total]

    def _make_dout(self):
        return make_inputs(1, self.size["h_q"], 1, self.total, 1, self.size["d_v"], 1, self.dtype, seed=1)[0][0].transpose(0, 1)

    def _attend(self, peer, q, k, v):
        return peer_packed(peer, q, k, v, self.cumulative, self.longest, self.causal, self.dropout)

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
    return {name: round(row.flops_of(name) / statistics.median(t) / 1e9, 1) for name, t in times.items()}
