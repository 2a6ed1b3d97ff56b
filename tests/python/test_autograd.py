"""Gradients of fa_attention.torch beside PyTorch's own operations; --device cuda runs them on a GPU."""

import itertools

import pytest
from conftest import refused

torch = pytest.importorskip("torch")

from fa_attention import _options, capi  # noqa: E402
from fa_attention.torch import Attention, attention, varlen_attention  # noqa: E402

ATTENTION_DEFAULTS = (False, None, False, None, None, 0, 0.0, False, None, None, (), (), False)  # of a plain call
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
UNITS = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-18, torch.float64: 2.0**-46}


def definition(q, k, v, causal=False, scale=None, top_left=False, keep=None):
    """O and LSE by PyTorch's own differentiable operations, in the dtype of the inputs."""
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    scores = (q @ k.transpose(2, 3)) * (scale if scale is not None else q.shape[3] ** -0.5)
    if causal:
        s_q, s_kv = scores.shape[2:]
        causal_keep = torch.ones(s_q, s_kv, dtype=torch.bool, device=q.device).tril(0 if top_left else s_kv - s_q)
        keep = causal_keep if keep is None else keep & causal_keep
    if keep is not None:
        scores = scores.masked_fill(~keep, float("-inf"))
    return torch.nan_to_num(scores.softmax(-1)) @ v, scores.logsumexp(-1)


@pytest.mark.parametrize("packed", [False, True])
def test_tensors_whose_memory_has_the_other_sign(device, packed):
    torch.manual_seed(6)
    results = []
    shapes = [(7, 4, 16), (9, 2, 16), (9, 2, 16)] if packed else [(1, 4, 7, 16), (1, 2, 9, 16), (1, 2, 9, 16)]
    data = [torch.randn(shape, device=device) for shape in shapes]
    dout, sink, gain = torch.randn(shapes[0], device=device), torch.linspace(-1, 1, 4, device=device), torch.rand(4, device=device)
    starts = [torch.tensor(ends, dtype=torch.int32, device=device) for ends in ((0, 3, 7), (0, 4, 9))] if packed else []
    for sign in (torch.neg, torch._neg_view):
        for more in ({}, {"sink": sink}, {"score": "score * gain[h]", "captures": {"gain": gain}}):
            more = {name: {n: sign(t) for n, t in value.items()} if name == "captures" else sign(value) if name == "sink" else value
                    for name, value in more.items()}
            leaves = [t.clone().requires_grad_() for t in data]
            call = varlen_attention if packed else attention
            plain = call(*(sign(t) for t in data), *starts, **more)
            o, lse = call(*map(sign, leaves), *starts, **more, return_lse=True)
            gradients_ = torch.autograd.grad((o, lse), leaves, (sign(dout), sign(lse.detach().cos())))
            results.append([plain, o.detach(), lse.detach(), *gradients_])
    for expected, actual in zip(results[:3], results[3:]):
        for x, y in zip(actual, expected):
            torch.testing.assert_close(x, y)


def gradients(function, tensors, dout, dlse, with_lse):
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    o, lse = function(*leaves)
    loss = (o * dout.to(o.dtype)).sum()
    if with_lse:
        loss = loss + (lse * dlse.to(lse.dtype)).sum()
    return [o, *torch.autograd.grad(loss, leaves)]


def worst(actual, expected):
    difference = (actual.double() - expected).abs()
    return difference.max().item() if torch.isfinite(difference).all() else float("inf")


def compare(device, dtype, b, h_q, h_kv, s_q, s_kv, d_qk, d_v, causal, top_left=False, scale=None, with_lse=True, bshd=False):
    torch.manual_seed(s_q * 1000 + s_kv)

    def normal(h, s, d):
        t = torch.randn(b, s, h, d) if bshd else torch.randn(b, h, s, d)
        return (t.transpose(1, 2) if bshd else t).to(device, dtype)

    tensors = [normal(h_q, s_q, d_qk), normal(h_kv, s_kv, d_qk), normal(h_kv, s_kv, d_v)]
    dout, dlse = normal(h_q, s_q, d_v), torch.randn(b, h_q, s_q).to(device)
    options = {"causal": causal, "scale": scale, "top_left": top_left}
    ours = gradients(lambda *t: attention(*t, **options, return_lse=True), tensors, dout, dlse, with_lse)
    own = lambda *t: definition(*t, **options)  # noqa: E731
    exact = gradients(own, [t.double() for t in tensors], dout, dlse, with_lse)
    half = dtype in (torch.float16, torch.bfloat16) and device == "cpu"  # not every PyTorch computes these on a CPU
    same = None if half else gradients(own, tensors, dout, dlse, with_lse)
    for n, name in enumerate(("o", "dq", "dk", "dv")):
        # Twice what PyTorch's own operations commit in the same dtype, or two roundings of the largest element.
        allowed = 2 * UNITS[dtype] * exact[n].abs().max().item()
        if same is not None:
            allowed = max(allowed, 2 * worst(same[n], exact[n]))
        assert worst(ours[n], exact[n]) <= allowed, name
        assert n == 0 or ours[n].stride() == tensors[n - 1].stride(), f"{name} has the memory order of its tensor"


def serves(device, dtype):
    if device == "cuda" and dtype == torch.float64:
        pytest.skip("fp64 is the host device's")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("causal", "bshd"), list(itertools.product((False, True), (False, True))))
def test_plain(device, dtype, causal, bshd):
    serves(device, dtype)
    compare(device, dtype, 2, 4, 2, 65, 130, 64, 64, causal, bshd=bshd)


@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_scales_and_alignments(device, dtype):
    serves(device, dtype)
    compare(device, dtype, 1, 6, 1, 100, 100, 40, 72, True, with_lse=False)
    compare(device, dtype, 1, 2, 2, 33, 70, 16, 16, True, top_left=True)
    compare(device, dtype, 1, 2, 1, 50, 60, 16, 16, False, scale=-0.3125)


def test_large(device):
    if device != "cuda":
        pytest.skip("of a GPU")
    compare("cuda", torch.bfloat16, 2, 8, 2, 1024, 1024, 128, 128, True, bshd=True)


def test_masked_rows(device):
    """More rows than keys, bottom-right: the first rows keep nothing, and PyTorch's own gradients would be NaN."""
    q, k, v = (torch.randn(1, 2, s, 16, device=device, requires_grad=True) for s in (9, 4, 4))
    o, lse = attention(q, k, v, causal=True, return_lse=True)
    (o.sum() + lse[:, :, 5:].sum()).backward()
    assert (q.grad[:, :, :5] == 0).all() and (o[:, :, :5] == 0).all()
    assert all(torch.isfinite(t.grad).all() for t in (q, k, v))


@pytest.mark.parametrize("b, h, s_q, s_kv", [(0, 2, 5, 5), (2, 2, 0, 5), (2, 2, 5, 0), (2, 0, 5, 5), (0, 0, 0, 0)])
def test_gradient_of_a_sum_of_nothing(device, b, h, s_q, s_kv):
    """It is expanded, and has no element that a copy would lay anew."""
    q, k, v = (torch.zeros(b, h, s, 16, device=device, requires_grad=True) for s in (s_q, s_kv, s_kv))
    o = attention(q, k, v)
    assert o.shape == q.shape and not o.any()
    o.sum().backward()
    assert all(t.grad.shape == t.shape and not t.grad.any() for t in (q, k, v))


def test_parts_of_the_graph(device):
    q, k, v = (torch.randn(2, 3, 7, 8, device=device, requires_grad=True) for _ in range(3))
    (dv,) = torch.autograd.grad(attention(q, k, v).sum(), v)  # an expanded gradient comes in
    assert torch.allclose(dv, torch.autograd.grad(definition(q, k, v)[0].sum(), v)[0], atol=1e-5)
    lse = attention(q, k, v, return_lse=True)[1]  # dout is not given at all
    dq, dv = torch.autograd.grad(lse.sum(), (q, v))
    expected = torch.autograd.grad(definition(q, k, v)[1].sum(), q)[0]
    assert torch.allclose(dq, expected, atol=1e-5) and (dv == 0).all()
    with torch.no_grad():
        assert not attention(q, k, v).requires_grad
    transposed = q.detach().transpose(2, 3).contiguous().transpose(2, 3).requires_grad_()  # a head dim of stride 7
    assert torch.equal(attention(transposed, k, v), attention(q, k, v))


def test_frozen_inputs_get_no_gradient(device):
    shapes = ((4, 5), (2, 6), (2, 6))
    tensors = [torch.randn(2, h, s, 8, device=device) for h, s in shapes]
    sink, bias = torch.randn(4, device=device), torch.randn(4, 5, 6, device=device)

    def run(*leaves):
        q, k, v, sink, bias = leaves
        o = attention(q, k, v, score="score + bias[h, q, kv]", captures={"bias": bias}, sink=sink)
        o.square().sum().backward()
        return [t.grad for t in leaves]

    everything = run(*(t.clone().requires_grad_() for t in (*tensors, sink, bias)))
    for frozen in range(5):
        leaves = [t.clone().requires_grad_(n != frozen) for n, t in enumerate((*tensors, sink, bias))]
        for n, (actual, expected) in enumerate(zip(run(*leaves), everything)):
            assert actual is None if n == frozen else torch.allclose(actual, expected, atol=1e-5, rtol=1e-5)
    o = attention(tensors[0].clone().requires_grad_(), *tensors[1:])
    assert [of is not None for of, _ in o.grad_fn.next_functions[:3]] == [True, False, False]


@pytest.mark.parametrize("options", [
    {"causal": True}, {"window_left": 2, "window_right": 1}, {"causal": True, "window_left": 1}, {"chunk": 2},
    {"top_left": True, "causal": True, "scale": 0.3}, {"score": "2.0 * tanh(score / 2.0)"}, {"mask": "(q + kv) % 2 == 0"},
    {"dropout": 0.3, "rng_state": (7, 9)}, {"score": "score * gain", "captures": {"gain": 0.5}}])
def test_gradcheck(options):
    q, k, v = (torch.randn(1, h, s, 8, dtype=torch.float64, requires_grad=True) for h, s in ((4, 3), (2, 5), (2, 5)))
    assert torch.autograd.gradcheck(lambda *t: attention(*t, **options, return_lse="mask" not in options), (q, k, v))


def test_gradcheck_of_captures_and_sinks():
    q, k, v = (torch.randn(1, h, s, 8, dtype=torch.float64, requires_grad=True) for h, s in ((4, 3), (2, 5), (2, 5)))
    bias = torch.randn(1, 4, 3, 5, dtype=torch.float64, requires_grad=True)
    sink, gain = (torch.randn(n, dtype=torch.float64, requires_grad=True) for n in (4, ()))

    def function(q, k, v, bias, sink, gain):
        return attention(q, k, v, score="score * gain + bias[b, h, q, kv]", captures={"bias": bias, "gain": gain}, sink=sink,
                         return_lse=True)

    assert torch.autograd.gradcheck(function, (q, k, v, bias, sink, gain))
    row = torch.randn(1, 1, 1, 5, dtype=torch.float64, requires_grad=True)  # broadcast
    assert torch.autograd.gradcheck(lambda row: attention(q, k, v, score="score + bias[b, h, q, kv]",
                                                          captures={"bias": row}), (row,))


def test_gradcheck_of_packed_batches():
    q, k, v = (torch.randn(n, h, 8, dtype=torch.float64, requires_grad=True) for n, h in ((7, 4), (9, 2), (9, 2)))
    cu_q, cu_kv = (torch.tensor(n, dtype=torch.int32) for n in ((0, 3, 7), (0, 4, 9)))
    sink = torch.randn(4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda q, k, v, sink: varlen_attention(q, k, v, cu_q, cu_kv, causal=True, sink=sink, return_lse=True), (q, k, v, sink))


def test_masks_beside_their_definition(device):
    """Windows, chunks and mask functions, as masks of PyTorch's operations."""
    s_q, s_kv = 40, 56
    row = torch.arange(s_q, device=device)[:, None] + s_kv - s_q
    key = torch.arange(s_kv, device=device)
    documents = torch.arange(s_kv, dtype=torch.int32, device=device) // 13
    cases = [({"window_left": 9, "window_right": 4}, (key >= row - 9) & (key <= row + 4)),
             ({"chunk": 16}, key // 16 == row // 16),
             ({"mask": "doc[q] == doc[kv]", "captures": {"doc": documents}}, documents[:s_q, None] == documents)]
    q, k, v = (torch.randn(2, h, s, 32, device=device, requires_grad=True) for h, s in ((4, s_q), (2, s_kv), (2, s_kv)))
    for options, keep in cases:
        actual = torch.autograd.grad(attention(q, k, v, **options).square().sum(), (q, k, v))
        expected = torch.autograd.grad(definition(q, k, v, keep=keep)[0].square().sum(), (q, k, v))
        assert all(torch.allclose(x, y, atol=1e-4, rtol=1e-4) for x, y in zip(actual, expected)), options


def test_double_backward(device):
    """Second derivatives raise, also where a part of them could be had."""
    q, k, v = (torch.randn(1, 2, 5, 8, device=device, requires_grad=True) for _ in range(3))
    o, lse = attention(q, k, v, return_lse=True)
    for loss in (o.sum(), lse.sum(), (o * q).sum()):
        first = torch.autograd.grad(loss, (q, k, v), create_graph=True, retain_graph=True)
        for gradient in first:
            refused(RuntimeError, lambda g=gradient: torch.autograd.grad(g.square().sum() + q.square().sum(), q,
                                                                         retain_graph=True), "first derivatives only")
    dq, = torch.autograd.grad(attention(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="first derivatives only|is not implemented"):
        torch.autograd.grad(dq.square().sum() + q.square().sum(), q)
    plain = torch.autograd.grad(o.sum(), (q, k, v), retain_graph=True)
    graph = torch.autograd.grad(o.sum(), (q, k, v), create_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(plain, graph)), "create_graph changes no gradient"
    assert not any(t.requires_grad for t in plain), "no graph of gradients without create_graph"


def test_what_changes_before_backward_is_told(device):
    q = torch.randn(9, 2, 8, device=device, requires_grad=True)
    state = torch.tensor((1, 2), dtype=torch.int64, device=device)
    cu = torch.tensor((0, 4, 9), dtype=torch.int32, device=device)
    for changed in (state, cu):
        o = varlen_attention(q, q, q, cu, cu, dropout=0.5, rng_state=state)
        changed.add_(0)
        refused(RuntimeError, o.sum().backward, "modified by an inplace operation")


def test_deterministic(device):
    q, k, v = (torch.randn(2, 4, 300, 64, device=device, dtype=torch.float32, requires_grad=True) for _ in range(3))
    runs = [torch.autograd.grad(attention(q, k, v, deterministic=True).square().sum(), (q, k, v)) for _ in range(5)]
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(run, runs[0]))


def test_dropout(device):
    """Beside PyTorch's operations with the library's own mask."""
    b, h, s_q, s_kv, d, p, rng = 2, 4, 33, 50, 16, 0.25, (5, 77)
    q = torch.randn(b, h, s_q, d, device=device, requires_grad=True)
    k, v = (torch.randn(b, h, s_kv, d, device=device, requires_grad=True) for _ in range(2))
    keep = torch.frombuffer(capi.load().dropout_mask(capi.dropout_state(*rng), p, b, h, s_q, s_kv), dtype=torch.uint8)
    keep = keep.view(b, h, s_q, s_kv).to(device, torch.float32) / (1 - p)
    weights = (q @ k.transpose(2, 3) * d**-0.5).softmax(-1)
    expected = torch.autograd.grad((weights * keep @ v).square().sum(), (q, k, v))
    in_memory = torch.tensor(rng, dtype=torch.int64, device=device)
    for rng_state in (rng, in_memory):
        o = attention(q, k, v, dropout=p, rng_state=rng_state)
        actual = torch.autograd.grad(o.square().sum(), (q, k, v))
        assert all(torch.allclose(x, y, atol=1e-4, rtol=1e-4) for x, y in zip(actual, expected))
    torch.manual_seed(3)
    first = attention(q, k, v, dropout=p)
    assert not torch.equal(first, attention(q, k, v, dropout=p)), "masks differ from call to call"
    torch.manual_seed(3)
    assert torch.equal(first, attention(q, k, v, dropout=p)), "torch.manual_seed repeats a mask"


def test_varlen(device):
    """Each sequence beside a call of its own; rows of no sequence get 0."""
    lengths, lengths_kv, h_q, h_kv, d = (5, 0, 70, 33), (9, 20, 64, 0), 4, 2, 16
    starts, starts_kv = ([sum(n[:i]) for i in range(len(n) + 1)] for n in (lengths, lengths_kv))
    q = torch.randn(starts[-1] + 3, h_q, d, device=device, requires_grad=True)
    k, v = (torch.randn(starts_kv[-1] + 2, h_kv, d, device=device, requires_grad=True) for _ in range(2))
    dout = torch.randn(starts[-1] + 3, h_q, d, device=device)
    cu_q, cu_kv = (torch.tensor(n, dtype=torch.int32, device=device) for n in (starts, starts_kv))
    o = varlen_attention(q, k, v, cu_q, cu_kv, causal=True, max_s_q=70)
    actual = [o, *torch.autograd.grad((o * dout).sum(), (q, k, v))]
    expected = [torch.zeros_like(t) for t in actual]
    for i in range(len(lengths)):
        rows, keys = slice(starts[i], starts[i + 1]), slice(starts_kv[i], starts_kv[i + 1])
        leaves = [t[part].detach().transpose(0, 1)[None].requires_grad_() for t, part in ((q, rows), (k, keys), (v, keys))]
        one = attention(*leaves, causal=True)
        parts = [one, *torch.autograd.grad((one * dout[rows].transpose(0, 1)[None]).sum(), leaves)]
        for whole, part, place in zip(expected, parts, (rows, rows, keys, keys)):
            whole[place] = part[0].transpose(0, 1)
    for name, x, y in zip(("o", "dq", "dk", "dv"), actual, expected):
        assert torch.allclose(x, y, atol=1e-5), name
    used = torch.tensor((5, 0, 8, 2), dtype=torch.int32, device=device)
    short = varlen_attention(q, k, v, cu_q, cu_kv, seqused_q=used)
    assert (short[starts[2] + 8: starts[3]] == 0).all() and (short[starts[2]: starts[2] + 8] != 0).all()


def test_errors(device):
    q = torch.randn(1, 1, 4, 16, device=device)
    wide = torch.randn(1, 1, 4, 20, device=device)
    refused(ValueError, lambda: attention(wide, wide, wide), "head_dim", "20")
    refused(ValueError, lambda: attention(q[0, 0], q, q), "q has shape [4, 16]", "[b, h_q, s_q, d_qk]")
    refused(ValueError, lambda: attention(q, q[0], q), "k has shape [1, 4, 16]", "[b, h_kv, s_kv, d_qk]")
    refused(ValueError, lambda: attention(q, q, q[None]), "v has shape [1, 1, 1, 4, 16]", "[b, h_kv, s_kv, d_v]")
    refused(TypeError, lambda: attention(q.long(), q, q), "q is torch.int64", "torch.bfloat16")
    refused(TypeError, lambda: attention(q, q, q.double()), "v is torch.float64", "torch.float32")
    refused(TypeError, lambda: attention(q.tolist(), q, q), "q is a builtins.list", "torch.Tensor")
    refused(TypeError, lambda: attention(q, q, None), "v is a builtins.NoneType", "torch.Tensor")
    refused(TypeError, lambda: attention(q, q, q, sink=[0.0] * q.shape[1]), "sink is a builtins.list", "torch.Tensor")
    refused(ValueError, lambda: attention(q, q.to("meta"), q), "k is on meta", "where q is")
    refused(ValueError, lambda: attention(q, q, q, dropout=0.5, rng_state=(1,)), "rng_state", "(seed, offset)")
    refused(ValueError, lambda: attention(q, q, q, dropout=1.5), "dropout")
    state = torch.zeros(2, dtype=torch.int32, device=device)
    refused(TypeError, lambda: attention(q, q, q, dropout=0.5, rng_state=state), "rng_state is torch.int32", "torch.int64")
    nested = torch.nested.nested_tensor([torch.randn(2, 3, 8), torch.randn(2, 5, 8)], layout=torch.jagged)
    refused(TypeError, lambda: attention(nested, q, q), "q is a nested tensor", "varlen_attention")


def test_errors_of_functions(device):
    q = torch.randn(1, 1, 4, 16, device=device)
    bias = torch.randn(4, device=device)
    refused(ValueError, lambda: attention(q, q, q, score="score + bais[kv]", captures={"bias": bias}), "'bias'", "bais[kv]")
    refused(ValueError, lambda: attention(q, q, q, score="score +"), "score", "column")
    refused(TypeError, lambda: attention(q, q, q, score="score + bias[kv]", captures={"bias": [1.0]}), "bias", "list")
    refused(TypeError, lambda: attention(q, q, q, score="score + bias[kv]", captures={"bias": bias.long()}), "torch.int64")
    refused(ValueError, lambda: attention(q, q, q, score="score + bias[kv]", captures={"bias": bias.to("meta")}), "meta")
    learned = bias.clone().requires_grad_()
    refused(ValueError, lambda: attention(q, q, q, mask="keep[kv] > 0.0", captures={"keep": learned}), "'keep'",
            "a mask has none")
    refused(ValueError, lambda: attention(q, q, q, sink=torch.randn(3, device=device)), "sink")


def test_errors_of_options(device):
    q = torch.randn(1, 1, 4, 16, device=device)
    refused(TypeError, lambda: attention(q, q, q, scale=torch.ones(())), "scale is a torch.Tensor", "a number")
    refused(TypeError, lambda: attention(q, q, q, score=lambda score, b, h, i, j: score), "score is a builtins.function", "text")
    refused(TypeError, lambda: attention(q, q, q, window_left=1.5), "window_left is a builtins.float", "an integer")
    refused(ValueError, lambda: attention(q, q, q, chunk=-1), "chunk", "-1")
    refused(ValueError, lambda: attention(q, q, q, scale=float("nan")), "scale", "nan")


def test_errors_of_packed_batches(device):
    q = torch.randn(1, 1, 4, 16, device=device)
    packed, cu = q[0].transpose(0, 1), torch.tensor([0, 4], dtype=torch.int32, device=device)
    varlen = lambda *lengths, **more: varlen_attention(packed, packed, packed, *lengths, **more)  # noqa: E731
    assert varlen(cu, cu).shape == packed.shape
    refused(ValueError, lambda: varlen_attention(q, packed, packed, cu, cu), "q has shape", "[total_q, h_q, d_qk]")
    refused(TypeError, lambda: varlen(cu.long(), cu), "cu_seqlens_q is torch.int64", "torch.int32")
    refused(TypeError, lambda: varlen(cu, [0, 4]), "cu_seqlens_kv is a builtins.list")
    refused(ValueError, lambda: varlen(cu, cu[:1]), "cu_seqlens_kv has 1 elements", "2")
    refused(ValueError, lambda: varlen(cu, cu, seqused_q=cu[:0]), "seqused_q", "0 elements")


def test_layouts_are_not_confused(device):
    """One after the other: calls that differ in one thing only each have their own result."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, 6, 16, device=device) for _ in range(3))
    expected = {causal: definition(q, k, v, causal)[0] for causal in (False, True)}
    for causal, order in itertools.product((False, True, False, True), range(8)):  # each alone in another order, and together
        a, b, c = (t.transpose(1, 2).contiguous().transpose(1, 2) if order >> n & 1 else t for n, t in enumerate((q, k, v)))
        assert torch.allclose(attention(a, b, c, causal=causal), expected[causal], atol=1e-5)
        assert torch.allclose(attention(a, b, c, causal=causal, return_lse=True)[0], expected[causal], atol=1e-5)
    unaligned = torch.randn(2 * 2 * 6 * 16 + 1, device=device)[1:].view(2, 2, 6, 16)
    assert torch.allclose(attention(unaligned, k, v), definition(unaligned, k, v)[0], atol=1e-5)


def test_threads(device):
    """Calls of one layout from several threads at a time: each has its own addresses."""
    from concurrent.futures import ThreadPoolExecutor

    torch.manual_seed(1)
    inputs = [torch.randn(1, 2, 33, 32, device=device, requires_grad=True) for _ in range(32)]
    expected = [definition(t, t, t)[0].detach() for t in inputs]

    def run(t):
        o = attention(t, t, t)
        o.sum().backward()
        return o.detach()

    with ThreadPoolExecutor(8) as pool:
        for _ in range(5):
            assert all(torch.allclose(x, y, atol=1e-4) for x, y in zip(pool.map(run, inputs), expected))


def test_calls_at_a_time_have_structs_of_their_own(monkeypatch):
    """A call that is still in the library when others of its layout come in: its addresses stay."""
    import threading
    from concurrent.futures import ThreadPoolExecutor

    from fa_attention import _prepared

    inputs = [torch.full((1, 1, 2, 8), float(n)) for n in range(4)]
    attention(inputs[0], inputs[0], inputs[0])
    inside, init = threading.Barrier(4), _prepared.PreparedCall.__init__

    def slow_init(self, *arguments):
        init(self, *arguments)
        function = self._function
        self._function = lambda *a: inside.wait(30) and None or function(*a)

    monkeypatch.setattr(_prepared.PreparedCall, "__init__", slow_init)
    odd = [t[:, :, :, :8].repeat(1, 1, 3, 1) for t in inputs]  # a layout of this test's own
    from fa_attention.torch import _raw

    plan = _raw.find_plan(*[odd[0]] * 3, None, (), _raw.Call(_options.make_options(*ATTENTION_DEFAULTS)), ())
    plan.forward(False)
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda t: attention(t, t, t), odd))
    assert all(torch.allclose(o, t) for o, t in zip(results, odd))


def test_alignment_is_asked_for():
    """Scratch memory depends on whether rows start at multiples of 16 bytes, by address and by stride."""
    from fa_attention._prepared import Layout, PreparedCall, Spec

    class Recorder:
        lib = capi.load()
        asked = []

        def workspace_size(self, *sizes, rows_aligned):
            self.asked.append(rows_aligned)
            return 4096 if rows_aligned else 64

    def call(stride):
        spec = Spec("float16", (1, 1, 2, 8), (16, 16, stride, 1))
        layout = Layout([("q", spec), ("k", spec), ("v", spec)], [("o", spec)], [], [], (), False, False)
        return PreparedCall(Recorder(), layout, (1, 1, 1, 2, 2))

    even = call(8)
    assert [even.scratch_size(a) for a in ([16, 32, 48, 64], [16, 32, 48, 66], [16, 32, 48, 80])] == [4096, 64, 4096]
    assert call(9).scratch_size([16, 32, 48, 64]) == 64 and Recorder.asked == [True, False, False]


def test_streams(device):
    """Forward on one stream, backward of a graph that another one made."""
    if device != "cuda":
        pytest.skip("of a GPU")
    q, k, v = (torch.randn(4, 8, 512, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    expected = torch.autograd.grad(attention(q, k, v, deterministic=True).float().sum(), (q, k, v))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        actual = torch.autograd.grad(attention(q, k, v, deterministic=True).float().sum(), (q, k, v))
    side.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(actual, expected))


def test_cuda_graph(device):
    """A captured forward follows what its inputs, and the state of dropout, hold when it is replayed."""
    if device != "cuda":
        pytest.skip("of a GPU")
    q, k, v = (torch.randn(2, 4, 256, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    state = torch.tensor((3, 4), dtype=torch.int64, device="cuda")
    call = lambda: attention(q, k, v, causal=True, dropout=0.1, rng_state=state)  # noqa: E731
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = call()
    for seed in (3, 8):
        q.normal_()
        state[0] = seed
        graph.replay()
        assert torch.equal(o, call())


@pytest.mark.parametrize("d", [(512, 512), (576, 512), (264, 40)])
def test_head_dims_above_256(d):
    """Forward of all, gradients where both are the same."""
    torch.manual_seed(9)
    q, k, v = (torch.randn(1, h, 6, n, dtype=torch.float64) for h, n in ((2, d[0]), (1, d[0]), (1, d[1])))
    o, lse = attention(q, k, v, causal=True, return_lse=True)
    expected, sums = definition(q, k, v, causal=True)
    assert (o - expected).abs().max() <= 1e-12 and (lse - sums).abs().max() <= 1e-12
    dout, dlse = torch.randn_like(o), torch.randn_like(lse)
    actual = lambda: gradients(lambda *t: attention(*t, causal=True, return_lse=True), (q, k, v), dout, dlse, True)  # noqa: E731
    if d[0] != d[1]:
        refused(NotImplementedError, actual, "head_dim_v", "256")
        return
    for x, y in zip(actual(), gradients(lambda *t: definition(*t, causal=True), (q, k, v), dout, dlse, True)):
        assert (x - y).abs().max() <= 1e-11
    module = Attention(2, d[0], kv_heads=1).double()
    o = module(*(t.transpose(1, 2) for t in (q, k, v)))
    assert (o.transpose(1, 2) - definition(q, k, v)[0]).abs().max() <= 1e-12
    refused(ValueError, lambda: Attention(2, 520), "520", "512")
