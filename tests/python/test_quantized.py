"""Attention of 8 bits in PyTorch, and what makes codes, beside float64 of the very codes and scales."""

import math

import pytest
from conftest import refused

torch = pytest.importorskip("torch")

from fa_attention import functions  # noqa: E402
from fa_attention.torch import _cache_ops, _quantized, attention, paged_attention, quantize  # noqa: E402
from fa_attention.torch import quantized_attention  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

B, H_Q, H_KV, S_Q, S_KV, D = 2, 4, 2, 33, 70, 32
E4M3, E5M2, I8, INT = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.int32
HALF = {torch.float16: 2e-3, torch.bfloat16: 8e-3, E4M3: 0.06}


@pytest.fixture(autouse=True)
def hopper(request):
    if request.config.getoption("--device") == "cuda" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("no kernels of 8 bits for this GPU")


def wide(device="cpu", dtype=torch.float32, sizes=((H_Q, S_Q), (H_KV, S_KV), (H_KV, S_KV))):
    torch.manual_seed(7)
    return [torch.randn(B, h, s, D, device=device).to(dtype) for h, s in sizes]


def codes_of(dtype, device="cpu"):
    q, k, v = wide(device)
    if dtype == I8:
        return (30 * q).round().clamp(-127, 127).to(I8), (30 * k).round().clamp(-127, 127).to(I8), v.to(E4M3)
    return tuple(t.to(dtype) for t in (q, k, v))


def rows(t, scale):
    """What codes stand for, in float64."""
    if scale is None:
        return t.double()
    return t.double() * (scale[..., None, None] if scale.dim() == 2 else scale[..., None]).double()


def expected(q, k, v, bias=None, causal=False, sink=None, softcap=None, scale=None):
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    scores = q @ k.mT
    scores = (scores if bias is None else scores + bias.double()[..., None]) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    if causal:
        hidden = torch.ones(scores.shape[-2:], device=q.device, dtype=torch.bool).triu(scores.shape[-1] - scores.shape[-2] + 1)
        scores = scores.masked_fill(hidden, -math.inf)
    if sink is not None:
        scores = torch.cat([scores, sink.double()[:, None, None].expand(*scores.shape[:1], -1, scores.shape[2], 1)], -1)
        v = torch.cat([v, torch.zeros_like(v[:, :, :1])], 2)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def error(o, whole):
    return ((o.double() - whole).square().mean() / whole.square().mean()).sqrt()


def bound(o, device):
    """Relative, root mean square. On a GPU P is of 8 bits, too."""
    return HALF[o.dtype] + (0 if device == "cpu" else 0.05)


@pytest.mark.parametrize("scales", ["none", "heads", "rows"])
@pytest.mark.parametrize("dtype", [E4M3, E5M2, I8])
def test_codes_and_scales_by_definition(device, dtype, scales):
    q, k, v = codes_of(dtype, device)
    given = {}
    if scales != "none":
        unit = {"q_scale": 1 / 900 if dtype == I8 else 1.0}
        given = {name: (torch.rand(t.shape[:2 if scales == "heads" else 3], device=device) + 0.5) * unit.get(name, 1.0)
                 for name, t in (("q_scale", q), ("k_scale", k), ("v_scale", v))}
    options = {"scale": 2.0**-12 if dtype == I8 and not given else None}
    values = [rows(t, given.get(f"{name}_scale")) for name, t in zip("qkv", (q, k, v))]
    for causal in (False, True):
        whole, sums = expected(*values, causal=causal, **options)
        for result in HALF:
            o, lse = quantized_attention(q, k, v, **given, dtype=result, causal=causal, return_lse=True, **options)
            assert o.dtype == result and o.shape == whole.shape and lse.dtype == torch.float32
            assert error(o, whole) <= bound(o, device) and (lse - sums).abs().max() <= (1e-4 if device == "cpu" else 2e-2)
    assert quantized_attention(q, k, v, **given, **options).dtype == torch.bfloat16


def test_options(device):
    q, k, v = codes_of(E4M3, device)
    values = [t.double() for t in (q, k, v)]
    sink = torch.randn(H_Q, device=device)
    for more, by in (({"sink": sink}, {"sink": sink}), ({"score": functions.softcap(2.0)}, {"softcap": 2.0}),
                     ({"score": "score * gain[h] * two", "captures": {"gain": torch.full((H_Q,), 0.5, device=device), "two": 3.0}},
                      {"scale": 1.5 * D**-0.5}), ({"precise": True, "scale": 0.3}, {"scale": 0.3})):
        o, lse = quantized_attention(q, k, v, dtype=torch.float16, return_lse=True, **more)
        whole, sums = expected(*values, **by)
        assert error(o, whole) <= bound(o, device) and (lse - sums).abs().max() <= (1e-4 if device == "cpu" else 2e-2)
    order = quantized_attention(q.transpose(1, 2).contiguous().transpose(1, 2), k, v)
    assert torch.equal(order, quantized_attention(q, k, v)) and order.stride(1) < order.stride(2)
    gaps = quantized_attention(q.transpose(2, 3).contiguous().transpose(2, 3), k, v)
    assert torch.equal(gaps, quantized_attention(q, k, v))
    shared = torch.full((1, 1), 0.5, device=device).expand(B, H_KV)
    assert torch.equal(quantized_attention(q, k, v, k_scale=shared), quantized_attention(q, k, v, k_scale=shared.contiguous()))


@pytest.mark.parametrize("result", [torch.bfloat16, E4M3])
@pytest.mark.parametrize("of_keys", [False, True])
def test_packed_batches(device, of_keys, result):
    q, k, v = codes_of(E4M3, device)
    lengths_q, lengths_kv = (5, 20), (40, 30)
    packed = [torch.cat([t[i, :, :n].transpose(0, 1) for i, n in enumerate(lengths)])
              for t, lengths in ((q, lengths_q), (k, lengths_kv), (v, lengths_kv))]
    packed[0] = torch.cat([packed[0].view(I8), torch.ones(3, H_Q, D, device=device, dtype=I8)]).view(E4M3)  # rows of no sequence
    cu_q, cu_kv = (torch.tensor([0, n[0], sum(n)], device=device, dtype=INT) for n in (lengths_q, lengths_kv))
    q_scale = torch.rand(H_Q, 28, device=device) + 0.5
    k_scale, v_scale = (torch.rand((H_KV, 70) if of_keys else (2, H_KV), device=device) + 0.5 for _ in range(2))
    o, lse = quantized_attention(*packed, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, key_scales=of_keys,
                                 value_scales=of_keys, cu_seqlens_q=cu_q, cu_seqlens_kv=cu_kv, causal=True, dtype=result,
                                 return_lse=True)
    for i in range(2):
        at_q, at_kv = slice(int(cu_q[i]), int(cu_q[i + 1])), slice(int(cu_kv[i]), int(cu_kv[i + 1]))
        scales = [q_scale[:, at_q], *((s[:, at_kv] if of_keys else s[i]) for s in (k_scale, v_scale))]
        whole, sums = expected(*(rows(t[at].transpose(0, 1)[None], s[None]) for t, at, s in
                                 zip(packed, (at_q, at_kv, at_kv), scales)), causal=True)
        assert error(o[at_q].transpose(0, 1), whole[0]) <= bound(o, device)
        assert (lse[:, at_q] - sums[0]).abs().max() <= (1e-4 if device == "cpu" else 2e-2)
    assert (o[25:].float() == 0).all() and (lse[:, 25:] == -math.inf).all()


@pytest.mark.parametrize("smooth", [False, True])
@pytest.mark.parametrize("dtype", [I8, E4M3])
@pytest.mark.parametrize("of", [torch.float32, torch.bfloat16, torch.float16])
def test_quantize_by_definition(device, of, dtype, smooth):
    q, k, v = wide(device, of)
    k = k + 4 * (torch.arange(D, device=device) % 16 == 3)
    q[0, 0, 0] = 0
    made = quantize(q, k, v, dtype=dtype, smooth=smooth)
    mean = k.float().mean(2)
    assert (made.k_mean is None) == (made.row_bias is None) == (not smooth)
    if smooth:
        assert (made.k_mean - mean).abs().max() <= 1e-5
        bias = (q.double() * made.k_mean.double().repeat_interleave(2, 1)[:, :, None]).sum(-1)
        assert (made.row_bias - bias).abs().max() <= 1e-4
    for t, codes, scale, kind in zip((q, k.float() - made.k_mean[:, :, None] if smooth else k, v), made[:3], made[3:6],
                                     (dtype, dtype, E4M3)):
        greatest = 127 if kind == I8 else 448
        assert codes.dtype == kind and codes.shape == t.shape and scale.shape == t.shape[:3] and scale.dtype == torch.float32
        assert torch.allclose(scale, t.float().abs().amax(-1) / greatest, rtol=1e-5)
        step = scale.double()[..., None]
        room = step / 2 if kind == I8 else torch.maximum(t.double().abs() / 16, step / 1024)
        assert ((codes.double() * step - t.double()).abs() <= room * (1 + 1e-3) + 1e-6).all()
    assert (made.q[0, 0, 0].float() == 0).all() and (made.q_scale[0, 0, 0] == 0).all()


@pytest.mark.parametrize("smooth", [False, True])
def test_codes_attend_as_what_they_were_made_of(device, smooth):
    q, k, v = wide(device, torch.bfloat16)
    k = k + 6 * (torch.arange(D, device=device) % 16 == 3)
    whole, sums = expected(*(t.double() for t in (q, k, v)), causal=True)
    o, lse = quantize(q, k, v, smooth=smooth).attention(causal=True, precise=True, return_lse=True)
    assert error(o, whole) <= (0.03 if smooth else 0.15) and (lse - sums).abs().max() <= (0.1 if smooth else 0.4)
    o = quantize(q, k, v, dtype=E4M3, smooth=smooth).attention(causal=True, precise=True)
    assert error(o, whole) <= (0.07 if smooth else 0.3)


def test_quantize_with_given_scales_and_mean(device):
    q, k, v = wide(device)
    whole = quantize(k=k, smooth=True)
    assert whole.q is None and whole.v is None and whole.row_bias is None
    given = torch.tensor([0.02, 0.03], device=device)[:, None].expand(B, H_KV, S_KV)
    made = quantize(k=k, k_scale=given, k_mean=whole.k_mean)
    assert made.k_scale is given and made.k_mean is whole.k_mean
    codes = ((k - whole.k_mean[:, :, None]) / given[..., None]).round().clamp(-127, 127)
    assert (made.k.float() - codes).abs().max() <= 1 and ((made.k.float() - codes) != 0).float().mean() <= 1e-3
    later = quantize(q, k_mean=whole.k_mean)
    assert later.k is None and (later.row_bias - quantize(q, k, smooth=True).row_bias).abs().max() <= 1e-5
    alone = quantize(v=v)
    assert alone.v.dtype == E4M3 and torch.equal(alone.v.view(I8), quantize(q, k, v).v.view(I8))


def test_quantize_packed(device):
    q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in wide(device))
    made = quantize(q, k, v, smooth=True)
    assert made.q_scale.shape == (H_Q, B * S_Q) and made.k_mean.shape == (H_KV, D) and made.row_bias.shape == (H_Q, B * S_Q)
    assert torch.allclose(made.k_mean, k.mean(0), atol=1e-5)
    cu_q, cu_kv = (torch.tensor([0, n, 2 * n], device=device, dtype=INT) for n in (S_Q, S_KV))
    o, lse = made.attention(cu_seqlens_q=cu_q, cu_seqlens_kv=cu_kv, precise=True, return_lse=True)
    whole, sums = expected(*(t.double() for t in wide(device)))
    assert error(o.view(B, S_Q, H_Q, D).transpose(1, 2), whole) <= 0.03
    assert (lse.view(H_Q, B, S_Q).transpose(0, 1) - sums).abs().max() <= 0.1


def arguments(q, k, v, captures=(), score=None, names=((), ()), numbers=(), scales=(None,) * 4, dtype=torch.bfloat16, sink=None):
    return (q, k, v, *scales, sink, list(captures), None, None, None, None, 0, 0, list(numbers), scales[1] is not None,
            scales[2] is not None, False, dtype, True, None, False, None, None, 0, score, None, *map(list, names))


def test_opcheck():
    q, k, v = codes_of(I8)
    made = quantize(*wide(), smooth=True)
    checks = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    torch.library.opcheck(_quantized.quantize_op, (*wide()[:2], None, *[None] * 4, I8, True), test_utils=checks)
    torch.library.opcheck(_quantized.quantize_op, (None, wide()[1], None, None, made.k_scale, None, made.k_mean, I8, False))
    checks = checks[1:]  # the first compares by torch.allclose, which PyTorch has not of float8
    torch.library.opcheck(_quantized.forward_op, arguments(*made[:3], scales=(*made[3:6], made.row_bias), sink=torch.zeros(H_Q)),
                          test_utils=checks)
    more = {"captures": [torch.ones(H_Q)], "score": "score * gain[h] * two", "names": (["gain"], ["two"]), "numbers": [2.0]}
    torch.library.opcheck(_quantized.forward_op, arguments(*codes_of(E4M3), **more), test_utils=checks)


@pytest.mark.parametrize("dynamic", [False, True])
def test_fullgraph(dynamic):
    call = lambda q, k, v: quantize(q, k, v, smooth=True).attention(causal=True, return_lse=True)  # noqa: E731
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for x, y in zip(compiled(*wide()), call(*wide())):
        assert torch.equal(x, y)


def test_fake_tensors_and_vmap():
    q, k, v = wide()
    with FakeTensorMode() as mode:
        made = quantize(*(mode.from_tensor(t) for t in (q, k, v)), smooth=True)
        assert made.q.dtype == I8 and made.v.dtype == E4M3 and made.row_bias.shape == (B, H_Q, S_Q)
        o, lse = made.attention(dtype=torch.float16, return_lse=True)
        assert o.shape == q.shape and o.dtype == torch.float16 and lse.shape == q.shape[:3]
    call = lambda q: quantize(q, k, v).attention()  # noqa: E731
    mapped = torch.vmap(call)(torch.stack([q, -q]))
    assert torch.equal(mapped[1], call(-q))


def test_what_is_refused():
    q, k, v = codes_of(E4M3)
    scale = torch.ones(B, H_Q)
    refused(TypeError, lambda: quantized_attention(q.float(), k, v), "q is torch.float32", "attention")
    refused(TypeError, lambda: quantized_attention(q, k.to(E5M2), v), "k is torch.float8_e5m2", "torch.float8_e4m3fn")
    refused(TypeError, lambda: quantized_attention(q.view(I8), k.view(I8), v.view(I8)), "v is torch.int8", "float8_e4m3fn")
    refused(TypeError, lambda: quantized_attention(q, k, None), "v is a", "torch.Tensor")
    refused(ValueError, lambda: quantized_attention(q[0], k, v), "q has shape", "[b, h_q, s_q, d_qk]")
    refused(TypeError, lambda: quantized_attention(q, k, v, dtype=torch.float32), "dtype is torch.float32", "bfloat16")
    refused(TypeError, lambda: quantized_attention(q, k, v, q_scale=scale.double()), "q_scale is torch.float64")
    refused(ValueError, lambda: quantized_attention(q, k, v, q_scale=scale[0]), "q_scale has shape [4]")
    refused(ValueError, lambda: quantized_attention(q, k, v, k_scale=scale), "k_scale", "4")
    refused(ValueError, lambda: quantized_attention(q, k, v, row_bias=scale), "row_bias")
    refused(ValueError, lambda: quantized_attention(q[..., :24], k[..., :24], v), "24", "16")
    refused(ValueError, lambda: quantized_attention(q, k, v, seqused_kv=torch.zeros(2, dtype=INT)), "cu_seqlens_q is None")
    refused(ValueError, lambda: quantized_attention(q, k, v, captures={"x": 1.0}), "'x'")
    refused(TypeError, lambda: attention(q, k, v), "q is torch.float8_e4m3fn")
    q, k, v = wide()
    refused(TypeError, lambda: quantize(q, k, v, dtype=E5M2), "dtype is torch.float8_e5m2", "torch.int8")
    refused(TypeError, lambda: quantize(q.double()), "q is torch.float64")
    refused(ValueError, lambda: quantize(), "q, k and v are None")
    refused(ValueError, lambda: quantize(q, k[0]), "k has shape")
    refused(ValueError, lambda: quantize(q, smooth=True), "smooth")
    refused(ValueError, lambda: quantize(v=v, k_mean=torch.zeros(B, H_KV, D)), "k_mean is given", "without q or k")
    refused(ValueError, lambda: quantize(q, k, q_scale=torch.ones(B, H_Q, S_Q)), "k_scale is None")
    refused(ValueError, lambda: quantize(q, k_scale=torch.ones(B, H_Q, S_Q)), "q_scale is None")
    refused(ValueError, lambda: quantize(q[..., :24]), "24")
    refused(ValueError, lambda: quantize(q, k).attention(), "v is None")
    coarse = quantize(q, k, v, dtype=E4M3, smooth=True)
    refused(ValueError, lambda: coarse.attention(return_lse=True), "return_lse", "row_bias")


def test_gradients_are_refused():
    q, k, v = wide()
    q.requires_grad_()
    refused(RuntimeError, lambda: quantize(q, k, v), "q requires a gradient", "quantize has no gradients")
    refused(RuntimeError, lambda: torch.compile(lambda: quantize(q, k, v), backend="aot_eager")(), "requires a gradient")
    with torch.no_grad():
        made = quantize(q, k, v)
    made.k_scale.requires_grad_()
    refused(RuntimeError, made.attention, "k_scale requires a gradient", "quantized_attention has no gradients")
    refused(RuntimeError, lambda: _quantized.forward_op(*arguments(*made[:3], scales=(*made[3:6], None))), "k_scale requires")
    codes = [t.requires_grad_() for t in codes_of(E4M3)]
    refused(RuntimeError, lambda: quantized_attention(*codes), "q requires a gradient")
    with torch.no_grad():
        assert not made.attention().requires_grad and not quantized_attention(*codes).requires_grad


def pool(t, page, table, layout):
    """Keys or values [b, h_kv, s_kv, d], or scales [b, h_kv, s_kv], in pages."""
    whole = torch.zeros((16, page, *t.shape[1:2], *t.shape[3:]), device=t.device, dtype=t.dtype)
    for i in range(t.shape[0]):
        for n, number in enumerate(table[i].tolist()):
            part = t[i, :, n * page:(n + 1) * page].transpose(0, 1)
            whole[number, :part.shape[0]] = part
    return whole if layout == "NHD" else whole.transpose(1, 2).contiguous()


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", [E4M3, E5M2, I8])
def test_pages(device, dtype, layout):
    q, k, v = codes_of(dtype, device)
    q = q[:, :, :5]
    table = torch.randperm(16, device=device)[:10].view(2, 5).to(INT)
    used = torch.tensor([70, 41], device=device, dtype=INT)
    pages = [pool(t, 16, table, layout) for t in (k, v)]
    unit = 1 / 900 if dtype == I8 else 1.0
    q_scale = torch.rand(B, H_Q, 5, device=device) + 0.5
    of_keys = [torch.rand(B, H_KV, S_KV, device=device) * n + n / 2 for n in (unit, 1.0)]
    of_heads = [torch.rand(B, H_KV, device=device) * n + n / 2 for n in (unit, 1.0)]
    bias = torch.randn(B, H_Q, 5, device=device) if dtype == I8 else None
    sink = torch.randn(H_Q, device=device)
    for scales in (of_keys, of_heads, [of_keys[0], of_heads[1]], [None, None]):
        given = [None if s is None else pool(s, 16, table, layout) if s.dim() == 3 else s for s in scales]
        for result in HALF:
            more = {"scale": unit if scales[0] is None else None}
            o, lse = paged_attention(q, *pages, table, used, layout=layout, causal=True, sink=sink, q_scale=q_scale,
                                     k_scale=given[0], v_scale=given[1], row_bias=bias, dtype=result, return_lse=True, **more)
            assert o.dtype == result
            for i, n in enumerate((70, 41)):
                values = [rows(t[i:i + 1, :, :n], None if s is None else s[i:i + 1, :, :n] if s.dim() == 3 else s[i:i + 1])
                          for t, s in zip((q, k, v), (q_scale, *scales))]
                row = None if bias is None else bias[i:i + 1]
                whole, sums = expected(*values, bias=row, causal=True, sink=sink, **more)
                assert error(o[i:i + 1], whole) <= bound(o, device)
                assert (lse[i] - sums[0]).abs().max() <= (2e-4 if device == "cpu" else 2e-2)


def test_pages_of_packed_queries_and_contiguous_caches(device):
    q, k, v = codes_of(E4M3, device)
    table = torch.arange(10, device=device, dtype=INT).view(2, 5)
    used = torch.tensor([70, 41], device=device, dtype=INT)
    pages = [pool(t, 16, table, "NHD") for t in (k, v)]
    dense = paged_attention(q, *pages, table, used, causal=True, precise=True)
    packed = q.transpose(1, 2).flatten(0, 1)
    cu = torch.tensor([0, S_Q, 2 * S_Q], device=device, dtype=INT)
    o, lse = paged_attention(packed, *pages, table, used, cu_seqlens_q=cu, max_s_q=S_Q, causal=True, precise=True, return_lse=True,
                             q_scale=torch.ones(H_Q, 2 * S_Q, device=device))
    assert error(o.view(B, S_Q, H_Q, D).transpose(1, 2), dense.double()) <= (1e-6 if device == "cpu" else 1e-2)
    assert lse.shape == (H_Q, 2 * S_Q)
    o, lse = paged_attention(packed[:-3], *pages, table, used, cu_seqlens_q=torch.tensor([0, 20, 30], device=device, dtype=INT),
                             dtype=E4M3, return_lse=True)
    assert (o[30:].float() == 0).all() and (lse[:, 30:] == -math.inf).all() and o[:30].float().isfinite().all()
    rows_of = [t.transpose(1, 2).contiguous() for t in (k, v)]
    o = paged_attention(q, *rows_of, None, used, causal=True, precise=True)
    assert error(o, dense.double()) <= (1e-6 if device == "cpu" else 1e-2)


def paged_arguments(q, k, v, table, used, *last):
    return (q, k, v, None, [], table, used, None, None, None, None, 0, 0, [], "NHD", True, None, None, None, 0, None, None, [], [],
            *last)


def test_pages_under_what_watches_a_call():
    q, k, v = codes_of(I8)
    table = torch.arange(10, dtype=INT).view(2, 5)
    used = torch.tensor([70, 41], dtype=INT)
    pages = [pool(t, 16, table, "NHD") for t in (k, v)]
    q_scale, k_scale, bias = torch.full((B, H_Q), 1 / 900), torch.ones(B, H_KV), torch.randn(B, H_Q, S_Q)
    checks = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    last = (k_scale, None, q_scale, bias, torch.float16, True)
    torch.library.opcheck(_cache_ops.forward_op, paged_arguments(q, *pages, table, used, *last), test_utils=checks)
    call = lambda q, bias: paged_attention(q, *pages, table, used, q_scale=q_scale, row_bias=bias,  # noqa: E731
                                           dtype=torch.float16)
    whole = call(q, bias)
    assert torch.equal(torch.compile(call, fullgraph=True, backend="aot_eager")(q, bias), whole) and whole.dtype == torch.float16
    mapped = torch.vmap(call)(torch.stack([q, -q]), torch.stack([bias, -bias]))
    assert torch.equal(mapped[0], whole) and torch.equal(mapped[1], call(-q, -bias))
    refused(ValueError, lambda: paged_attention(q, *pages, table, used, seq_begin=torch.zeros_like(used)), "seq_begin")
    refused(TypeError, lambda: paged_attention(q, pages[0], pages[0], table, used), "v_pages is torch.int8", "float8_e4m3fn")
    refused(TypeError, lambda: paged_attention(q, *pages, table, used, dtype=torch.float32), "dtype is torch.float32")
    refused(ValueError, lambda: paged_attention(q, *pages, table, used, k_scale=torch.ones(3, 16, H_KV)), "k_scale has shape")
    half = torch.zeros(B, H_Q, 1, D, dtype=torch.bfloat16)
    caches = torch.zeros(2, 4, 16, H_KV, D, dtype=torch.bfloat16)
    for more in ({"q_scale": q_scale}, {"dtype": torch.float16}, {"precise": True}, {"row_bias": bias}):
        refused(ValueError, lambda: paged_attention(half, *caches, table[:, :1], used, **more), next(iter(more)), "8 bits")
    bias.requires_grad_()
    refused(RuntimeError, lambda: call(q, bias), "row_bias requires a gradient")
