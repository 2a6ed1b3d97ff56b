"""Functions with other packages' signatures, beside PyTorch's own attention in the same dtype."""

import pytest
from conftest import refused

torch = pytest.importorskip("torch")

import torch.nn.functional as functional  # noqa: E402
from fa_attention import flash_attn  # noqa: E402
from fa_attention.torch import attention, scaled_dot_product_attention  # noqa: E402


def make(*shapes, dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def same(ours, own, leaves, **tolerance):
    """Results and gradients of both."""
    dout = torch.randn_like(own)
    assert ours.shape == own.shape and ours.dtype == own.dtype
    assert torch.allclose(ours, own, **tolerance)
    pairs = zip(torch.autograd.grad(ours, leaves, dout), torch.autograd.grad(own, leaves, dout))
    assert all(torch.allclose(x, y, **tolerance) for x, y in pairs)


@pytest.mark.parametrize("options", [
    {}, {"is_causal": True}, {"scale": 0.3}, {"mask": (5, 7)}, {"mask": (2, 1, 5, 7)}, {"mask": (4, 1, 7)}, {"mask": (7,)},
    {"mask": (2, 4, 5, 7)}, {"bool": (5, 7)}, {"bool": (2, 1, 5, 7)}, {"bool": (2, 1, 1, 7)}])
def test_sdpa(options):
    q, k, v = make((2, 4, 5, 16), (2, 4, 7, 16), (2, 4, 7, 8))
    leaves = [q, k, v]
    given = {name: value for name, value in options.items() if name not in ("mask", "bool")}
    if "mask" in options:
        given["attn_mask"] = torch.randn(options["mask"], dtype=torch.float64, requires_grad=True)
        leaves.append(given["attn_mask"])
    if "bool" in options:
        given["attn_mask"] = torch.rand(options["bool"]) < 0.7
        given["attn_mask"][..., 0] = True
    same(scaled_dot_product_attention(q, k, v, **given), functional.scaled_dot_product_attention(q, k, v, **given), leaves)


@pytest.mark.parametrize("shapes", [
    ((3, 5, 8), (3, 7, 8), (3, 7, 8)), ((5, 8), (7, 8), (7, 8)), ((2, 3, 4, 5, 8), (2, 3, 4, 7, 8), (2, 3, 4, 7, 8)),
    ((2, 4, 5, 20), (2, 4, 7, 20), (2, 4, 7, 13)), ((2, 4, 5, 3), (2, 4, 7, 3), (2, 4, 7, 5)),
    ((4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 8)), ((5, 8), (3, 7, 8), (7, 8)),
    ((2, 4, 5, 8), (1, 4, 7, 8), (1, 4, 7, 8)), ((2, 1, 4, 5, 8), (1, 3, 4, 7, 8), (3, 4, 7, 8)),
    ((2, 4, 5, 0), (2, 4, 7, 0), (2, 4, 7, 8)), ((0, 4, 5, 8), (0, 4, 7, 8), (0, 4, 7, 8)),
    ((2, 4, 0, 8), (2, 4, 7, 8), (2, 4, 7, 8))])
def test_sdpa_shapes(shapes):
    leaves = make(*shapes)
    same(scaled_dot_product_attention(*leaves), functional.scaled_dot_product_attention(*leaves), leaves)
    if len(shapes[0]) == 3 or len(shapes[0]) == 5:
        batch = torch.broadcast_shapes(*(shape[:-3] for shape in shapes)) if len(shapes[0]) == 5 else (shapes[0][0],)
        mask = torch.randn(*batch, *((4,) if len(shapes[0]) == 5 else ()), 5, 7, dtype=torch.float64)
        same(scaled_dot_product_attention(*leaves, mask), functional.scaled_dot_product_attention(*leaves, mask), leaves)


def test_sdpa_of_tensors_whose_memory_has_the_other_sign():
    data = make((2, 4, 5, 16), (2, 4, 7, 16), (2, 4, 7, 8))
    mask, = make((2, 4, 5, 7), seed=1)
    results = []
    for sign in (torch.neg, torch._neg_view):
        o = scaled_dot_product_attention(*map(sign, data), sign(mask))
        results.append([o, *torch.autograd.grad(o, [*data, mask], sign(o.detach().cos()))])
    for expected, actual in zip(*results):
        assert torch.allclose(actual, expected)


def test_sdpa_grouped_heads():
    leaves = make((2, 6, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8))
    options = {"enable_gqa": True, "is_causal": True}
    same(scaled_dot_product_attention(*leaves, **options), functional.scaled_dot_product_attention(*leaves, **options), leaves)
    refused(ValueError, lambda: scaled_dot_product_attention(*leaves), "key has 2 heads", "enable_gqa")


@pytest.mark.parametrize("lengths", [(5, 7), (7, 5), (6, 6)])
def test_sdpa_causal_bias(lengths):
    """PyTorch's tensors that stand for a causal mask, and have no elements."""
    from torch.nn.attention.bias import causal_lower_right, causal_upper_left

    s_q, s_kv = lengths
    q, k, v = make((2, 4, s_q, 16), (2, 4, s_kv, 16), (2, 4, s_kv, 8))
    kept = torch.ones(s_q, s_kv, dtype=torch.bool)
    masks = [(causal_upper_left, kept.tril())]
    if s_q <= s_kv:  # else PyTorch has NaN in rows without keys
        masks.append((causal_lower_right, kept.tril(s_kv - s_q)))
    for make_bias, mask in masks:
        o = scaled_dot_product_attention(q, k, v, make_bias(s_q, s_kv))
        assert type(o) is torch.Tensor
        same(o, functional.scaled_dot_product_attention(q, k, v, mask), [q, k, v])
    other, bias = causal_upper_left(s_q + 1, s_kv), causal_upper_left(s_q, s_kv)
    refused(ValueError, lambda: scaled_dot_product_attention(q, k, v, other), "attn_mask is causal", "queries")
    refused(ValueError, lambda: scaled_dot_product_attention(q, k, v, bias, is_causal=True), "is_causal")


def test_sdpa_has_pytorchs_signature():
    """Positions and defaults, as PyTorch documents them."""
    import inspect

    names = ["query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"]
    parameters = inspect.signature(scaled_dot_product_attention).parameters
    assert list(parameters) == names
    assert [parameters[name].default for name in names[3:]] == [None, 0.0, False, None, False]


def test_sdpa_errors():
    q, k, v = make((1, 2, 3, 8), (1, 2, 3, 8), (1, 2, 3, 8))
    both = {"attn_mask": torch.ones(3, 3), "is_causal": True}
    refused(ValueError, lambda: scaled_dot_product_attention(q, k, v, **both), "attn_mask and is_causal")
    refused(TypeError, lambda: scaled_dot_product_attention(q, k, v, torch.ones(3, 3, dtype=torch.int64)), "attn_mask", "int64")
    refused(TypeError, lambda: scaled_dot_product_attention(None, k, v), "query", "torch.Tensor")
    refused(ValueError, lambda: scaled_dot_product_attention(q, k[0, 0, 0], v), "key has shape [8]")


def test_sdpa_dropout_and_rows_without_keys():
    q, k, v = make((1, 2, 64, 8), (1, 2, 64, 8), (1, 2, 64, 8))
    torch.manual_seed(0)
    first = scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    assert not torch.equal(first, scaled_dot_product_attention(q, k, v, dropout_p=0.5))
    mask = torch.ones(64, 64, dtype=torch.bool)
    mask[3] = False
    o = scaled_dot_product_attention(q, k, v, mask)
    o.sum().backward()
    assert (o[:, :, 3] == 0).all() and torch.isfinite(q.grad).all() and (q.grad[:, :, 3] == 0).all()


def test_sdpa_compiles():
    q, k, v = make((2, 4, 5, 20), (2, 4, 7, 20), (2, 4, 7, 20))
    mask = torch.rand(2, 1, 5, 7) < 0.8
    compiled = torch.compile(lambda *t: scaled_dot_product_attention(*t), fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(q, k, v, mask), scaled_dot_product_attention(q, k, v, mask))


def definition(q, k, v, causal=False, window=(-1, -1), softcap=0.0, slopes=None):
    """flash_attn's documentation, for [b, s, h, d]."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    group, s_q, s_kv = q.shape[1] // k.shape[1], q.shape[2], k.shape[2]
    scores = q @ k.repeat_interleave(group, 1).transpose(2, 3) * q.shape[-1] ** -0.5
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    row, key = torch.arange(s_q)[:, None] + s_kv - s_q, torch.arange(s_kv)
    if slopes is not None:
        scores = scores - slopes.reshape(-1, q.shape[1], 1, 1) * (row - key).abs()
    keep = torch.ones(s_q, s_kv, dtype=torch.bool)
    keep &= (key >= row - window[0]) if window[0] >= 0 else True
    keep &= (key <= row + window[1]) if window[1] >= 0 else True
    keep &= (key <= row) if causal else True
    scores = scores.masked_fill(~keep, float("-inf"))
    return (torch.softmax(scores, -1) @ v.repeat_interleave(group, 1)).transpose(1, 2), scores.logsumexp(-1)


SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=torch.float64)
FLASH = [{}, {"causal": True}, {"window": (2, 1)}, {"causal": True, "window": (1, 0)}, {"softcap": 2.5}, {"slopes": SLOPES},
         {"slopes": torch.stack([SLOPES, SLOPES / 2]), "causal": True, "softcap": 3.0}]


def renamed(options):
    names = {"window": "window_size", "slopes": "alibi_slopes"}
    return {names.get(name, name): value for name, value in options.items()}


@pytest.mark.parametrize("options", FLASH)
def test_flash_attn(options):
    leaves = make((2, 5, 4, 12), (2, 7, 2, 12), (2, 7, 2, 12))
    o, lse, none = flash_attn.flash_attn_func(*leaves, return_attn_probs=True, **renamed(options))
    expected, expected_lse = definition(*leaves, **options)
    same(o, expected, leaves)
    assert none is None and torch.allclose(lse, expected_lse)
    assert torch.equal(flash_attn.flash_attn_func(*leaves, **renamed(options)), o)


@pytest.mark.parametrize("options", FLASH)
def test_flash_attn_of_packed_batches(options):
    q, k, v = leaves = make((7, 4, 12), (9, 2, 12), (9, 2, 12))
    cu_q, cu_k = (torch.tensor(n, dtype=torch.int32) for n in ((0, 3, 7), (0, 4, 9)))
    o, lse, _ = flash_attn.flash_attn_varlen_func(*leaves, cu_q, cu_k, 4, 5, return_attn_probs=True, **renamed(options))
    parts = []
    for i in range(2):
        own = dict(options)
        if options.get("slopes") is not None and options["slopes"].dim() == 2:
            own["slopes"] = options["slopes"][i]
        rows, keys = slice(cu_q[i], cu_q[i + 1]), slice(cu_k[i], cu_k[i + 1])
        parts.append(definition(q[rows][None], k[keys][None], v[keys][None], **own))
    same(o, torch.cat([part[0][0] for part in parts]), leaves)
    assert torch.allclose(lse, torch.cat([part[1][0] for part in parts], 1))


def test_flash_attn_of_one_tensor():
    (qkv,) = make((2, 5, 3, 4, 8))
    whole = flash_attn.flash_attn_func(*qkv.unbind(2), causal=True)
    assert torch.equal(flash_attn.flash_attn_qkvpacked_func(qkv, causal=True), whole)
    assert torch.equal(flash_attn.flash_attn_kvpacked_func(qkv[:, :, 0], qkv[:, :, 1:], causal=True), whole)
    cu, flat = torch.tensor([0, 5, 10], dtype=torch.int32), qkv.flatten(0, 1)
    packed = flash_attn.flash_attn_varlen_qkvpacked_func(flat, cu, 5, causal=True)
    assert torch.allclose(packed, whole.flatten(0, 1))
    assert torch.equal(flash_attn.flash_attn_varlen_kvpacked_func(flat[:, 0], flat[:, 1:], cu, cu, 5, 5, causal=True), packed)


def test_attention_of_memory_order():
    """[b, s, h, d] stays as it is: no copy of the result."""
    q = torch.randn(2, 5, 4, 8)
    assert flash_attn.flash_attn_func(q, q, q).is_contiguous()
    assert attention(*[q.transpose(1, 2)] * 3).transpose(1, 2).is_contiguous()
