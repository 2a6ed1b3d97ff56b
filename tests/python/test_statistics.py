"""Statistics of forward, beside PyTorch's own arithmetic in float64."""

import math

import pytest
from conftest import refused

torch = pytest.importorskip("torch")

from fa_attention.torch import attention, attention_statistics  # noqa: E402

B, H_Q, H_KV, S_Q, S_KV, D = 2, 4, 2, 70, 90, 64


def tensors(device, dtype=torch.bfloat16):
    torch.manual_seed(3)
    return [torch.randn(B, h, s, D, dtype=dtype, device=device) for h, s in ((H_Q, S_Q), (H_KV, S_KV), (H_KV, S_KV))]


def scores_of(q, k, causal):
    scores = q.double() @ k.double().repeat_interleave(H_Q // H_KV, 1).transpose(-1, -2) / math.sqrt(D)
    if causal:
        hidden = torch.ones(S_Q, S_KV, dtype=torch.bool, device=q.device).triu(S_KV - S_Q + 1)
        scores = scores.masked_fill(hidden, -math.inf)
    return scores


@pytest.mark.parametrize("by_head", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_statistics_are_those_of_pytorch(device, causal, by_head):
    q, k, v = tensors(device)
    got = attention_statistics(q, k, v, causal=causal, max_logit="softmax", max_logit_by_head=by_head, entropy=True,
                               column_sums="query_heads")
    scores = scores_of(q, k, causal)
    p = torch.softmax(scores, -1)
    greatest = scores.amax((0, 2, 3)) if by_head else scores.amax(-1)
    assert (got.max_logit - greatest).abs().max() <= 1e-4
    assert (got.entropy - torch.special.entr(p).sum(-1)).abs().max() <= 1e-4
    assert (got.column_sums - p.sum(2)).abs().max() <= 1e-3
    assert (got.lse - torch.logsumexp(scores, -1)).abs().max() <= 1e-3
    assert torch.equal(got.o, attention(q, k, v, causal=causal)) or (got.o - attention(q, k, v, causal=causal)).abs().max() <= 2e-2


def test_kv_heads_and_functions(device):
    q, k, v = tensors(device, torch.float32)
    bias = torch.randn(H_Q, dtype=torch.float32, device=device)
    got = attention_statistics(q, k, v, max_logit="scaled", column_sums="kv_heads", score="score + gain[h]",
                               captures={"gain": bias})
    scores = scores_of(q, k, False)
    p = torch.softmax(scores + bias.double()[:, None, None], -1)
    assert (got.max_logit - scores.amax(-1)).abs().max() <= 1e-4
    assert (got.column_sums - p.sum(2).view(B, H_KV, H_Q // H_KV, S_KV).sum(2)).abs().max() <= 1e-3
    assert got.entropy is None
    assert got.top_keys is None


@pytest.mark.parametrize("heads", ["none", "query_heads", "kv_heads"])
def test_top_keys_are_those_of_a_stable_sort(device, heads):
    q, k, v = tensors(device)
    got = attention_statistics(q, k, v, causal=True, column_sums=heads, top_keys=S_KV + 3)
    sums = got.column_sums if heads != "none" else attention_statistics(q, k, v, causal=True, column_sums="query_heads").column_sums
    assert got.top_keys.dtype == torch.int32 and got.top_keys.shape == (*sums.shape[:2], S_KV + 3)
    assert torch.equal(got.top_keys[..., :S_KV].long(), sums.sort(dim=-1, descending=True, stable=True).indices)
    assert (got.top_keys[..., S_KV:] == -1).all()
    few = attention_statistics(q, k, v, causal=True, column_sums=heads, top_keys=5)
    assert torch.equal(few.top_keys, got.top_keys[..., :5])


def test_what_is_refused(device):
    q, k, v = tensors(device)
    refused(ValueError, lambda: attention_statistics(q, k, v, max_logit="largest"), "max_logit")
    refused(ValueError, lambda: attention_statistics(q, k, v, max_logit_by_head=True), "max_logit_by_head")
    refused(ValueError, lambda: attention_statistics(q, k, v, top_keys=-1), "top_keys")
    refused(ValueError, lambda: attention_statistics(q, k, v, top_keys=1025), "top_keys")


def weighted(results, weights):
    """A loss that is linear in what gradients flow through."""
    return sum((t * w.to(t.dtype)).sum() for t, w in zip(results[:5], weights) if t is not None)


def by_pytorch(q, k, v, causal, sink=None, by_head=False):
    """The same by PyTorch's own operations: o, lse, the greatest logits, the entropy and column sums of KV heads."""
    group = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(group, 1).transpose(-1, -2) / math.sqrt(q.shape[-1])
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[2:], dtype=torch.bool, device=q.device).triu(k.shape[2] - q.shape[2] + 1), -math.inf)
    everything = scores if sink is None else torch.cat([scores, sink[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
    lse = everything.logsumexp(-1)
    p = torch.exp(scores - lse[..., None])
    entropy = -(p * torch.where(p > 0, scores - lse[..., None], 0)).sum(-1)
    greatest = scores.transpose(0, 1).flatten(1).max(-1).values if by_head else scores.max(-1).values
    return p @ v.repeat_interleave(group, 1), lse, greatest, entropy, p.unflatten(1, (-1, group)).sum((2, 3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize("by_head", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_are_those_of_pytorch(device, causal, by_head, with_sink, dtype):
    tensors_ = tensors(device, dtype)
    sink = torch.randn(H_Q, dtype=torch.float32, device=device)
    leaves = [*tensors_, *([sink] if with_sink else [])]
    weights = [torch.randn(shape, device=device) for shape in ((B, H_Q, S_Q, D), (B, H_Q, S_Q), (B, H_Q, S_Q), (B, H_Q, S_Q), (B, H_KV, S_KV))]
    if by_head:
        weights[2] = weights[2][0, :, 0]

    ours = [t.detach().clone().requires_grad_() for t in leaves]
    results = attention_statistics(*ours[:3], causal=causal, max_logit="softmax", max_logit_by_head=by_head, entropy=True,
                                   column_sums="kv_heads", sink=ours[3] if with_sink else None)
    weighted(results, weights).backward()
    exact = [t.detach().double().requires_grad_() for t in leaves]
    theirs = by_pytorch(*exact[:3], causal, exact[3] if with_sink else None, by_head)
    sum((t * w).sum() for t, w in zip(theirs, weights)).backward()
    unit = {torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9, torch.float32: 1e-4}[dtype]
    for mine, theirs in zip(ours, exact):
        assert (mine.grad.double() - theirs.grad).abs().max() <= unit * theirs.grad.abs().max()


@pytest.mark.parametrize("which", ["entropy", "max_logit", "max_logit of heads", "column_sums", "all"])
def test_gradients_by_differences(which):
    torch.manual_seed(5)
    q, k, v = (torch.randn(1, h, s, 8, dtype=torch.float64, requires_grad=True) for h, s in ((2, 4), (1, 6), (1, 6)))
    sink = torch.randn(2, dtype=torch.float64, requires_grad=True)
    slope = torch.rand(2, dtype=torch.float64, requires_grad=True)

    def statistics(q, k, v, sink, slope):
        results = attention_statistics(q, k, v, causal=True, max_logit="scaled" if "max_logit" in which or which == "all" else "none",
                                       max_logit_by_head=which == "max_logit of heads",
                                       entropy=which in ("entropy", "all"), sink=sink,
                                       column_sums="query_heads" if which in ("column_sums", "all") else "none",
                                       deterministic=which == "all", captures={"slope": slope},
                                       score="2.0 * tanh(score) - slope[h] * float(q - kv)")
        return tuple(t for t in results[:5] if t is not None)

    assert torch.autograd.gradcheck(statistics, (q, k, v, sink, slope), eps=1e-6, atol=1e-6)


def test_what_has_no_gradient(device):
    q, k, v = (t.requires_grad_() for t in tensors(device))
    got = attention_statistics(q, k, v, max_logit="softmax", max_logit_by_head=True, entropy=True, column_sums="kv_heads", top_keys=3)
    assert not got.top_keys.requires_grad
    assert got.max_logit.requires_grad and got.entropy.requires_grad and got.column_sums.requires_grad and got.o.requires_grad and got.lse.requires_grad
    gradient, = torch.autograd.grad(got.entropy.sum(), q)
    assert gradient.abs().max() > 0
    plain = attention_statistics(q.detach(), k.detach(), v.detach(), entropy=True)
    assert not plain.o.requires_grad


EVERYTHING = {"max_logit": "softmax", "entropy": True, "column_sums": "kv_heads"}


def test_second_derivatives_are_refused(device):
    q, k, v = (t.requires_grad_() for t in tensors(device, torch.float32))
    for loss in (lambda got: got.o.sum(), lambda got: got.entropy.sum()):
        first, = torch.autograd.grad(loss(attention_statistics(q, k, v, **EVERYTHING)), q, create_graph=True)
        refused(RuntimeError, lambda: torch.autograd.grad(first.square().sum() + q.square().sum(), q), "first derivatives")


def test_tensors_whose_memory_has_the_other_sign(device):
    results = []
    for sign in (torch.neg, torch._neg_view):
        leaves = [t.requires_grad_() for t in tensors(device, torch.float32)]
        sink = torch.linspace(-1, 1, H_Q, device=device)
        gain = torch.linspace(1, 2, H_Q, device=device).requires_grad_()
        got = attention_statistics(*map(sign, leaves), **EVERYTHING, sink=sign(sink), score="score * gain[h]",
                                   captures={"gain": sign(gain)})[:5]
        gradients = torch.autograd.grad(got, [*leaves, gain], [sign(t.detach().cos()) for t in got])
        results.append([t.detach() for t in (*got, *gradients)])
    for expected, actual in zip(*results):
        torch.testing.assert_close(actual, expected)


def test_sinks_and_captures_are_those_of_attention(device):
    q, k, v = tensors(device, torch.float32)
    more = {"sink": torch.linspace(-1, 1, H_Q, device=device, dtype=torch.bfloat16), "score": "score * gain[0] + shift",
            "captures": {"gain": torch.tensor(0.5, device=device, requires_grad=True), "shift": 2}}
    got = attention_statistics(q, k, v, **more)
    expected, lse = attention(q, k, v, **more, return_lse=True)
    torch.testing.assert_close(got.o, expected)
    torch.testing.assert_close(got.lse, lse)
    gradients = [torch.autograd.grad(o.sum(), more["captures"]["gain"])[0] for o in (got.o, expected)]
    assert gradients[0].shape == ()
    torch.testing.assert_close(*gradients)


def test_kinds_that_are_refused(device):
    q, k, v = tensors(device, torch.float32)
    refused(TypeError, lambda: attention_statistics(q, k, v, sink=[0.0] * H_Q), "sink", "list", "torch.Tensor")
    refused(TypeError, lambda: attention_statistics(q, k, v, score="score * x", captures={"x": "1"}), "captures", "x", "str")
    wide = {"x": q[0, :, 0, 0].long()}
    refused(TypeError, lambda: attention_statistics(q, k, v, score="score * x[h]", captures=wide), "x", "int64")
    refused(TypeError, lambda: attention_statistics(q.long(), k.long(), v.long()), "q", "int64")
