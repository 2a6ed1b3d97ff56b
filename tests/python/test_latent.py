"""Caches whose values are columns of keys, and caches of 4 bits, in PyTorch, beside float64 of what is stored."""

import math

import pytest
from conftest import refused

torch = pytest.importorskip("torch")

from cache_cases import E4M3, INT, TOLERANCE, Pages, angles, numbers, one_request, turned  # noqa: E402
from fa_attention.torch import KVCache, _cache_ops, append, paged_attention  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

CHECKS = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
COLUMN = [0, 2, 4, 6, 1, 3, 5, 7]  # of the codes of a word, from the lowest bits on


def latents(rows):
    """What rows of 656 bytes stand for, in float64, before they are rounded to the dtype of q."""
    codes = rows[..., :512].double().unflatten(-1, (4, 128))
    tail = rows.view(torch.uint8)[..., 512:].contiguous()
    scales = tail[..., :16].contiguous().view(torch.float32).double()
    return (codes * scales[..., None]).flatten(-2), tail[..., 16:].contiguous().view(torch.bfloat16).double()


def whole(rows, dtype):
    c, r = latents(rows)
    return torch.cat([c.to(dtype).double(), r.to(dtype).double()], -1)


def nibbles(t):
    """The codes of a cache of 4 bits, in the order of columns."""
    codes = torch.stack([t & 15, t >> 4], -1).flatten(-2).unflatten(-1, (-1, 8))
    return codes[..., [COLUMN.index(n) for n in range(8)]].flatten(-2).double()


def read_nibbles(t, pairs):
    codes, groups = nibbles(t), pairs.double().unflatten(-1, (-1, 2))
    parts = codes.unflatten(-1, (groups.shape[-2], -1))
    return (groups[..., :1] * parts + groups[..., 1:]).to(pairs.dtype).flatten(-2).double()


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("d", [(576, 512), (48, 32)])
def test_values_are_columns_of_keys(device, d, dtype, layout):
    if device == "cuda" and dtype == torch.float32 and d[0] > 256:
        pytest.skip("not of every GPU")
    pages = Pages([13, 6], device, dtype, layout, h_kv=1, d=d[0])
    q = torch.randn(2, 4, 3, d[0], device=device, dtype=dtype)
    o, lse = paged_attention(q, pages.k, None, pages.table, pages.used, layout=layout, value_in_key=d[1], causal=True, scale=0.05,
                             return_lse=True)
    assert o.shape == (2, 4, 3, d[1])
    for i in range(2):
        k = pages.rows(pages.k, i)
        expected, sums = one_request(q[i].transpose(0, 1), k, k[..., :d[1]], causal=True, scale=0.05)
        torch.testing.assert_close(o[i].double(), expected, **TOLERANCE[dtype])
        torch.testing.assert_close(lse[i].double(), sums, atol=2e-3, rtol=2e-3)
    apart = pages.k[..., :d[1]].contiguous()
    if d[0] <= 256:
        torch.testing.assert_close(o, paged_attention(q, pages.k, apart, pages.table, pages.used, layout=layout, causal=True,
                                                      scale=0.05), **TOLERANCE[dtype])


def test_packed_queries_and_contiguous_caches(device):
    pages = Pages([13, 6], device, torch.bfloat16, h_kv=1, d=48)
    q = torch.randn(2, 4, 3, 48, device=device, dtype=torch.bfloat16)
    dense = paged_attention(q, pages.k, None, pages.table, pages.used, value_in_key=32, causal=True)
    cu = numbers(0, 3, 6, device=device)
    packed = paged_attention(q.transpose(1, 2).flatten(0, 1), pages.k, None, pages.table, pages.used, value_in_key=32, causal=True,
                             cu_seqlens_q=cu, max_s_q=3)
    torch.testing.assert_close(packed.view(2, 3, 4, 32).transpose(1, 2), dense, **TOLERANCE[torch.bfloat16])
    rows = torch.zeros(3, 20, 1, 48, device=device, dtype=torch.bfloat16)
    for i, n in enumerate((13, 6)):
        rows[i, :n] = pages.rows(pages.k, i)
    cache = KVCache(rows, None, pages.used, value_in_key=32)
    torch.testing.assert_close(cache.attention(q, causal=True), dense, **TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_latent_rows(device, dtype, paged):
    torch.manual_seed(3)
    k = torch.randn(2, 1, 5, 576, device=device, dtype=dtype)
    q = torch.randn(2, 4, 5, 576, device=device, dtype=dtype)
    used = numbers(5, 7, device=device)
    pool = torch.zeros(8, 4, 1, 656, device=device, dtype=torch.uint8).view(E4M3)
    table = numbers(6, 1, 3, 2, device=device).view(2, 2) if paged else None
    cache = pool if paged else pool.view(torch.uint8).view(4, 8, 1, 656)[:2].view(E4M3)
    cos, sin = angles(16, 64, device)
    version = cache._version
    turned_q = append(k, None, cache, None, used, block_table=table, q=q, rotary_cos=cos, rotary_sin=sin)
    assert cache._version > version
    stored = []
    for i, n in enumerate((5, 7)):
        of_request = cache[table[i].long()].view(torch.uint8).flatten(0, 1).view(E4M3) if paged else cache[i]
        rows = of_request[n - 5:n, 0]
        stored.append(whole(of_request[:n], dtype))
        c, r = latents(rows)
        places = torch.arange(n - 5, n, device=device)
        expected = turned(k[i].transpose(0, 1)[..., 512:].double(), cos, sin, places, False)[:, 0]
        assert (r - expected).abs().max() <= 2e-2
        of_c = k[i, 0, :, :512].double().unflatten(-1, (4, 128))
        assert (c.unflatten(-1, (4, 128)) - of_c).abs().max() <= of_c.abs().max() / 14
        wide = turned(q[i].transpose(0, 1)[..., 512:].double(), cos, sin, places, False)
        assert torch.equal(turned_q[i][..., :512], q[i][..., :512])
        assert (turned_q[i][..., 512:].transpose(0, 1) - wide).abs().max() <= 2e-2
    o, lse = paged_attention(q, cache, None, table, used, value_in_key=512, causal=True, scale=0.05, return_lse=True)
    for i in range(2):
        expected, sums = one_request(q[i].transpose(0, 1), stored[i], stored[i][..., :512], causal=True, scale=0.05)
        torch.testing.assert_close(o[i].double(), expected, **TOLERANCE[dtype])
        torch.testing.assert_close(lse[i].double(), sums, atol=2e-3, rtol=2e-3)
    known = KVCache(cache, None, used, table, value_in_key=512)
    assert torch.equal(known.attention(q, causal=True, scale=0.05), o)
    known.append(k)
    assert known.attention(q).shape == o.shape


def nibble_pages(device, dtype, group, layout="NHD", d=(64, 128), half=None):
    """Requests of 13 and 6 keys in pools of 4 bits, written by `append`. half: of k or v, which keeps 16 bits."""
    torch.manual_seed(5)
    used, table = numbers(13, 6, device=device), numbers(3, 1, 0, 2, device=device).view(2, 2)
    new = [torch.randn(2, 2, 13, n, device=device, dtype=dtype) for n in d]
    pools, pairs = [], []
    for name, n in zip("kv", d):
        axes = (4, 8, 2) if layout == "NHD" else (4, 2, 8)
        kept = name == half
        pools.append(torch.zeros(*axes, n if kept else n // 2, device=device, dtype=dtype if kept else torch.uint8))
        pairs.append(None if kept else torch.zeros(*axes, 2 * n // group, device=device, dtype=dtype))
    slots = [-1 if n >= used[i] else int(table[i, n // 8]) * 8 + n % 8 for i in range(2) for n in range(13)]
    slots = torch.tensor(slots, device=device)
    append(*new, *pools, slots=slots, block_table=table, layout=layout, k_scale=pairs[0], v_scale=pairs[1])
    return new, pools, pairs, table, used


def of_request(t, table, i, n, layout):
    t = t if layout == "NHD" else t.transpose(1, 2)
    return t[table[i].long()].flatten(0, 1)[:n]


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("half", [None, "k", "v"])
@pytest.mark.parametrize("group", [32, 64])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_caches_of_4_bits(device, dtype, group, half, layout):
    new, pools, pairs, table, used = nibble_pages(device, dtype, group, layout, half=half)
    values = [pool.double() if p is None else read_nibbles(pool, p) for pool, p in zip(pools, pairs)]
    q = torch.randn(2, 4, 2, 64, device=device, dtype=dtype)
    o, lse = paged_attention(q, *pools, table, used, layout=layout, causal=True, k_scale=pairs[0], v_scale=pairs[1],
                             return_lse=True)
    assert o.shape == (2, 4, 2, 128)
    for i, n in enumerate((13, 6)):
        k, v = (of_request(t, table, i, n, layout) for t in values)
        for t, given, pair in zip((k, v), new, pairs):
            expected = given[i, :, :n].transpose(0, 1).double()
            step = 0.0
            if pair is not None:
                step = 0.55 * of_request(pair, table, i, n, layout)[..., ::2].double().repeat_interleave(group, -1)
            assert ((t - expected).abs() <= step + expected.abs() / 64 + 1e-3 * (pair is not None)).all()
        expected, sums = one_request(q[i].transpose(0, 1), k, v, causal=True)
        torch.testing.assert_close(o[i].double(), expected, **TOLERANCE[dtype])
        torch.testing.assert_close(lse[i].double(), sums, atol=5e-3, rtol=5e-3)


def test_contiguous_caches_of_4_bits(device):
    new, pools, pairs, table, used = nibble_pages(device, torch.bfloat16, 32)
    q = torch.randn(2, 4, 2, 64, device=device, dtype=torch.bfloat16)
    paged = paged_attention(q, *pools, table, used, k_scale=pairs[0], v_scale=pairs[1])
    caches = [torch.zeros(3, 16, 2, n // 2, device=device, dtype=torch.uint8) for n in (64, 128)]
    scales = [torch.zeros(3, 16, 2, n // 16, device=device, dtype=torch.bfloat16) for n in (64, 128)]
    cache = KVCache(*caches, torch.full_like(used, 13), k_scale=scales[0], v_scale=scales[1])
    cache.append(*new)
    torch.testing.assert_close(cache._replace(seqused_kv=used).attention(q), paged, **TOLERANCE[torch.bfloat16])


def forward_arguments(q, k, v, table, used, *last):
    return (q, k, v, None, [], table, used, None, None, None, None, 0, 0, [], "NHD", True, None, None, None, 0, None, None, [], [],
            *last)


def test_opcheck_and_compiled_calls():
    pages = Pages([13, 6], dtype=torch.bfloat16, h_kv=1, d=48)
    q = torch.randn(2, 4, 1, 48, dtype=torch.bfloat16)
    arguments = forward_arguments(q, pages.k, None, pages.table, pages.used, *[None] * 5, False, 32)
    torch.library.opcheck(_cache_ops.forward_op, arguments, test_utils=CHECKS)
    call = lambda q: paged_attention(q, pages.k, None, pages.table, pages.used, value_in_key=32)  # noqa: E731
    assert torch.equal(torch.compile(call, fullgraph=True, backend="aot_eager")(q), call(q))
    assert torch.equal(torch.vmap(call)(torch.stack([q, -q]))[1], call(-q))
    new, pools, pairs, table, used = nibble_pages("cpu", torch.bfloat16, 32)
    q = torch.randn(2, 4, 1, 64, dtype=torch.bfloat16)
    torch.library.opcheck(_cache_ops.forward_op, forward_arguments(q, *pools, table, used, *pairs), test_utils=CHECKS)
    rows = [t[:, :, :1].contiguous() for t in new]
    torch.library.opcheck(_cache_ops.append_op, (*rows, *pools, None, table, used, *[None] * 6, "NHD", 0, 0.0, False, *pairs),
                          test_utils=CHECKS)
    k, latent = torch.randn(2, 1, 1, 576, dtype=torch.bfloat16), torch.zeros(4, 8, 1, 656, dtype=torch.uint8).view(E4M3)
    torch.library.opcheck(_cache_ops.append_op, (k, None, latent, None, None, table, used, *[None] * 6, "NHD", 0, 0.0, False),
                          test_utils=CHECKS[1:])  # the first compares by torch.allclose, which PyTorch has not of float8

    def both(k, latent):
        append(k, None, latent, None, used, block_table=table)
        return paged_attention(k, latent, None, table, used, value_in_key=512)

    assert torch.equal(torch.compile(both, fullgraph=True, backend="aot_eager")(k, latent), both(k, latent))
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(t) for t in (k, latent, table, used)]
        append(fake[0], None, fake[1], None, fake[3], block_table=fake[2])
        assert paged_attention(fake[0], fake[1], None, *fake[2:], value_in_key=512).shape == (2, 1, 1, 512)


def test_what_is_refused():
    pages = Pages([13, 6], dtype=torch.bfloat16, h_kv=1, d=48)
    q = torch.randn(2, 4, 1, 48, dtype=torch.bfloat16)
    over = lambda q, k, v, **more: paged_attention(q, k, v, pages.table, pages.used, **more)  # noqa: E731
    refused(ValueError, lambda: over(q, pages.k, None), "v_pages is None", "value_in_key 0")
    refused(ValueError, lambda: over(q, pages.k, pages.v, value_in_key=32), "v_pages is given", "value_in_key 32")
    refused(ValueError, lambda: over(q, pages.k, None, value_in_key=20), "value_in_key", "20")
    refused(ValueError, lambda: over(q, pages.k, None, value_in_key=32, k_scale=torch.ones(1)), "k_scale is given")
    refused(ValueError, lambda: over(q.to(E4M3), pages.k.to(E4M3), None, value_in_key=32), "value_in_key is 32")
    refused(TypeError, lambda: append(q[:, :1], None, pages.k, None, pages.used, block_table=pages.table), "v is None", "656")
    latent = torch.zeros(4, 8, 1, 656, dtype=torch.uint8).view(E4M3)
    table = numbers(3, 1, 0, 2).view(2, 2)
    refused(ValueError, lambda: append(q[:, :1], None, latent, None, pages.used, block_table=table), "k has shape", "576")
    refused(TypeError, lambda: append(q[:, :1], q[:, :1], latent, None, pages.used, block_table=table), "v_cache is None")
    wide = torch.zeros(2, 1, 1, 576, dtype=torch.bfloat16)
    scale = torch.ones(4, 8, 1)
    refused(ValueError, lambda: paged_attention(wide, latent, None, table, pages.used, value_in_key=512, k_scale=scale), "k_scale",
            "in its rows")
    refused(ValueError, lambda: paged_attention(wide, latent, None, table, pages.used, value_in_key=256), "value_in_key")
    wide.requires_grad_()
    refused(RuntimeError, lambda: paged_attention(wide, latent, None, table, pages.used, value_in_key=512), "q requires a gradient")
    _, pools, pairs, table, used = nibble_pages("cpu", torch.bfloat16, 32)
    q = torch.randn(2, 4, 1, 64, dtype=torch.bfloat16)
    scales = {"k_scale": pairs[0], "v_scale": pairs[1]}
    over = lambda **more: paged_attention(q, *pools, table, used, **{**scales, **more})  # noqa: E731
    refused(TypeError, lambda: over(k_scale=None), "k_scale is None", "pairs")
    refused(TypeError, lambda: over(v_scale=pairs[1].float()), "v_scale is torch.float32", "bfloat16")
    refused(ValueError, lambda: over(k_scale=pairs[0][..., 0]), "k_scale has shape")
    refused(ValueError, lambda: over(k_scale=pairs[0][:3]), "k_scale has shape")
    refused(ValueError, lambda: over(k_scale=pairs[0][..., :3]), "group_size")
    assert math.isfinite(float(over().float().sum())) and used.dtype == INT
