"""Transforms of calls over a KV cache: vmap, and the derivatives that there are none of."""

import itertools

import pytest
from conftest import refused

torch = pytest.importorskip("torch")

from cache_cases import E4M3, I8, Pages, StoredPages, numbers  # noqa: E402
from fa_attention.flash_attn import flash_attn_with_kvcache  # noqa: E402
from fa_attention.torch import KVCache, _cache_ops, append, paged_attention  # noqa: E402


def each(function, *tensors):
    """What vmap over the first axes means."""
    results = [function(*parts) for parts in zip(*tensors)]
    if isinstance(results[0], tuple):
        return tuple(map(torch.stack, zip(*results)))
    return torch.stack(results)


def same(x, y):
    """Bit by bit on the host; on a GPU more requests may share their keys out otherwise."""
    return torch.equal(x, y) if x.device.type == "cpu" else torch.allclose(x, y, atol=1e-2, rtol=1e-2)


def counted(monkeypatch):
    """How many calls reach the library."""
    calls = []
    original = _cache_ops._cache_raw.forward
    monkeypatch.setattr(_cache_ops._cache_raw, "forward", lambda *a, **more: calls.append(a[0].shape) or original(*a, **more))
    return calls


def test_vmap_of_forward_is_one_call(device, monkeypatch):
    pages = StoredPages([13, 6], (E4M3, I8), device)
    q = torch.randn(3, 2, 4, 1, 16, device=device, dtype=torch.bfloat16)
    used = numbers(13, 6, 9, 9, 1, 12, device=device).view(3, 2)
    tables = torch.stack([pages.table, pages.table.flip(0), pages.table])
    begin, index = numbers(0, 2, 1, 1, 0, 3, device=device).view(3, 2), numbers(1, 0, 0, 0, 1, 1, device=device).view(3, 2)
    over = lambda q, used, table, **more: paged_attention(  # noqa: E731
        q, pages.k, pages.v, table, used, causal=True, window_left=9, k_scale=pages.k_scale, v_scale=pages.v_scale,
        return_lse=True, **more)
    cases = [(lambda q: over(q, pages.used, pages.table), (q,)), (lambda q, n: over(q, n, pages.table), (q, used)),
             (lambda n: over(q[0], n, pages.table), (used,)), (over, (q, used, tables)),
             (lambda q, n, i: over(q, n, pages.table, batch_index=i), (q, used, index)),
             (lambda q, n, s: over(q, n, pages.table, seq_begin=s), (q, used, begin))]
    calls = counted(monkeypatch)
    for function, tensors in cases:
        expected = each(function, *tensors)
        calls.clear()
        o, lse = torch.vmap(function)(*tensors)
        assert len(calls) == 1 and calls[0][0] == 6
        assert same(o, expected[0]) and same(lse, expected[1])
    inner = q.movedim(0, 2)
    o, _ = torch.vmap(cases[0][0], in_dims=2)(inner)
    assert same(o, each(cases[0][0], q)[0])
    twice = torch.stack([q, -q])
    o, _ = torch.vmap(torch.vmap(cases[0][0]))(twice)
    assert same(o[1], each(cases[0][0], -q)[0])
    fewer = torch.vmap(lambda q: over(q, pages.used, pages.table))(q[:, :, :, :0])[0]
    assert fewer.shape == (3, 2, 4, 0, 16)


def test_vmap_of_forward_by_calls(device, monkeypatch):
    """Where the mapped axis is seen by more than the requests."""
    pages = Pages([13, 6], device)
    q = torch.randn(3, 2, 4, 1, 16, device=device)
    caches = [torch.randn(3, *pages.k.shape, device=device) for _ in range(2)]
    sinks, bias = torch.randn(3, 4, device=device), torch.randn(2, 16, device=device)
    cu, index, biases = numbers(0, 1, 2, device=device), numbers(3, 0, device=device), torch.randn(3, 16, device=device)
    tables = torch.cat([pages.table, pages.table]).expand(3, -1, -1)
    by_request = {"score": "score + bias[b, kv]", "captures": {"bias": bias}}
    cases = [(lambda q, k, v: paged_attention(q, k, v, pages.table, pages.used), (q, *caches)),
             (lambda q, sink: pages.call(q, sink=sink), (q, sinks)), (lambda q: pages.call(q, **by_request), (q,)),
             (lambda q: pages.call(q, cu_seqlens_q=cu), (q[:, :, :, 0],)),
             (lambda q, t: paged_attention(q, pages.k, pages.v, t, pages.used, batch_index=index), (q, tables)),
             (lambda q, bias: pages.call(q, score="score + bias[kv]", captures={"bias": bias}), (q, biases))]
    calls = counted(monkeypatch)
    for function, tensors in cases:
        expected = each(function, *tensors)
        calls.clear()
        assert torch.equal(torch.vmap(function)(*tensors), expected) and len(calls) == 3


def test_vmap_of_append(device):
    """Of caches that are mapped, which change in place; of one that is not it is refused."""
    pages = StoredPages([13, 6], (I8, E4M3), device)
    k, v, q = (torch.randn(3, 2, h, 1, 16, device=device, dtype=torch.bfloat16) for h in (2, 2, 4))
    first = [torch.stack([t] * 3) for t in (pages.k, pages.v, pages.k_scale, pages.v_scale)]
    second = [t.clone() for t in first]
    used = numbers(13, 6, 9, 4, 1, 12, device=device).view(3, 2)

    def step(q, k, v, used, pool_k, pool_v, k_scale, v_scale):
        scales = {"k_scale": k_scale, "v_scale": v_scale}
        q = append(k, v, pool_k, pool_v, used, block_table=pages.table, q=q, rotary_dims=8, **scales)
        return paged_attention(q, pool_k, pool_v, pages.table, used, causal=True, **scales)

    versions = [t._version for t in second]
    expected = each(step, q, k, v, used, *first)
    assert torch.equal(torch.vmap(step)(q, k, v, used, *second), expected)
    assert all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(first, second))
    assert all(t._version > n for t, n in zip(second, versions))
    call = lambda *dims: torch.vmap(step, in_dims=(0, 0, 0, 0, *dims))  # noqa: E731
    one = [pages.k, pages.v, pages.k_scale, pages.v_scale]
    for n, name in enumerate(("k_cache", "v_cache", "k_scale", "v_scale")):
        given = [one[n] if n == m else second[m] for m in range(4)]
        dims = [None if n == m else 0 for m in range(4)]
        refused(ValueError, lambda: call(*dims)(q, k, v, used, *given), f"{name} is not mapped", "k is", "in place")
    scale = torch.rand(2, device=device).expand(one[2].shape) + 0.5
    given = lambda k, pool_k, pool_v: paged_attention(  # noqa: E731
        append(k, k, pool_k, pool_v, pages.used, block_table=pages.table, q=k, rotary_dims=8, k_scale=scale, v_scale=scale,
               scales_given=True), pool_k, pool_v, pages.table, pages.used, k_scale=scale, v_scale=scale)
    expected = each(given, k, *first[:2])
    assert torch.equal(torch.vmap(given)(k, *second[:2]), expected), "scales that are read need not be mapped"


def test_vmap_compiles():
    pages, k = StoredPages([13, 6], (E4M3, I8)), torch.randn(3, 2, 2, 1, 16, dtype=torch.bfloat16)

    def step(k, pool_k, pool_v, k_scale, v_scale):
        scales = {"k_scale": k_scale, "v_scale": v_scale}
        q = append(k, k, pool_k, pool_v, pages.used, block_table=pages.table, q=k, rotary_dims=8, **scales)
        return pages.call(q, causal=True), paged_attention(q, pool_k, pool_v, pages.table, pages.used, **scales)

    first = [torch.stack([t] * 3) for t in (pages.k, pages.v, pages.k_scale, pages.v_scale)]
    second = [t.clone() for t in first]
    expected = torch.vmap(step)(k, *first)
    actual = torch.compile(torch.vmap(step), fullgraph=True, backend="aot_eager")(k, *second)
    assert all(torch.equal(x, y) for x, y in zip(actual, expected))
    assert all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(first, second))


def test_vmap_of_contiguous_caches(device):
    q, new = torch.randn(3, 2, 1, 4, 16, device=device), torch.randn(3, 2, 1, 2, 16, device=device)
    caches = [torch.randn(3, 2, 32, 2, 16, device=device) for _ in range(2)]
    others = [t.clone() for t in caches]
    used = numbers(4, 9, device=device)
    call = lambda q, new, k, v: flash_attn_with_kvcache(q, k, v, new, new, cache_seqlens=used, causal=True)  # noqa: E731
    expected = each(call, q, new, *caches)
    assert torch.equal(torch.vmap(call)(q, new, *others), expected)
    assert all(torch.equal(x, y) for x, y in zip(caches, others))
    read = lambda q: KVCache(caches[0][0], caches[1][0], used).attention(q.transpose(1, 2))  # noqa: E731
    assert same(torch.vmap(read)(q), each(read, q))


def test_derivatives_are_refused():
    """Of all modes; and there is nothing of which second ones could be asked for."""
    pages = Pages([13, 6])
    q, k = torch.randn(2, 4, 1, 16), torch.randn(2, 2, 1, 16)
    total = lambda q: pages.call(q).sum()  # noqa: E731
    appended = lambda k: append(k, k.detach(), pages.k, pages.v, pages.used, block_table=pages.table, q=k,  # noqa: E731
                                rotary_dims=8).sum()
    for function, x, name in ((total, q, "q"), (appended, k, "k")):
        reverse = [(transform(function), x) for transform in (torch.func.grad, torch.func.jacrev)]
        for transform, given in (*reverse, (torch.vmap(torch.func.grad(function)), x[None])):
            refused(RuntimeError, lambda: transform(given), f"{name} requires a gradient", "no gradients", "torch.no_grad()")
        refused(RuntimeError, lambda: torch.func.hessian(function)(x), f"{name} ", "no gradients")
        refused(RuntimeError, lambda: torch.func.jvp(function, (x,), (x,)), f"{name} has a tangent", "no gradients")
        refused(RuntimeError, lambda: torch.func.jacfwd(function)(x), f"{name} has a tangent")
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, x)
            refused(RuntimeError, lambda: function(dual), f"{name} has a tangent", "torch.no_grad()")
            with torch.no_grad():
                assert torch.autograd.forward_ad.unpack_dual(function(dual)).tangent is None


def test_nothing_is_recorded():
    """A call whose inputs need no gradient leaves no node: what else is in the graph may be differentiated twice."""
    pages = Pages([13, 6])
    q, weight = torch.randn(2, 4, 1, 16), torch.randn(16, requires_grad=True)
    o, lse = pages.call(q, return_lse=True)
    turned = append(q[:, :2], q[:, :2], pages.k, pages.v, pages.used, block_table=pages.table, q=q, rotary_dims=8)
    by_operator = torch.ops.fa_attention.paged_forward(q, pages.k, pages.v, None, [], pages.table, pages.used, None, None, None,
                                                       None, 0, 0, [], "NHD", False, None, None, None, 0, None, None, [], [])
    assert all(t.grad_fn is None and not t.requires_grad for t in (o, lse, turned, *by_operator))
    loss = (o * weight.square()).sum()
    first, = torch.autograd.grad(loss, weight, create_graph=True)
    second, = torch.autograd.grad(first.sum(), weight)
    assert torch.allclose(second, 2 * o.sum((0, 1, 2)), atol=1e-5)

    class Asks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, weight):
            with torch.no_grad():
                o = pages.call(q)
            ctx.save_for_backward(o)
            return o * weight

        @staticmethod
        def backward(ctx, dout):
            assert ctx.needs_input_grad == (False, True)
            return None, (dout * ctx.saved_tensors[0]).sum((0, 1, 2))

    Asks.apply(q, weight).sum().backward()
    assert torch.isfinite(weight.grad).all()


@pytest.mark.parametrize("which", list(itertools.product((False, True), repeat=4)))
def test_vmap_of_single_requests(device, which):
    """What is not mapped is the same in each call, of one request."""
    if not any(which):
        pytest.skip("nothing is mapped")
    pages = Pages((9, 4, 7), device)
    torch.manual_seed(4)
    tensors = (torch.randn(3, 4, 2, 16, device=device), pages.table, pages.used, numbers(1, 0, 2, device=device))
    tensors = [t if mapped else t[0] for t, mapped in zip(tensors, which)]

    def one(q, table, used, begin):
        return paged_attention(q[None], pages.k, pages.v, table[None], used[None], seq_begin=begin[None], causal=True)

    actual = torch.vmap(one, in_dims=tuple(0 if mapped else None for mapped in which))(*tensors)
    for n in range(3):
        expected = one(*(t[n] if mapped else t for t, mapped in zip(tensors, which)))
        torch.testing.assert_close(actual[n], expected, atol=1e-5, rtol=1e-5)


def test_vmap_over_a_table_of_more_rows_is_refused(device):
    pages = Pages((9, 4, 7), device)
    q = torch.randn(3, 4, 2, 16, device=device)
    one = lambda q, used: paged_attention(q[None], pages.k, pages.v, pages.table, used[None])  # noqa: E731
    refused(ValueError, lambda: torch.vmap(one)(q, pages.used), "block_table", "[3, 3]", "b = 1")
