#!/usr/bin/env python3
"""Gradients of python/fa_torch.py beside PyTorch's own: autograd_test.py --device cuda|cpu --lib libfa.so

Exits with 77, and says why, where PyTorch or the device is missing.
"""

import argparse
import itertools
import pathlib
import sys

try:
    import torch
except ImportError as problem:
    print(f"skipped: {problem}")
    sys.exit(77)

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent.parent / "python"))
import fa_torch  # noqa: E402

failures = []


def check(condition, text):
    if not condition:
        failures.append(text)
        print(f"FAILED: {text}")


def definition(q, k, v, causal, scale, top_left):
    """O and LSE by PyTorch's own differentiable operations, in the dtype of the inputs."""
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    scores = (q @ k.transpose(2, 3)) * (scale if scale is not None else q.shape[3] ** -0.5)
    if causal:
        s_q, s_kv = scores.shape[2:]
        keep = torch.ones(s_q, s_kv, dtype=torch.bool, device=q.device).tril(0 if top_left else s_kv - s_q)
        scores = scores.masked_fill(~keep, float("-inf"))
    lse = scores.logsumexp(-1)
    return torch.nan_to_num(scores.softmax(-1)) @ v, lse


def gradients(function, tensors, dout, dlse, with_lse):
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    o, lse = function(*leaves)
    loss = (o * dout.to(o.dtype)).sum()
    if with_lse:
        loss = loss + (lse * dlse.to(lse.dtype)).sum()
    return [o, *torch.autograd.grad(loss, leaves)]


def worst(actual, expected):
    difference = (actual.double() - expected).abs()
    return difference.max().item() if torch.isfinite(difference).all() else float("inf")


def compare(device, dtype, b, h_q, h_kv, s_q, s_kv, d_qk, d_v, causal, top_left=False, scale=None, with_lse=True, bshd=False):
    torch.manual_seed(s_q * 1000 + s_kv)

    def normal(h, s, d):
        t = torch.randn(b, s, h, d) if bshd else torch.randn(b, h, s, d)
        return (t.transpose(1, 2) if bshd else t).to(device, dtype)

    tensors = [normal(h_q, s_q, d_qk), normal(h_kv, s_kv, d_qk), normal(h_kv, s_kv, d_v)]
    dout, dlse = normal(h_q, s_q, d_v), torch.randn(b, h_q, s_q).to(device)
    ours = gradients(
        lambda q, k, v: fa_torch.attention(q, k, v, causal=causal, scale=scale, top_left=top_left, return_lse=True),
        tensors, dout, dlse, with_lse,
    )
    own = lambda q, k, v: definition(q, k, v, causal, scale, top_left)  # noqa: E731
    exact = gradients(own, [t.double() for t in tensors], dout, dlse, with_lse)
    half = dtype in (torch.float16, torch.bfloat16) and device == "cpu"  # not every PyTorch computes these on a CPU
    same = None if half else gradients(own, tensors, dout, dlse, with_lse)
    unit = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-18, torch.float64: 2.0**-46}[dtype]
    for n, name in enumerate(("o", "dq", "dk", "dv")):
        # Twice what PyTorch's own operations commit in the same dtype, or two roundings of the largest element.
        allowed = 2 * unit * exact[n].abs().max().item()
        if same is not None:
            allowed = max(allowed, 2 * worst(same[n], exact[n]))
        error = worst(ours[n], exact[n])
        check(error <= allowed, f"{dtype} {tuple(tensors[0].shape)} {tuple(tensors[1].shape)} {name}: {error} > {allowed}")
        check(n == 0 or ours[n].stride() == tensors[n - 1].stride(), f"{name} has the memory order of its tensor")


def test_masked_rows(device):
    """More rows than keys, bottom-right: the first rows keep nothing, and PyTorch's own gradients would be NaN."""
    q, k, v = (torch.randn(1, 2, s, 16, device=device, requires_grad=True) for s in (9, 4, 4))
    o, lse = fa_torch.attention(q, k, v, causal=True, return_lse=True)
    (o.sum() + lse[:, :, 5:].sum()).backward()
    check(bool((q.grad[:, :, :5] == 0).all()), "rows without keys have zero gradients")
    check(bool((o[:, :, :5] == 0).all()), "rows without keys are zero")
    check(all(bool(torch.isfinite(t.grad).all()) for t in (q, k, v)), "gradients are finite")


def test_parts_of_the_graph(device):
    q, k, v = (torch.randn(2, 3, 7, 8, device=device, requires_grad=True) for _ in range(3))
    (dv,) = torch.autograd.grad(fa_torch.attention(q, k, v).sum(), v)  # an expanded gradient comes in
    check(torch.allclose(dv, torch.autograd.grad(definition(q, k, v, False, None, False)[0].sum(), v)[0], atol=1e-5), "dv of a sum")
    lse = fa_torch.attention(q, k, v, return_lse=True)[1]  # dout is not given at all
    dq, dv = torch.autograd.grad(lse.sum(), (q, v))
    expected = torch.autograd.grad(definition(q, k, v, False, None, False)[1].sum(), q)[0]
    check(torch.allclose(dq, expected, atol=1e-5) and bool((dv == 0).all()), "gradients of the log-sum-exp alone")
    with torch.no_grad():
        check(not fa_torch.attention(q, k, v).requires_grad, "no graph without gradients")
    transposed = q.detach().transpose(2, 3).contiguous().transpose(2, 3).requires_grad_()  # a head dim of stride 7
    check(torch.equal(fa_torch.attention(transposed, k, v), fa_torch.attention(q, k, v)), "any strides")


def refused(call, *words):
    """That `call` raises a RuntimeError with these words in it."""
    try:
        call()
        check(False, f"refused, naming {words}")
    except RuntimeError as error:
        check(all(word in str(error) for word in words), f"{words} are named: {error}")


def test_errors(device):
    q = torch.randn(1, 1, 4, 16, device=device)
    wide = torch.randn(1, 1, 4, 20, device=device)
    refused(lambda: fa_torch.attention(wide, wide, wide), "head_dim", "20")
    refused(lambda: fa_torch.attention(q[0, 0], q, q), "q has shape [4, 16]", "[b, h_q, s_q, d_qk]")
    refused(lambda: fa_torch.attention(q, q[0], q), "k has shape [1, 4, 16]", "[b, h_kv, s_kv, d_qk]")
    refused(lambda: fa_torch.attention(q, q, q[None]), "v has shape [1, 1, 1, 4, 16]", "[b, h_kv, s_kv, d_v]")
    refused(lambda: fa_torch.attention(q.long(), q, q), "q is torch.int64", "torch.bfloat16")
    refused(lambda: fa_torch.attention(q, q, q.double()), "v is torch.float64", "torch.float32")
    refused(lambda: fa_torch.attention(q.tolist(), q, q), "q is a builtins.list", "torch.Tensor")
    refused(lambda: fa_torch.attention(q, q.cpu().numpy(), q), "k is a numpy.ndarray", "torch.Tensor")
    refused(lambda: fa_torch.attention(q, q, None), "v is a builtins.NoneType", "torch.Tensor")
    refused(lambda: fa_torch.attention(q.to("meta"), q.to("meta"), q.to("meta")), "q is on meta", "cpu and cuda")
    refused(lambda: fa_torch.attention(q, q, q, dropout=0.5, rng_state=(1,)), "rng_state", "(seed, offset)")
    state = torch.zeros(2, dtype=torch.int32, device=device)
    refused(lambda: fa_torch.attention(q, q, q, dropout=0.5, rng_state=state), "rng_state is torch.int32", "torch.int64")
    packed, cu = q[0].transpose(0, 1), torch.tensor([0, 4], dtype=torch.int32, device=device)
    varlen = lambda *lengths, **more: fa_torch.varlen_attention(packed, packed, packed, *lengths, **more)  # noqa: E731
    check(varlen(cu, cu).shape == packed.shape, "these are accepted")
    refused(lambda: fa_torch.varlen_attention(q, packed, packed, cu, cu), "q has shape", "[total_q, h_q, d_qk]")
    refused(lambda: varlen(cu.long(), cu), "cu_seqlens_q is torch.int64", "torch.int32")
    refused(lambda: varlen(cu, [0, 4]), "cu_seqlens_kv is a builtins.list")
    refused(lambda: varlen(cu, cu[:1]), "cu_seqlens_kv has 1 elements", "2")
    refused(lambda: varlen(cu, cu, seqused_q=cu[:0]), "seqused_q", "at least 1")


def test_double_backward(device):
    """Second derivatives raise, also where a part of them could be had."""
    q, k, v = (torch.randn(1, 2, 5, 8, device=device, requires_grad=True) for _ in range(3))
    o, lse = fa_torch.attention(q, k, v, return_lse=True)
    for loss in (o.sum(), lse.sum(), (o * q).sum()):
        first = torch.autograd.grad(loss, (q, k, v), create_graph=True, retain_graph=True)
        for gradient in first:
            refused(lambda g=gradient: torch.autograd.grad(g.square().sum() + q.square().sum(), q, retain_graph=True),
                    "first derivatives only")
    plain = torch.autograd.grad(o.sum(), (q, k, v), retain_graph=True)
    graph = torch.autograd.grad(o.sum(), (q, k, v), create_graph=True)
    check(all(torch.equal(a, b) for a, b in zip(plain, graph)), "create_graph changes no gradient")
    check(not any(t.requires_grad for t in plain), "no graph of gradients without create_graph")


def test_deterministic(device):
    q, k, v = (torch.randn(2, 4, 300, 64, device=device, dtype=torch.float32, requires_grad=True) for _ in range(3))
    runs = [torch.autograd.grad(fa_torch.attention(q, k, v, deterministic=True).square().sum(), (q, k, v)) for _ in range(5)]
    check(all(torch.equal(a, b) for run in runs[1:] for a, b in zip(run, runs[0])), "deterministic gradients repeat")


def test_dropout(device):
    """Beside PyTorch's operations with the library's own mask."""
    b, h, s_q, s_kv, d, p, rng = 2, 4, 33, 50, 16, 0.25, (5, 77)
    q = torch.randn(b, h, s_q, d, device=device, requires_grad=True)
    k, v = (torch.randn(b, h, s_kv, d, device=device, requires_grad=True) for _ in range(2))
    state = fa_torch.fa_ctypes.dropout_state(*rng)
    keep = torch.frombuffer(fa_torch.load().dropout_mask(state, p, b, h, s_q, s_kv), dtype=torch.uint8)
    keep = keep.view(b, h, s_q, s_kv).to(device, torch.float32) / (1 - p)
    weights = (q @ k.transpose(2, 3) * d**-0.5).softmax(-1)
    expected = torch.autograd.grad((weights * keep @ v).square().sum(), (q, k, v))
    in_memory = torch.tensor(rng, dtype=torch.int64, device=device)
    for rng_state in (rng, in_memory):
        o = fa_torch.attention(q, k, v, dropout=p, rng_state=rng_state)
        actual = torch.autograd.grad(o.square().sum(), (q, k, v))
        check(all(torch.allclose(x, y, atol=1e-4, rtol=1e-4) for x, y in zip(actual, expected)), "gradients with dropout")
    torch.manual_seed(3)
    first = fa_torch.attention(q, k, v, dropout=p)
    check(not torch.equal(first, fa_torch.attention(q, k, v, dropout=p)), "masks differ from call to call")
    torch.manual_seed(3)
    check(torch.equal(first, fa_torch.attention(q, k, v, dropout=p)), "torch.manual_seed repeats a mask")


def test_varlen(device):
    """Each sequence beside a call of its own; rows of no sequence get 0."""
    lengths, lengths_kv, h_q, h_kv, d = (5, 0, 70, 33), (9, 20, 64, 0), 4, 2, 16
    starts, starts_kv = ([sum(n[:i]) for i in range(len(n) + 1)] for n in (lengths, lengths_kv))
    q = torch.randn(starts[-1] + 3, h_q, d, device=device, requires_grad=True)
    k, v = (torch.randn(starts_kv[-1] + 2, h_kv, d, device=device, requires_grad=True) for _ in range(2))
    dout = torch.randn(starts[-1] + 3, h_q, d, device=device)
    cu_q, cu_kv = (torch.tensor(n, dtype=torch.int32, device=device) for n in (starts, starts_kv))
    o = fa_torch.varlen_attention(q, k, v, cu_q, cu_kv, causal=True, max_s_q=70)
    actual = [o, *torch.autograd.grad((o * dout).sum(), (q, k, v))]
    expected = [torch.zeros_like(t) for t in actual]
    for i in range(len(lengths)):
        rows, keys = slice(starts[i], starts[i + 1]), slice(starts_kv[i], starts_kv[i + 1])
        leaves = [t[part].detach().transpose(0, 1)[None].requires_grad_() for t, part in ((q, rows), (k, keys), (v, keys))]
        one = fa_torch.attention(*leaves, causal=True)
        parts = [one, *torch.autograd.grad((one * dout[rows].transpose(0, 1)[None]).sum(), leaves)]
        for whole, part, place in zip(expected, parts, (rows, rows, keys, keys)):
            whole[place] = part[0].transpose(0, 1)
    for name, x, y in zip(("o", "dq", "dk", "dv"), actual, expected):
        check(torch.allclose(x, y, atol=1e-5), f"{name} of a packed batch")


def test_streams():
    """Forward on one stream, backward of a graph that another one made."""
    q, k, v = (torch.randn(4, 8, 512, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    expected = torch.autograd.grad(fa_torch.attention(q, k, v, deterministic=True).float().sum(), (q, k, v))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        actual = torch.autograd.grad(fa_torch.attention(q, k, v, deterministic=True).float().sum(), (q, k, v))
    side.synchronize()
    check(all(torch.equal(a, b) for a, b in zip(actual, expected)), "the current stream is used")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--lib", type=pathlib.Path)
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        print("skipped: PyTorch sees no CUDA device")
        sys.exit(77)
    torch.backends.cuda.matmul.allow_tf32 = False
    fa_torch.load(args.lib)
    dtypes = [torch.float16, torch.bfloat16, torch.float32] + ([torch.float64] if args.device == "cpu" else [])
    for dtype, causal, bshd in itertools.product(dtypes, (False, True), (False, True)):
        compare(args.device, dtype, 2, 4, 2, 65, 130, 64, 64, causal, bshd=bshd)
    for dtype in dtypes:
        compare(args.device, dtype, 1, 6, 1, 100, 100, 40, 72, True, with_lse=False)
        compare(args.device, dtype, 1, 2, 2, 33, 70, 16, 16, True, top_left=True)
        compare(args.device, dtype, 1, 2, 1, 50, 60, 16, 16, False, scale=-0.3125)
    if args.device == "cuda":
        compare("cuda", torch.bfloat16, 2, 8, 2, 1024, 1024, 128, 128, True, bshd=True)
        test_streams()
    tests = (test_masked_rows, test_parts_of_the_graph, test_errors, test_double_backward, test_deterministic, test_dropout,
             test_varlen)
    for test in tests:
        test(args.device)
    if args.device == "cpu":
        q, k, v = (torch.randn(1, h, s, 8, dtype=torch.float64, requires_grad=True) for h, s in ((4, 3), (2, 5), (2, 5)))
        attention = lambda *t: fa_torch.attention(*t, causal=True, return_lse=True)  # noqa: E731
        check(torch.autograd.gradcheck(attention, (q, k, v)), "gradcheck")
    print("autograd: " + (f"{len(failures)} checks failed" if failures else "all checks passed"))
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
