"""flash_attn_with_kvcache and the module, beside plain PyTorch in float64."""

import inspect
import itertools

import pytest
from conftest import refused

torch = pytest.importorskip("torch")

from cache_cases import TOLERANCE, Pages, angles, numbers, one_request, turned  # noqa: E402
from fa_attention import flash_attn  # noqa: E402
from fa_attention.flash_attn import flash_attn_with_kvcache  # noqa: E402
from fa_attention.torch import Attention, KVCache  # noqa: E402


def kvcache_reference(q, k_rows, v_rows, k, v, lengths, cos, sin, interleaved, begin, **options):
    """flash_attn_with_kvcache by its documentation: k_rows, v_rows, lists of [s_max, h_kv, d], are changed."""
    outputs, statistics = [], []
    slopes = options.pop("slopes", None)
    by_row = options.get("causal", False) or options.get("window", (-1, -1)) != (-1, -1)
    for i, length in enumerate(lengths):
        q_i, used = q[i], length
        if k is not None:
            used, k_i = length + k.shape[1], k[i]
            if cos is not None:
                k_i = turned(k_i, cos, sin, torch.arange(length, used, device=q.device), interleaved)
                rows = torch.arange(q.shape[1], device=q.device) * by_row + length
                q_i = turned(q_i, cos, sin, rows, interleaved)
            k_rows[i][length:used], v_rows[i][length:used] = k_i, v[i]
        slope = None if slopes is None else slopes[i] if slopes.dim() == 2 else slopes
        o, lse = one_request(q_i, k_rows[i][:used], v_rows[i][:used], 0 if begin is None else int(begin[i]), slope=slope, **options)
        outputs.append(o.transpose(0, 1))
        statistics.append(lse)
    return torch.stack(outputs), torch.stack(statistics)


SLOPES = torch.tensor([[0.5, 0.25, 0.125, 0.0625], [0.3, 0.2, 0.1, 0.05]])
KINDS = [{}, {"causal": True}, {"window": (5, 2)}, {"causal": True, "window": (4, -1), "softcap": 2.5},
         {"slopes": SLOPES[0]}, {"slopes": SLOPES, "causal": True}]


@pytest.mark.parametrize("options", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("s_q,s_new,rotary", [(1, 1, None), (3, 3, "halves"), (3, 2, "pairs"), (2, 0, None), (1, 1, "pairs")])
@pytest.mark.parametrize("kind", ["pages", "contiguous", "index", "left padding"])
def test_kvcache(device, kind, s_q, s_new, rotary, dtype, options):
    torch.manual_seed(s_q + 10 * s_new)
    lengths, h, h_kv, d, s_max = [14, 5], 4, 2, 16, 48
    q = torch.randn(2, s_q, h, d, device=device, dtype=dtype)
    k, v = (torch.randn(2, s_new, h_kv, d, device=device, dtype=dtype) for _ in range(2)) if s_new else (None, None)
    given = {"cache_seqlens": numbers(*lengths, device=device)}
    rows_of, begin = [0, 1], None
    if kind == "pages":
        pages = Pages([s_max - 1] * 2, device, dtype, page=8, h_kv=h_kv, d=d)
        cache, given["block_table"] = (pages.k, pages.v), pages.table
        gather = lambda pool: [pool[pages.table[i].long()].flatten(0, 1) for i in range(2)]  # noqa: E731
    else:
        cache = tuple(torch.randn(4 if kind == "index" else 2, s_max, h_kv, d, device=device, dtype=dtype) for _ in range(2))
        if kind == "index":
            rows_of = [3, 1]
            given["cache_batch_idx"] = numbers(*rows_of, device=device)
        if kind == "left padding":
            begin = given["cache_leftpad"] = numbers(3, 5, device=device)
        gather = lambda pool: [pool[i].clone() for i in rows_of]  # noqa: E731
    cos = sin = None
    if rotary:
        cos, sin = angles(s_max, 8, device, dtype)
    own = {"slopes" if name == "slopes" else name: t.to(device) if name == "slopes" else t for name, t in options.items()}
    names = {"window": "window_size", "slopes": "alibi_slopes"}
    k_rows, v_rows = gather(cache[0]), gather(cache[1])
    expected, expected_lse = kvcache_reference(q, k_rows, v_rows, k, v, lengths, cos, sin, rotary == "pairs", begin, **own)
    o, lse = flash_attn_with_kvcache(q, *cache, k, v, cos, sin, rotary_interleaved=rotary == "pairs", return_softmax_lse=True,
                                     **given, **{names.get(name, name): t for name, t in own.items()})
    assert o.shape == q.shape and o.is_contiguous() and lse.shape == (2, h, s_q)
    assert torch.allclose(o.double(), expected, **TOLERANCE[dtype])
    assert torch.allclose(lse.double(), expected_lse, **TOLERANCE[dtype])
    for actual, rows in zip(map(gather, cache), (k_rows, v_rows)):
        assert all(torch.allclose(x.double(), y.double(), **TOLERANCE[dtype]) for x, y in zip(actual, rows))


def test_kvcache_of_whole_and_counted_caches(device):
    q = torch.randn(2, 3, 4, 16, device=device)
    for s_max, order in itertools.product((64, 48, 7), (False, True)):
        k, v = (torch.randn(2, s_max, 2, 16, device=device) for _ in range(2))
        if order:  # heads first in memory: one page for each row of the cache
            k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (k, v))
        whole = flash_attn_with_kvcache(q, k, v, causal=True)
        assert torch.allclose(whole, flash_attn.flash_attn_func(q, k, v, causal=True), atol=1e-5)
        assert torch.equal(flash_attn_with_kvcache(q, k, v, cache_seqlens=s_max, causal=True), whole)
        part = flash_attn_with_kvcache(q, k, v, cache_seqlens=5, softmax_scale=0.3)
        assert torch.allclose(part, flash_attn.flash_attn_func(q, k[:, :5], v[:, :5], softmax_scale=0.3), atol=1e-5)
    larger = torch.randn(2, 5, 7, 2, 16, device=device)
    part = flash_attn_with_kvcache(q, *larger, cache_seqlens=5)
    assert torch.allclose(part, flash_attn.flash_attn_func(q, larger[0, :2, :5], larger[1, :2, :5]), atol=1e-5)


@pytest.mark.parametrize("d_qk, d_v", [(59, 59), (12, 16), (16, 5)])
@pytest.mark.parametrize("pages", [False, True])
def test_kvcache_of_any_head_dim(device, d_qk, d_v, pages):
    """And with sides of a window that are tensors, as FlashAttention's own test gives them."""
    q = torch.randn(2, 3, 4, d_qk, device=device)
    k_rows, v_rows = torch.randn(2, 32, 2, d_qk, device=device), torch.randn(2, 32, 2, d_v, device=device)
    k, v = torch.randn(2, 3, 2, d_qk, device=device), torch.randn(2, 3, 2, d_v, device=device)
    shape = (4, 16) if pages else (2, 32)
    k_cache, v_cache = (t.clone().view(*shape, *t.shape[2:]) for t in (k_rows, v_rows))
    given = {"block_table": numbers(0, 1, 2, 3, device=device).view(2, 2)} if pages else {}
    window = torch.tensor([6, 2])
    o, lse = flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=20, window_size=window, return_softmax_lse=True,
                                     **given)
    k_rows[:, 20:23], v_rows[:, 20:23] = k, v
    assert torch.equal(k_cache.view_as(k_rows), k_rows) and torch.equal(v_cache.view_as(v_rows), v_rows)
    k_rows, v_rows = k_rows[:, :23], v_rows[:, :23]
    expected, expected_lse, _ = flash_attn.flash_attn_func(q, k_rows, v_rows, window_size=(6, 2), return_attn_probs=True)
    assert o.shape == (2, 3, 4, d_v) and torch.allclose(o, expected, atol=1e-5) and torch.allclose(lse, expected_lse, atol=1e-5)


def test_kvcache_of_any_head_dim_refuses_what_others_refuse(device):
    q, cache = torch.randn(1, 1, 2, 12, device=device), torch.randn(1, 16, 2, 12, device=device)
    new = torch.randn(1, 1, 2, 12, device=device)
    base = {"q": q, "k_cache": cache, "v_cache": cache.clone(), "k": new, "v": new, "cache_seqlens": 3}
    kept = cache.clone()
    for change, words in (({"k": new[..., :10]}, ("k has a head dim of 10", "12")), ({"v": new[..., :9]}, ("v has a head dim of 9", "12")),
                          ({"k": None}, ("v is given",)), ({"k_descale": torch.ones(1, 2, device=device)}, ("k_descale",))):
        refused(ValueError, lambda: flash_attn_with_kvcache(**{**base, **change}), *words)
    assert torch.equal(cache, kept)


def test_kvcache_has_flash_attns_signature():
    parameters = inspect.signature(flash_attn_with_kvcache).parameters
    assert {name: p.default for name, p in list(parameters.items())[3:]} == {
        "k": None, "v": None, "rotary_cos": None, "rotary_sin": None, "cache_seqlens": None, "cache_batch_idx": None,
        "cache_leftpad": None, "block_table": None, "softmax_scale": None, "causal": False, "window_size": (-1, -1), "softcap": 0.0,
        "rotary_interleaved": True, "alibi_slopes": None, "num_splits": 0, "return_softmax_lse": False,
        "k_descale": None, "v_descale": None}
    assert list(parameters)[:3] == ["q", "k_cache", "v_cache"]


def test_kvcache_compiles():
    k, v = torch.randn(2, 32, 2, 16), torch.randn(2, 32, 2, 16)
    q, new = torch.randn(2, 1, 4, 16), torch.randn(2, 1, 2, 16)
    cos, sin = angles(32, 16)
    call = lambda q, k, v, n: flash_attn_with_kvcache(q, k, v, new, new, cos, sin, cache_seqlens=n, causal=True)  # noqa: E731
    other_k, other_v = k.clone(), v.clone()
    expected = call(q, k, v, numbers(4, 9))
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, other_k, other_v, numbers(4, 9)), expected)
    assert torch.equal(k, other_k) and torch.equal(v, other_v)


def test_kvcache_errors():
    q, new, cache = torch.randn(2, 1, 4, 16), torch.randn(2, 1, 2, 16), torch.randn(2, 32, 2, 16)
    cos, sin = angles(32, 16)
    base = {"q": q, "k_cache": cache, "v_cache": cache.clone(), "k": new, "v": new, "cache_seqlens": numbers(3, 4)}
    for change, kind, *words in (
            ({"k": None}, ValueError, "v is given", "None without k"),
            ({"v": None}, ValueError, "k is given", "None without v"),
            ({"k": None, "v": None, "rotary_cos": cos}, ValueError, "rotary_cos is given", "k and v"),
            ({"rotary_cos": cos}, ValueError, "rotary_cos and rotary_sin"),
            ({"cache_seqlens": None}, ValueError, "cache_seqlens is None"),
            ({"cache_seqlens": numbers(3, 4, dtype=torch.int64)}, TypeError, "cache_seqlens is torch.int64", "torch.int32"),
            ({"cache_seqlens": numbers(3)}, ValueError, "cache_seqlens has shape [1]", "[2]"),
            ({"cache_seqlens": [3, 4]}, TypeError, "cache_seqlens is a builtins.list"),
            ({"cache_seqlens": 32}, ValueError, "seqused_kv[0]", "33"),
            ({"cache_batch_idx": numbers(0, 1, dtype=torch.int64)}, TypeError, "cache_batch_idx is torch.int64"),
            ({"cache_leftpad": numbers(0, 1).to("meta")}, ValueError, "cache_leftpad is on meta"),
            ({"block_table": numbers(0, 1, dtype=torch.int64)[:, None]}, TypeError, "block_table is torch.int64"),
            ({"k_cache": cache[0]}, ValueError, "k_cache has shape"),
            ({"k_cache": cache.half()}, TypeError, "k_cache is torch.float16"),
            ({"v_cache": cache.to("meta")}, ValueError, "v_cache is on meta"),
            ({"k_cache": cache[..., :12]}, ValueError, "k_cache has a head dim of 12", "multiples of 8"),
            ({"k_cache": torch.randn(2, 32, 16, 2).transpose(2, 3)}, ValueError, "k_cache has strides"),
            ({"k_cache": cache[:1], "v_cache": cache[:1].clone()}, ValueError, "k_cache"),
            ({"k": new[0]}, ValueError, "k has shape"),
            ({"q": q[0]}, ValueError, "q has shape"),
            ({"alibi_slopes": torch.rand(4, dtype=torch.float64).to("meta")}, ValueError, "slope is on meta"),
            ({"q": 3}, TypeError, "q is a builtins.int")):
        refused(kind, lambda: flash_attn_with_kvcache(**{**base, **change}), *words)


def test_varlen_over_pages(device):
    pages = Pages([13, 6], device)
    q, cu_q, cu_k = torch.randn(7, 4, 16, device=device), numbers(0, 3, 7, device=device), numbers(0, 13, 19, device=device)
    o, lse, none = flash_attn.flash_attn_varlen_func(q, pages.k, pages.v, cu_q, cu_k, 4, 13, causal=True, softcap=2.0,
                                                     return_attn_probs=True, block_table=pages.table)
    k, v = (torch.cat([pages.rows(pool, i) for i in range(2)]) for pool in (pages.k, pages.v))
    expected = flash_attn.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 4, 13, causal=True, softcap=2.0, return_attn_probs=True)
    assert none is None and torch.allclose(o, expected[0], atol=1e-5) and torch.allclose(lse, expected[1], atol=1e-5)
    given = (q, pages.k, pages.v, cu_q, cu_k, 4, 13)
    call = lambda **more: flash_attn.flash_attn_varlen_func(*given, block_table=pages.table, **more)  # noqa: E731
    refused(ValueError, lambda: call(dropout_p=0.5), "dropout_p")
    assert torch.equal(call(causal=True, softcap=2.0), o)


def test_module(device):
    torch.manual_seed(0)
    model = Attention(4, 16, kv_heads=2, causal=True, window_left=5, softcap=3.0, sinks=True, device=device)
    assert list(model.state_dict()) == ["sinks"] and list(Attention(4, 16).state_dict()) == []
    with torch.no_grad():
        model.sinks.normal_()
    q, k, v = (torch.randn(2, 9, h, 16, device=device, requires_grad=True) for h in (4, 2, 2))
    o = model(q, k, v)
    for i in range(2):
        expected, _ = one_request(q[i], k[i], v[i], causal=True, window=(5, -1), softcap=3.0, sink=model.sinks)
        assert torch.allclose(o[i].double(), expected.transpose(0, 1), atol=2e-5)
    o.square().sum().backward()
    assert model.sinks.grad.abs().sum() > 0 and q.grad.abs().sum() > 0
    other = Attention(4, 16, kv_heads=2, causal=True, window_left=5, softcap=3.0, sinks=True, device=device)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(q, k, v), o)
    assert "window_left=5" in repr(model)


@pytest.mark.parametrize("kind", ["pages", "NHD", "HND"])
def test_module_with_a_cache(device, kind):
    """A prefill, then one row at a time, beside all rows at once."""
    model = Attention(4, 16, kv_heads=2, causal=True, window_left=6, sinks=True, device=device)
    q, k, v = (torch.randn(2, 9, h, 16, device=device) for h in (4, 2, 2))
    used = numbers(0, 0, device=device)
    if kind == "pages":
        pages = Pages([16, 16], device)
        cache = KVCache(pages.k, pages.v, used, pages.table)
    else:
        shape = (2, 32, 2, 16) if kind == "NHD" else (2, 2, 32, 16)
        cache = KVCache(torch.zeros(shape, device=device), torch.zeros(shape, device=device), used, layout=kind)
    with torch.no_grad():
        whole, parts = model(q, k, v), []
        for rows in (slice(0, 6), slice(6, 7), slice(7, 8), slice(8, 9)):
            used += rows.stop - rows.start
            parts.append(model(q[:, rows], k[:, rows], v[:, rows], cache))
        assert torch.allclose(torch.cat(parts, 1), whole, atol=1e-5)
        assert torch.equal(model(q[:, 8:], cache=cache), parts[-1]), "a call without new keys reads the cache alone"
    refused(RuntimeError, lambda: model(q[:, 8:], cache=cache), "sink requires a gradient")


def test_module_compiles():
    model = Attention(4, 16, kv_heads=2, causal=True).requires_grad_(False)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    q, k, v = (torch.randn(2, 1, h, 16) for h in (4, 2, 2))
    assert torch.equal(compiled(q, k, v), model(q, k, v))
    results = []
    for call in (model, compiled):
        cache = KVCache(torch.zeros(2, 32, 2, 16), torch.zeros(2, 32, 2, 16), numbers(1, 1))
        first = call(q, k, v, cache)
        cache.seqused_kv.add_(1)
        results.append((first, call(q, v, k, cache), cache.k))
    assert all(torch.equal(x, y) for x, y in zip(*results))


def test_module_errors():
    q = torch.randn(2, 3, 4, 16)
    model = Attention(4, 16, dropout=0.5)
    for call, *words in (
            (lambda: Attention(4, 16, kv_heads=3), "heads is 4", "kv_heads 3"), (lambda: Attention(4, 12), "head_dim is 12"),
            (lambda: Attention(4, 16, dropout=1.0), "dropout is 1.0"), (lambda: Attention(4, 16, softcap=0.0), "cap is 0.0"),
            (lambda: Attention(4, 16, window_left=-1), "window_left is -1"),
            (lambda: Attention(4, 16, scale=float("nan")), "scale is nan"),
            (lambda: model(q[:, :, :2], q, q), "q has shape", "[b, s, 4, 16]"), (lambda: model(q, q, q[..., :8]), "v has shape"),
            (lambda: model(q), "k is None"), (lambda: model(q, q), "v is None"),
            (lambda: model(q, q, q, KVCache(q, q, numbers(3, 3))), "dropout is 0.5", "cache")):
        refused(ValueError, call, *words)
    assert not torch.equal(model(q, q, q), model(q, q, q)), "dropout in training"
    model.eval()
    assert torch.equal(model(q, q, q), model(q, q, q))
    short = KVCache(q[:1], q[:1], numbers(3, 3))
    refused(ValueError, lambda: model(q, cache=short), "k_cache has 1 rows", "batch_index")


def test_cuda_graph(device):
    """A captured step of a decode follows lengths, tables and what is in the cache when it is replayed."""
    if device != "cuda":
        pytest.skip("of a GPU")
    pages, dtype = Pages([40, 3], device, torch.bfloat16, page=16, d=64, room=16), torch.bfloat16
    cache = torch.zeros(2, 2, 64, 2, 64, device=device, dtype=dtype)
    q, k, v = (torch.randn(2, 1, h, 64, device=device, dtype=dtype) for h in (4, 2, 2))
    cos, sin = angles(64, 64, device, dtype)

    def call(k_pages, v_pages, k_cache, v_cache):
        paged = flash_attn_with_kvcache(q, k_pages, v_pages, k, v, cos, sin, pages.used, block_table=pages.table, causal=True)
        return paged, flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cos, sin, pages.used, causal=True)

    call(pages.k.clone(), pages.v.clone(), *cache.clone())
    graph, own = torch.cuda.CUDAGraph(), (pages.k.clone(), pages.v.clone(), *cache.clone())
    with torch.cuda.graph(graph):
        results = call(*own)
    for _ in range(3):
        for t in (q, k, v):
            t.normal_()
        pages.table.copy_(pages.table.flip(0))
        graph.replay()
        expected = call(pages.k, pages.v, *cache)
        assert all(torch.equal(x, y) for x, y in zip((*results, *own), (*expected, pages.k, pages.v, *cache)))
        pages.used += 1
