"""Requests over a KV cache, and what attention over it is by definition, in plain PyTorch and float64."""

import torch
from fa_attention.torch import append, paged_attention

INT = torch.int32
TOLERANCE = {torch.float32: {"atol": 2e-5, "rtol": 2e-5}, torch.bfloat16: {"atol": 2e-2, "rtol": 2e-2},
             torch.float16: {"atol": 4e-3, "rtol": 4e-3}, torch.float64: {"atol": 1e-12, "rtol": 1e-12}}


def numbers(*values, device="cpu", dtype=INT):
    return torch.tensor(values, dtype=dtype, device=device)


def one_request(q, k, v, begin=0, causal=False, window=(-1, -1), softcap=0.0, slope=None, scale=None, sink=None):
    """o [s_q, h_q, d] and lse [h_q, s_q] of q [s_q, h_q, d] over k and v [s_kv, h_kv, d], in float64."""
    q, k, v = (t.double().transpose(0, 1) for t in (q, k, v))
    group, s_q, s_kv = q.shape[0] // k.shape[0], q.shape[1], k.shape[1]
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    scores = q @ k.transpose(1, 2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    place = torch.arange(s_q, device=q.device)[:, None] + s_kv - s_q
    key = torch.arange(s_kv, device=q.device)
    if slope is not None:
        scores = scores - slope.double()[:, None, None] * (place - key).abs()
    keep = (key >= begin) & (place == place)
    keep &= (key <= place) if causal else True
    keep &= (key >= place - window[0]) if window[0] >= 0 else True
    keep &= (key <= place + window[1]) if window[1] >= 0 and not causal else True
    scores = scores.masked_fill(~keep, float("-inf"))
    if sink is not None:
        column = sink.double()[:, None, None].expand(-1, s_q, 1)
        scores = torch.cat([scores, column], -1)
        v = torch.cat([v, v.new_zeros(v.shape[0], 1, v.shape[2])], 1)
    return torch.softmax(scores, -1).nan_to_num() @ v, scores.logsumexp(-1)


def turned(t, cos, sin, places, interleaved):
    """t [s, h, d] with its rotary embedding at `places` [s], rounded to its dtype."""
    half = cos.shape[1]
    c, s = (table[places].double()[:, None] for table in (cos, sin))
    part = t[..., : 2 * half].double()
    x, y = (part[..., 0::2], part[..., 1::2]) if interleaved else (part[..., :half], part[..., half:])
    x, y = x * c - y * s, y * c + x * s
    part = torch.stack([x, y], -1).flatten(-2) if interleaved else torch.cat([x, y], -1)
    return torch.cat([part.to(t.dtype), t[..., 2 * half:]], -1)


class Pages:
    """Requests of some lengths over a pool, K and V interleaved in one tensor or apart."""

    def __init__(self, lengths, device="cpu", dtype=torch.float32, layout="NHD", page=4, h_kv=2, d=16, room=1, together=False):
        torch.manual_seed(len(lengths) + page)
        width = -(-(max(lengths) + room) // page)
        pages = len(lengths) * width + 3
        shape = (pages, page, h_kv, d) if layout == "NHD" else (pages, h_kv, page, d)
        if together:
            self.k, self.v = torch.randn(2, *shape, device=device, dtype=dtype).transpose(0, 1).contiguous().unbind(1)
        else:
            self.k, self.v = (torch.randn(shape, device=device, dtype=dtype) for _ in range(2))
        order = torch.randperm(pages, device=device)[: len(lengths) * width]
        self.table = order.to(INT).view(len(lengths), width)
        self.used, self.layout, self.lengths = numbers(*lengths, device=device), layout, lengths

    def rows(self, pool, i, row=None):
        """[s_kv, h_kv, d] of request i."""
        pool = pool if self.layout == "NHD" else pool.transpose(1, 2)
        return pool[self.table[i if row is None else row].long()].flatten(0, 1)[: int(self.used[i])]

    def call(self, q, **options):
        return paged_attention(q, self.k, self.v, self.table, self.used, layout=self.layout, **options)


def angles(positions, dims, device="cpu", dtype=torch.float32):
    places = torch.arange(positions, device=device, dtype=torch.float64)
    a = places[:, None] * 10000.0 ** (-2 * torch.arange(dims // 2, device=device, dtype=torch.float64) / dims)
    return a.cos().to(dtype), a.sin().to(dtype)


E4M3, I8 = torch.float8_e4m3fn, torch.int8
GREATEST = {E4M3: 448, I8: 127}


def stored(k, v, kinds, layout="NHD"):
    """k and v, pages of 16-bit elements, as caches of `kinds` (None: as they are), and the scales of their rows."""
    caches = [torch.zeros(t.shape, device=t.device, dtype=kind or t.dtype) for t, kind in zip((k, v), kinds)]
    scales = [torch.zeros(t.shape[:-1], device=t.device) if kind else None for t, kind in zip((k, v), kinds)]
    new = [t.transpose(1, 2) if layout == "NHD" else t for t in (k, v)]
    used = torch.full((k.shape[0],), new[0].shape[2], dtype=INT, device=k.device)
    append(*new, *caches, used, layout=layout, k_scale=scales[0], v_scale=scales[1])
    return (*caches, *scales)


def read(cache, scale):
    """What the elements of a cache stand for, in float64."""
    return cache.double() if scale is None else cache.double() * scale.double()[..., None]


class StoredPages(Pages):
    """`Pages` whose K and V are stored as `kinds`; `original` are those of 16 bits, `values` what is stored."""

    def __init__(self, lengths, kinds, device="cpu", dtype=torch.bfloat16, layout="NHD", **options):
        super().__init__(lengths, device, dtype, layout, **options)
        self.original = self.k, self.v
        self.k, self.v, self.k_scale, self.v_scale = stored(self.k, self.v, kinds, layout)
        self.values = read(self.k, self.k_scale), read(self.v, self.v_scale)

    def call(self, q, **options):
        return super().call(q, k_scale=self.k_scale, v_scale=self.v_scale, **options)
