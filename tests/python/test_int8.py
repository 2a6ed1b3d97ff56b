"""Forward of int8 q and k, and what makes them, through the base layer, beside float64."""

import math

import pytest
from conftest import refused

torch = pytest.importorskip("torch")

from fa_attention import capi  # noqa: E402
from fa_attention._library import load  # noqa: E402

B, H_Q, H_KV, S, D = 2, 4, 2, 130, 64


def attention(device, dtype="int8", **more):
    if device == "cuda" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("no kernels of 8 bits for this GPU")
    place = (capi.DEVICE_HOST, 0) if device == "cpu" else (capi.DEVICE_CUDA, 0)
    return capi.Attention(load(), D, dtype, device=place, **more)


def codes_of(fa, device, q, k, v, smooth):
    dtypes = (torch.int8, torch.int8, torch.float8_e4m3fn)
    codes = [torch.empty(x.shape, dtype=dtype, device=device) for x, dtype in zip((q, k, v), dtypes)]
    scales = [torch.empty(x.shape[:3], device=device) for x in (q, k, v)]
    mean = torch.empty(B, H_KV, D, device=device) if smooth else None
    bias = torch.empty(q.shape[:3], device=device) if smooth else None
    fa.bind_quantize(q, k, v, *codes, *scales, k_mean=mean, row_bias=bias)()
    return codes, scales, mean, bias


@pytest.mark.parametrize("smooth", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_codes_attend_as_what_they_stand_for(device, causal, smooth):
    torch.manual_seed(1)
    q, k, v = (torch.randn(B, h, S, D, device=device).to(torch.bfloat16) for h in (H_Q, H_KV, H_KV))
    k = k + 6 * (torch.arange(D, device=device) % 16 == 3)
    fa = attention(device, o_dtype="float16", causal=causal, key_scales=True, value_scales=True, precise=True)
    codes, scales, mean, bias = codes_of(fa, device, q, k, v, smooth)
    o = torch.empty(B, H_Q, S, D, dtype=torch.float16, device=device)
    lse = torch.empty(B, H_Q, S, device=device)
    fa.bind_forward(*codes, o, lse, q_scale=scales[0], k_scale=scales[1], v_scale=scales[2], row_bias=bias)()
    stored = [x.double() * scale.double()[..., None] for x, scale in zip(codes, scales)]
    if smooth:
        assert (mean - k.double().mean(2)).abs().max() <= 1e-5
        stored[1] = stored[1] + mean.double()[:, :, None]
    for given, back in zip((q, k, v), stored):
        assert (back - given.double()).abs().max() <= 0.25
    wide = [x.repeat_interleave(H_Q // H_KV, 1) for x in stored[1:]]
    scores = stored[0] @ wide[0].transpose(-1, -2)
    if smooth:  # the bias is of q as it was given
        rows = (q.double() - stored[0]) * mean.double().repeat_interleave(H_Q // H_KV, 1)[:, :, None]
        scores = scores + rows.sum(-1, keepdim=True)
    scores = scores / math.sqrt(D)
    if causal:
        scores = scores.masked_fill(torch.ones(S, S, device=device, dtype=torch.bool).triu(1), -math.inf)
    expected = torch.softmax(scores, -1) @ wide[1]
    assert ((o.double() - expected).square().mean() / expected.square().mean()).sqrt() <= 0.003
    assert (lse.double() - torch.logsumexp(scores, -1)).abs().max() <= 2e-3


def test_what_is_refused(device):
    fa = attention(device)
    q, k, v = (torch.zeros(B, h, S, D, dtype=torch.bfloat16, device=device) for h in (H_Q, H_KV, H_KV))
    codes, scales, _, bias = codes_of(fa, device, q, k, v, False)
    refused(ValueError, fa.bind_quantize(q, q_codes=codes[0], q_scale=scales[0], row_bias=scales[0].clone()), "row_bias")
    refused(ValueError, fa.bind_quantize(k, q_codes=codes[0], q_scale=scales[0]), "q_codes")
    plain = attention(device, "float8_e4m3fn")
    e4m3 = [torch.zeros(x.shape, device=device).to(torch.float8_e4m3fn) for x in (q, k, v)]
    refused(ValueError, plain.bind_forward(*e4m3, q.clone(), row_bias=torch.zeros(B, H_Q, S, device=device)), "row_bias")
