"""Caches of 8 bits in PyTorch: append and forward beside float64, of what is stored and of what it was made of."""

import pytest
from conftest import refused

torch = pytest.importorskip("torch")

from cache_cases import E4M3, GREATEST, I8, INT, Pages, StoredPages, angles, numbers  # noqa: E402
from cache_cases import one_request, read, stored, turned  # noqa: E402
from fa_attention import capi, functions  # noqa: E402
from fa_attention._library import load  # noqa: E402
from fa_attention.flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache  # noqa: E402
from fa_attention.torch import Attention, KVCache, SharedPrefix, _cache_ops, append, paged_attention  # noqa: E402
from fa_attention.torch import shared_prefix_attention  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

KINDS = [(E4M3, E4M3), (I8, I8), (E4M3, I8), (I8, None), (None, E4M3)]
U = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def by_definition(t, kind):
    """Codes and scales of rows of float32."""
    scale = t.abs().amax(-1) / GREATEST[kind]
    whole = (t / scale[..., None]).nan_to_num()
    return (whole.round() if kind == I8 else whole.to(E4M3)).double(), scale


def close(actual, scale, expected, kind):
    """That rows are stored as docs/numerics.md says: each element rounded to one of its neighbours."""
    step = scale.double()[..., None]
    size = expected.abs()
    bound = step / 2 if kind == I8 else torch.where(size < 2.0**-6 * step, 2.0**-10 * step, 2.0**-4 * size)
    assert ((read(actual, scale) - expected).abs() <= bound * (1 + 1e-4)).all()


def equal(x, y):
    return torch.equal(x.view(torch.uint8), y.view(torch.uint8)) if x.dtype == E4M3 else torch.equal(x, y)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kinds", KINDS)
def test_append_stores_rows_and_scales(device, kinds, dtype, layout):
    pages = StoredPages([13, 6, 3], kinds, device, dtype, layout)
    for t, scale, values, kind in zip(pages.original, (pages.k_scale, pages.v_scale), pages.values, kinds):
        if kind is None:
            assert torch.equal(values, t.double())
            continue
        codes, expected = by_definition(t.float(), kind)
        assert torch.allclose(scale, expected, rtol=1e-6)
        assert ((values / scale.double()[..., None] - codes).abs() <= (1 if kind == I8 else codes.abs() / 8 + 2.0**-9)).all()
        close(pages.k if t is pages.original[0] else pages.v, scale, t.double(), kind)
    k, v, q = (torch.randn(3, 3, h, 16, device=device, dtype=dtype).transpose(1, 2) for h in (2, 2, 4))
    k[0], v[1] = 100 * k[0], 0
    cos, sin = angles(20, 8, device)
    before = [t.clone() for t in (pages.k, pages.v, pages.k_scale, pages.v_scale) if t is not None]
    version = [t._version for t in (pages.k_scale, pages.v_scale) if t is not None]
    turned_q = append(k, v, pages.k, pages.v, pages.used, block_table=pages.table, layout=layout, q=q, rotary_cos=cos,
                      rotary_sin=sin, k_scale=pages.k_scale, v_scale=pages.v_scale)
    after = [t for t in (pages.k, pages.v, pages.k_scale, pages.v_scale) if t is not None]
    assert all(t._version > n for t, n in zip(after[2:], version))
    for i in range(3):
        places = torch.arange(int(pages.used[i]) - 3, int(pages.used[i]), device=device)
        of_k = turned(k[i].transpose(0, 1).double(), cos, sin, places, False)
        for cache, scale, kind, expected, slack in ((pages.k, pages.k_scale, kinds[0], of_k, 1e-5),
                                                    (pages.v, pages.v_scale, kinds[1], v[i].transpose(0, 1).double(), 0)):
            rows = pages.rows(read(cache, scale), i)[-3:]
            if kind is None:
                assert torch.allclose(rows, expected, rtol=2 * U[dtype], atol=1e-3)
                continue
            size = expected.abs()
            greatest = size.amax(-1, keepdim=True)
            bound = greatest / 254 if kind == I8 else torch.maximum(size / 16, greatest / 448 / 1024)
            assert ((rows - expected).abs() <= bound * (1 + 1e-4) + slack * greatest).all()
    for new, old in zip(after[:2], before[:2]):
        changed = (new.view(torch.uint8) != old.view(torch.uint8)).any(-1)
        assert int(changed.sum()) <= 3 * 3 * 2, "other rows keep their values"
    assert turned_q.shape == q.shape


def test_append_by_slots_and_to_a_contiguous_cache(device):
    k, v = (torch.randn(5, 1, 16, device=device, dtype=torch.bfloat16) for _ in range(2))
    caches = [torch.zeros(2, 6, 1, 16, device=device, dtype=kind) for kind in (I8, E4M3)]
    scales = [torch.full((2, 6, 1), -1.0, device=device) for _ in range(2)]
    for slots in (numbers(7, 0, -1, 9, 11, device=device), None):
        where = {"slots": slots} if slots is not None else {
            "seqused_kv": numbers(2, 6, device=device), "cu_seqlens_k_new": numbers(0, 2, 5, device=device),
            "batch_index": numbers(1, 0, device=device)}
        places = [7, 0, 9, 11] if slots is not None else [6, 7, 3, 4, 5]
        rows = [0, 1, 3, 4] if slots is not None else [0, 1, 2, 3, 4]
        append(k, v, *caches, k_scale=scales[0], v_scale=scales[1], **where)
        for t, cache, scale, kind in ((k, caches[0], scales[0], I8), (v, caches[1], scales[1], E4M3)):
            close(cache.flatten(0, 1)[places], scale.flatten(0, 1)[places], t[rows].double(), kind)
    assert int((scales[0] < 0).sum()) == 12 - 8 and torch.equal(scales[0] < 0, scales[1] < 0)


@pytest.mark.parametrize("kind", [E4M3, I8])
def test_append_with_given_scales(device, kind):
    k = torch.randn(2, 2, 3, 16, device=device, dtype=torch.float16)
    k[0, 0, 0, 0] = 1000
    scale = torch.tensor([0.01, 0.02], device=device).expand(2, 8, 2)
    caches = [torch.zeros(2, 8, 2, 16, device=device, dtype=kind) for _ in range(2)]
    append(k, 2 * k, *caches, numbers(3, 8, device=device), k_scale=scale, v_scale=scale, scales_given=True)
    assert torch.equal(scale[0, 0], torch.tensor([0.01, 0.02], device=device))
    for t, cache in zip((k, 2 * k), caches):
        for i, first in ((0, 0), (1, 5)):
            whole = (t[i].transpose(0, 1).float() / scale[i, first:first + 3, :, None]).clamp(-GREATEST[kind], GREATEST[kind])
            expected = whole.round() if kind == I8 else whole.to(E4M3).float()
            error = (cache[i, first:first + 3].float() - expected).abs()
            assert (error <= (1 if kind == I8 else expected.abs() / 8 + 2.0**-9)).all() and (error > 0).float().mean() < 0.01
    refused(ValueError, lambda: append(k, k, *caches, numbers(3, 8, device=device), k_scale=scale, v_scale=scale), "k_scale")


OPTIONS = [({}, {}), ({"causal": True, "scale": 0.4}, {"causal": True, "scale": 0.4}),
           ({"causal": True, "window_left": 3}, {"causal": True, "window": (3, -1)}),
           ({"score": functions.softcap(2.0)}, {"softcap": 2.0})]


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kinds", KINDS)
def test_forward(device, kinds, dtype, layout):
    """Beside float64 of what is stored, within the bound of the dtype; and of the tensors before, within what storage adds."""
    pages = StoredPages([13, 6, 0], kinds, device, dtype, layout)
    q = torch.randn(3, 3, 4, 16, device=device, dtype=dtype).transpose(1, 2)
    sink, begin = torch.randn(4, device=device), numbers(2, 6, 0, device=device)
    u = U[dtype] if kinds[1] is None else U[torch.bfloat16]  # what P is rounded to
    for options, own in (*OPTIONS, ({"sink": sink}, {"sink": sink}), ({"seq_begin": begin, "causal": True}, {"causal": True})):
        o, lse = pages.call(q, return_lse=True, **options)
        assert o.stride() == q.stride() and o.dtype == dtype and lse.dtype == torch.float32
        assert torch.equal(pages.call(q, **options), o)
        for i in range(3):
            first = int(begin[i]) if "seq_begin" in options else 0
            rows = q[i].transpose(0, 1)
            k, v = (pages.rows(t, i) for t in pages.values)
            expected, expected_lse = one_request(rows, k, v, first, **own)
            bound = 2 * u * one_request(rows, k, v.abs(), first, **own)[0] + 1e-5
            assert ((o[i].double() - expected).abs() <= bound).all(), (options, i)
            assert torch.allclose(lse[i].double(), expected_lse, atol=1e-4, rtol=1e-5), (options, i)
            if not len(k):
                continue
            k_16, v_16 = (pages.rows(t, i).double() for t in pages.original)
            before, before_lse = one_request(rows, k_16, v_16, first, **own)
            scale = own.get("scale", 0.25)
            e = (torch.einsum("qhd,khd->hqk", rows.double().abs(), (k - k_16).abs().repeat_interleave(2, 1)) * scale).amax(-1)
            finite = torch.isfinite(before_lse)
            assert ((lse[i].double() - before_lse).abs()[finite] <= e[finite] + 1e-4).all(), (options, i)
            of_v = (v - v_16).abs().amax(), v_16.abs().amax()
            bound = ((2 * e).exp() - 1) * of_v[1] + of_v[0] + 2 * u * (of_v[0] + of_v[1])
            assert ((o[i].double() - before).abs() <= bound[..., None]).all(), (options, i)


def test_forward_of_packed_queries(device):
    pages = StoredPages([13, 6, 9], (E4M3, I8), device)
    q, cu = torch.randn(9, 4, 16, device=device, dtype=torch.bfloat16), numbers(0, 1, 6, 8, device=device)
    index, slopes = numbers(2, 0, 1, device=device), torch.tensor([0.5, 0.25, 0.125, 0.0625], device=device)
    pages.used = pages.used[index.long()].contiguous()
    o, lse = pages.call(q, cu_seqlens_q=cu, batch_index=index, causal=True, score=functions.alibi(), captures={"slope": slopes},
                        max_s_q=5, max_s_kv=13, return_lse=True)
    for i in range(3):
        rows = slice(int(cu[i]), int(cu[i + 1]))
        k, v = (pages.rows(t, i, int(index[i])) for t in pages.values)
        expected = one_request(q[rows], k, v, causal=True, slope=slopes)
        assert torch.allclose(o[rows].double().transpose(0, 1), expected[0], atol=2e-2, rtol=2e-2)
        assert torch.allclose(lse[:, rows].double(), expected[1], atol=1e-4)
    assert (o[8] == 0).all() and torch.isneginf(lse[:, 8]).all()


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("s_max", [64, 48, 7])
def test_contiguous_cache(device, s_max, layout):
    """KVCache: scales a row, of a head of a row of the cache, and of a head."""
    q = torch.randn(2, 4, 1, 16, device=device, dtype=torch.bfloat16)
    shape = (3, s_max, 2, 16) if layout == "NHD" else (3, 2, s_max, 16)
    original = [torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(2)]
    used, new = numbers(7, 5, device=device), torch.randn(2, 2, 1, 16, device=device, dtype=torch.bfloat16)
    shared = torch.rand(3, 2, device=device) + 0.5
    axis = 1 if layout == "NHD" else 2
    for scale in (None, shared.unsqueeze(axis).expand(shape[:3]), shared[:1].unsqueeze(axis).expand(shape[:3])):
        k, v, k_scale, v_scale = stored(*original, (E4M3, I8), layout)
        given = {}
        if scale is not None:
            k_scale = v_scale = scale
            given["scales_given"] = True
        cache = KVCache(k, v, used, layout=layout, k_scale=k_scale, v_scale=v_scale)
        cache.append(new, new, **given)
        indexed = cache._replace(batch_index=numbers(0, 1, device=device))
        o = cache.attention(q)
        assert torch.equal(indexed.attention(q), o)
        for i in range(2):
            rows = [t if layout == "NHD" else t.transpose(1, 2) for t in (read(k, k_scale), read(v, v_scale))]
            expected, _ = one_request(q[i].transpose(0, 1), *(t[i, : int(used[i])] for t in rows))
            size, _ = one_request(q[i].transpose(0, 1), rows[0][i, : int(used[i])], rows[1][i, : int(used[i])].abs())
            assert ((o[i].double() - expected).abs() <= 2.0**-7 * size + 1e-5).all()


@pytest.mark.parametrize("kinds", [(E4M3, E4M3), (I8, I8), (I8, None)])
@pytest.mark.parametrize("kind", ["pages", "one request", "contiguous", "index"])
def test_kvcache_with_descales(device, kind, kinds):
    """flash_attn_with_kvcache: what a stored element is multiplied by, a request and head, or a head."""
    torch.manual_seed(4)
    b, s_max, dtype = 1 if kind == "one request" else 2, 48, torch.bfloat16
    q, new = torch.randn(b, 1, 4, 16, device=device, dtype=dtype), torch.randn(b, 1, 2, 16, device=device, dtype=dtype)
    descales = [torch.rand(b, 2, device=device) * 0.02 + 0.04 for _ in range(2)]
    if kind in ("pages", "index"):
        descales = [t[:1].expand(b, 2) for t in descales]
    lengths, given = [14, 5][:b], {"cache_seqlens": numbers(*[14, 5][:b], device=device)}
    codes = lambda shape, of: (torch.randn(shape, device=device) * 30).to(of or dtype)  # noqa: E731
    if kind in ("pages", "one request"):
        pages = Pages([s_max - 1] * b, device, dtype, page=8, d=16)
        caches = [codes(pages.k.shape, of) for of in kinds]
        given["block_table"] = pages.table
        rows = lambda cache, i: cache[pages.table[i].long()].flatten(0, 1)  # noqa: E731
    else:
        caches = [codes((4, s_max, 2, 16), of) for of in kinds]
        order = [3, 1] if kind == "index" else [0, 1]
        given |= {"cache_batch_idx": numbers(*order, device=device)} if kind == "index" else {}
        rows = lambda cache, i: cache[order[i]]  # noqa: E731
    scales = [t if of else None for t, of in zip(descales, kinds)]
    o = flash_attn_with_kvcache(q, *caches, new, new, k_descale=scales[0], v_descale=scales[1], causal=True, **given)
    for i in range(b):
        k, v = (rows(t.double(), i)[: lengths[i] + 1] * (s.double()[i][:, None] if s is not None else 1)
                for t, s in zip(caches, scales))
        for row, scale, of in zip((k[-1], v[-1]), scales, kinds):
            expected = new[i, 0].double()
            near = scale[i].double()[:, None] / 2 if of == I8 else expected.abs() / 16 + 1e-4
            assert ((row - expected).abs() <= near * 1.001).all()
        expected, _ = one_request(q[i], k, v)
        size, _ = one_request(q[i], k, v.abs())
        assert ((o[i].double().transpose(0, 1) - expected).abs() <= 2.0**-7 * size + 1e-5).all()
    one = flash_attn_with_kvcache(q, *caches, causal=True, k_descale=torch.ones(b, 2, device=device)[:1].expand(b, 2), **given)
    assert torch.equal(flash_attn_with_kvcache(q, *caches, causal=True, **given), one), "None is 1"


def test_kvcache_with_descales_refuses():
    q, cache = torch.randn(2, 1, 4, 16).half(), torch.zeros(2, 32, 2, 16, dtype=I8)
    scale = torch.rand(2, 2)
    base = {"q": q, "k_cache": cache, "v_cache": cache.clone(), "cache_seqlens": 4, "k_descale": scale, "v_descale": scale}
    for change, kind, *words in (
            ({"block_table": numbers(0, 1)[:, None]}, ValueError, "k_descale has strides", "one scale of a head", "stride of 0"),
            ({"cache_batch_idx": numbers(0, 1)}, ValueError, "k_descale has strides", "cache_batch_idx"),
            ({"k_descale": scale.double()}, TypeError, "k_descale is torch.float64", "torch.float32"),
            ({"k_descale": 0.5}, TypeError, "k_descale is a builtins.float"),
            ({"v_descale": scale[0]}, ValueError, "v_descale has shape [2]", "[2, 2]"),
            ({"v_descale": scale.to("meta")}, ValueError, "v_descale is on meta"),
            ({"v_cache": torch.zeros(2, 32, 2, 16).half()}, ValueError, "v_descale is given", "torch.float16"),
            ({"q": q.float()}, TypeError, "q is torch.float32", "torch.float16 and torch.bfloat16"),
            ({"k_cache": cache[..., :8]}, ValueError, "k_cache has a head dim of 8", "multiples of 16"),
            ({"k_cache": cache.to(torch.uint8)}, TypeError, "k_cache is torch.uint8", "torch.int8")):
        refused(kind, lambda: flash_attn_with_kvcache(**{**base, **change}), *words)
    refused(RuntimeError, lambda: flash_attn_with_kvcache(**{**base, "k_descale": scale.clone().requires_grad_()}),
            "k_descale requires a gradient")
    cu = numbers(0, 1, 2)
    refused(TypeError, lambda: flash_attn_varlen_func(q[:, 0], cache, cache, cu, cu, 1, 1, block_table=cu[None]),
            "k is torch.int8")


def test_module_with_a_stored_cache(device):
    model = Attention(4, 16, kv_heads=2, causal=True, window_left=6, device=device)
    q, k, v = (torch.randn(2, 9, h, 16, device=device, dtype=torch.bfloat16) for h in (4, 2, 2))
    used = numbers(0, 0, device=device)
    caches = [torch.zeros(2, 32, 2, 16, device=device, dtype=E4M3) for _ in range(2)]
    scales = torch.zeros(2, 2, 32, 2, device=device)
    cache, parts = KVCache(*caches, used, k_scale=scales[0], v_scale=scales[1]), []
    for rows in (slice(0, 6), slice(6, 7), slice(7, 9)):
        used += rows.stop - rows.start
        parts.append(model(q[:, rows], k[:, rows], v[:, rows], cache))
    plain = [read(t, s)[:, :9].to(torch.bfloat16).float() for t, s in zip(caches, scales)]
    assert torch.allclose(torch.cat(parts, 1).float(), model(q.float(), *plain), atol=3e-2)


def stored_arguments(pages):
    return (pages.k, pages.v, pages.table, pages.used)


def forward_arguments(q, pages):
    return (q, pages.k, pages.v, None, [], pages.table, pages.used, None, None, None, None, 0, 0, [], pages.layout, True, None, 3,
            None, 0, None, None, [], [], pages.k_scale, pages.v_scale)


def append_arguments(pages, k, v, given=False):
    scales = pages.k_scale, pages.v_scale
    return (k, v, pages.k, pages.v, None, pages.table, pages.used, *[None] * 6, pages.layout, 0, 0.0, False, *((None, None) if given else scales), *(scales if given else (None, None)))


@pytest.mark.parametrize("kinds", [(E4M3, E4M3), (I8, I8), (I8, None)])
def test_opcheck(kinds):
    pages = StoredPages([13, 6], kinds)
    q, k, v = (torch.randn(2, h, 1, 16, dtype=torch.bfloat16) for h in (4, 2, 2))
    checks = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    checks = checks[E4M3 in kinds:]  # the first compares by torch.allclose, which PyTorch has not of float8
    torch.library.opcheck(_cache_ops.forward_op, forward_arguments(q, pages), test_utils=checks)
    torch.library.opcheck(_cache_ops.append_op, append_arguments(pages, k, v), test_utils=checks)
    torch.library.opcheck(_cache_ops.append_op, append_arguments(pages, k, v, given=True), test_utils=checks)
    written = [t for t in (pages.k, pages.v, pages.k_scale, pages.v_scale) if t is not None]
    versions = [t._version for t in written]
    _cache_ops.append_op(*append_arguments(pages, k, v))
    assert all(t._version > n for t, n in zip(written, versions))
    versions = [t._version for t in written]
    _cache_ops.append_op(*append_arguments(pages, k, v, given=True))
    assert [t._version > n for t, n in zip(written, versions)] == [True, True, *[False] * (len(written) - 2)]
    both = [*append_arguments(pages, k, v)]
    both[-2:] = [pages.k_scale, pages.v_scale]
    refused(ValueError, lambda: _cache_ops.append_op(*both), "k_scale_given")


def step(q, k, v, pool_k, pool_v, table, used, k_scale, v_scale):
    """What a layer does in one step of a decode."""
    append(k, v, pool_k, pool_v, used, block_table=table, k_scale=k_scale, v_scale=v_scale)
    o, lse = paged_attention(q, pool_k, pool_v, table, used, causal=True, return_lse=True, k_scale=k_scale, v_scale=v_scale)
    return o.sin(), lse


@pytest.mark.parametrize("kinds", [(E4M3, E4M3), (I8, I8)])
@pytest.mark.parametrize("backend,dynamic", [("aot_eager", False), ("aot_eager", True), ("inductor", None)])
def test_fullgraph(backend, dynamic, kinds):
    compiled = torch.compile(step, fullgraph=True, backend=backend, dynamic=dynamic)
    for lengths in ([13, 6], [9, 3, 1]):
        pages, other = StoredPages(lengths, kinds), StoredPages(lengths, kinds)
        new = [torch.randn(len(lengths), h, 1, 16, dtype=torch.bfloat16) for h in (4, 2, 2)]
        expected = step(*new, *stored_arguments(pages), pages.k_scale, pages.v_scale)
        actual = compiled(*new, *stored_arguments(other), other.k_scale, other.v_scale)
        assert all(torch.allclose(x, y, atol=1e-2 if backend == "inductor" else 0) for x, y in zip(actual, expected))
        assert equal(pages.k, other.k) and equal(pages.v, other.v), "the cache is changed in place"
        assert torch.equal(pages.k_scale, other.k_scale) and torch.equal(pages.v_scale, other.v_scale)


def test_fullgraph_with_given_scales():
    q, new = torch.randn(2, 1, 4, 16).half(), torch.randn(2, 1, 2, 16).half()
    descale, used = torch.rand(2, 2) + 0.1, numbers(3, 9)
    scales = {"k_descale": descale, "v_descale": descale}
    call = lambda k, v: flash_attn_with_kvcache(q, k, v, new, new, cache_seqlens=used, **scales)  # noqa: E731
    caches, others = ([torch.zeros(2, 32, 2, 16, dtype=I8) for _ in range(2)] for _ in range(2))
    expected = call(*caches)
    assert torch.equal(torch.compile(call, fullgraph=True, backend="aot_eager")(*others), expected)
    assert torch.equal(caches[0], others[0]) and torch.equal(caches[1], others[1]) and caches[0].any()


def test_cuda_graph(device):
    """A captured step of a decode follows lengths and new rows, and writes their scales."""
    if device != "cuda":
        pytest.skip("of a GPU")
    pages = StoredPages([40, 3], (E4M3, I8), device, page=16, d=64, room=16)
    new = [torch.randn(2, h, 1, 64, device=device, dtype=torch.bfloat16) for h in (4, 2, 2)]
    arguments = (*new, *stored_arguments(pages), pages.k_scale, pages.v_scale)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(*arguments)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, lse = step(*arguments)
    for _ in range(3):
        pages.used.add_(1)
        new[1].normal_(), new[2].normal_()
        others = [t.clone() for t in arguments]
        graph.replay()
        expected = step(*others)
        assert torch.equal(o, expected[0]) and torch.equal(lse, expected[1])
        assert all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(arguments, others))


def test_fake_tensors_and_export():
    with FakeTensorMode():
        q, k = torch.randn(2, 4, 1, 16).half(), torch.randn(2, 2, 1, 16).half()
        cache, scale = torch.zeros(9, 4, 2, 16, dtype=E4M3), torch.zeros(9, 4, 2)
        table, used = torch.zeros(2, 4, dtype=INT), torch.zeros(2, dtype=INT)
        append(k, k, cache, cache.clone(), used, block_table=table, k_scale=scale, v_scale=scale.clone())
        o = paged_attention(q, cache, cache, table, used, k_scale=scale, v_scale=scale)
        assert o.shape == q.shape and o.dtype == q.dtype

    class Step(torch.nn.Module):
        def forward(self, *tensors):
            return step(*tensors)

    pages, other = StoredPages([13, 6], (E4M3, I8)), StoredPages([13, 6], (E4M3, I8))
    new = [torch.randn(2, h, 1, 16, dtype=torch.bfloat16) for h in (4, 2, 2)]
    scales = pages.k_scale, pages.v_scale
    program = torch.export.export(Step(), (*new, *(t.clone() for t in stored_arguments(pages)), *(t.clone() for t in scales)))
    expected = step(*new, *stored_arguments(pages), *scales)
    actual = program.module()(*new, *stored_arguments(other), other.k_scale, other.v_scale)
    assert all(torch.equal(x, y) for x, y in zip(actual, expected)) and torch.equal(other.k_scale, pages.k_scale)


def test_gradients_are_refused():
    pages = StoredPages([13, 6], (I8, I8))
    q, k = torch.randn(2, 4, 1, 16).half(), torch.randn(2, 2, 1, 16).half()
    pages.k_scale.requires_grad_()
    refused(RuntimeError, lambda: pages.call(q), "k_scale requires a gradient", "no gradients")
    call = lambda: append(k, k, pages.k, pages.v, pages.used, block_table=pages.table, k_scale=pages.k_scale,  # noqa: E731
                          v_scale=pages.v_scale)
    refused(RuntimeError, call, "k_scale requires a gradient", "append has no gradients")
    refused(RuntimeError, lambda: _cache_ops.forward_op(*forward_arguments(q, pages)), "k_scale requires a gradient")
    with torch.no_grad():
        call()
        pages.call(q)


def test_errors():
    pages = StoredPages([13, 6], (E4M3, I8))
    q, k = torch.randn(2, 4, 1, 16).half(), torch.randn(2, 2, 1, 16).half()
    scale, plain = pages.k_scale, pages.original[0].half()
    forward = {"q": q, "k_pages": pages.k, "v_pages": pages.v, "block_table": pages.table, "seqused_kv": pages.used,
               "k_scale": scale, "v_scale": pages.v_scale}
    shared = (("q", "k_pages", "v_pages", paged_attention, forward),
              ("k", "k_cache", "v_cache", append, {"k": k, "v": k, "k_cache": pages.k, "v_cache": pages.v,
                                                   "seqused_kv": pages.used, "block_table": pages.table, "k_scale": scale,
                                                   "v_scale": pages.v_scale}))
    for of, name, other, function, base in shared:
        for change, kind, *words in (
                ({"k_scale": None}, TypeError, "k_scale is None", name, "torch.float8_e4m3fn", "[pages, page_size, h_kv]"),
                ({"v_scale": None}, TypeError, "v_scale is None", other, "torch.int8"),
                ({"k_scale": 0.5}, TypeError, "k_scale is a builtins.float", "torch.Tensor"),
                ({"k_scale": scale.half()}, TypeError, "k_scale is torch.float16", "torch.float32"),
                ({"k_scale": scale[0]}, ValueError, "k_scale has shape", "[pages, page_size, h_kv]"),
                ({"k_scale": scale[1:]}, ValueError, "k_scale has shape", f"the rows of {name}"),
                ({"v_scale": scale.to("meta")}, ValueError, "v_scale is on meta"),
                ({name: plain}, ValueError, "k_scale is given", "None", "torch.float16"),
                ({name: pages.k.view(torch.float8_e5m2)}, TypeError, f"{name} is torch.float8_e5m2"),
                ({name: pages.k[..., 0]}, ValueError, f"{name} has shape", "[pages, page_size, h_kv, d]"),
                ({name: pages.k.to("meta")}, ValueError, f"{name} is on meta"),
                ({of: base[of].float(), **({"v": base["v"].float()} if of == "k" else {})}, TypeError, f"{of} is torch.float32",
                 "torch.float16 and torch.bfloat16"),
                ({of: base[of][..., :8]}, ValueError, "head_dim", "multiple of 16")):
            refused(kind, lambda: function(**{**base, **change}), *words)
    base = shared[1][4]
    refused(ValueError, lambda: append(**{**base, "k_cache": plain, "v_cache": plain.clone(), "k_scale": None, "v_scale": None,
                                          "scales_given": True}), "scales_given is True", "8 bits")
    level = SharedPrefix(pages.table, numbers(0, 2), numbers(4))
    refused(TypeError, lambda: shared_prefix_attention(q, pages.k, pages.v, pages.table, pages.used, pages.used, [level]),
            "k_scale is None", "k_pages of torch.float8_e4m3fn")
    apart = KVCache(torch.zeros(2, 64, 2, 16, dtype=I8), torch.zeros(2, 64, 2, 16, dtype=I8), pages.used,
                    k_scale=torch.zeros(2, 32, 2), v_scale=torch.zeros(2, 64, 2))
    refused(ValueError, lambda: apart.attention(q), "k_scale has shape [2, 32, 2]", "[2, 64, 2]")


def test_latent_rows_are_appended(device):
    place = (capi.DEVICE_HOST, 0) if device == "cpu" else (capi.DEVICE_CUDA, 0)
    attention = capi.Attention(load(), 576, "bfloat16", device=place, value_in_key=512, page_size=-1, k_dtype="float8_e4m3fn")
    torch.manual_seed(3)
    k = torch.randn(2, 1, 3, 576, dtype=torch.bfloat16, device=device)
    cache = torch.zeros(2, 1, 5, 656, dtype=torch.uint8, device=device)
    lengths = torch.tensor([3, 4], dtype=torch.int32, device=device)
    attention.bind_append(k, None, cache.view(E4M3), None, seqused_kv=lengths)()
    rows = torch.stack([cache[0, 0, :3], cache[1, 0, 1:4]])
    codes, scales = rows[..., :512].view(E4M3).double(), rows[..., 512:528].contiguous().view(torch.float32)
    groups = k[:, 0, :, :512].double().unflatten(-1, (4, 128))
    assert torch.allclose(scales.double(), groups.abs().amax(-1) / 448, rtol=1e-6)
    close(codes.unflatten(-1, (4, 128)), scales, groups, E4M3)
    assert torch.equal(rows[..., 528:].contiguous().view(torch.bfloat16), k[:, 0, :, 512:])
    refused(ValueError, attention.bind_append(k, k, cache.view(E4M3), None, seqused_kv=lengths), "v = given")
