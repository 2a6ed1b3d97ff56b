"""fa_attention.attention and gradients of NumPy arrays on the host device."""

import pathlib
import subprocess
import sys

import pytest
from conftest import refused

np = pytest.importorskip("numpy")

import fa_attention  # noqa: E402
from fa_attention import functions  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


def make_arrays(dtype=np.float64, seed=0, s_q=5, s_kv=7):
    random = np.random.default_rng(seed)
    return [random.standard_normal((2, h, s, d)).astype(dtype) for h, s, d in ((4, s_q, 8), (2, s_kv, 8), (2, s_kv, 16))]


def definition(q, k, v, causal=False, score=None, keep=None, sink=None):
    """O and LSE by NumPy, in float64; score: what becomes of the scores."""
    q, k, v = (t.astype(np.float64) for t in (q, k, v))
    group = q.shape[1] // k.shape[1]
    scores = np.einsum("bhqd,bhkd->bhqk", q, np.repeat(k, group, 1)) / q.shape[-1] ** 0.5
    scores = scores if score is None else score(scores)
    s_q, s_kv = scores.shape[2:]
    if causal:
        scores = np.where(np.arange(s_kv) <= np.arange(s_q)[:, None] + s_kv - s_q, scores, -np.inf)
    if keep is not None:
        scores = np.where(keep, scores, -np.inf)
    extra = np.full((1, q.shape[1], 1, 1), -np.inf) if sink is None else sink.reshape(1, -1, 1, 1)
    top = np.maximum(scores.max(-1, keepdims=True), extra)
    total = np.exp(scores - top).sum(-1, keepdims=True) + np.exp(extra - top)
    return np.exp(scores - top) / total @ np.repeat(v, group, 1), (top + np.log(total))[..., 0]


def numeric_gradient(function, array, step=1e-6):
    gradient = np.zeros_like(array)
    for index in np.ndindex(array.shape):
        kept = array[index]
        array[index] = kept + step
        above = function()
        array[index] = kept - step
        gradient[index] = (above - function()) / (2 * step)
        array[index] = kept
    return gradient


@pytest.mark.parametrize(("dtype", "allowed"), [(np.float64, 1e-13), (np.float32, 1e-5), (np.float16, 2e-3)])
@pytest.mark.parametrize("causal", [False, True])
def test_forward(dtype, allowed, causal):
    q, k, v = make_arrays(dtype)
    o, lse = fa_attention.attention(q, k, v, causal=causal, return_lse=True)
    expected, expected_lse = definition(q, k, v, causal)
    assert o.dtype == dtype and lse.dtype == (np.float64 if dtype == np.float64 else np.float32)
    assert np.abs(o - expected).max() < allowed and np.abs(lse - expected_lse).max() < max(allowed, 1e-5)
    assert np.array_equal(o, fa_attention.attention(q, k, v, causal=causal))


def test_options():
    q, k, v = make_arrays()
    row, key = np.arange(5)[:, None] + 2, np.arange(7)
    slope, doc = np.array([0.5, 0.25, 0.125, 0.0625]), np.array([0, 0, 0, 1, 1, 2, 2], dtype=np.int32)
    sink = np.array([0.5, -1.0, 2.0, 0.0])
    parents = np.array([4, -1, 1, 1, 1])  # a tree of five drafts behind two keys
    sees = np.array([[n == i or n == parents[i] or n == parents[parents[i]] and i == 0 for n in range(5)] for i in range(5)])
    words = (sees << np.arange(5)).sum(axis=1, dtype=np.int32).reshape(5, 1)
    cases = [
        ({"window_left": 2, "window_right": 1}, {"keep": (key >= row - 2) & (key <= row + 1)}),
        ({"chunk": 3}, {"keep": key // 3 == row // 3}),
        ({"score": functions.softcap(2)}, {"score": lambda s: 2 * np.tanh(s / 2)}),
        ({"score": functions.alibi(), "captures": {"slope": slope}},
         {"score": lambda s: s - slope.reshape(1, 4, 1, 1) * np.abs(row - key)}),
        ({"mask": functions.documents(), "captures": {"doc": doc}}, {"keep": doc[:5, None] == doc}),
        ({"mask": functions.tree(batched=False), "captures": {"tree": words}},
         {"keep": np.concatenate([np.ones((5, 2), bool), sees], axis=1)}),
        ({"mask": functions.tree(), "captures": {"tree": words[None]}},
         {"keep": np.concatenate([np.ones((5, 2), bool), sees], axis=1)}),
        ({"sink": sink}, {"sink": sink}),
        ({"score": functions.compose(functions.bias("k"), functions.softcap(3.5)), "captures": {"bias": slope.sum() * key}},
         {"score": lambda s: 3.5 * np.tanh((s + slope.sum() * key) / 3.5)}),
        ({"mask": functions.both("q != 1", functions.block_sparse(2, 4)), "captures": {"blocks": np.eye(3, 2, dtype=np.int32)}},
         {"keep": (np.arange(5)[:, None] != 1) & (np.arange(5)[:, None] // 2 == key // 4)}),
    ]
    for ours, own in cases:
        o, lse = fa_attention.attention(q, k, v, return_lse=True, **ours)
        with np.errstate(invalid="ignore"):
            expected, expected_lse = definition(q, k, v, **own)
        seen = np.isfinite(expected_lse)
        assert np.abs((o - expected)[seen]).max() < 1e-12 and np.abs((lse - expected_lse)[seen]).max() < 1e-12, ours
        assert (o[~seen] == 0).all()


def test_numbers_of_numpy():
    q, k, v = make_arrays()
    ours = {"scale": np.float32(0.5), "window_left": np.int64(2), "chunk": np.int32(4)}
    own = fa_attention.attention(q, k, v, scale=0.5, window_left=2, chunk=4)
    assert np.array_equal(fa_attention.attention(q, k, v, **ours), own)


def test_gradients():
    q, k, v = make_arrays(s_q=2, s_kv=3)
    sink, bias = np.array([0.5, -1.0, 2.0, 0.0]), np.random.default_rng(5).standard_normal((4, 2, 3))
    dout = np.random.default_rng(6).standard_normal((2, 4, 2, 16))
    dlse = np.random.default_rng(7).standard_normal((2, 4, 2))
    options = {"score": functions.bias("hqk"), "captures": {"bias": bias}, "sink": sink}

    def loss():
        o, lse = fa_attention.attention(q, k, v, return_lse=True, **options)
        return (o * dout).sum() + (lse * dlse).sum()

    o, lse = fa_attention.attention(q, k, v, return_lse=True, **options)
    actual = fa_attention.gradients(dout, q, k, v, o, lse, dlse=dlse, requires_grad=["bias"], **options)
    pairs = [(actual.dq, q), (actual.dk, k), (actual.dv, v), (actual.dsink, sink), (actual.dcaptures["bias"], bias)]
    for gradient, array in pairs:
        assert np.abs(gradient - numeric_gradient(loss, array)).max() < 1e-7


def test_packed_batches():
    q, k, v = (np.ascontiguousarray(t[0].transpose(1, 0, 2)) for t in make_arrays())
    cu_q, cu_kv = np.array([0, 2, 5], dtype=np.int32), np.array([0, 3, 7], dtype=np.int32)
    o, lse = fa_attention.varlen_attention(q, k, v, cu_q, cu_kv, causal=True, return_lse=True)
    gradients = fa_attention.varlen_gradients(np.ones_like(o), q, k, v, o, lse, cu_q, cu_kv, causal=True)
    for (q0, q1), (kv0, kv1) in (((0, 2), (0, 3)), ((2, 5), (3, 7))):
        parts = [t.transpose(1, 0, 2)[None] for t in (q[q0:q1], k[kv0:kv1], v[kv0:kv1])]
        one, one_lse = fa_attention.attention(*parts, causal=True, return_lse=True)
        assert np.allclose(o[q0:q1], one[0].transpose(1, 0, 2)) and np.allclose(lse[:, q0:q1], one_lse[0])
        expected = fa_attention.gradients(np.ones_like(one), *parts, one, one_lse, causal=True)
        assert np.allclose(gradients.dq[q0:q1], expected.dq[0].transpose(1, 0, 2))
        assert np.allclose(gradients.dk[kv0:kv1], expected.dk[0].transpose(1, 0, 2))


def test_dropout():
    q, k, v = make_arrays()
    o = fa_attention.attention(q, k, v, dropout=0.5, rng_state=(3, 4))
    assert np.array_equal(o, fa_attention.attention(q, k, v, dropout=0.5, rng_state=np.array([3, 4])))
    assert not np.array_equal(o, fa_attention.attention(q, k, v, dropout=0.5, rng_state=(4, 4)))
    refused(ValueError, lambda: fa_attention.attention(q, k, v, dropout=0.5), "rng_state", "(seed, offset)")


def test_strides_and_outputs():
    q, k, v = make_arrays()
    expected = fa_attention.attention(q, k, v)
    swapped = [np.ascontiguousarray(t.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3) for t in (q, k, v)]
    out = np.empty((2, 5, 4, 16)).transpose(0, 2, 1, 3)
    assert fa_attention.attention(*swapped, out=out) is out and np.array_equal(out, expected)
    assert np.array_equal(fa_attention.attention(q[:, ::-1], k[:, ::-1], v[:, ::-1]), expected[:, ::-1])
    locked = np.empty((2, 4, 5, 16))
    locked.flags.writeable = False
    refused(ValueError, lambda: fa_attention.attention(q, k, v, out=locked), "o", "writable")


def test_errors():
    q, k, v = make_arrays()
    attend = lambda **options: lambda: fa_attention.attention(q, k, v, **options)  # noqa: E731
    refused(TypeError, attend(score="score * x", captures=[1]), "captures is a builtins.list", "a mapping")
    refused(TypeError, attend(dropout=0.5, rng_state=5), "rng_state is a builtins.int", "(seed, offset)")
    refused(TypeError, lambda: fa_attention.attention(q, k, v, causal="yes"), "causal is a builtins.str", "a bool")
    refused(TypeError, lambda: fa_attention.attention(q.tolist(), k, v), "q is a builtins.list", "NumPy")
    refused(TypeError, lambda: fa_attention.attention(q.astype(np.int64), k, v), "q is int64", "float16")
    refused(TypeError, lambda: fa_attention.attention(q, k.astype(np.float32), v), "k is float32", "as in q")
    refused(TypeError, lambda: fa_attention.attention(q.astype(complex), k, v), "q is complex128")
    refused(ValueError, lambda: fa_attention.attention(q[0, 0], k, v), "q has shape [5, 8]", "[b, h_q, s_q, d_qk]")
    refused(ValueError, lambda: fa_attention.attention(q[..., :5], k[..., :5], v), "head_dim", "5")
    refused(ValueError, lambda: fa_attention.attention(q[:, :3], k, v), "h_q")
    refused(ValueError, lambda: fa_attention.attention(q, k, v, captures={"bias": q}), "'bias'")
    refused(ValueError, lambda: fa_attention.gradients(q, q, k, v, q, q, requires_grad=["bias"]), "requires_grad", "'bias'")


def test_cupy(device):
    """Arrays of a GPU by DLPack: results and gradients beside those of the host in float64."""
    if device != "cuda":
        pytest.skip("of a GPU")
    cupy = pytest.importorskip("cupy")
    host = [t.astype(np.float32) for t in make_arrays(s_q=65, s_kv=80)]
    arrays = [cupy.asarray(t) for t in host]
    o, lse = fa_attention.attention(*arrays, causal=True, return_lse=True)
    expected, expected_lse = definition(*host, causal=True)
    assert isinstance(o, cupy.ndarray) and np.abs(o.get() - expected).max() < 1e-4
    assert np.abs(lse.get() - expected_lse).max() < 1e-4
    actual = fa_attention.gradients(cupy.ones_like(o), *arrays, o, lse, causal=True)
    exact = [t.astype(np.float64) for t in host]
    own = fa_attention.gradients(np.ones_like(expected), *exact, expected, expected_lse, causal=True)
    assert all(np.abs(x.get() - y).max() < 1e-3 for x, y in zip(actual[:3], own[:3]))


def test_pytorch_is_not_needed():
    code = ("import sys, numpy as np; import fa_attention; q = np.ones((1, 2, 3, 8)); fa_attention.attention(q, q, q)\n"
            "assert 'torch' not in sys.modules")
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT / "python", capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
