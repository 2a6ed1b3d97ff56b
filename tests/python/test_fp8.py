"""Forward of 8-bit floats through the base layer, beside float64 of the very codes and scales."""

import math

import pytest
from conftest import refused

torch = pytest.importorskip("torch")

from fa_attention import capi  # noqa: E402
from fa_attention._library import load  # noqa: E402

DTYPES = ["float8_e4m3fn", "float8_e5m2"]


def place(device):
    return (capi.DEVICE_HOST, 0) if device == "cpu" else (capi.DEVICE_CUDA, 0)


def attention(device, dtype, **more):
    if device == "cuda" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("no kernels of 8-bit floats for this GPU")
    return capi.Attention(load(), 64, dtype, device=place(device), **more)


@pytest.mark.parametrize("key_scales", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_and_scales_are_those_of_pytorch(device, dtype, causal, key_scales):
    torch.manual_seed(1)
    b, h_q, h_kv, s, d = 2, 4, 2, 70, 64
    codes = [torch.randn(b, h, s, d, device=device).to(getattr(torch, dtype)) for h in (h_q, h_kv, h_kv)]
    q_scale = torch.rand(b, h_q, s, device=device) + 0.5
    k_scale, v_scale = (torch.rand(b, h_kv, device=device) - 0.5 for _ in range(2))
    if key_scales:
        k_scale, v_scale = (torch.rand(b, h_kv, s, device=device) - 0.25 for _ in range(2))
    o = torch.empty(b, h_q, s, d, dtype=torch.float16, device=device)
    lse = torch.empty(b, h_q, s, device=device)
    attention(device, dtype, o_dtype="float16", causal=causal, key_scales=key_scales, value_scales=key_scales).bind_forward(
        *codes, o, lse, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)()
    q = codes[0].double() * q_scale.double()[..., None]
    k, v = ((x.double() * (scale.double() if scale.dim() == 3 else scale.double()[..., None])[..., None]).repeat_interleave(h_q // h_kv, 1)
            for x, scale in zip(codes[1:], (k_scale, v_scale)))
    scores = q @ k.transpose(-1, -2) / math.sqrt(d)
    if causal:
        scores = scores.masked_fill(torch.ones(s, s, device=device, dtype=torch.bool).triu(1), -math.inf)
    expected = torch.softmax(scores, -1) @ v
    on_host = device == "cpu"
    assert ((o.double() - expected).square().mean() / expected.square().mean()).sqrt() <= (1e-3 if on_host else 0.04)
    assert (lse.double() - torch.logsumexp(scores, -1)).abs().max() <= (1e-4 if on_host else 5e-3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_precise_is_as_exact_as_16_bits(device, dtype):
    torch.manual_seed(2)
    q, k, v = (torch.randn(1, 2, 200, 64, device=device).to(getattr(torch, dtype)) for _ in range(3))
    expected = torch.softmax(q.double() @ k.double().transpose(-1, -2) / 8, -1) @ v.double()
    o = torch.empty(1, 2, 200, 64, dtype=torch.float16, device=device)
    attention(device, dtype, o_dtype="float16", precise=True).bind_forward(q, k, v, o, None)()
    assert ((o.double() - expected).square().mean() / expected.square().mean()).sqrt() <= 0.3 * 0.026


def test_scales_are_of_8_bit_floats(device):
    b, h, s, d = 1, 1, 8, 64
    x = torch.zeros(b, h, s, d, dtype=torch.bfloat16, device=device)
    plain = capi.Attention(load(), d, "bfloat16", device=place(device))
    refused(ValueError, plain.bind_forward(x, x, x, x.clone(), q_scale=torch.ones(b, h, device=device)), "q_scale")
    refused(ValueError, lambda: capi.Attention(load(), d, "bfloat16", device=place(device), o_dtype="float16"),
            "o_dtype")
