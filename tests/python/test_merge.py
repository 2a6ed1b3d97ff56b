"""Merges of partial results in PyTorch, beside float64 and beside attention over all keys."""

import math

import pytest
from conftest import refused

torch = pytest.importorskip("torch")

from fa_attention.torch import _merge, attention, merge_states, varlen_attention  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

B, H, S, D = 2, 4, 5, 16
BOUND = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def states_of(count, device="cpu", dtype=torch.float64, packed=False, grad=False):
    torch.manual_seed(count)
    sums = torch.float64 if dtype == torch.float64 else torch.float32
    shape, rows = ((S, H, D), (H, S)) if packed else ((B, H, S, D), (B, H, S))
    return [(torch.randn(shape, device=device, dtype=dtype, requires_grad=grad),
             (2 * torch.randn(rows, device=device, dtype=sums)).requires_grad_(grad)) for _ in range(count)]


def expected(states, sink=None):
    """The definition, in float64."""
    o, lse = ([t.double() for t in parts] for parts in zip(*states))
    sums = torch.stack(lse)
    if sink is not None:
        sums = torch.cat([sums, sink.double()[:, None].expand(sums.shape[1:])[None]])
    whole = sums.logsumexp(0)
    weights = (sums[: len(o)] - whole).exp()
    weights = weights.transpose(1, 2) if o[0].dim() == 3 else weights
    return (weights[..., None] * torch.stack(o)).sum(0), whole


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize("count", [1, 2, 16])
@pytest.mark.parametrize("dtype", list(BOUND))
def test_merge_by_definition(device, dtype, count, with_sink, packed):
    if device == "cuda" and dtype == torch.float64:
        pytest.skip("float64 is of the host")
    states = states_of(count, device, dtype, packed)
    sink = torch.randn(H, device=device, dtype=dtype) if with_sink else None
    o, lse = merge_states(states, sink=sink)
    whole, sums = expected(states, sink)
    assert o.dtype == dtype and o.shape == states[0][0].shape and lse.dtype == states[0][1].dtype
    assert (o.double() - whole).abs().max() <= BOUND[dtype] and (lse.double() - sums).abs().max() <= 2e-6


def test_dtypes_of_states_and_result(device):
    half, single = states_of(2, device, torch.bfloat16), states_of(3, device, torch.float32)
    whole, _ = expected([*half, *single])
    for states, dtype, of in (([*half, *single], None, torch.bfloat16), ([*single, *half], None, torch.float32),
                              ([*half, *single], torch.float32, torch.float32), ([*single, *half], torch.bfloat16, torch.bfloat16)):
        o, _ = merge_states(states, dtype=dtype)
        assert o.dtype == of and (o.double() - whole).abs().max() <= BOUND[of]
    o, _ = merge_states(single, dtype=torch.float16)
    assert o.dtype == torch.float16 and (o.double() - expected(single)[0]).abs().max() <= BOUND[torch.float16]


def test_memory_order_and_strides(device):
    (o, lse), (o2, lse2) = states_of(2, device, torch.float32)
    whole, _ = merge_states([(o, lse), (o2, lse2)])
    turned = o.transpose(1, 2).contiguous().transpose(1, 2)
    apart = o2.transpose(2, 3).contiguous().transpose(2, 3)  # head dims with gaps are copied
    got, _ = merge_states([(turned, lse.mT.contiguous().mT), (apart, lse2)])
    assert torch.equal(got, whole) and got.stride() == turned.stride()


def test_states_without_keys_take_no_part(device):
    states = states_of(3, device, torch.float32, grad=True)
    hidden = [torch.zeros(B, H, S, dtype=torch.bool, device=device) for _ in states]
    hidden[0][0, 0], hidden[1][0, 0, 2], hidden[1][1], hidden[2][0, 0, 2] = True, True, True, True
    given = []
    for (o, lse), mask, value in zip(states, hidden, (-math.inf, math.inf, -math.inf)):
        given.append((o.masked_fill(mask[..., None], math.nan), lse.masked_fill(mask, value)))
    o, lse = merge_states(given)
    assert (o[0, 0, 2] == 0).all() and lse[0, 0, 2] == -math.inf
    seen = [(o, lse.double().masked_fill(mask, -math.inf)) for (o, lse), mask in zip(states, hidden)]
    whole, sums = expected(seen)
    row = torch.ones_like(lse, dtype=torch.bool)
    row[0, 0, 2] = False
    assert (o - whole)[row].abs().max() <= 1e-5 and (lse - sums)[row].abs().max() <= 1e-5
    leaves = [t for state in states for t in state]
    dout = torch.randn_like(o)
    actual = torch.autograd.grad([o, lse], leaves, [dout, row.float()])
    wanted = torch.autograd.grad([whole[row], sums[row]], leaves, [dout.double()[row], torch.ones_like(sums[row])])
    for x, y in zip(actual, wanted):
        assert x.isfinite().all() and (x - y.nan_to_num()).abs().max() <= 1e-5
    o, lse = merge_states(given, sink=torch.zeros(H, device=device))
    assert (o[0, 0, 2] == 0).all() and lse[0, 0, 2] == 0


@pytest.mark.parametrize("packed", [False, True])
def test_gradients_are_those_of_the_definition(packed):
    states = states_of(3, packed=packed, grad=True)
    sink = torch.randn(H, dtype=torch.float64, requires_grad=True)
    leaves = [*(t for state in states for t in state), sink]
    dout, dlse = torch.randn_like(states[0][0]), torch.randn_like(states[0][1])
    for of in ((0,), (1,), (0, 1)):
        results = [[call(states, sink)[n] for n in of] for call in (lambda s, x: merge_states(s, sink=x), expected)]
        actual, wanted = (torch.autograd.grad(r, leaves, [(dout, dlse)[n] for n in of], allow_unused=True) for r in results)
        for x, y in zip(actual, wanted):
            y = torch.zeros_like(x) if y is None else y
            assert (x - y).abs().max() <= 1e-12
    call = lambda *t: merge_states([(t[0], t[1]), (t[2], t[3]), (t[4], t[5])], sink=t[6])  # noqa: E731
    assert torch.autograd.gradcheck(call, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(call, leaves, fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_of_keys_have_the_gradients_of_all(device, dtype):
    torch.manual_seed(5)
    q, k, v = (torch.randn(B, h, s, D, device=device, dtype=dtype, requires_grad=True) for h, s in ((H, 7), (2, 40), (2, 40)))
    sink = torch.randn(H, device=device, requires_grad=True)
    parts = [attention(q, k[:, :, i:i + 16], v[:, :, i:i + 16], return_lse=True) for i in range(0, 40, 16)]
    o, lse = merge_states(parts, sink=sink)
    whole, sums = attention(q, k, v, sink=sink, return_lse=True)
    bound = 1e-5 if dtype == torch.float32 else 4e-2
    assert (o - whole).abs().max() <= bound and (lse - sums).abs().max() <= 1e-5
    dout, dlse = torch.randn_like(o), torch.randn_like(lse)
    actual, wanted = (torch.autograd.grad(r, (q, k, v, sink), (dout, dlse)) for r in ((o, lse), (whole, sums)))
    for x, y in zip(actual, wanted):
        assert (x - y).abs().max() <= bound * y.abs().max().clamp(1)


def test_parts_of_a_packed_batch(device):
    torch.manual_seed(6)
    q, k, v = (torch.randn(9, h, D, device=device, requires_grad=True) for h in (H, 2, 2))
    cu = torch.tensor([0, 4, 9], dtype=torch.int32, device=device)
    first, last = (torch.tensor(n, dtype=torch.int32, device=device) for n in ([2, 3], [2, 2]))
    starts = torch.tensor([2, 7, 9], dtype=torch.int32, device=device)
    parts = [varlen_attention(q, k, v, cu, cu, seqused_kv=first, return_lse=True),
             varlen_attention(q, k, v, cu, starts, seqused_kv=last, return_lse=True)]
    o, lse = merge_states(parts)
    whole, sums = varlen_attention(q, k, v, cu, cu, return_lse=True)
    assert (o - whole).abs().max() <= 1e-5 and (lse - sums).abs().max() <= 1e-5
    dout = torch.randn_like(o)
    for x, y in zip(torch.autograd.grad(o, (q, k, v), dout), torch.autograd.grad(whole, (q, k, v), dout)):
        assert (x - y).abs().max() <= 1e-5


def test_opcheck():
    for packed in (False, True):
        states = states_of(3, dtype=torch.float32, packed=packed, grad=True)
        sink = torch.randn(H, requires_grad=True)
        o, lse = ([*t] for t in zip(*states))
        torch.library.opcheck(_merge.merge_op, (o, lse, sink, None))
        torch.library.opcheck(_merge.merge_op, (o[:2], lse[:2], None, torch.float16))


@pytest.mark.parametrize("dynamic", [False, True])
def test_fullgraph(dynamic):
    loss = lambda *t: sum(x.sin().sum() for x in merge_states([(t[0], t[1]), (t[2], t[3])], sink=t[4]))  # noqa: E731
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    leaves = [t for state in states_of(2, dtype=torch.float32, grad=True) for t in state] + [torch.randn(H, requires_grad=True)]
    actual, wanted = (torch.autograd.grad(call(*leaves), leaves) for call in (compiled, loss))
    assert all(torch.allclose(x, y, atol=1e-6) for x, y in zip(actual, wanted))


def test_fake_and_meta_tensors():
    states = states_of(2, dtype=torch.bfloat16)
    o, lse = merge_states([(a.to("meta"), b.to("meta")) for a, b in states], dtype=torch.float32)
    assert o.shape == (B, H, S, D) and o.dtype == torch.float32 and lse.shape == (B, H, S) and o.device.type == "meta"
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        o, lse = merge_states([(mode.from_tensor(a), mode.from_tensor(b)) for a, b in states])
        assert o.dtype == torch.bfloat16 and lse.dtype == torch.float32


def test_transforms():
    states = states_of(2, dtype=torch.float64)
    stacked = [torch.stack([t, t.flip(0), -t]) for state in states for t in state]
    call = lambda *t: merge_states([(t[0], t[1]), (t[2], t[3])])  # noqa: E731
    o, lse = torch.vmap(call)(*stacked)
    for n in range(3):
        one = call(*(t[n] for t in stacked))
        assert torch.equal(o[n], one[0]) and torch.equal(lse[n], one[1])
    o, _ = torch.vmap(call, in_dims=(0, None, 0, None))(stacked[0], stacked[1][0], stacked[2], stacked[3][0])
    assert torch.equal(o[1], call(stacked[0][1], stacked[1][0], stacked[2][1], stacked[3][0])[0])
    sinks = torch.randn(3, H, dtype=torch.float64)
    with_sink = lambda sink: merge_states(states, sink=sink)[1]  # noqa: E731
    assert torch.equal(torch.vmap(with_sink)(sinks)[2], with_sink(sinks[2]))
    loss = lambda *t: sum(x.sin().sum() for x in call(*t))  # noqa: E731
    leaves = [t[0].clone().requires_grad_() for t in stacked]
    for x, y in zip(torch.func.grad(loss, argnums=(0, 1, 2, 3))(*(t.detach() for t in leaves)),
                    torch.autograd.grad(loss(*leaves), leaves)):
        assert torch.allclose(x, y)
    each = torch.vmap(torch.func.grad(loss, argnums=1))(*stacked)
    assert torch.allclose(each[0], torch.autograd.grad(loss(*leaves), leaves)[1])


def test_what_is_refused():
    states = states_of(2, dtype=torch.float32)
    (o, lse), other = states
    refused(ValueError, lambda: merge_states([]), "states", "1 to 16")
    refused(ValueError, lambda: merge_states([(o, lse)] * 17), "17", "16")
    refused(TypeError, lambda: merge_states([o, lse]), "states[0]", "(o, lse)")
    refused(TypeError, lambda: merge_states([(o, None)]), "states[0].lse", "NoneType")
    refused(ValueError, lambda: merge_states([(o, lse), (o[:1], lse[:1])]), "states[1].o", "[1, 4, 5, 16]")
    refused(ValueError, lambda: merge_states([(o, lse.mT)]), "states[0].lse", "rows")
    refused(TypeError, lambda: merge_states([(o, lse.double())]), "states[0].lse", "float64")
    refused(TypeError, lambda: merge_states([(o.half(), lse), (o.bfloat16(), lse)]), "states[1].o", "bfloat16")
    refused(TypeError, lambda: merge_states([(o.double(), lse.double()), (o, lse)]), "states[1]", "float32")
    refused(TypeError, lambda: merge_states([(o.half(), lse)], dtype=torch.bfloat16), "dtype", "bfloat16")
    refused(TypeError, lambda: merge_states([(o.to(torch.int8), lse)]), "states[0].o", "int8")
    refused(ValueError, lambda: merge_states(states, sink=torch.zeros(3)), "sink", "[4]")
    refused(ValueError, lambda: merge_states([(o[..., :12], lse)]), "12")
    refused(TypeError, lambda: merge_states(states, sink=0.5), "sink", "float")
