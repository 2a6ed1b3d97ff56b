"""The compiled operators beside those in Python: the same bits, the same refusals. Skipped where FA_TORCH_OPS names none."""

import threading

import pytest
from conftest import refused

torch = pytest.importorskip("torch")

import fa_attention  # noqa: E402
from fa_attention.torch import _native, _ops, attention, varlen_attention  # noqa: E402

if not _native.loaded:
    pytest.skip(f"no compiled operators: {_native.problem}", allow_module_level=True)

CU = torch.tensor([0, 3, 3, 9], dtype=torch.int32)
SCORE, MASK = "score * gain + bias[h, q, kv] + slope", "kept[kv] != 0"


def arguments(arrays=(None,) * 5, numbers=(0, 0, 0, 0), values=(), names=((), ()), **given):
    """Those of `forward` behind captures."""
    fixed = {"causal": False, "scale": None, "top_left": False, "window_left": None, "window_right": None, "chunk": 0,
             "dropout": 0.0, "deterministic": False, "score": None, "mask": None, **given}
    return (*arrays, *numbers, list(values), *fixed.values(), *map(list, names))


def tensors(*shapes, dtype=torch.float32, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def dense(dtype=torch.float32, order=False):
    q, k, v = tensors((2, 4, 5, 16), (2, 2, 7, 16), (2, 2, 7, 24), dtype=dtype)
    return [t.transpose(1, 2).contiguous().transpose(1, 2) if order else t for t in (q, k, v)]


def packed():
    return tensors((9, 4, 16), (9, 2, 16), (9, 2, 16))


def functions():
    bias, kept = tensors((4, 5, 7))[0], torch.tensor([1, 1, 0, 1, 1, 1, 0], dtype=torch.int32)
    return [bias, kept], arguments(values=(0.5, 0.25), names=(("bias", "kept"), ("gain", "slope")), score=SCORE, mask=MASK)


CASES = {
    "plain": lambda: (dense(), None, [], arguments()),
    "causal": lambda: (dense(torch.bfloat16), None, [], arguments(causal=True)),
    "half": lambda: (dense(torch.float16), None, [], arguments(scale=0.3, top_left=True, causal=True)),
    "double": lambda: (dense(torch.float64), None, [], arguments(window_left=2, window_right=1)),
    "chunk": lambda: (dense(order=True), None, [], arguments(chunk=3, deterministic=True)),
    "sink": lambda: (dense(), tensors((4,))[0], [], arguments(causal=True)),
    "dropout": lambda: (dense(), None, [], arguments(numbers=(0, 0, 7, 9), dropout=0.25)),
    "state": lambda: (dense(), None, [], arguments((None,) * 4 + (torch.tensor([7, 9]),), dropout=0.25)),
    "functions": lambda: (dense(), None, *functions()),
    "packed": lambda: (packed(), None, [], arguments((CU, CU, None, None, None), (6, 6, 0, 0), causal=True)),
    "used": lambda: (packed(), None, [], arguments((CU, CU, torch.tensor([2, 0, 6], dtype=torch.int32),
                                                    torch.tensor([3, 0, 4], dtype=torch.int32), None))),
    "strided": lambda: ([t.transpose(2, 3).contiguous().transpose(2, 3) for t in dense()], None, [], arguments()),
}


def same(results, wanted):
    for result, right in zip(results, wanted):
        if isinstance(right, list):
            same(result, right)
        else:
            assert result.dtype == right.dtype and result.stride() == right.stride()
            assert torch.equal(result, right)


@pytest.mark.parametrize("name", CASES)
def test_same_bits(name):
    qkv, sink, captures, rest = CASES[name]()
    o, lse = _ops.forward_op(*qkv, sink, captures, *rest)
    same((o, lse), _ops._forward(*qkv, sink, captures, *rest))
    dout, dlse = tensors(o.shape, lse.shape, seed=4)
    dout, dlse = dout.to(o.dtype), dlse.to(lse.dtype)
    all_of_them = [True, True, True, sink is not None] + [t.is_floating_point() for t in captures]
    for needed in (all_of_them, [True, False, False, False] + [False] * len(captures), [False, True, True, *all_of_them[3:]],
                   [False] * len(all_of_them)):
        for gradients in ((dout, dlse), (dout, None), (None, dlse)):
            given = (*gradients, *qkv, o, lse, sink, captures, *rest, needed)
            same(_ops.backward_op(*given), _ops._backward(*given))


def test_plain_calls_take_the_short_way():
    q, k, v = (t.requires_grad_() for t in dense(torch.float64))
    assert type(attention(q, k, v, return_lse=True)[0].grad_fn).__name__ == "_AttendBackward"
    assert type(attention(q, k, v, dropout=0.5).grad_fn).__name__ == "_DirectBackward"
    assert torch.autograd.gradcheck(lambda q, k, v: attention(q, k, v, causal=True, return_lse=True), (q, k, v))
    dq, = torch.autograd.grad(attention(q, k.detach(), v.detach()).sum(), q, create_graph=True)
    refused(RuntimeError, lambda: dq.sum().backward(), "is not implemented")


def test_calls_for_o_alone_have_a_node_of_pytorchs_own(device):
    on_gpu = device != "cpu"
    name, node = (_native._GPU_NODE, _native._gpu_node) if on_gpu else (_native._NODE, _native._node)
    if node is None:
        pytest.skip(f"this PyTorch's {name} is another")
    q, k, v = (t.to(device).requires_grad_() for t in dense(torch.bfloat16 if on_gpu else torch.float64))
    options = dict(causal=True, window_left=3, scale=0.3, deterministic=True)
    o = attention(q, k, v, **options)
    assert type(o.grad_fn).__name__.lower().startswith(name.replace("_", ""))
    other, _ = attention(q, k, v, **options, return_lse=True)
    douts = torch.randn(3, *o.shape, generator=torch.Generator().manual_seed(5)).to(o)
    expected = [torch.autograd.grad(other, (q, k, v), dout, retain_graph=True) for dout in douts]
    for dout, gradients in zip(douts, expected):
        same(torch.autograd.grad(o, (q, k, v), dout, retain_graph=True), gradients)
    same(torch.autograd.grad(o, (q, v), douts[0], retain_graph=True), expected[0][::2])
    for needed in range(1, 8):
        leaves = [t.detach().clone().requires_grad_(bool(needed >> n & 1)) for n, t in enumerate((q, k, v))]
        attention(*leaves, **options).backward(douts[0])
        assert [t.grad is not None for t in leaves] == [t.requires_grad for t in leaves]
        for leaf, right in zip(leaves, expected[0]):
            if leaf.requires_grad:
                torch.testing.assert_close(leaf.grad, right)
    batched = torch.autograd.grad(o, (q, k, v), douts, is_grads_batched=True, retain_graph=True)
    same(batched, [torch.stack(parts) for parts in zip(*expected)])
    dq, = torch.autograd.grad(attention(q, k, v, **options), q, douts[0], create_graph=True)
    refused(RuntimeError, lambda: dq.sum().backward(), "is not implemented")
    with torch.no_grad():
        k.add_(1)
    refused(RuntimeError, lambda: torch.autograd.grad(o, q, douts[0]), "modified by an inplace operation")
    direct = getattr(torch.ops.aten, name)
    refused((RuntimeError, ValueError), lambda: direct(q, k, v), "accepted are calls of fa_attention")


def test_operators_refuse():
    """An error that names the argument; the functions' own errors are those of the package."""
    wrong = (RuntimeError, ValueError)
    q, k, v = dense()
    refused(wrong, lambda: _ops.forward_op(q, k.double(), v, None, [], *arguments()), "k is torch.float64", "q is")
    refused(wrong, lambda: _ops.forward_op(q[0], k, v, None, [], *arguments()), "q has shape [4, 5, 16]")
    refused(wrong, lambda: _ops.forward_op(q, k, v, None, [q.bool()], *arguments(names=(("x",), ()), score="score + x[q]")),
            "captures['x']", "torch.bool")
    refused(wrong, lambda: _ops.forward_op(q, k, v, None, [], *arguments(names=(("x",), ()))), "captures has 0 tensors")
    refused(wrong, lambda: _ops.forward_op(q, k[:, :, :, :8], v, None, [], *arguments()), "k")
    long = arguments((CU.long(), CU, None, None, None))
    refused(wrong, lambda: _ops.forward_op(*packed(), None, [], *long), "cu_seqlens_q is torch.int64")
    o, lse = _ops.forward_op(q, k, v, None, [], *arguments())
    refused(wrong, lambda: _ops.backward_op(o, None, q, k, v, o, lse, None, [], *arguments(), [True]), "needed has 1")
    refused(fa_attention.InvalidArgument, lambda: attention(q, k[:, :, :, :8], v), "k")
    refused(TypeError, lambda: attention(q, k.double(), v), "k is torch.float64")
    refused(TypeError, lambda: attention(q, k, v, window_left="x"), "window_left")


def test_threads_share_it():
    q, k, v = (t.requires_grad_() for t in dense())
    wanted = attention(q, k, v, causal=True, scale=0.2)
    wrong = []

    def work(n):
        for _ in range(50):
            o = attention(q, k, v, causal=True, scale=0.2 if n % 2 == 0 else 0.2 + n)
            gradients = torch.autograd.grad(o.sum(), (q, k, v))
            if (n % 2 == 0) != torch.equal(o, wanted) or not all(t.isfinite().all() for t in gradients):
                wrong.append(n)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_packed_batches_and_captures_go_on():
    q, k, v = packed()
    o = varlen_attention(q, k, v, CU, CU, causal=True)
    assert o.shape == (9, 4, 16)
    bias = torch.zeros(4, 5, 7, requires_grad=True)
    attention(*dense(), score="score + bias[h, q, kv]", captures={"bias": bias}).sum().backward()
    assert bias.grad is not None and bias.grad.abs().max() > 0
