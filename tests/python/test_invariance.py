"""Calls of PyTorch whose bits depend on the row alone: dense, packed and paged, eager, compiled and mapped."""

import pytest

torch = pytest.importorskip("torch")

from cache_cases import INT, numbers  # noqa: E402
from conftest import refused  # noqa: E402
from fa_attention import capi  # noqa: E402
from fa_attention.torch import Attention, KVCache, attention, paged_attention, varlen_attention  # noqa: E402
from torch.library import opcheck  # noqa: E402

LENGTHS = (37, 20)
ROWS = {"invariance": "rows", "causal": True}


def requests(device, dtype=torch.float32, d=32):
    """q, k and v of each request, [1, h, s, d]."""
    torch.manual_seed(11)
    return [[torch.randn(1, h, s, d, dtype=dtype, device=device) for h in (4, 2, 2)] for s in LENGTHS]


def pages_of(device, tensors, page=8):
    """k and v of the requests in pages, and their table."""
    counts = [-(-s // page) for s in LENGTHS]
    pools = [torch.zeros(sum(counts) + 1, page, 2, tensors[0][0].shape[-1], dtype=tensors[0][0].dtype, device=device) for _ in "kv"]
    table = torch.zeros(len(LENGTHS), max(counts), dtype=INT, device=device)
    place = sum(counts)
    for i, (_, k, v) in enumerate(tensors):
        for j in range(counts[i]):
            table[i, j] = place
            for pool, t in zip(pools, (k, v)):
                part = t[0, :, j * page:(j + 1) * page].transpose(0, 1)
                pool[place, : part.shape[0]] = part
            place -= 1
    return *pools, table, numbers(*LENGTHS, device=device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dense_packed_and_paged_calls_have_the_same_bits(device, dtype):
    tensors = requests(device, dtype)
    dense = [attention(*each, **ROWS, return_lse=True) for each in tensors]
    packed = [torch.cat([t[0].transpose(0, 1) for t in parts]) for parts in zip(*tensors)]
    cu = numbers(0, LENGTHS[0], sum(LENGTHS), device=device)
    pools = pages_of(device, tensors)
    results = [varlen_attention(*packed, cu, cu, **ROWS, return_lse=True),
               paged_attention(packed[0], *pools, cu_seqlens_q=cu, **ROWS, return_lse=True)]
    for o, lse in results:
        for i, (expected, expected_lse) in enumerate(dense):
            rows = slice(int(cu[i]), int(cu[i + 1]))
            assert torch.equal(o[rows].transpose(0, 1), expected[0]) and torch.equal(lse[:, rows], expected_lse[0])
    last = torch.cat([q[:, :, -1:] for q, _, _ in tensors])  # a decode in the place of a prefill
    o = paged_attention(last, *pools, **ROWS)
    assert all(torch.equal(o[i, :, 0], dense[i][0][0, :, -1]) for i in range(len(LENGTHS)))


@pytest.fixture
def given(monkeypatch):
    """What handles are made with."""
    from fa_attention import _options

    made = []

    class Watched(capi.Attention):
        def __init__(self, *arguments, **options):
            made.append(options["invariance"])
            super().__init__(*arguments, **options)

    monkeypatch.setattr(_options.capi, "Attention", Watched)
    yield made


def test_it_reaches_the_library(given):
    q, k, v = requests("cpu", d=24)[0]  # head dims that no other test has: handles are kept
    pool = torch.randn(5, 8, 2, 24)
    table, used = numbers(0, 1, 2, 3, 4)[None], numbers(37)
    cu = numbers(0, 37)
    rows = [t[0].transpose(0, 1).contiguous() for t in (q, k, v)]
    for kind in ("batch", "rows"):
        given.clear()
        expected = attention(q, k, v, invariance=kind)
        assert given == [kind]
        varlen_attention(*rows, cu, cu, invariance=kind)
        assert given == [kind] * 2
        paged_attention(q, pool, pool, table, used, invariance=kind)
        assert given == [kind] * 3
        layer = Attention(4, 24, kv_heads=2, invariance=kind)
        o = layer(*(t.transpose(1, 2) for t in (q, k, v)))
        assert torch.equal(o.transpose(1, 2), expected)
        layer(q[:, :, -1:].transpose(1, 2), cache=KVCache(pool, pool, used, table))
        assert len(given) == 3  # handles of the same calls
        assert f"invariance={kind}" in repr(layer)


def test_gradients_and_transforms(given):
    q, k, v = requests("cpu", torch.float64, d=40)[1]
    call = lambda *t: attention(*t, **ROWS)  # noqa: E731
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    expected = call(*leaves)
    dout = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, leaves, dout)
    plain = torch.autograd.grad(attention(*leaves, causal=True), leaves, dout)
    for ours, theirs in zip(wanted, plain):
        torch.testing.assert_close(ours, theirs)
    _, pullback = torch.func.vjp(call, q, k, v)
    assert all(torch.equal(x, y) for x, y in zip(pullback(dout), wanted))
    stacked = [torch.stack([t, -t]) for t in (q, k, v)]
    assert torch.equal(torch.func.vmap(call)(*stacked)[0], expected)
    operator = torch.ops.fa_attention.invariant_forward
    rest = (None, [], *[None] * 5, 0, 0, 0, 0, [], True, None, False, None, None, 0, 0.0, False, None, None, [], [], "rows")
    assert torch.equal(operator(q, k, v, *rest)[0], expected)
    opcheck(operator.default, (*leaves, *rest))
    assert "rows" in given and set(given) <= {"rows", "none"}


def test_it_is_served_by_compiled_graphs(given):
    torch._dynamo.reset()
    q, k, v = requests("cpu", d=48)[1]
    pools = torch.randn(4, 8, 2, 48)
    table, used = numbers(0, 1, 2)[None], numbers(20)

    def work(q, k, v):
        return attention(q, k, v, **ROWS).sin(), paged_attention(q.detach(), pools, pools, table, used, **ROWS)

    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    results = torch.compile(work, fullgraph=True, backend="aot_eager")(*leaves)
    expected = work(*leaves)
    assert all(torch.equal(x, y) for x, y in zip(results, expected))
    gradients = [torch.autograd.grad(each[0].sum(), leaves) for each in (results, expected)]
    assert all(torch.equal(x, y) for x, y in zip(*gradients))
    assert given and set(given) == {"rows"}


def test_what_is_refused():
    q, k, v = requests("cpu")[0]
    cu = numbers(0, 37)
    rows = [t[0].transpose(0, 1).contiguous() for t in (q, k, v)]
    pool = torch.randn(5, 8, 2, 32)
    words = "invariance", "columns", "none, batch, rows"
    refused(ValueError, lambda: attention(q, k, v, invariance="columns"), *words)
    refused(ValueError, lambda: varlen_attention(*rows, cu, cu, invariance="columns"), *words)
    table, used = numbers(0, 1, 2, 3, 4)[None], numbers(37)
    refused(ValueError, lambda: paged_attention(q, pool, pool, table, used, invariance="columns"), *words)
    refused(ValueError, lambda: Attention(4, 32, invariance="columns"), *words)
    stored = torch.zeros(5, 8, 2, 32, dtype=torch.int8)
    scale = torch.ones(5, 8, 2)
    refused(ValueError, lambda: paged_attention(q.bfloat16(), stored, stored, table, used, k_scale=scale, v_scale=scale,
                                                invariance="rows"), "invariance")
