"""`attention_statistics` under what watches a call: opcheck, torch.compile, torch.export, fake tensors, autocast, torch.func."""

import pytest
from conftest import refused

torch = pytest.importorskip("torch")

from fa_attention.torch import attention, attention_statistics  # noqa: E402
from fa_attention.torch import _statistics_ops as ops  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

SCORE = "score + bias[h, q, kv] * gain"
EVERYTHING = {"max_logit": "softmax", "entropy": True, "column_sums": "kv_heads", "top_keys": 3}


def make_leaves(device="cpu", dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    shapes = [(2, h, s, 16) for h, s in ((4, 3), (2, 5), (2, 5))] + [(4, 3, 5), (4,)]
    return [torch.randn(shape, dtype=dtype, device=device).requires_grad_() for shape in shapes]


def call(q, k, v, bias, sink, **options):
    return attention_statistics(q, k, v, causal=True, score=SCORE, captures={"bias": bias, "gain": 0.5}, sink=sink,
                                **{**EVERYTHING, **options})


def loss(*leaves, **options):
    return sum((n + 1) * t.sin().sum() for n, t in enumerate(call(*leaves, **options)[:5]))


def fixed(**options):
    defaults = ops.Fixed("none", False, False, "none", 0, False, None, False, None, None, 0, False)
    return defaults._replace(**options)


def rest(bias=None, **options):
    captured = ([bias], [0.5]) if bias is not None else ([], [])
    functions = (SCORE, None, ["bias"], ["gain"]) if bias is not None else (None, None, [], [])
    return (*captured, *fixed(**options), *functions)


@pytest.mark.parametrize("options", [{}, {"max_logit": "scaled"}, {"max_logit": "softmax", "max_logit_by_head": True},
                                     {"entropy": True, "causal": True}, {"column_sums": "query_heads"}, {"top_keys": 2},
                                     {"column_sums": "kv_heads", "top_keys": 2}, EVERYTHING])
def test_opcheck(options):
    q, k, v, bias, sink = make_leaves()
    torch.library.opcheck(ops.forward_op, (q, k, v, sink, *rest(bias, **options)))
    with torch.no_grad():
        q, k, v, bias, sink = (t.detach() for t in (q, k, v, bias, sink))
        o, lse, *statistics, _ = ops.forward_op(q, k, v, sink, *rest(bias, **options))
    present = ops.present([None, None, *statistics, None], fixed(**options))[2:5]
    douts = [torch.randn_like(t) for t in (o, lse)] + [None if t is None else torch.randn_like(t) for t in present]
    for needed in ([True] * 5, [True, False, True, False, True], [False, True, False, False, False]):
        torch.library.opcheck(ops.backward_op, (*douts, q, k, v, o, lse, statistics[1], sink, *rest(bias, **options), needed))
    torch.library.opcheck(ops.backward_op, (None, *douts[1:], q, k, v, o, lse, statistics[1], sink, *rest(bias, **options),
                                            [True] * 5))


@pytest.mark.parametrize("order", ["bshd", "head dim apart"])
def test_opcheck_of_other_orders(order):
    q = torch.randn(2, 6, 4, 8).transpose(1, 2) if order == "bshd" else torch.randn(2, 4, 8, 6).transpose(2, 3)
    q.requires_grad_()
    torch.library.opcheck(ops.forward_op, (q, q, q, None, *rest(**EVERYTHING)))
    got = attention_statistics(q, q, q)
    assert got.o.stride() == attention(q, q, q).stride()


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("by_head", [False, True])
def test_fullgraph(device, dynamic, by_head):
    compiled = torch.compile(lambda *leaves: loss(*leaves, max_logit_by_head=by_head), fullgraph=True, backend="aot_eager",
                             dynamic=dynamic)
    for seed in (0, 1):
        leaves = make_leaves(device, seed=seed)
        actual = torch.autograd.grad(compiled(*leaves), leaves)
        expected = torch.autograd.grad(loss(*leaves, max_logit_by_head=by_head), leaves)
        for x, y in zip(actual, expected):
            torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-5)


def test_fullgraph_with_inductor(device):
    leaves = make_leaves(device)
    compiled = torch.compile(lambda *leaves: call(*leaves), fullgraph=True)
    for x, y in zip(compiled(*leaves), call(*leaves)):
        torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-5)
    plain = torch.compile(lambda q, k, v: attention_statistics(q, k, v, entropy=True), fullgraph=True)
    got = plain(*leaves[:3])
    assert got.max_logit is None and got.top_keys is None
    torch.testing.assert_close(got.entropy, attention_statistics(*leaves[:3], entropy=True).entropy)


def test_export_and_fake_tensors():
    class Model(torch.nn.Module):
        def forward(self, q):
            return attention_statistics(q, q, q, causal=True, max_logit="softmax", column_sums="query_heads")[:5]

    q = torch.randn(2, 4, 3, 8)
    program = torch.export.export(Model(), (q,), dynamic_shapes={"q": {0: torch.export.Dim.AUTO, 2: torch.export.Dim.AUTO}})
    longer = torch.randn(3, 4, 7, 8)
    for actual, expected in zip(program.module()(longer), Model()(longer)):
        assert (actual is None and expected is None) or torch.equal(actual, expected)
    with FakeTensorMode():
        q = torch.randn(2, 6, 4, 8, dtype=torch.bfloat16).transpose(1, 2)
        got = attention_statistics(q, q, q, **EVERYTHING)
    assert got.o.stride() == q.stride() and got.entropy.dtype == torch.float32 and got.top_keys.shape == (2, 4, 3)


def test_autocast():
    q = torch.randn(1, 2, 9, 8, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = attention_statistics(q, q.detach().half(), q, entropy=True)
        compiled = torch.compile(lambda q: attention_statistics(q, q, q).o, fullgraph=True, backend="aot_eager")
        assert got.o.dtype == compiled(q).dtype == torch.bfloat16 and got.entropy.dtype == torch.float32
    got.entropy.sum().backward()
    assert q.grad.dtype == torch.float32 and q.grad.abs().sum() > 0


@pytest.mark.parametrize("by_head", [False, True])
def test_vmap(by_head):
    x, bias = torch.randn(3, 2, 4, 5, 8), torch.randn(3, 4, 5, 5)
    options = {**EVERYTHING, "max_logit_by_head": by_head}
    plain = lambda t, u: attention_statistics(t, u, u, causal=True, **options)  # noqa: E731
    mapped = torch.vmap(plain, in_dims=(0, None))(x, x[0])
    for n in range(3):
        for actual, expected in zip(mapped, plain(x[n], x[0])):
            torch.testing.assert_close(actual[n], expected)
    options["score"] = "score + bias[h, q, kv]"
    biased = lambda t, b: attention_statistics(t, t, t, captures={"bias": b}, **options)  # noqa: E731
    mapped = torch.vmap(biased)(x, bias)
    for n in range(3):
        for actual, expected in zip(mapped, biased(x[n], bias[n])):
            torch.testing.assert_close(actual[n], expected)


def test_gradients_under_torch_func():
    x, bias = torch.randn(3, 2, 4, 5, 8), torch.randn(3, 4, 5, 5)

    def function(b, x):
        got = attention_statistics(x, x, x, score="score + bias[h, q, kv]", captures={"bias": b}, **EVERYTHING)
        return got.o.sin().sum() + got.entropy.square().sum() + got.column_sums[..., 0].sum()

    mapped = torch.vmap(torch.func.grad(function, argnums=(0, 1)))(bias, x)
    kept = torch.vmap(torch.func.grad(lambda x: function(bias[0], x)))(x)  # part of the batch, with a capture
    for n in range(3):
        leaves = [bias[n].clone().requires_grad_(), x[n].clone().requires_grad_()]
        for actual, expected in zip(mapped, torch.autograd.grad(function(*leaves), leaves)):
            torch.testing.assert_close(actual[n], expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(kept[n], torch.autograd.grad(function(bias[0], leaves[1]), leaves[1])[0], atol=1e-5, rtol=1e-5)
    twice = torch.func.grad(lambda x: torch.func.grad(lambda x: attention_statistics(x, x, x, entropy=True).entropy.sum())(x).sum())
    refused(RuntimeError, lambda: twice(x[0]), "first derivatives only")


def test_gradients_that_nobody_needs_are_not_computed():
    needed = []
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    def keep(graph, inputs):
        needed.extend(node.args[-1] for node in graph.graph.nodes if "statistics_backward" in str(node.target))
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=lambda g, i: make_boxed_func(g.forward), bw_compiler=keep)
    q, k, v, *_ = make_leaves()
    k = k.detach()
    torch.compile(lambda q, v: attention_statistics(q, k, v, entropy=True).entropy.sum(), fullgraph=True, backend=backend)(
        q, v).backward()
    assert [list(each) for each in needed] == [[True, False, True, False]]
    assert k.grad is None and q.grad is not None


def test_what_is_refused():
    q = torch.randn(1, 2, 3, 8)
    meta = q.to("meta")
    refused(ValueError, lambda: attention_statistics(meta, meta, meta, max_logit="largest"), "max_logit", "'largest'", "'scaled'")
    refused(ValueError, lambda: attention_statistics(q, q, q, column_sums="heads"), "column_sums", "'heads'", "'kv_heads'")
    refused(ValueError, lambda: attention_statistics(q, q, q, score="score", captures={"x": 1.0}), "captures", "'x'")
    refused(TypeError, lambda: attention_statistics(None, q, q, sink=q), "q is a builtins.NoneType")
    keep = torch.ones(3, requires_grad=True)
    refused(ValueError, lambda: attention_statistics(q, q, q, mask="keep[kv] > 0.5", captures={"keep": keep}),
            "keep", "requires a gradient", "a mask has none")
