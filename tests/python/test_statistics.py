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
