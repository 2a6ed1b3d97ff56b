"""Forwards that add their keys to a state, in place, beside attention over all keys in float64."""

import math

import pytest
from conftest import refused

torch = pytest.importorskip("torch")

from fa_attention.torch import _accumulate, accumulate, attention, merge_states, varlen_attention  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

B, H_Q, H_KV, S_Q, S_KV, D = 2, 4, 2, 7, 40, 16
BOUND = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 4e-3}


def tensors(device="cpu", dtype=torch.float32):
    torch.manual_seed(3)
    return [torch.randn(B, h, s, D, device=device, dtype=dtype) for h, s in ((H_Q, S_Q), (H_KV, S_KV), (H_KV, S_KV))]


def expected(q, k, v, gain=1.0):
    k, v = (t.double().repeat_interleave(H_Q // H_KV, 1) for t in (k, v))
    scores = gain * (q.double() @ k.mT) / math.sqrt(D)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def nothing(q):
    """A state without keys; its o is not read."""
    sums = torch.float64 if q.dtype == torch.float64 else torch.float32
    return torch.full_like(q, math.nan), torch.full(q.shape[:3], -math.inf, device=q.device, dtype=sums)


@pytest.mark.parametrize("begin", ["state", "nothing"])
@pytest.mark.parametrize("dtype", list(BOUND))
def test_keys_are_added(device, dtype, begin):
    if device == "cuda" and dtype == torch.float64:
        pytest.skip("float64 is of the host")
    q, k, v = tensors(device, dtype)
    o, lse = attention(q, k[:, :, :16], v[:, :, :16], return_lse=True) if begin == "state" else nothing(q)
    version = o._version, lse._version
    for i in range(16 if begin == "state" else 0, S_KV, 12):
        accumulate(q, k[:, :, i:i + 12], v[:, :, i:i + 12], o, lse)
    whole, sums = expected(q, k, v)
    assert (o - whole).abs().max() <= BOUND[dtype] and (lse - sums).abs().max() <= max(BOUND[dtype] / 10, 1e-12)
    assert o._version > version[0] and lse._version > version[1]


def test_options_and_memory_orders(device):
    q, k, v = tensors(device)
    gain = torch.full((H_Q,), 0.5, device=device)
    o, lse = nothing(q.transpose(1, 2).contiguous().transpose(1, 2))
    for part in (slice(0, 25), slice(25, S_KV)):
        accumulate(q.transpose(2, 3).contiguous().transpose(2, 3), k[:, :, part], v[:, :, part], o, lse,
                   score="score * gain[h] * two", captures={"gain": gain, "two": 2.5})
    whole, sums = expected(q, k, v, 1.25)
    assert (o - whole).abs().max() <= 1e-5 and (lse - sums).abs().max() <= 1e-5
    o, lse = nothing(q)
    last = [t[:, :, S_KV - S_Q:] for t in (k, v)]
    accumulate(q, *last, o, lse, causal=True, window_left=3, scale=0.5)
    whole, sums = attention(q, *last, causal=True, window_left=3, scale=0.5, return_lse=True)
    assert (o - whole).abs().max() <= 1e-6 and (lse - sums).abs().max() <= 1e-6


def test_rows_without_keys_keep_their_bits(device):
    q, k, v = tensors(device)
    o, lse = attention(q, k, v, return_lse=True)
    before = o.clone(), lse.clone()
    accumulate(q, k[:, :, :3], v[:, :, :3], o, lse, causal=True)  # the first rows see none
    assert torch.equal(o[:, :, :4], before[0][:, :, :4]) and torch.equal(lse[:, :, :4], before[1][:, :, :4])
    assert not torch.equal(o[:, :, 4:], before[0][:, :, 4:])


def test_packed_batches(device):
    torch.manual_seed(4)
    q, k, v = (torch.randn(9, h, D, device=device) for h in (H_Q, H_KV, H_KV))
    cu = torch.tensor([0, 4, 9], dtype=torch.int32, device=device)
    used = torch.tensor([2, 3], dtype=torch.int32, device=device)
    starts = torch.tensor([2, 7, 9], dtype=torch.int32, device=device)
    o, lse = varlen_attention(q, k, v, cu, cu, seqused_kv=used, return_lse=True)
    accumulate(q, k, v, o, lse, cu_seqlens_q=cu, cu_seqlens_kv=starts, seqused_kv=torch.full_like(used, 2))
    whole, sums = varlen_attention(q, k, v, cu, cu, return_lse=True)
    assert (o - whole).abs().max() <= 1e-5 and (lse - sums).abs().max() <= 1e-5


def test_it_is_what_a_merge_gives(device):
    q, k, v = tensors(device)
    first, second = (attention(q, k[:, :, part], v[:, :, part], return_lse=True) for part in (slice(0, 9), slice(9, S_KV)))
    o, lse = (t.clone() for t in first)
    accumulate(q, k[:, :, 9:], v[:, :, 9:], o, lse)
    for x, y in zip((o, lse), merge_states([first, second])):
        assert (x - y).abs().max() <= 1e-6


def arguments(q, k, v, o, lse, captures=(), score=None, names=((), ()), numbers=()):
    return (q, k, v, o, lse, list(captures), None, None, None, None, 0, 0, list(numbers), True, None, False, None, None, 0, score,
            None, *map(list, names))


def test_opcheck():
    q, k, v = tensors()
    torch.library.opcheck(_accumulate.accumulate_op, arguments(q, k, v, *attention(q, k, v, return_lse=True)))
    more = {"captures": [torch.ones(H_Q)], "score": "score * gain[h] * two", "names": (["gain"], ["two"]), "numbers": [2.0]}
    torch.library.opcheck(_accumulate.accumulate_op, arguments(q, k, v, *attention(q, k, v, return_lse=True), **more))


@pytest.mark.parametrize("dynamic", [False, True])
def test_fullgraph(dynamic):
    q, k, v = tensors()

    def call(q, k, v):
        o, lse = attention(q, k[:, :, :8], v[:, :, :8], return_lse=True)
        accumulate(q, k[:, :, 8:], v[:, :, 8:], o, lse)
        return o + 1, lse

    with torch.no_grad():
        for x, y in zip(torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=dynamic)(q, k, v), call(q, k, v)):
            assert torch.equal(x, y)


def test_fake_tensors_and_vmap():
    q, k, v = tensors()
    o, lse = nothing(q)
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(t) for t in (q, k, v, o, lse)]
        assert accumulate(*fake) is None
        refused(ValueError, lambda: accumulate(*fake[:4], fake[4][0]), "lse")
    states = [torch.stack([t, t]) for t in (o, lse)]
    torch.vmap(lambda q, o, lse: (accumulate(q, k, v, o, lse), o)[1])(torch.stack([q, 2 * q]), *states)
    for n in range(2):
        one = nothing(q)
        accumulate((n + 1) * q, k, v, *one)
        assert torch.equal(states[0][n], one[0]) and torch.equal(states[1][n], one[1])
    refused(ValueError, lambda: torch.vmap(lambda q: (accumulate(q, k, v, o, lse), q)[1])(torch.stack([q, q])), "o is not mapped")


def test_what_is_refused():
    q, k, v = tensors()
    o, lse = attention(q, k, v, return_lse=True)
    for name, t in (("q", q), ("k", k), ("v", v), ("o", o), ("lse", lse)):
        t.requires_grad_()
        refused(RuntimeError, lambda: accumulate(q, k, v, o, lse), f"{name} requires a gradient", "accumulate has no gradients")
        refused(RuntimeError, lambda: _accumulate.accumulate_op(*arguments(q, k, v, o, lse)), f"{name} requires a gradient")
        with torch.no_grad():
            accumulate(q, k, v, o, lse)
        t.requires_grad_(False)
    refused(TypeError, lambda: accumulate(q, k, v, o.double(), lse), "o is torch.float64", "torch.float32")
    refused(TypeError, lambda: accumulate(q, k, v, o, None), "lse is a", "torch.Tensor")
    refused(ValueError, lambda: accumulate(q, k, v, o[:1], lse), "o has shape [1, 4, 7, 16]")
    refused(ValueError, lambda: accumulate(q, k, v, o.mT.contiguous().mT, lse), "o has strides")
    refused(TypeError, lambda: accumulate(q.to(torch.int8), k, v, o, lse), "q is torch.int8")
    refused(ValueError, lambda: accumulate(q, k, v, o, lse, seqused_kv=torch.zeros(2, dtype=torch.int32)), "cu_seqlens_q is None")
    refused(ValueError, lambda: accumulate(q, k, v, o, lse, captures={"x": 1.0}), "captures", "'x'")
