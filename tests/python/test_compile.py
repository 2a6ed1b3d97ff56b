"""fa_attention.torch under what watches a call: opcheck, torch.compile, torch.export, fake tensors, autocast, torch.func,
checkpointing."""

import pytest
from conftest import refused

torch = pytest.importorskip("torch")

import fa_attention  # noqa: E402
from fa_attention.torch import _ops, _plain_ops, attention, varlen_attention  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

SCORE = "score + bias[h, q, kv] * gain"
CU = torch.tensor([0, 4, 9], dtype=torch.int32)


def make_leaves(seed=0):
    torch.manual_seed(seed)
    q, k, v = (torch.randn(2, h, s, 8, requires_grad=True) for h, s in ((4, 3), (2, 5), (2, 5)))
    return q, k, v, torch.randn(4, 3, 5, requires_grad=True), torch.randn(4, requires_grad=True)


def loss(q, k, v, bias, sink):
    o, lse = attention(q, k, v, causal=True, window_left=3, score=SCORE, captures={"bias": bias, "gain": 0.5}, sink=sink,
                       return_lse=True)
    return o.sin().sum() + lse.sum()


def operator_arguments(cu=None, rng=None, captures=(), numbers=(), dropout=0.0, score=None, names=((), ())):
    return (list(captures), cu, cu, None, None, rng, 0, 0, 0, 0, list(numbers), True, None, False, None, None, 0, dropout, False,
            score, None, *map(list, names))


def test_opcheck():
    q, k, v, bias, sink = make_leaves()
    more = operator_arguments(captures=[bias], numbers=[0.5], score=SCORE, names=(["bias"], ["gain"]))
    torch.library.opcheck(_ops.forward_op, (q, k, v, sink, *more))
    o, lse = _ops.forward_op(q, k, v, sink, *more)
    saved = [t.detach() for t in (torch.randn_like(o), torch.randn_like(lse), q, k, v, o, lse, sink)]
    more = operator_arguments(captures=[bias.detach()], numbers=[0.5], score=SCORE, names=(["bias"], ["gain"]))
    for needed in ([True] * 5, [True, False, True, False, True], [False] * 3 + [True, False]):
        torch.library.opcheck(_ops.backward_op, (*saved, *more, needed))
    torch.library.opcheck(_ops.backward_op, (None, *saved[1:], *more, [True] * 5))


@pytest.mark.parametrize("order", ["bhsd", "bshd", "head dim apart"])
def test_opcheck_of_plain_calls(order):
    q = torch.randn(2, 4, 6, 8)
    if order == "bshd":
        q = torch.randn(2, 6, 4, 8).transpose(1, 2)
    elif order == "head dim apart":
        q = torch.randn(2, 4, 8, 6).transpose(2, 3)
    q.requires_grad_()
    torch.library.opcheck(_ops.forward_op, (q, q, q, None, *operator_arguments()))
    options = (0.5, True, False, True)
    torch.library.opcheck(_plain_ops.forward_op, (q, q, q, *options))
    with torch.no_grad():
        o, lse = _plain_ops.forward_op(q, q, q, *options)
        dout, dlse = torch.randn_like(o), torch.randn_like(lse)
        q = q.detach()
    for needed in ([True] * 3, [True, False, True], [False, True, False]):
        torch.library.opcheck(_plain_ops.backward_op, (dout, dlse, q, q, q, o, lse, *options, needed))
    torch.library.opcheck(_plain_ops.backward_op, (None, dlse, q, q, q, o, lse, *options, [True] * 3))


def test_opcheck_of_packed_batches():
    q = torch.randn(9, 2, 8, requires_grad=True)
    rng = torch.tensor([1, 2])
    torch.library.opcheck(_ops.forward_op, (q, q.detach(), q.detach(), None, *operator_arguments(CU, rng, dropout=0.25)))


def test_plain_calls_are_operators_of_few_arguments():
    """The same results and gradients as the others, also under transforms and twice."""
    q, k, v, *_ = make_leaves()
    o, lse = _plain_ops.forward_op(q, k, v, 0.3, True, True, True)
    other, other_lse = _ops.forward_op(q, k, v, None, [], *[None] * 5, 0, 0, 0, 0, [], True, 0.3, True, None, None, 0, 0.0, True,
                                       None, None, [], [])
    assert torch.equal(o, other) and torch.equal(lse, other_lse)
    for of, like in (((o,), (other,)), ((lse,), (other_lse,)), ((o, lse), (other, other_lse))):
        douts = [torch.randn_like(t) for t in of]
        actual = torch.autograd.grad(of, (q, k, v), douts, retain_graph=True)
        expected = torch.autograd.grad(like, (q, k, v), douts, retain_graph=True)
        assert all(torch.equal(x, y) for x, y in zip(actual, expected))
    (dq,) = torch.autograd.grad(o.sum(), q, create_graph=True)
    refused(RuntimeError, lambda: torch.autograd.grad(dq.sum(), q), "first derivatives only")
    x = torch.randn(3, 2, 4, 5, 8)
    mapped = torch.vmap(lambda t: _plain_ops.forward_op(t, x[0], x[1], None, True, False, False)[0], in_dims=1, out_dims=1)(
        x.transpose(0, 1))
    for n in range(3):
        assert torch.allclose(mapped[:, n], attention(x[n], x[0], x[1], causal=True), atol=1e-6)
    names = []

    def keep(graph, inputs):
        names.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    for options in ({"causal": True}, {"scale": 0.5, "top_left": True, "deterministic": True}, {"window_left": 3}):
        call = torch.compile(lambda q: attention(q, k, v, **options), fullgraph=True, backend=keep, dynamic=False)
        assert torch.equal(call(q), attention(q, k, v, **options))
    assert [name for name in names if "fa_attention" in name] == ["fa_attention.plain_forward.default"] * 2 + [
        "fa_attention.forward.default"]


@pytest.mark.parametrize("dynamic", [False, True])
def test_fullgraph(dynamic):
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for seed in (0, 1):
        leaves = make_leaves(seed)
        actual = torch.autograd.grad(compiled(*leaves), leaves)
        expected = torch.autograd.grad(loss(*leaves), leaves)
        assert all(torch.allclose(x, y, atol=1e-6) for x, y in zip(actual, expected))


def test_fullgraph_with_inductor():
    leaves = make_leaves()
    actual = torch.autograd.grad(torch.compile(loss, fullgraph=True)(*leaves), leaves)
    expected = torch.autograd.grad(loss(*leaves), leaves)
    assert all(torch.allclose(x, y, atol=1e-5) for x, y in zip(actual, expected))


def test_fullgraph_of_other_calls():
    q = torch.randn(9, 2, 8)
    packed = torch.compile(lambda q: varlen_attention(q, q, q, CU, CU, causal=True), fullgraph=True, backend="aot_eager")
    assert torch.equal(packed(q), varlen_attention(q, q, q, CU, CU, causal=True))
    dense = torch.randn(1, 2, 9, 8)
    whole = torch.compile(lambda q: fa_attention.attention(q, q, q), fullgraph=True, backend="aot_eager")
    assert torch.equal(whole(dense), attention(dense, dense, dense))
    sizes = torch.compile(lambda q, scale, left: attention(q, q, q, scale=scale, window_left=left), fullgraph=True,
                          backend="aot_eager", dynamic=True)
    for scale, left in ((0.5, 1), (0.25, 3), (1.5, 2)):
        assert torch.equal(sizes(dense, scale, left), attention(dense, dense, dense, scale=scale, window_left=left))


def test_fullgraph_with_dropout():
    q = torch.randn(1, 2, 64, 8, requires_grad=True)
    compiled = torch.compile(lambda q: attention(q, q, q, dropout=0.5), fullgraph=True, backend="aot_eager")
    torch.manual_seed(0)
    first = compiled(q)
    assert not torch.equal(first, compiled(q)), "masks differ from call to call"
    torch.manual_seed(0)
    assert torch.equal(first, compiled(q)), "torch.manual_seed repeats a mask"


def test_gradients_that_nobody_needs_are_not_in_the_graph():
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph

    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    backend = aot_autograd(fw_compiler=lambda g, i: make_boxed_func(g.forward),
                           bw_compiler=lambda g, i: make_boxed_func(keep(g, i).forward))
    q, k, v, *_ = make_leaves()
    frozen_k = k.detach()
    torch.compile(lambda q, v: attention(q, frozen_k, v).sum(), fullgraph=True, backend=backend)(q, v).backward()
    calls = [node for graph in graphs for node in graph.graph.nodes if "backward" in str(node.target)]
    assert len(calls) == 1 and list(calls[0].args[-1]) == [True, False, True]


def test_export():
    class Model(torch.nn.Module):
        def forward(self, q):
            return attention(q, q, q, causal=True)

    q = torch.randn(2, 4, 3, 8)
    program = torch.export.export(Model(), (q,), dynamic_shapes={"q": {0: torch.export.Dim.AUTO, 2: torch.export.Dim.AUTO}})
    longer = torch.randn(3, 4, 7, 8)
    assert torch.equal(program.module()(longer), attention(longer, longer, longer, causal=True))


def test_fake_and_meta_tensors():
    with FakeTensorMode():
        q = torch.randn(2, 6, 4, 8, dtype=torch.bfloat16).transpose(1, 2)
        o, lse = attention(q, q, q, return_lse=True)
    assert o.shape == q.shape and o.stride() == q.stride() and lse.shape == (2, 4, 6) and lse.dtype == torch.float32
    q = torch.randn(9, 4, 8, device="meta")
    o, lse = varlen_attention(q, q, q, CU.to("meta"), CU.to("meta"), return_lse=True)
    assert o.shape == q.shape and lse.shape == (4, 9)


def test_autocast():
    q = torch.randn(1, 2, 9, 8, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o = attention(q, q.detach().half(), q)
        assert o.dtype == torch.bfloat16
        assert attention(q.double(), q.double(), q.double()).dtype == torch.float64
        compiled = torch.compile(lambda q: attention(q, q, q), fullgraph=True, backend="aot_eager")
        assert compiled(q).dtype == torch.bfloat16
    o.float().sum().backward()
    assert q.grad.dtype == torch.float32 and q.grad.abs().sum() > 0


def causal(x):
    return attention(x, x, x, causal=True)


def test_vmap():
    x = torch.randn(3, 2, 4, 5, 8)
    assert torch.allclose(torch.vmap(causal)(x), torch.stack([causal(t) for t in x]), atol=1e-6)
    mixed = torch.vmap(lambda q, k: attention(q, k, k), in_dims=(1, None), out_dims=2)(x, x[:, 0])
    assert torch.allclose(mixed, torch.stack([attention(x[:, i], x[:, 0], x[:, 0]) for i in range(2)], 2), atol=1e-6)
    bias = torch.randn(3, 4, 5, 5)
    biased = lambda t, b: attention(t, t, t, score="score + bias[h, q, kv]", captures={"bias": b})  # noqa: E731
    assert torch.allclose(torch.vmap(biased)(x, bias), torch.stack([biased(*pair) for pair in zip(x, bias)]), atol=1e-6)
    prefix = torch.tensor([1, 4], dtype=torch.int32)  # a function of the batch, which the mapped axis is no part of
    of_batch = lambda t: attention(t, t, t, mask="kv < prefix[b]", captures={"prefix": prefix})  # noqa: E731
    assert torch.allclose(torch.vmap(of_batch)(x), torch.stack([of_batch(t) for t in x]), atol=1e-6)


def test_gradients_under_torch_func():
    x, bias = torch.randn(3, 2, 4, 5, 8), torch.randn(3, 4, 5, 5)

    def function(b, x):
        return attention(x, x, x, score="score + bias[h, q, kv]", captures={"bias": b}).sin().sum()

    actual = torch.vmap(torch.func.grad(function, argnums=(0, 1)))(bias, x)
    for n in range(3):
        leaves = [bias[n].clone().requires_grad_(), x[n].clone().requires_grad_()]
        expected = torch.autograd.grad(function(*leaves), leaves)
        assert all(torch.allclose(a[n], e, atol=1e-5) for a, e in zip(actual, expected))
    kept = torch.vmap(torch.func.grad(lambda x: function(bias[0], x)))(x)  # a part of the batch, with a capture
    for n in range(3):
        leaf = x[n].clone().requires_grad_()
        assert torch.allclose(kept[n], torch.autograd.grad(function(bias[0], leaf), leaf)[0], atol=1e-5)
    small = torch.randn(1, 1, 2, 8, dtype=torch.float64)
    leaf = small.clone().requires_grad_()
    rows = [torch.autograd.grad(causal(leaf).flatten()[n], leaf)[0] for n in range(small.numel())]
    assert torch.allclose(torch.func.jacrev(causal)(small).flatten(0, 3), torch.stack(rows))
    twice = torch.func.grad(lambda x: torch.func.grad(lambda x: causal(x).sum())(x).sum())
    refused(RuntimeError, lambda: twice(small), "first derivatives only")


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant):
    q = torch.randn(1, 2, 33, 8, requires_grad=True)
    function = lambda q: attention(q, q, q, dropout=0.4)  # noqa: E731
    gradients = []
    for run in (function, lambda q: checkpoint(function, q, use_reentrant=reentrant)):
        torch.manual_seed(7)
        q.grad = None
        run(q).square().sum().backward()
        gradients.append(q.grad)
    assert torch.equal(*gradients)


def test_second_derivatives_of_a_compiled_call_raise():
    q = torch.randn(1, 2, 3, 8, requires_grad=True)
    o, _ = _ops.forward_op(q, q, q, None, *operator_arguments())
    (dq,) = torch.autograd.grad(o.sum(), q, create_graph=True)
    refused(RuntimeError, lambda: torch.autograd.grad(dq.sum(), q), "first derivatives only")


def test_errors_of_the_operator():
    q = torch.randn(1, 2, 3, 8)
    refused(ValueError, lambda: attention(q.to("meta"), q, q), "k is on cpu")
    refused(ValueError, lambda: attention(*[q.to("meta")] * 3, score="score", captures={"bias": 1.0}), "'bias'")
