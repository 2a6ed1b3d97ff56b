"""A KV cache in PyTorch: forward over pages and append, beside plain PyTorch in float64."""

import pytest
from conftest import refused

torch = pytest.importorskip("torch")

from cache_cases import INT, TOLERANCE, Pages, angles, numbers, one_request, turned  # noqa: E402
from fa_attention import functions  # noqa: E402
from fa_attention.flash_attn import flash_attn_with_kvcache  # noqa: E402
from fa_attention.torch import KVCache, _cache_ops, append, attention, paged_attention  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.library import opcheck  # noqa: E402


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forward_over_pages(device, layout, dtype):
    pages = Pages([13, 6, 0], device, dtype, layout, together=layout == "NHD")
    q = torch.randn(3, 3, 4, 16, device=device, dtype=dtype).transpose(1, 2)
    sink = torch.randn(4, device=device)
    begin = numbers(2, 6, 0, device=device)
    for options, own in (({}, {}), ({"causal": True, "scale": 0.4}, {"causal": True, "scale": 0.4}),
                         ({"causal": True, "window_left": 3}, {"causal": True, "window": (3, -1)}),
                         ({"window_left": 2, "window_right": 1}, {"window": (2, 1)}), ({"sink": sink}, {"sink": sink}),
                         ({"seq_begin": begin, "causal": True}, {"causal": True}),
                         ({"score": functions.softcap(2.0)}, {"softcap": 2.0})):
        o, lse = pages.call(q, return_lse=True, **options)
        assert o.stride() == q.stride() and lse.dtype == torch.float32
        assert torch.equal(pages.call(q, **options), o)
        for i in range(3):
            first = int(begin[i]) if "seq_begin" in options else 0
            expected = one_request(q[i].transpose(0, 1), pages.rows(pages.k, i), pages.rows(pages.v, i), first, **own)
            assert torch.allclose(o[i].double(), expected[0], **TOLERANCE[dtype]), (options, i)
            assert torch.allclose(lse[i].double(), expected[1], **TOLERANCE[dtype]), (options, i)


def test_tensors_whose_memory_has_the_other_sign(device):
    results = []
    for sign in (torch.neg, torch._neg_view):
        pages = Pages([13, 6], device)
        torch.manual_seed(2)
        new = [torch.randn(2, 2, 3, 16, device=device) for _ in "kv"]
        q, sink = torch.randn(2, 4, 1, 16, device=device), torch.randn(4, device=device)
        append(*map(sign, new), pages.k, pages.v, pages.used, block_table=pages.table)
        o = pages.call(sign(q), sink=sign(sink))
        pools = [sign(t) for t in (pages.k, pages.v)]
        results.append([pages.k, pages.v, o, paged_attention(q, *pools, pages.table, pages.used)])
    assert all(torch.equal(x, y) for x, y in zip(*results))


def test_forward_of_packed_queries(device):
    pages = Pages([13, 6, 9], device)
    q, cu = torch.randn(9, 4, 16, device=device), numbers(0, 1, 6, 8, device=device)
    index, slopes = numbers(2, 0, 1, device=device), torch.tensor([0.5, 0.25, 0.125, 0.0625], device=device)
    pages.used = pages.used[index.long()].contiguous()
    o, lse = pages.call(q, cu_seqlens_q=cu, batch_index=index, causal=True, score=functions.alibi(), captures={"slope": slopes},
                        max_s_q=5, max_s_kv=13, return_lse=True)
    for i in range(3):
        rows = slice(int(cu[i]), int(cu[i + 1]))
        expected = one_request(q[rows], pages.rows(pages.k, i, int(index[i])), pages.rows(pages.v, i, int(index[i])), causal=True,
                               slope=slopes)
        assert torch.allclose(o[rows].double().transpose(0, 1), expected[0], **TOLERANCE[torch.float32])
        assert torch.allclose(lse[:, rows].double(), expected[1], **TOLERANCE[torch.float32])
    assert (o[8] == 0).all() and torch.isneginf(lse[:, 8]).all()
    fewer = pages.call(q, cu_seqlens_q=cu, seqused_q=numbers(1, 2, 2, device=device), batch_index=index)
    assert (fewer[3:6] == 0).all() and (fewer[:3] != 0).all()


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("rotary", ["none", "base", "table", "interleaved"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_append_to_pages(device, layout, rotary, dtype):
    pages = Pages([13, 6, 3], device, dtype, layout)
    k, v, q = (torch.randn(3, 3, h, 16, device=device, dtype=dtype).transpose(1, 2) for h in (2, 2, 4))
    cos, sin = angles(20, 8, device)
    options = {"none": {}, "base": {"rotary_dims": 8}, "table": {"rotary_cos": cos, "rotary_sin": sin},
               "interleaved": {"rotary_cos": cos.to(dtype), "rotary_sin": sin.to(dtype), "rotary_interleaved": True}}[rotary]
    before = [pages.k.clone(), pages.v.clone(), k.clone(), q.clone()]
    version = pages.k._version
    given = None if rotary == "none" else q
    turned_q = append(k, v, pages.k, pages.v, pages.used, block_table=pages.table, layout=layout, q=given, **options)
    assert pages.k._version > version, "what autograd saved is known to have changed"
    assert torch.equal(k, before[2]) and torch.equal(q, before[3])
    assert (turned_q is None) == (rotary == "none")
    changed = 0
    for i in range(3):
        places = torch.arange(int(pages.used[i]) - 3, int(pages.used[i]), device=device)
        expected_k, expected_q = k[i].transpose(0, 1), q[i].transpose(0, 1)
        if rotary != "none":
            tables = options.get("rotary_cos", cos), options.get("rotary_sin", sin)
            expected_k = turned(expected_k, *tables, places, rotary == "interleaved")
            expected_q = turned(expected_q, *tables, places, rotary == "interleaved")
            assert torch.allclose(turned_q[i].transpose(0, 1).double(), expected_q.double(), **TOLERANCE[dtype])
        assert torch.allclose(pages.rows(pages.k, i)[-3:].double(), expected_k.double(), **TOLERANCE[dtype])
        assert torch.equal(pages.rows(pages.v, i)[-3:], v[i].transpose(0, 1))
        changed += 3
    for new, old in ((pages.k, before[0]), (pages.v, before[1])):
        rows = (new != old).any(-1) if layout == "NHD" else (new != old).any(-1).transpose(1, 2)
        assert int(rows.any(-1).sum()) == changed, "other rows keep their values"


def test_append_by_slots_and_of_packed_rows(device):
    pages = Pages([8, 8], device, h_kv=1)
    k, v = torch.randn(5, 1, 16, device=device), torch.randn(5, 1, 16, device=device)
    for kind in (INT, torch.int64):
        slots = numbers(7, 0, -1, 9, 12, device=device, dtype=kind)
        places = numbers(3, 0, 2, 1, 4, device=device, dtype=kind)
        pages.k.zero_()
        q = append(k, v, pages.k, pages.v, block_table=pages.table, slots=slots, rotary_dims=8, positions=places, q=k)
        cos, sin = angles(8, 8, device)
        flat = pages.k.flatten(0, 1)
        assert torch.allclose(q, turned(k, cos, sin, places.long(), False), atol=1e-5)
        assert torch.allclose(flat[slots.long().clamp(min=0)][[0, 1, 3, 4]], q[[0, 1, 3, 4]])
        assert int((flat != 0).any(-1).any(-1).sum()) == 4
    pages.v.zero_()
    flat = pages.v.flatten(0, 1)
    append(k, v, pages.k, pages.v, slots=slots)  # no table is needed
    assert torch.equal(flat[slots.long()][[0, 1, 3, 4]], v[[0, 1, 3, 4]])
    contiguous_k, contiguous_v = torch.zeros(2, 2, 6, 1, 16, device=device)
    cu, used = numbers(0, 2, 5, device=device), numbers(2, 6, device=device)
    append(k, v, contiguous_k, contiguous_v, used, cu_seqlens_k_new=cu, batch_index=numbers(1, 0, device=device))
    assert torch.equal(contiguous_v[1, :2], v[:2]) and torch.equal(contiguous_k[0, 3:], k[2:])
    assert int((contiguous_k != 0).any(-1).sum()) == 5


def forward_arguments(q, pages, captures=(), names=((), ()), values=(), score=None, sink=None, **arrays):
    optional = [arrays.get(name) for name in ("cu_seqlens_q", "seqused_q", "batch_index", "seq_begin")]
    return (q, pages.k, pages.v, sink, list(captures), pages.table, pages.used, *optional, 0, 0, list(values), pages.layout, True,
            None, 3, None, 0, score, None, *map(list, names))


def append_arguments(pages, k, v, q=None, cos=None, sin=None, dims=0, slots=None, positions=None):
    return (k, v, pages.k, pages.v, q, pages.table, pages.used, None, None, slots, cos, sin, positions, pages.layout, dims, 0.0,
            False)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_opcheck(layout):
    pages = Pages([13, 6], layout=layout)
    q, bias = torch.randn(2, 4, 3, 16), torch.randn(4, 16)
    opcheck(_cache_ops.forward_op, forward_arguments(q, pages))
    apart = torch.randn(2, 4, 16, 3).transpose(2, 3)
    more = {"captures": [bias], "names": (["bias"], ["gain"]), "values": [0.5], "score": "score + gain * bias[h, kv]"}
    opcheck(_cache_ops.forward_op, forward_arguments(apart, pages, sink=torch.randn(4), **more))
    packed = {"cu_seqlens_q": numbers(0, 1, 4), "batch_index": numbers(1, 0), "seq_begin": numbers(1, 0)}
    opcheck(_cache_ops.forward_op, forward_arguments(torch.randn(5, 4, 16), pages, **packed))
    k, v = torch.randn(2, 2, 1, 16), torch.randn(2, 2, 1, 16)
    opcheck(_cache_ops.append_op, append_arguments(pages, k, v))
    cos, sin = angles(16, 8)
    opcheck(_cache_ops.append_op, append_arguments(pages, k, v, q[:, :, :1], cos, sin, 8))
    versions = pages.k._version, pages.v._version
    _cache_ops.append_op(*append_arguments(pages, k, v))
    assert pages.k._version > versions[0] and pages.v._version > versions[1]
    slots = numbers(3, -1, dtype=torch.int64)
    given = append_arguments(pages, k, v, q[:, :, :1], dims=16, slots=slots, positions=slots + 2)
    opcheck(_cache_ops.append_op, given)


def step(q, k, v, pool_k, pool_v, table, used):
    """What a layer does in one step of a decode."""
    q = append(k, v, pool_k, pool_v, used, block_table=table, q=q, rotary_dims=16)
    o, lse = paged_attention(q, pool_k, pool_v, table, used, causal=True, window_left=7, return_lse=True)
    return o.sin(), lse


@pytest.mark.parametrize("dynamic", [False, True])
def test_fullgraph(dynamic):
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for lengths in ([13, 6], [9, 3, 1]):
        pages, other = Pages(lengths), Pages(lengths)
        q, k, v = (torch.randn(len(lengths), h, 1, 16) for h in (4, 2, 2))
        expected = step(q, k, v, pages.k, pages.v, pages.table, pages.used)
        actual = compiled(q, k, v, other.k, other.v, other.table, other.used)
        assert all(torch.equal(x, y) for x, y in zip(actual, expected))
        assert torch.equal(pages.k, other.k) and torch.equal(pages.v, other.v), "the cache is changed in place"


def test_fullgraph_with_inductor():
    pages, other = Pages([13, 6], together=True), Pages([13, 6], together=True)
    q, k, v = (torch.randn(2, h, 1, 16) for h in (4, 2, 2))
    expected = step(q, k, v, pages.k, pages.v, pages.table, pages.used)
    actual = torch.compile(step, fullgraph=True)(q, k, v, other.k, other.v, other.table, other.used)
    assert all(torch.allclose(x, y, atol=1e-6) for x, y in zip(actual, expected))
    assert torch.equal(pages.k, other.k) and torch.equal(pages.v, other.v)


def test_export():
    class Step(torch.nn.Module):
        def forward(self, *tensors):
            return step(*tensors)

    pages, other = Pages([13, 6]), Pages([13, 6])
    new = [torch.randn(2, h, 1, 16) for h in (4, 2, 2)]
    program = torch.export.export(Step(), (*new, pages.k.clone(), pages.v.clone(), pages.table, pages.used))
    expected = step(*new, pages.k, pages.v, pages.table, pages.used)
    actual = program.module()(*new, other.k, other.v, other.table, other.used)
    assert all(torch.equal(x, y) for x, y in zip(actual, expected))
    assert torch.equal(pages.k, other.k) and torch.equal(pages.v, other.v)


def test_empty_calls():
    pages = Pages([13, 6])
    none = torch.empty(0, 4, 1, 16)
    o, lse = paged_attention(none, pages.k, pages.v, pages.table[:0], pages.used[:0], return_lse=True)
    assert o.shape == none.shape and lse.shape == (0, 4, 1)
    before = pages.k.clone()
    assert append(none[:, :2], none[:, :2], pages.k, pages.v, pages.used[:0], block_table=pages.table[:0]) is None
    q = torch.empty(2, 4, 0, 16)
    assert append(q[:, :2], q[:, :2], pages.k, pages.v, pages.used, block_table=pages.table, q=q, rotary_dims=8).shape == q.shape
    assert pages.call(q).shape == q.shape and torch.equal(pages.k, before)


def test_threads_share_a_plan():
    """Each call of a layout has structs of its own."""
    from concurrent.futures import ThreadPoolExecutor

    cases = []
    for seed in range(8):
        pages = Pages([13, 6])
        torch.manual_seed(seed)
        cases.append((pages, torch.randn(2, 4, 1, 16), torch.randn(2, 2, 1, 16)))

    def run(case):
        pages, q, k = case
        append(k, k, pages.k, pages.v, pages.used, block_table=pages.table)
        return pages.call(q)

    alone = [run(case) for case in cases]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(10):
            assert all(torch.equal(x, y) for x, y in zip(pool.map(run, cases), alone))


def test_fake_tensors():
    with FakeTensorMode():
        pages = Pages([13, 6], dtype=torch.bfloat16)
        q = torch.randn(2, 1, 4, 16, dtype=torch.bfloat16).transpose(1, 2)
        o, lse = pages.call(q, return_lse=True)
        k = torch.randn(2, 2, 1, 16, dtype=torch.bfloat16)
        turned_q = append(k, k, pages.k, pages.v, pages.used, block_table=pages.table, q=q, rotary_dims=16)
    assert o.shape == q.shape and o.stride() == q.stride() and lse.shape == (2, 4, 1) and lse.dtype == torch.float32
    assert turned_q.shape == q.shape and turned_q.stride() == q.stride()


def test_inference_mode():
    with torch.inference_mode():
        pages = Pages([13, 6])
        q, k = torch.randn(2, 4, 1, 16), torch.randn(2, 2, 1, 16)
        append(k, k, pages.k, pages.v, pages.used, block_table=pages.table)
        o = pages.call(q)
    again = pages.call(q.clone())
    assert torch.equal(o, again)


def test_gradients_are_refused():
    pages = Pages([13, 6])
    q, k = torch.randn(2, 4, 1, 16, requires_grad=True), torch.randn(2, 2, 1, 16, requires_grad=True)
    refused(RuntimeError, lambda: pages.call(q), "q requires a gradient", "no gradients", "torch.no_grad()")
    bias = torch.randn(16, requires_grad=True)
    biased = {"score": "score + bias[kv]", "captures": {"bias": bias}}
    refused(RuntimeError, lambda: pages.call(q.detach(), **biased), "captures['bias'] requires a gradient")
    refused(RuntimeError, lambda: pages.call(q.detach(), sink=torch.randn(4, requires_grad=True)), "sink requires a gradient")
    masked = {"mask": "keep[kv] > 0.0", "captures": {"keep": bias}}
    refused(RuntimeError, lambda: pages.call(q.detach(), **masked), "captures['keep'] requires a gradient")
    call = lambda: append(k, k.detach(), pages.k, pages.v, pages.used, block_table=pages.table)  # noqa: E731
    refused(RuntimeError, call, "k requires a gradient", "append has no gradients")
    refused(RuntimeError, lambda: _cache_ops.forward_op(*forward_arguments(q, pages)), "q requires a gradient")
    refused(RuntimeError, lambda: _cache_ops.append_op(*append_arguments(pages, k, k)), "k requires a gradient")
    refused(RuntimeError, lambda: torch.compile(pages.call, backend="aot_eager")(q), "q requires a gradient")
    refused(RuntimeError, lambda: flash_attn_with_kvcache(q.transpose(1, 2), pages.k, pages.v, block_table=pages.table),
            "q requires a gradient", "flash_attn_with_kvcache")
    dense = torch.randn(1, 2, 3, 16)
    masked["captures"] = {"keep": torch.ones(3, requires_grad=True)}
    refused(ValueError, lambda: attention(dense, dense, dense.clone().requires_grad_(), **masked),
            "captures['keep'] requires a gradient", "a mask has none")
    with torch.no_grad():
        call()
        pages.call(q, **biased)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_contiguous_caches(layout, device):
    """Without a block_table each request has a row of the cache: its bits are those of the same rows as pages."""
    k, v = (torch.randn(3, 12, 2, 16, device=device, dtype=torch.bfloat16) for _ in range(2))
    k, v = (t.transpose(1, 2).contiguous() if layout == "HND" else t for t in (k, v))
    used, rows, begin = (numbers(*values, device=device) for values in ([12, 5], [2, 0], [3, 1]))
    q = torch.randn(2, 4, 1, 16, device=device, dtype=torch.bfloat16)
    options = {"layout": layout, "causal": True, "return_lse": True, "seq_begin": begin}
    pages = paged_attention(q, k, v, rows[:, None], used, **options)
    for o, lse in (paged_attention(q, k, v, None, used, batch_index=rows, **options),
                   KVCache(k, v, used, batch_index=rows, seq_begin=begin, layout=layout).attention(q, causal=True, return_lse=True),
                   paged_attention(q, k[rows.long()], v[rows.long()], None, used, **options)):
        torch.testing.assert_close(o, pages[0], atol=2e-2, rtol=0)
        torch.testing.assert_close(lse, pages[1], atol=1e-2, rtol=0)
    packed = paged_attention(q[:, :, 0], k, v, None, used, batch_index=rows, cu_seqlens_q=numbers(0, 1, 2, device=device),
                             layout=layout, causal=True, seq_begin=begin)
    torch.testing.assert_close(packed, pages[0][:, :, 0], atol=2e-2, rtol=0)
    compiled = torch.compile(lambda q: paged_attention(q, k, v, None, used, batch_index=rows, **options)[0], backend="eager",
                             fullgraph=True)
    torch.testing.assert_close(compiled(q), pages[0], atol=2e-2, rtol=0)
    opcheck(torch.ops.fa_attention.paged_forward.default,
                          (q, k, v, None, [], None, used, None, None, rows, begin, 0, 0, [], layout, True, None, None, None, 0, None,
                           None, [], []))


def test_errors_of_forward():
    pages = Pages([13, 6])
    q = torch.randn(2, 4, 1, 16)
    table, used = pages.table, pages.used
    base = {"q": q, "k_pages": pages.k, "v_pages": pages.v, "block_table": table, "seqused_kv": used}
    for change, kind, *words in (
            ({"q": q[0, 0]}, ValueError, "q has shape [1, 16]", "[b, h_q, s_q, d_qk]"),
            ({"q": None}, TypeError, "q is a", "torch.Tensor"),
            ({"q": q.long()}, TypeError, "q is torch.int64", "torch.bfloat16"),
            ({"k_pages": pages.k.half()}, TypeError, "k_pages is torch.float16", "torch.float32"),
            ({"v_pages": pages.v.to("meta")}, ValueError, "v_pages is on meta", "cpu"),
            ({"k_pages": pages.k[0, 0]}, ValueError, "k_pages has shape [2, 16]", "[pages, page_size, h_kv, d]"),
            ({"k_pages": torch.randn(9, 4, 16, 2).transpose(2, 3)}, ValueError, "k_pages has strides", "a stride of 1"),
            ({"v_pages": pages.v[1:]}, ValueError, "v_pages has shape", "k_pages"),
            ({"k_pages": pages.k[:, :0], "v_pages": pages.v[:, :0]}, ValueError, "k_pages", "page_size"),
            ({"block_table": table.long()}, TypeError, "block_table is torch.int64", "torch.int32"),
            ({"block_table": table[0]}, ValueError, "block_table has shape", "two axes"),
            ({"block_table": table[:1]}, ValueError, "block_table", "b = 2"),
            ({"block_table": None}, ValueError, "k_pages has", "rows: accepted without block_table and batch_index are 2"),
            ({"seqused_kv": used.long()}, TypeError, "seqused_kv is torch.int64", "torch.int32"),
            ({"seqused_kv": used[None]}, ValueError, "seqused_kv has shape [1, 2]", "one axis"),
            ({"seqused_kv": used[:1]}, ValueError, "seqused_kv has 1 elements", "accepted are 2"),
            ({"seqused_kv": [13, 6]}, TypeError, "seqused_kv is a builtins.list"),
            ({"seqused_kv": numbers(13, 0, 6, 0)[::2]}, ValueError, "seqused_kv has strides", "contiguous"),
            ({"seqused_kv": numbers(13, 99)}, ValueError, "seqused_kv[1]", "99"),
            ({"batch_index": numbers(0, 1, dtype=torch.int64)}, TypeError, "batch_index is torch.int64"),
            ({"batch_index": numbers(0)}, ValueError, "batch_index has 1 elements"),
            ({"batch_index": numbers(0, 7)}, ValueError, "batch_index[1]", "7"),
            ({"seq_begin": numbers(0, 7)}, ValueError, "seq_begin[1]", "7"),
            ({"seq_begin": numbers(0, 1).to("meta")}, ValueError, "seq_begin is on meta"),
            ({"seqused_q": numbers(1, 1)}, ValueError, "seqused_q is given", "cu_seqlens_q"),
            ({"cu_seqlens_q": numbers(0, 1, 2)}, ValueError, "q has shape", "[total_q, h_q, d_qk]"),
            ({"q": q[:, :, 0], "cu_seqlens_q": numbers(0, 2)}, ValueError, "cu_seqlens_q has 2 elements", "accepted are 3"),
            ({"layout": "HDN"}, ValueError, "layout is 'HDN'", "NHD", "HND"),
            ({"q": torch.randn(2, 3, 1, 16)}, ValueError, "3", "2"),
            ({"captures": {"bias": torch.randn(3)}}, ValueError, "captures has 'bias'"),
            ({"scale": "big"}, TypeError, "scale is a builtins.str"),
            ({"sink": [0.0] * 4}, TypeError, "sink is a builtins.list", "torch.Tensor"),
            ({"window_left": 1.5}, TypeError, "window_left"),
            ({"score": "score + bias[kv]", "captures": {"bias": torch.randn(16).to("meta")}}, ValueError, "bias is on meta"),
            ({"score": "score + bias[kv]", "captures": {"bias": torch.arange(16)}}, TypeError, "bias is torch.int64")):
        refused(kind, lambda: paged_attention(**{**base, **change}), *words)


def test_errors_of_append():
    pages = Pages([13, 6])
    k, q = torch.randn(2, 2, 1, 16), torch.randn(2, 4, 1, 16)
    cos, sin = angles(20, 16)
    base = {"k": k, "v": k, "k_cache": pages.k, "v_cache": pages.v, "seqused_kv": pages.used, "block_table": pages.table}
    turn = {"rotary_cos": cos, "rotary_sin": sin, "q": q}
    for change, kind, *words in (
            ({"k": k[0, 0]}, ValueError, "k has shape [1, 16]", "[b, h_kv, s_new, d]"),
            ({"k": None}, TypeError, "k is a"),
            ({"v": k.half()}, TypeError, "v is torch.float16", "torch.float32"),
            ({"v": k[:, :, 0]}, ValueError, "v has shape", "[b, h_kv, s_new, d]"),
            ({"v": k[:1]}, ValueError, "v"),
            ({"k_cache": pages.k.to("meta")}, ValueError, "k_cache is on meta"),
            ({"k_cache": pages.k.bfloat16()}, TypeError, "k_cache is torch.bfloat16"),
            ({"v_cache": torch.randn(11, 4, 16, 2).transpose(2, 3)}, ValueError, "v_cache has strides", "a stride of 1"),
            ({"k_cache": pages.v}, ValueError, "k_cache", "v_cache"),
            ({"seqused_kv": None}, ValueError, "seqused_kv is None", "slots"),
            ({"seqused_kv": [13, 6]}, TypeError, "seqused_kv is a builtins.list"),
            ({"seqused_kv": pages.used.long()}, TypeError, "seqused_kv is torch.int64"),
            ({"seqused_kv": numbers(13, 0)}, ValueError, "seqused_kv[1]", "0"),
            ({"seqused_kv": numbers(13)}, ValueError, "seqused_kv has 1 elements"),
            ({"k": k[:, :, 0], "v": k[:, :, 0]}, ValueError, "cu_seqlens_k_new is None"),
            ({"cu_seqlens_k_new": numbers(0, 1, 2)}, ValueError, "cu_seqlens_k_new is given"),
            ({"block_table": pages.table.long()}, TypeError, "block_table is torch.int64"),
            ({"slots": numbers(1, 2, dtype=torch.int16)}, TypeError, "slots is torch.int16", "torch.int32 or torch.int64"),
            ({"slots": numbers(1)}, ValueError, "slots has 1 elements", "accepted are 2"),
            ({"slots": numbers(1, 9999)}, ValueError, "slots[1]", "9999"),
            ({"q": q}, ValueError, "q is given", "rotary"),
            ({"positions": numbers(1, 2)}, ValueError, "positions is given", "rotary"),
            ({"rotary_cos": cos}, ValueError, "rotary_cos and rotary_sin"),
            ({**turn, "rotary_cos": cos.half()}, TypeError, "rotary_cos is torch.float16"),
            ({**turn, "rotary_sin": sin.to("meta")}, ValueError, "rotary_sin is on meta"),
            ({**turn, "rotary_sin": sin[0]}, ValueError, "rotary_sin has shape"),
            ({**turn, "rotary_cos": cos[:4], "rotary_sin": sin[:4]}, ValueError, "rotary.positions", "12"),
            ({**turn, "q": torch.randn(2, 4, 2, 16)}, ValueError, "q"),
            ({**turn, "positions": numbers(1)}, ValueError, "positions has 1 elements"),
            ({"rotary_dims": 7}, ValueError, "rotary.dims", "7"),
            ({"layout": None}, ValueError, "layout is None")):
        refused(kind, lambda: append(**{**base, **change}), *words)
