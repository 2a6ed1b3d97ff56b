"""Shared prefixes from PyTorch: what paged attention over all keys gives."""

import pytest

torch = pytest.importorskip("torch")

from cache_cases import E4M3, I8, TOLERANCE, Pages, StoredPages, numbers  # noqa: E402
from conftest import refused  # noqa: E402
from fa_attention import functions  # noqa: E402
from fa_attention.torch import SharedPrefix, shared_prefix_attention  # noqa: E402

LENGTHS, BEGINS, GROUPS = (11, 8 + 6, 10, 20 + 3, 20 + 9), (8, 8, 8, 20, 20), (0, 0, 0, 1, 1)


class Case:
    """Five requests of which three share 8 keys and two share 5 pages of 4; the whole tables name these pages, too."""

    def __init__(self, device, dtype, packed=False, positions=False, kinds=None, s_q=1):
        self.pages = pages = StoredPages(LENGTHS, kinds, device, dtype, room=4) if kinds else Pages(LENGTHS, device, dtype, room=4)
        for i in (1, 2):
            pages.table[i, :2] = pages.table[0, :2]
        pages.table[4, :5] = pages.table[3, :5]
        self.own = pages.table.clone()
        for i, begin in enumerate(BEGINS):
            self.own[i, : begin // 4] = -1
        rows = (2, 1, 1, 3, 1) if packed else (s_q,) * 5
        first = torch.tensor((0, *rows)).cumsum(0)
        torch.manual_seed(3)
        shape = (int(first[-1]), 4, 16) if packed else (5, s_q, 4, 16)
        self.q = torch.randn(shape, device=device).to(dtype)
        self.q = self.q if packed else self.q.transpose(1, 2)  # batch entries one behind the other
        self.more = {"cu_seqlens_q": first.to(device, torch.int32)} if packed else {}
        cu_rows = numbers(0, int(first[3]), int(first[5]), device=device)
        self.level = SharedPrefix(torch.stack([pages.table[0], pages.table[3]]), cu_rows, numbers(8, 20, device=device))
        self.begins = numbers(*BEGINS, device=device)
        if positions:
            places = torch.zeros((2, int(first[-1])), dtype=torch.int32, device=device)
            for i, group in enumerate(GROUPS):
                for r in range(rows[i]):
                    places[group, int(first[i]) + r - int(cu_rows[group])] = LENGTHS[i] - rows[i] + r
            self.level = self.level._replace(positions=places)
        if kinds:
            self.more.update(k_scale=pages.k_scale, v_scale=pages.v_scale)

    def call(self, q=None, **options):
        q = self.q if q is None else q
        return shared_prefix_attention(q, self.pages.k, self.pages.v, self.own, self.pages.used, self.begins, [self.level],
                                       causal=True, **self.more, **options)

    def expected(self, q=None, **options):
        more = {name: t for name, t in self.more.items() if name == "cu_seqlens_q"}
        return self.pages.call(self.q if q is None else q, causal=True, return_lse=True, **more, **options)

    def arguments(self, **options):
        """Of the operator."""
        score = options.pop("score", None)
        named = (["gain"], options.pop("numbers")) if "numbers" in options else ([], [])
        scales = (self.more.get("k_scale"), self.more.get("v_scale"))
        level = self.level
        return (self.q, self.pages.k, self.pages.v, options.pop("sink", None), [], self.own, self.pages.used,
                self.more.get("cu_seqlens_q"), None, self.begins, 0, 0, named[1], "NHD", True, None, None, None, 0, score, None, [],
                named[0], *scales, 0, [level.block_table], [level.cu_rows], [level.lengths], [level.begin], [level.positions], [0],
                [0])


def shared(device, dtype, packed=False, positions=False, kinds=None, s_q=1, **options):
    case = Case(device, dtype, packed, positions, kinds, s_q)
    o, lse = case.call(return_lse=True, **options)
    expected, expected_lse = case.expected(**options)
    assert o.stride() == expected.stride()
    torch.testing.assert_close(o, expected, **TOLERANCE[dtype])
    torch.testing.assert_close(lse, expected_lse, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("packed", (False, True))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_prefixes(device, dtype, packed):
    shared(device, dtype, packed)
    shared(device, dtype, packed, score="2.0 * tanh(score / 2.0)", sink=torch.tensor([0.5, -1.0, 2.0, 0.0], device=device))
    shared(device, dtype, packed, positions=True, window_left=7)


def test_functions_with_captures_and_stored_pages(device):
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], device=device)
    shared(device, torch.float32, positions=True, score="score - slope[h] * float(q + s_kv - s_q - kv) * gain",
           captures={"slope": slopes, "gain": 2})
    sees = torch.ones(2, 2, dtype=torch.bool, device=device).tril()
    tree = functions.tree_words(sees)
    shared(device, torch.float32, s_q=2, mask=functions.tree(batched=False), captures={"tree": tree})
    shared(device, torch.bfloat16, kinds=(E4M3, I8))
    shared(device, torch.bfloat16, packed=True, kinds=(None, I8))


def test_results_go_where_the_caller_says(device):
    case = Case(device, torch.float32)
    out = torch.full((5, 1, 4, 16), float("nan"), device=device).transpose(1, 2)
    version = out._version
    o, lse = case.call(out=out, return_lse=True)
    assert o is out and out._version > version
    expected, expected_lse = case.expected()
    torch.testing.assert_close(out, expected, **TOLERANCE[torch.float32])
    torch.testing.assert_close(lse, expected_lse, **TOLERANCE[torch.float32])
    refused(ValueError, lambda: case.call(out=out[:4]), "out has shape [4, 4, 1, 16]", "[5, 4, 1, 16]")
    refused(TypeError, lambda: case.call(out=out.half()), "out is torch.float16", "torch.float32")
    refused(TypeError, lambda: case.call(out=[0]), "out is a builtins.list")
    refused(ValueError, lambda: case.call(out=torch.zeros(5, 4, 1, 32, device=device)[..., ::2]), "out has strides")


@pytest.mark.parametrize("packed", (False, True))
def test_opcheck(packed):
    for case in (Case("cpu", torch.float32, packed, positions=True), Case("cpu", torch.bfloat16, packed, kinds=(I8, None))):
        arguments = case.arguments(score="gain * tanh(score / gain)", numbers=[2.0], sink=torch.zeros(4))
        torch.library.opcheck(torch.ops.fa_attention.shared_prefix_forward.default, arguments)
        torch.library.opcheck(torch.ops.fa_attention.shared_prefix_forward_out.default, (torch.empty_like(case.q), *arguments))


@pytest.mark.parametrize("dynamic", (False, True))
@pytest.mark.parametrize("with_out", (False, True))
def test_fullgraph(device, dynamic, with_out):
    case = Case(device, torch.float32)

    def step(q, *tensors):
        level = SharedPrefix(*tensors[5:8], max_rows=3)
        out = torch.empty_like(q) if with_out else None
        o, lse = shared_prefix_attention(q, *tensors[:5], [level], causal=True, score="tanh(score)", return_lse=True, out=out)
        return o * 2, lse

    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend="inductor" if with_out else "aot_eager")
    level = case.level
    tensors = (case.pages.k, case.pages.v, case.own, case.pages.used, case.begins, level.block_table, level.cu_rows, level.lengths)
    for q in (case.q, case.q.neg()):
        for actual, expected in zip(compiled(q, *tensors), step(q, *tensors)):
            torch.testing.assert_close(actual, expected)


def test_vmap(device):
    case = Case(device, torch.float32)
    q = torch.stack([case.q, -case.q, 2 * case.q])
    for actual, layer in zip(torch.vmap(case.call)(q), q):
        torch.testing.assert_close(actual, case.call(layer))
    refused(ValueError, lambda: torch.vmap(lambda q: case.call(q, out=case.q.clone()))(q), "out is not mapped")


def test_graph_replays_serve_other_lengths(device):
    if device != "cuda":
        pytest.skip("CUDA graphs are of a GPU")
    case = Case(device, torch.bfloat16)
    case.call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = case.call()
    case.pages.used -= numbers(1, 2, 0, 1, 5, device=device)
    graph.replay()
    torch.testing.assert_close(o, case.expected()[0], **TOLERANCE[torch.bfloat16])


def test_refusals(device):
    with pytest.raises(ValueError, match="positions"):
        shared(device, torch.float32, window_left=7)
    with pytest.raises(Exception, match="functions that do not depend on q"):
        shared(device, torch.float32, score="score + float(q)")
    for name in ("q", "k_pages", "v_pages"):
        others = {each: torch.zeros(1, 2, 1, 16, device=device) for each in ("q", "k_pages", "v_pages")}
        for bad, word in ((None, "NoneType"), (others["q"].long(), "int64"), (others["q"].cpu().numpy(), "ndarray")):
            kind = ValueError if name == "v_pages" and bad is None else TypeError  # else the values are in the keys
            with pytest.raises(kind, match=f"^{name} is.*{word if kind is TypeError else 'None'}.*accepted"):
                shared_prefix_attention(**{**others, name: bad}, block_table=numbers(0, device=device)[None], prefixes=[],
                                        seqused_kv=numbers(1, device=device), seq_begin=numbers(0, device=device))
    refused(TypeError, lambda: shared(device, torch.float32, sink=[0.0] * 4), "sink", "list", "torch.Tensor")
    q = torch.randn(1, 2, 1, 16, device=device)
    call = lambda table, begin=None: shared_prefix_attention(q, q, q, table, numbers(1, device=device), begin, [])  # noqa: E731
    refused(TypeError, lambda: call(None), "block_table", "NoneType", "torch.Tensor")
    refused(TypeError, lambda: call(numbers(0, device=device)[None]), "seq_begin", "NoneType", "torch.int32")
    refused(TypeError, lambda: call(q[0, 0], numbers(0, device=device)), "block_table", "float32", "torch.int32")
    q = torch.randn(1, 2, 1, 16, device=device, requires_grad=True)
    with pytest.raises(RuntimeError, match="shared_prefix_attention"):
        shared_prefix_attention(q, q, q, None, None, None, [])


def test_refusals_of_levels(device):
    case = Case(device, torch.float32)
    level = case.level

    def refuse(kind, *words, levels=None, **fields):
        case.level = level._replace(**fields)
        given = levels if levels is not None else [case.level]
        refused(kind, lambda: shared_prefix_attention(case.q, case.pages.k, case.pages.v, case.own, case.pages.used, case.begins,
                                                      given, causal=True), *words)

    refuse(ValueError, "prefixes has 0 elements", "1 to 8", levels=[])
    refuse(TypeError, "prefixes is a", "a list of SharedPrefix", levels=level)
    refuse(TypeError, "prefixes[1] is a builtins.tuple", "SharedPrefix", levels=[level, tuple(level)])
    refuse(TypeError, "prefixes[0].cu_rows is torch.int64", "torch.int32", cu_rows=level.cu_rows.long())
    refuse(TypeError, "prefixes[0].lengths is a builtins.NoneType", lengths=None)
    refuse(ValueError, "prefixes[0].lengths", "[2, 1]", "[groups]", lengths=level.lengths[:, None])
    refuse(ValueError, "prefixes[0].block_table", "meta", block_table=level.block_table.to("meta"))
    refuse(TypeError, "prefixes[0].positions is torch.float32", positions=torch.zeros(2, 5, device=device))
    dense = torch.randn(5, 4, 2, 16, device=device)
    refused(ValueError, lambda: Case(device, torch.float32, s_q=2).call(dense), "q", "one behind the other")
    refuse(ValueError, "prefixes[0].begin has strides [0]", begin=level.lengths[:1].expand(2))
