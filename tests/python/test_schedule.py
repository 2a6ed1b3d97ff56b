"""Schedules of calls over a KV cache: made once, for all layers of a step."""

import pytest

torch = pytest.importorskip("torch")

from cache_cases import INT, TOLERANCE, Pages, numbers, one_request, stored  # noqa: E402
from conftest import refused  # noqa: E402
from fa_attention.torch import KVCache, paged_attention, schedule  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

LENGTHS = (1500, 3, 700)  # long enough for a GPU to share them out


def expected(q, pages, **options):
    rows = q.transpose(1, 2)
    results = [one_request(rows[i], pages.rows(pages.k, i), pages.rows(pages.v, i), **options)[0] for i in range(len(q))]
    return torch.stack(results)  # [b, h_q, s_q, d]


def is_close(actual, q, pages, **options):
    torch.testing.assert_close(actual.double(), expected(q, pages, **options), **TOLERANCE[q.dtype])


def requests(device, dtype=torch.bfloat16, lengths=LENGTHS, s_q=1, **options):
    pages = Pages(lengths, device, dtype, page=16, room=64, **options)
    torch.manual_seed(1)
    return pages, torch.randn(len(lengths), 4, s_q, 16, device=device, dtype=dtype)


def made(q, pages, **options):
    return schedule(q, pages.k, pages.v, pages.table, pages.used, layout=pages.layout, **options)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "window_left": 600}, {"sink": True}])
@pytest.mark.parametrize("s_q", [1, 3])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_calls_with_a_schedule(device, layout, s_q, options):
    pages, q = requests(device, s_q=s_q, layout=layout)
    causal, window = options.get("causal", False), (options.get("window_left", -1), -1)
    sink = {"sink": torch.linspace(-1, 1, 4, device=device)} if "sink" in options else {}
    options = {**options, **sink}
    memory = made(q, pages, **options)
    assert memory.dtype == torch.uint8 and memory.dim() == 1 and (memory.numel() > 0) == (device == "cuda")
    for layer in (q, torch.randn_like(q)):
        is_close(pages.call(layer, schedule=memory, **options), layer, pages, causal=causal, window=window, **sink)
    pages.used -= numbers(400, 1, 3, device=device)  # the next step
    assert made(q, pages, out=memory, **options) is memory
    is_close(pages.call(q, schedule=memory, **options), q, pages, causal=causal, window=window, **sink)


def test_packed_queries_begins_and_batch_index(device):
    pages, _ = requests(device)
    q = torch.randn(6, 4, 16, device=device, dtype=torch.bfloat16)
    more = {"cu_seqlens_q": numbers(0, 1, 3, 6, device=device), "max_s_q": 3, "causal": True,
            "seq_begin": numbers(32, 0, 100, device=device)}
    o = pages.call(q, schedule=made(q, pages, **more), **more)
    torch.testing.assert_close(o, pages.call(q, **more), **TOLERANCE[q.dtype])
    index = numbers(2, 0, 1, device=device)
    turned = Pages(LENGTHS, device, torch.bfloat16, page=16, room=64)
    turned.used = turned.used[index.long()].contiguous()
    q = q[:3, :, None].contiguous()
    o = turned.call(q, batch_index=index, schedule=made(q, turned, batch_index=index))
    torch.testing.assert_close(o, turned.call(q, batch_index=index), **TOLERANCE[q.dtype])


@pytest.mark.parametrize("kinds", [(torch.float8_e4m3fn, torch.int8), (None, torch.int8)])
def test_stored_and_contiguous_caches(device, kinds):
    torch.manual_seed(2)
    k, v = torch.randn(2, 3, 1600, 2, 16, device=device, dtype=torch.bfloat16)
    k, v, k_scale, v_scale = stored(k, v, kinds)
    cache = KVCache(k, v, numbers(*LENGTHS, device=device), k_scale=k_scale, v_scale=v_scale)
    q = torch.randn(3, 4, 1, 16, device=device, dtype=torch.bfloat16)
    torch.testing.assert_close(cache.attention(q, causal=True, schedule=cache.schedule(q, causal=True)),
                               cache.attention(q, causal=True), **TOLERANCE[q.dtype])


def test_opcheck():
    pages, q = requests("cpu", torch.float32, (9, 4))
    memory = torch.empty(256, dtype=torch.uint8)
    rest = (None, [], pages.table, pages.used, *[None] * 4, 0, 0, [], "NHD", True, None, None, None, 0, None, None, [], [])
    torch.library.opcheck(torch.ops.fa_attention.schedule.default, (memory, q, pages.k, pages.v, *rest))
    torch.library.opcheck(torch.ops.fa_attention.paged_forward.default, (q, pages.k, pages.v, *rest), {"schedule": memory})


@pytest.mark.parametrize("dynamic", [False, True])
def test_fullgraph(device, dynamic):
    def step(q, k, v, table, used, memory):
        schedule(q, k, v, table, used, causal=True, out=memory)
        o = paged_attention(q, k, v, table, used, causal=True, schedule=memory)
        return o + paged_attention(o, k, v, table, used, causal=True, schedule=memory)

    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic)
    for lengths in (LENGTHS, (1400, 64, 20)):
        pages, q = requests(device, lengths=lengths)
        memory = made(q, pages, causal=True)
        arguments = (q, pages.k, pages.v, pages.table, pages.used)
        torch.testing.assert_close(compiled(*arguments, memory), step(*arguments, memory), **TOLERANCE[q.dtype])


def test_graph_replays_serve_other_lengths(device):
    if device != "cuda":
        pytest.skip("CUDA graphs are of a GPU")
    pages, q = requests(device)

    def step(memory=None):
        memory = made(q, pages, causal=True, out=memory)
        return memory, [pages.call(layer, causal=True, schedule=memory) for layer in (q, -q)]

    step()  # compiles
    for given in (None, made(q, pages, causal=True)):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            _, results = step(given)
        for lengths in ((1500, 3, 700), (5, 1550, 2), (640, 641, 642)):
            pages.used.copy_(numbers(*lengths, device=device))
            graph.replay()
            for layer, o in zip((q, -q), results):
                is_close(o, layer, pages, causal=True)


def test_what_is_refused(device):
    pages, q = requests(device)
    refused(TypeError, lambda: made(q, pages, out=[0]), "out is a builtins.list", "torch.Tensor")
    refused(TypeError, lambda: made(q, pages, out=torch.zeros(8, device=device)), "out is torch.float32", "torch.uint8")
    square = torch.zeros(8, 8, dtype=torch.uint8, device=device)
    refused(ValueError, lambda: made(q, pages, out=square), "out", "[8, 8]", "one contiguous")
    refused(TypeError, lambda: pages.call(q, schedule=q), "schedule is torch.bfloat16", "torch.uint8")
    refused(ValueError, lambda: pages.call(q, schedule=torch.zeros(8, dtype=torch.uint8, device="meta")), "schedule", "meta")
    refused(TypeError, lambda: schedule(None, pages.k, pages.v, pages.table, pages.used), "q is a builtins.NoneType")
    refused(TypeError, lambda: schedule(q, pages.k, pages.v, pages.table.long(), pages.used), "block_table", "torch.int64")
    refused(TypeError, lambda: schedule(q, pages.k, pages.v, pages.table, None), "seqused_kv is None")
    refused(ValueError, lambda: made(q, pages, captures={"x": 1.0}), "captures", "'x'")
    refused(RuntimeError, lambda: made(q.clone().requires_grad_(), pages), "q requires a gradient", "schedule")
    memory = made(q, pages)
    mapped = lambda layer: pages.call(layer, schedule=memory)  # noqa: E731
    refused(ValueError, lambda: torch.vmap(mapped)(torch.stack([q, q])), "schedule is given", "torch.vmap")
    again = lambda layer: made(layer, pages, out=memory)  # noqa: E731
    refused(ValueError, lambda: torch.vmap(again)(torch.stack([q, q])), "torch.vmap", "schedule")
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = mode.from_tensor(q)
        refused(ValueError, lambda: made(fake, pages), "out is None", "torch.compile")
    if device == "cuda":
        refused(ValueError, lambda: made(q, pages, out=memory[:256]), "out has 256 bytes", str(memory.numel()))
        fewer = Pages(LENGTHS[:2], device, torch.bfloat16, page=16, room=64)
        refused(ValueError, lambda: fewer.call(q[:2], schedule=memory), "schedule", "other limits")


def test_lengths_are_checked_on_the_host():
    pages, q = requests("cpu", torch.float32, (9, 4))
    assert made(q, pages).numel() == 0
    short = pages.used[:1]
    refused(ValueError, lambda: schedule(q, pages.k, pages.v, pages.table, short), "seqused_kv has 1 elements", "2")
    assert pages.used.dtype == INT
