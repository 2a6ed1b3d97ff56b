"""fa as PyTorch's flash backend. On the host its kernels stand in for the ones that PyTorch has on a GPU alone."""

import itertools

import pytest
from conftest import refused

torch = pytest.importorskip("torch")

import fa_attention  # noqa: E402
from fa_attention import capi  # noqa: E402
from fa_attention.torch import _flash_backend, attention, register_flash_attention, varlen_attention  # noqa: E402
from torch.nn import attention as registry  # noqa: E402

aten = torch.ops.aten
ATOL = {torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}
has_registry = hasattr(registry, "register_flash_attention_impl")


@pytest.fixture
def kernels():
    """On the host, until the end of a test."""
    handle = _flash_backend.Handle("CPU")
    yield
    handle.remove()


def inputs(s_q, s_kv, h_kv=4, d_v=16, order="bhsd"):
    torch.manual_seed(s_q + s_kv)
    made = []
    for h, s, d in ((4, s_q, 16), (h_kv, s_kv, 16), (h_kv, s_kv, d_v)):
        sizes = {"b": 2, "h": h, "s": s, "d": d}
        made.append(torch.randn([sizes[axis] for axis in order]).permute([order.index(axis) for axis in "bhsd"]).requires_grad_())
    return made


def gradients(o, weight, tensors):
    return torch.autograd.grad((o * weight).sum(), tensors)


@pytest.mark.parametrize("order", ["bhsd", "bshd", "sbhd"])
@pytest.mark.parametrize("causal", [False, True])
def test_dense(kernels, causal, order):
    for (s_q, s_kv, h_kv), d_v, scale in itertools.product(((9, 9, 4), (5, 9, 2), (1, 9, 2)), (16, 8), (None, 0.3)):
        q, k, v = inputs(s_q, s_kv, h_kv, d_v, order)
        o, lse, cu_q, cu_k, max_q, max_k, state, unused, mask = aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, causal, scale=scale)
        like = torch.empty_strided(q.shape, q.stride(), device="meta")
        on_meta = aten._scaled_dot_product_flash_attention(like, k.to("meta"), v.to("meta"), 0.0, causal)
        assert lse.shape == on_meta[1].shape
        if d_v == 16:  # PyTorch's own kernels want it to be d
            assert o.shape == on_meta[0].shape
            assert all(n == 1 or x == y for n, x, y in zip(o.shape, o.stride(), on_meta[0].stride()))
        assert cu_q is None and cu_k is None and (max_q, max_k) == (s_q, s_kv) and mask.numel() == 0
        assert state.dtype == torch.uint64 and state.shape == (2,) and unused.shape == ()
        expected, expected_lse = attention(q, k, v, causal=causal, scale=scale, return_lse=True)
        assert torch.equal(o, expected) and torch.equal(lse, expected_lse)
        weight = torch.randn_like(o)
        for x, y in zip(gradients(o, weight, (q, k, v)), gradients(expected, weight, (q, k, v))):
            assert torch.equal(x, y)
        by_rows = [t.transpose(1, 2) for t in (q, k, v)]
        o, lse, *_ = aten._flash_attention_forward(*by_rows, None, None, s_q, s_kv, 0.0, causal, False, scale=scale,
                                                   window_size_left=3, window_size_right=-1 if causal else 2)
        expected = attention(q, k, v, causal=causal, scale=scale, window_left=3, window_right=None if causal else 2)
        assert torch.equal(o.transpose(1, 2), expected)
        for x, y in zip(gradients(o.transpose(1, 2), weight, (q, k, v)), gradients(expected, weight, (q, k, v))):
            assert torch.equal(x, y)


def test_dropout(kernels):
    """The mask of forward is that of backward, drawn from PyTorch's generator."""
    q, k, v = inputs(9, 9)
    torch.manual_seed(1)
    o, _, _, _, _, _, state, _, _ = aten._scaled_dot_product_flash_attention(q, k, v, 0.5)
    expected = attention(q, k, v, dropout=0.5, rng_state=state.view(torch.int64))
    assert torch.equal(o, expected) and not torch.equal(o, attention(q, k, v))
    weight = torch.randn_like(o)
    assert all(torch.equal(x, y) for x, y in zip(gradients(o, weight, (q, k, v)), gradients(expected, weight, (q, k, v))))
    assert not torch.equal(aten._scaled_dot_product_flash_attention(q, k, v, 0.5)[0], o)
    torch.manual_seed(1)
    assert torch.equal(aten._scaled_dot_product_flash_attention(q, k, v, 0.5)[0], o)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("s_q, s_kv, causal", [(9, 9, True), (5, 131, False), (3, 256, False)])
def test_debug_mask(kernels, s_q, s_kv, causal, dtype):
    """What PyTorch's own function of products makes of the mask is what forward made of it."""
    q, k, v = (t.detach().to(dtype) for t in inputs(s_q, s_kv, h_kv=2))
    o, _, _, _, _, _, state, _, mask = aten._scaled_dot_product_flash_attention(q, k, v, 0.25, causal, True)
    assert mask.shape == (2, 4, s_q, s_kv) and mask.dtype == dtype and set(mask.unique().tolist()) == {-1, 1}
    rng = capi.dropout_state(*state.view(torch.int64).tolist())
    wanted = torch.frombuffer(fa_attention.load().dropout_mask(rng, 0.25, 2, 4, s_q, s_kv), dtype=torch.uint8)
    assert torch.equal(mask > 0, wanted.view(mask.shape) != 0)
    wide = (t.float() for t in (q, k, v))
    math = aten._scaled_dot_product_attention_math(*wide, None, 0.25, causal, mask > 0, enable_gqa=True)[0]
    assert torch.allclose(o.float(), math, atol=ATOL[dtype])


def test_debug_mask_of_packed(kernels):
    q, k, v = (torch.randn(n, 4, 16) for n in (7, 12, 12))
    cu_q, cu_k = (torch.tensor(t, dtype=torch.int32) for t in ((0, 3, 7), (0, 5, 12)))
    o, _, _, _, mask = aten._flash_attention_forward(q, k, v, cu_q, cu_k, 4, 7, 0.5, False, True)
    assert mask.shape == (2, 4, 4, 7)
    for n in range(2):
        rows, keys = slice(*cu_q[n:n + 2].tolist()), slice(*cu_k[n:n + 2].tolist())
        one = [t.transpose(0, 1)[None] for t in (q[rows], k[keys], v[keys])]
        kept = mask[n:n + 1, :, :one[0].shape[2], :one[1].shape[2]] > 0
        expected = aten._scaled_dot_product_attention_math(*one, None, 0.5, False, kept)[0]
        assert torch.allclose(o[rows], expected[0].transpose(0, 1), atol=2e-5)
    by_rows = [t.detach().transpose(1, 2) for t in inputs(9, 9)]
    mask = aten._flash_attention_forward(*by_rows, None, None, 9, 9, 0.5, False, True)[-1]
    assert mask.shape == (2, 4, 9, 9) and not torch.equal(mask[0], mask[1])


def test_packed(kernels):
    q, k, v = (torch.randn(n, 4, 16, requires_grad=True) for n in (7, 12, 12))
    cu_q, cu_k, used = (torch.tensor(t, dtype=torch.int32) for t in ((0, 3, 7), (0, 5, 12), (4, 6)))
    o, lse, *_ = aten._flash_attention_forward(q, k, v, cu_q, cu_k, 4, 7, 0.0, True, False, scale=0.4)
    expected, expected_lse = varlen_attention(q, k, v, cu_q, cu_k, causal=True, scale=0.4, return_lse=True)
    assert torch.equal(o, expected) and torch.equal(lse, expected_lse)
    weight = torch.randn_like(o)
    assert all(torch.equal(x, y) for x, y in zip(gradients(o, weight, (q, k, v)), gradients(expected, weight, (q, k, v))))
    into, plain = torch.empty(7, 4, 16), [t.detach() for t in (q, k, v)]
    if hasattr(aten, "_flash_attention_forward_no_dropout_inplace"):
        lse = aten._flash_attention_forward_no_dropout_inplace(into, *plain, cu_q, cu_k, 4, 7, 0.0, False, False, seqused_k=used)
        expected, expected_lse = varlen_attention(*plain, cu_q, cu_k, seqused_kv=used, return_lse=True)
        assert torch.equal(into, expected) and torch.equal(lse, expected_lse)
    call = lambda *more, **options: aten._flash_attention_forward(  # noqa: E731
        q, k, v, *more, 4, 7, 0.0, False, False, **options)
    refused(ValueError, lambda: call(cu_q, cu_k, seqused_k=used), "seqused_k is given")
    refused(ValueError, lambda: call(cu_q, None), "cum_seq_q and cum_seq_k")
    refused(ValueError, lambda: call(cu_q, cu_k, alibi_slopes=torch.rand(4)), "alibi_slopes is given", "None")
    if "block_table" in str(aten._flash_attention_forward.default._schema):
        refused(ValueError, lambda: call(cu_q, cu_k, block_table=cu_q[None]), "block_table is given", "None")
    refused(ValueError, lambda: aten._flash_attention_forward(q, k, v, cu_q, cu_k, 4, 7, 0.0, False, True),
            "return_debug_mask is given", "False without dropout")


def test_compiles(kernels):
    function = lambda q, k, v: aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0].sin()  # noqa: E731
    for order in ("bhsd", "bshd", "sbhd"):
        q, k, v = inputs(9, 9, 2, order=order)
        o, expected = torch.compile(function, fullgraph=True)(q, k, v), function(q, k, v)
        assert torch.allclose(o, expected, atol=1e-6)
        weight = torch.randn_like(o)
        for x, y in zip(gradients(o, weight, (q, k, v)), gradients(expected, weight, (q, k, v))):
            assert torch.allclose(x, y, atol=1e-5)


@pytest.mark.skipif(not has_registry, reason="this PyTorch has no registry")
def test_registry():
    before = registry.current_flash_attention_impl()
    register_flash_attention(activate=False)
    assert "fa" in registry.list_flash_attention_impls() and registry.current_flash_attention_impl() == before
    try:
        register_flash_attention()
        assert registry.current_flash_attention_impl() == "fa"
        assert "_flash_backend" in torch._C._dispatch_dump("aten::_scaled_dot_product_flash_attention")
        register_flash_attention()
        assert registry.current_flash_attention_impl() == "fa"
    finally:
        registry.restore_flash_attention_impl()
    assert registry.current_flash_attention_impl() is None
    assert "_flash_backend" not in torch._C._dispatch_dump("aten::_scaled_dot_product_flash_attention")


def test_without_a_registry(monkeypatch):
    monkeypatch.delattr(registry, "register_flash_attention_impl", raising=False)
    refused(fa_attention.Unsupported, register_flash_attention, torch.__version__, "register_flash_attention_impl",
            "fa_attention.torch.scaled_dot_product_attention")
    refused(NotImplementedError, register_flash_attention)


@pytest.mark.skipif(not has_registry, reason="this PyTorch has no registry")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scaled_dot_product_attention(device, dtype):
    """torch.nn.functional's own function, on a GPU, by fa."""
    if device != "cuda":
        pytest.skip("of a GPU")
    varlen_attn = pytest.importorskip("torch.nn.attention.varlen").varlen_attn
    register_flash_attention()
    try:
        shapes = ((128, 128, 8, 64), (77, 77, 2, 128), (1, 300, 2, 72))
        for (s_q, s_kv, h_kv, d), causal in itertools.product(shapes, (False, True)):
            if causal and s_q != s_kv:
                continue  # PyTorch's flash backend takes none of these
            q, k, v = (torch.randn(2, s, h, d, device=device, dtype=dtype).transpose(1, 2).requires_grad_()
                       for s, h in ((s_q, 8), (s_kv, h_kv), (s_kv, h_kv)))
            with registry.sdpa_kernel(registry.SDPBackend.FLASH_ATTENTION):
                function = torch.nn.functional.scaled_dot_product_attention
                o = function(q, k, v, is_causal=causal, enable_gqa=True)
                compiled = torch.compile(function)(q, k, v, is_causal=causal, enable_gqa=True)
            expected = attention(q, k, v, causal=causal)
            weight = torch.randn_like(o)
            assert torch.allclose(o.float(), expected.float(), atol=1e-3) and torch.allclose(compiled, o, atol=1e-3)
            for x, y in zip(gradients(o, weight, (q, k, v)), gradients(expected, weight, (q, k, v))):
                assert torch.allclose(x.float(), y.float(), atol=ATOL[dtype], rtol=1e-2)
        lengths = torch.tensor([0, 30, 130], dtype=torch.int32, device=device)
        q, k, v = (torch.randn(130, 4, 64, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
        o = varlen_attn(q, k, v, lengths, lengths, 100, 100, window_size=(-1, 0))
        expected = varlen_attention(q, k, v, lengths, lengths, causal=True)
        assert torch.allclose(o.float(), expected.float(), atol=1e-3)
        weight = torch.randn_like(o)
        for x, y in zip(gradients(o, weight, (q, k, v)), gradients(expected, weight, (q, k, v))):
            assert torch.allclose(x.float(), y.float(), atol=ATOL[dtype], rtol=1e-2)
    finally:
        registry.restore_flash_attention_impl()
    q, k, v = (torch.randn(2, 4, 128, 64, device=device, dtype=dtype) for _ in range(3))
    with registry.sdpa_kernel(registry.SDPBackend.FLASH_ATTENTION):
        own = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    assert torch.allclose(own.float(), attention(q, k, v).float(), atol=ATOL[dtype])
