"""Context parallelism from Python: ranks are threads of this process, on the host device."""

import inspect
import os
import pathlib
import subprocess
import sys
import threading

import pytest

torch = pytest.importorskip("torch")

import fa_attention  # noqa: E402
from conftest import refused  # noqa: E402
from fa_attention import parallel  # noqa: E402
from fa_attention.torch import ContextParallel, attention, varlen_attention  # noqa: E402

if not os.environ.get("FA_PARALLEL_LIBRARY") and not (
        pathlib.Path(fa_attention.load().path).resolve().parent / "libfa_parallel.so").is_file():
    pytest.skip("there is no libfa_parallel.so beside libfa.so", allow_module_level=True)

SIZES = {"b": 2, "h_q": 4, "h_kv": 2, "s": 64, "d": 16}


def on_ranks(count, work):
    """What `work` returns for each rank; the first exception otherwise."""
    group = parallel.Communicator.local_group(count)
    results, problems = [None] * count, []

    def run(communicator):
        try:
            results[communicator.rank] = work(communicator)
        except BaseException as problem:
            problems.append(problem)
            communicator.abort(str(problem))

    threads = [threading.Thread(target=run, args=(communicator,)) for communicator in group]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if problems:
        raise problems[0]
    return results


def wholes(dtype=torch.float64, seed=1):
    generator = torch.Generator().manual_seed(seed)
    make = lambda heads: torch.randn(SIZES["b"], heads, SIZES["s"], SIZES["d"], dtype=dtype, generator=generator)  # noqa: E731
    return [make(SIZES[heads]) for heads in ("h_q", "h_kv", "h_kv", "h_q")]


def together(parts, layout, like):
    whole = torch.full_like(like, float("nan"))
    for rank, part in enumerate(parts):
        parallel.unshard(part, whole, len(parts), rank, layout)
    return whole


@pytest.mark.parametrize("layout", list(parallel.LAYOUTS))
@pytest.mark.parametrize("scheme", ["ring", "all_gather", "ulysses"])
def test_ranks_come_to_what_one_device_comes_to(layout, scheme):
    q, k, v, dout = wholes()
    ones = [t.clone().requires_grad_() for t in (q, k, v)]
    expected, expected_lse = attention(*ones, causal=True, window_left=40, return_lse=True)
    wanted = torch.autograd.grad((expected, expected_lse), ones, (dout, dout[..., 0]))

    def work(communicator):
        shared = ContextParallel(communicator=communicator, layout=layout, scheme=scheme, causal=True, window_left=40)
        mine = [shared.shard(t).requires_grad_() for t in (q, k, v)]
        o, lse = shared(*mine, return_lse=True)
        dlse = shared.shard(dout[..., :1].contiguous())[..., 0]
        return (o.detach(), *torch.autograd.grad((o, lse), mine, (shared.shard(dout), dlse)))

    results = on_ranks(2, work)
    for parts, whole in zip(zip(*results), (expected, *wanted)):
        torch.testing.assert_close(together(parts, layout, whole.detach()), whole.detach(), rtol=1e-10, atol=1e-10)


def test_rows_before_heads_a_sink_and_32_bits():
    q, k, v, dout = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in wholes(torch.float32))
    sink = torch.linspace(-1, 1, SIZES["h_q"])
    one_sink = sink.clone().requires_grad_()
    expected = attention(q, k, v, causal=True, sink=one_sink)
    wanted, = torch.autograd.grad(expected, one_sink, dout)

    def work(communicator):
        shared = ContextParallel(communicator=communicator, causal=True)
        own_sink = sink.clone().requires_grad_()
        mine = [shared.shard(t).transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
        o = shared(*mine, sink=own_sink)
        assert o.stride() == mine[0].stride()
        return o.detach(), *torch.autograd.grad(o, own_sink, shared.shard(dout))

    results = on_ranks(4, work)
    whole = together([o for o, _ in results], "zigzag", expected.detach())
    torch.testing.assert_close(whole, expected.detach(), rtol=1e-5, atol=1e-5)
    for _, dsink in results:  # every rank has the gradient of the whole
        torch.testing.assert_close(dsink, wanted, rtol=1e-4, atol=1e-4)


def test_rows_with_gaps_are_copied():
    q, k, v, _ = wholes()
    one = q.clone().requires_grad_()
    expected = attention(one, k, v, causal=True)
    expected.sum().backward()  # a gradient whose strides are 0

    def work(communicator):
        shared = ContextParallel(communicator=communicator, causal=True)
        mine = shared.shard(q).transpose(2, 3).contiguous().transpose(2, 3).requires_grad_()
        o = shared(mine, shared.shard(k), shared.shard(v))
        o.sum().backward()
        return o.detach(), mine.grad

    for parts, whole in zip(zip(*on_ranks(2, work)), (expected.detach(), one.grad)):
        parts = [part.contiguous() for part in parts]
        torch.testing.assert_close(together(parts, "zigzag", whole), whole, rtol=1e-10, atol=1e-10)


def test_packed_batches():
    lengths = [32, 8, 24]
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(sum(lengths), heads, 16, dtype=torch.float64, generator=generator) for heads in (4, 2, 2))
    cu = torch.tensor([0, 32, 40, 64], dtype=torch.int32)
    expected = varlen_attention(q, k, v, cu, cu, causal=True)

    def work(communicator):
        shared = ContextParallel(communicator=communicator, causal=True)
        return shared(*(shared.shard(t, lengths) for t in (q, k, v)), lengths=lengths)

    whole = torch.full_like(expected, float("nan"))
    for rank, part in enumerate(on_ranks(2, work)):
        parallel.unshard(part, whole, 2, rank, "zigzag", lengths)
    torch.testing.assert_close(whole, expected, rtol=1e-10, atol=1e-10)


class FarAway:
    """An array of a GPU, as far as its protocol tells."""

    def __init__(self, *shape):
        self.dtype, self.__cuda_array_interface__ = "float32", {"shape": shape, "data": (4096, False)}


def test_what_is_refused():
    group = parallel.Communicator.local_group(2)
    assert [communicator.rank for communicator in group] == [0, 1] and group[0].size == 2
    make = lambda **more: parallel.ContextParallel(group[0], 16, "float32", **more)  # noqa: E731
    refused(ValueError, lambda: make(layout="spiral"), "layout", "spiral", "zigzag")
    refused(ValueError, lambda: make(scheme="star"), "scheme", "ulysses")
    refused(fa_attention.Error, lambda: make(page_size=16), "page")
    assert make(scheme="ring", causal=True).scheme(1, 4, 4, 64, 64) == ("ring", 1)
    refused(ValueError, lambda: make().prepare(1, 4, 4, 63, 63), "63")
    refused(ValueError, lambda: parallel.Communicator.local_group(0), "0")
    far = FarAway(1, 4, 8, 8)
    refused(ValueError, lambda: parallel.ContextParallel(group[0], 8, "float32").forward(far, far, far, far), "q", "the host's")
    shared = ContextParallel(communicator=group[0])
    refused(ValueError, lambda: shared(*(torch.ones(4, 2, 8) for _ in "qkv")), "q", "[4, 2, 8]", "[b, h_q, s_q, d_qk]")
    q = torch.ones(1, 2, 8, 8)
    refused(TypeError, lambda: shared(None, q, q), "q", "NoneType", "torch.Tensor")
    refused(TypeError, lambda: shared(q, q.numpy(), q), "k", "numpy.ndarray", "torch.Tensor")
    refused(TypeError, lambda: shared(q.long(), q.long(), q.long()), "q", "torch.int64", "torch.float32")
    refused(TypeError, lambda: shared(q, q, q, sink=[0.0, 0.0]), "sink", "list", "torch.Tensor")
    dropped = ContextParallel(communicator=group[0], layout="contiguous", dropout=0.5)
    refused(ValueError, lambda: dropped(q, q, q, rng_state=(1, 2, 3)), "rng_state", "3 elements")
    alone = parallel.Communicator.__new__(parallel.Communicator)
    refused(ValueError, lambda: alone.agree(int), "local_group")
    refused(fa_attention.Error, lambda: parallel.Communicator.of_nccl(0))
    refused(ValueError, lambda: parallel.Communicator.of_nccl(0, transfers="mail"), "transfers", "puts")


DROPPED = {"dropout": 0.25, "causal": True}


def dropped_on_ranks(tensors, rng_state, calls=1):
    """Of each call: o, dq, dk and dv of the whole, by two ranks."""

    def work(communicator):
        shared, results = ContextParallel(communicator=communicator, **DROPPED), []
        for _ in range(calls):
            mine = [shared.shard(t).requires_grad_() for t in tensors[:3]]
            o = shared(*mine, rng_state=rng_state)
            results.append((o.detach(), *torch.autograd.grad(o, mine, shared.shard(tensors[3]))))
        return results

    both = on_ranks(2, work)
    wholes_ = (tensors[3], *tensors[:3])
    return [[together(parts, "zigzag", whole) for parts, whole in zip(zip(*call), wholes_)] for call in zip(*both)]


def rows_of_dropout():
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(1, heads, 128, 16, dtype=torch.float64, generator=generator) for heads in (2, 1, 1, 2)]


@pytest.mark.parametrize("state", [(5, 9), torch.tensor([5, 9])])
def test_dropout_is_that_of_the_whole(state):
    tensors = rows_of_dropout()
    ones = [t.clone().requires_grad_() for t in tensors[:3]]
    expected = attention(*ones, **DROPPED, rng_state=(5, 9))
    wanted = (expected.detach(), *torch.autograd.grad(expected, ones, tensors[3]))
    for ours, theirs in zip(dropped_on_ranks(tensors, state)[0], wanted):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def test_dropout_draws_one_mask_for_all_ranks_in_each_call():
    tensors = rows_of_dropout()
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        runs.append([call[0] for call in dropped_on_ranks(tensors, None, calls=2)])
    assert not torch.equal(runs[0][0], runs[0][1])  # calls differ
    assert torch.equal(runs[0][0], runs[1][0]) and torch.equal(runs[0][1], runs[1][1])  # a seed repeats them
    assert not torch.equal(runs[0][0], runs[2][0])
    torch.manual_seed(1)  # rank 0's draw is that of one device, so that both ranks had it
    torch.testing.assert_close(runs[0][0], attention(*tensors[:3], **DROPPED), rtol=1e-10, atol=1e-10)


BROADCAST = '''
import sys
import torch
import torch.distributed as dist
from fa_attention.torch._parallel import NcclCommunicator

rank = int(sys.argv[1])
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[2], 3), rank=rank, world_size=3)
for ranks, group in (([0, 1, 2], None), ([1, 2], dist.new_group([1, 2]))):
    if rank in ranks:
        communicator = NcclCommunicator.__new__(NcclCommunicator)
        communicator._group = group
        state = torch.tensor([rank, rank + 10])
        communicator.broadcast(state)
        assert state.tolist() == [ranks[0], ranks[0] + 10], state
'''


def test_a_state_is_broadcast_from_the_first_rank_of_a_group(tmp_path):
    pytest.importorskip("torch.distributed")
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("this PyTorch has no gloo")
    package = str(pathlib.Path(fa_attention.__file__).resolve().parent.parent)
    run = [subprocess.Popen([sys.executable, "-c", BROADCAST, str(rank), str(tmp_path / "store")], stderr=subprocess.PIPE,
                            text=True, env={**os.environ, "PYTHONPATH": package}) for rank in range(3)]
    problems = [process.communicate(timeout=120)[1] for process in run]
    assert [process.returncode for process in run] == [0, 0, 0], problems


def test_second_derivatives_are_refused():
    q, k, v, _ = wholes()

    def work(communicator):
        shared = ContextParallel(communicator=communicator)
        mine = shared.shard(q).requires_grad_()
        first, = torch.autograd.grad(shared(mine, shared.shard(k), shared.shard(v)).sum(), mine, create_graph=True)
        refused(RuntimeError, lambda: torch.autograd.grad(first.square().sum() + mine.square().sum(), mine), "first derivatives")

    on_ranks(2, work)


def test_tensors_whose_memory_has_the_other_sign():
    q, k, v, dout = wholes()

    def work(communicator):
        shared = ContextParallel(communicator=communicator)
        results = []
        for sign in (torch.neg, torch._neg_view):
            mine = [shared.shard(t).requires_grad_() for t in (q, k, v)]
            sink = torch.linspace(-1, 1, SIZES["h_q"], dtype=q.dtype)
            o, lse = shared(*map(sign, mine), sink=sign(sink), return_lse=True)
            given = (sign(shared.shard(dout)), sign(lse.detach().cos()))
            results.append((o.detach(), *torch.autograd.grad((o, lse), mine, given)))
        return results

    for expected, actual in on_ranks(2, work):
        assert all(torch.equal(x, y) for x, y in zip(actual, expected))


def test_a_rank_that_fails_ends_the_others():
    def work(communicator):
        if communicator.rank == 1:
            raise RuntimeError("the data are at an end")
        shared = ContextParallel(communicator=communicator, scheme="ring")
        shared(*(torch.ones(1, 2, 8, 8) for _ in "qkv"))

    group = parallel.Communicator.local_group(2)
    group[1].abort("the data are at an end")
    refused(fa_attention.Error, lambda: group[0].check(), "the data are at an end")
    with pytest.raises(RuntimeError, match="the data are at an end"):
        on_ranks(2, work)


def test_ranks_that_differ_are_told():
    def work(communicator):
        shared = ContextParallel(communicator=communicator, causal=communicator.rank == 0)
        refused(ValueError, lambda: shared(*(torch.ones(1, 2, 8, 8) for _ in "qkv")), "rank")

    on_ranks(2, work)


def test_plans_and_the_model():
    sizes = {"b": 1, "h_q": 8, "h_kv": 4, "s_q": 64, "s_kv": 64}

    def work(communicator):
        one = parallel.ContextParallel(communicator, 16, "float32", scheme="ring", causal=True)
        packed = parallel.ContextParallel(communicator, 16, "float32", scheme="ring", causal=True, varlen=True)
        plain, before = one.describe(**sizes), one.hash()
        packed.set_speeds(flops=1, backward_flops=1)
        lengths = {"lengths": [32, 8, 24]}
        one.set_speeds(flops=1, backward_flops=1)
        assert "exchange 0" in plain and "two lanes" not in plain
        for backward in (False, True):
            assert "two lanes" in packed.describe(**sizes, backward=backward, **lengths)
        assert packed.memory(**sizes, **lengths) == one.memory(**sizes)
        assert one.hash() != before
        times, memory = one.times(**sizes), one.memory(**sizes)
        assert times["forward"] > 1 and times["single"] > times["forward"]
        assert memory["shard_kv"] == 4 * 2 * 16 * 32 * 4 and memory["kv_in_flight"] == 2 * memory["shard_kv"]
        assert memory["scratch"] > one.memory(**sizes, with_backward=False)["scratch"]
        with pytest.raises(ValueError, match="no speed"):
            one.set_speeds(light=3e8)
        refused(fa_attention.Error, lambda: one.set_speeds(link=-1), "speeds.link")
        return True

    assert all(on_ranks(2, work))


@pytest.mark.parametrize("layout", list(parallel.LAYOUTS))
def test_rows_of_ranks(layout):
    whole = torch.arange(24.0).reshape(1, 24, 1).contiguous()
    for rank in range(3):
        part = torch.empty(1, 8, 1)
        parallel.shard(whole, part, 3, rank, layout)
        assert parallel.shard_rows(3, rank, [24], layout) == part.flatten().int().tolist()
    refused(ValueError, lambda: parallel.shard_rows(2, 0, [8], "round"), "layout")


def test_functions_and_what_they_capture():
    q, k, v, dout = wholes()
    slopes, keep = torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=torch.float64), torch.arange(SIZES["s"], dtype=torch.int32)
    options = {"score": "score - slope[h] * float(abs(q - kv)) * gain", "mask": "keep[kv] % 3 != 1"}
    captures = {"slope": slopes, "gain": 0.5, "keep": keep}
    ones = [t.clone().requires_grad_() for t in (q, k, v)]
    expected = attention(*ones, **options, captures=captures)
    wanted = torch.autograd.grad(expected, ones, dout)

    def work(communicator):
        shared = ContextParallel(communicator=communicator, **options)
        mine = [shared.shard(t).requires_grad_() for t in (q, k, v)]
        signed = {**captures, "slope": torch._neg_view(-slopes)}
        o = shared(*mine, captures=signed)
        refused(ValueError, lambda: shared(*mine, captures={"bias": slopes}), "captures", "'bias'")
        learnt = {**captures, "slope": slopes.clone().requires_grad_()}
        refused(ValueError, lambda: shared(*mine, captures=learnt), "slope", "gradient")
        refused(TypeError, lambda: shared(*mine, captures={**captures, "slope": slopes.long()}), "slope", "int64")
        return (o.detach(), *torch.autograd.grad(o, mine, shared.shard(dout)))

    for parts, whole in zip(zip(*on_ranks(2, work)), (expected, *wanted)):
        torch.testing.assert_close(together(parts, "zigzag", whole.detach()), whole.detach(), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("needed", [(True, False, False), (False, True, False), (False, True, True)])
def test_inputs_that_require_no_gradient_get_none(needed):
    q, k, v, dout = wholes()
    ones = [t.clone().requires_grad_(need) for t, need in zip((q, k, v), needed)]
    expected = attention(*ones, causal=True)
    wanted = torch.autograd.grad(expected, [t for t in ones if t.requires_grad], dout)

    def work(communicator):
        shared = ContextParallel(communicator=communicator, causal=True)
        mine = [shared.shard(t).requires_grad_(need) for t, need in zip((q, k, v), needed)]
        o, lse = shared(*mine, return_lse=True)
        unused = torch.autograd.grad(o, [t for t in mine if t.requires_grad], shared.shard(dout), retain_graph=True)
        o.backward(shared.shard(dout))
        assert [t.grad is not None for t in mine] == list(needed)
        return unused

    for parts, whole in zip(zip(*on_ranks(2, work)), wanted):
        torch.testing.assert_close(together(parts, "zigzag", whole), whole, rtol=1e-10, atol=1e-10)


def test_captures_that_change_before_backward_are_told():
    def work(communicator):
        shared = ContextParallel(communicator=communicator, score="score * gain[h]")
        mine = shared.shard(wholes()[0]).requires_grad_()
        gain = torch.ones(SIZES["h_q"], dtype=torch.float64)
        o = shared(mine, mine, mine, captures={"gain": gain})
        gain += 1
        refused(RuntimeError, lambda: o.sum().backward(), "modified by an inplace operation")

    on_ranks(1, work)


def test_what_watches_calls_is_refused_or_breaks_its_graph():
    q = torch.randn(1, 2, 8, 16)

    def work(communicator):
        shared = ContextParallel(communicator=communicator)
        expected = shared(q, q, q)
        broken = torch.compile(lambda q: shared(q * 1, q, q) * 2, backend="aot_eager")
        torch.testing.assert_close(broken(q), 2 * expected)
        whole = torch.compile(lambda q: shared(q, q, q), fullgraph=True, backend="aot_eager")
        refused(RuntimeError, lambda: whole(q), *(["ContextParallel is no operator"] if "reason" in str(
            inspect.signature(torch.compiler.disable)) else []))
        refused(RuntimeError, lambda: torch.vmap(lambda q: shared(q, q, q))(q[None]), "ContextParallel", "torch.func")
        from torch._subclasses.fake_tensor import FakeTensorMode
        refused(TypeError, lambda: shared(*[FakeTensorMode().from_tensor(q)] * 3), "q is a", "FakeTensor", "accepted")
        refused(ValueError, lambda: shared(*[q.to("meta")] * 3), "q is on meta", "cpu")
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert shared(q, q, q).dtype == torch.bfloat16
        refused(TypeError, lambda: shared.shard([1.0]), "whole", "list")

    on_ranks(1, work)
