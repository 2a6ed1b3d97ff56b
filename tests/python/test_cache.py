"""A KV cache in PyTorch: forward over pages, append, flash_attn_with_kvcache and the module, beside plain PyTorch in float64."""

import inspect
import itertools

import pytest
from conftest import refused

torch = pytest.importorskip("torch")

from fa_attention import flash_attn, functions  # noqa: E402
from fa_attention.flash_attn import flash_attn_with_kvcache  # noqa: E402
from fa_attention.torch import Attention, KVCache, _cache_ops, append, attention, paged_attention  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

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


def angles(positions, dims, device="cpu", dtype=torch.float32):
    places = torch.arange(positions, device=device, dtype=torch.float64)
    a = places[:, None] * 10000.0 ** (-2 * torch.arange(dims // 2, device=device, dtype=torch.float64) / dims)
    return a.cos().to(dtype), a.sin().to(dtype)


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
    torch.library.opcheck(_cache_ops.forward_op, forward_arguments(q, pages))
    apart = torch.randn(2, 4, 16, 3).transpose(2, 3)
    more = {"captures": [bias], "names": (["bias"], ["gain"]), "values": [0.5], "score": "score + gain * bias[h, kv]"}
    torch.library.opcheck(_cache_ops.forward_op, forward_arguments(apart, pages, sink=torch.randn(4), **more))
    packed = {"cu_seqlens_q": numbers(0, 1, 4), "batch_index": numbers(1, 0), "seq_begin": numbers(1, 0)}
    torch.library.opcheck(_cache_ops.forward_op, forward_arguments(torch.randn(5, 4, 16), pages, **packed))
    k, v = torch.randn(2, 2, 1, 16), torch.randn(2, 2, 1, 16)
    torch.library.opcheck(_cache_ops.append_op, append_arguments(pages, k, v))
    cos, sin = angles(16, 8)
    torch.library.opcheck(_cache_ops.append_op, append_arguments(pages, k, v, q[:, :, :1], cos, sin, 8))
    slots = numbers(3, -1, dtype=torch.int64)
    torch.library.opcheck(_cache_ops.append_op, append_arguments(pages, k, v, q[:, :, :1], dims=16, slots=slots, positions=slots + 2))


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
    keep = torch.ones(3, requires_grad=True)
    refused(ValueError, lambda: attention(dense, dense, dense.clone().requires_grad_(), mask="keep[kv] > 0.0", captures={"keep": keep}),
            "captures['keep'] requires a gradient", "a mask has none")
    with torch.no_grad():
        call()
        pages.call(q, **biased)


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
            ({"block_table": None}, TypeError, "block_table is None"),
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
            ({"window_left": 1.5}, TypeError, "window_left"),
            ({"score": "score + bias[kv]", "captures": {"bias": torch.randn(16).to("meta")}}, ValueError, "bias is on meta"),
            ({"score": "score + bias[kv]", "captures": {"bias": numbers(*range(16), dtype=torch.int64)}}, TypeError, "bias is torch.int64")):
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


def test_kvcache_has_flash_attns_signature():
    parameters = inspect.signature(flash_attn_with_kvcache).parameters
    assert {name: p.default for name, p in list(parameters.items())[3:]} == {
        "k": None, "v": None, "rotary_cos": None, "rotary_sin": None, "cache_seqlens": None, "cache_batch_idx": None,
        "cache_leftpad": None, "block_table": None, "softmax_scale": None, "causal": False, "window_size": (-1, -1), "softcap": 0.0,
        "rotary_interleaved": True, "alibi_slopes": None, "num_splits": 0, "return_softmax_lse": False}
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
    call = lambda **more: flash_attn.flash_attn_varlen_func(q, pages.k, pages.v, cu_q, cu_k, 4, 13, block_table=pages.table, **more)  # noqa: E731
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
            (lambda: Attention(4, 16, window_left=-1), "window_left is -1"), (lambda: Attention(4, 16, scale=float("nan")), "scale"),
            (lambda: model(q[:, :, :2], q, q), "q has shape", "[b, s, 4, 16]"), (lambda: model(q, q, q[..., :8]), "v has shape"),
            (lambda: model(q), "k is None"), (lambda: model(q, q), "v is None"),
            (lambda: model(q, q, q, KVCache(q, q, numbers(3, 3))), "dropout is 0.5", "cache")):
        refused(ValueError, call, *words)
    assert not torch.equal(model(q, q, q), model(q, q, q)), "dropout in training"
    model.eval()
    assert torch.equal(model(q, q, q), model(q, q, q))
    short = KVCache(q[:1], q[:1], numbers(3, 3))
    refused(ValueError, lambda: model(q, cache=short), "k_cache has 1 rows", "batch_index")
