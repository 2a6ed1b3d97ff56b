"""Shared prefixes from PyTorch: what paged attention over all keys gives."""

import pytest

torch = pytest.importorskip("torch")

from cache_cases import TOLERANCE, Pages, numbers  # noqa: E402
from conftest import refused  # noqa: E402
from fa_attention.torch import SharedPrefix, shared_prefix_attention  # noqa: E402


def shared(device, dtype, packed, positions=None, **options):
    """Five requests of which three share 8 keys and two share 5 pages of 4; the whole tables name these pages, too."""
    lengths, begins, groups = (11, 8 + 6, 9, 20 + 3, 20 + 9), (8, 8, 8, 20, 20), (0, 0, 0, 1, 1)
    pages = Pages(lengths, device, dtype, room=4)
    for i in (1, 2):
        pages.table[i, :2] = pages.table[0, :2]
    pages.table[4, :5] = pages.table[3, :5]
    own = pages.table.clone()
    for i, begin in enumerate(begins):
        own[i, : begin // 4] = -1
    s_q = 1 if not packed else None
    rows = (1,) * 5 if not packed else (2, 1, 1, 3, 1)
    first = torch.tensor((0, *rows)).cumsum(0)
    torch.manual_seed(3)
    q = torch.randn((int(first[-1]), 4, 16) if packed else (5, 4, s_q, 16), device=device, dtype=dtype)
    more = {"cu_seqlens_q": first.to(device, torch.int32)} if packed else {}
    cu_rows = numbers(0, int(first[3]), int(first[5]), device=device)
    level = SharedPrefix(torch.stack([pages.table[0], pages.table[3]]), cu_rows, numbers(8, 20, device=device))
    if positions:
        width = int(first[-1])
        places = torch.zeros((2, width), dtype=torch.int32, device=device)
        for i, group in enumerate(groups):
            for r in range(rows[i]):
                places[group, int(first[i]) + r - int(cu_rows[group])] = lengths[i] - rows[i] + r
        level = level._replace(positions=places)
    o, lse = shared_prefix_attention(q, pages.k, pages.v, own, pages.used, numbers(*begins, device=device), [level],
                                     causal=True, return_lse=True, **more, **options)
    expected, expected_lse = pages.call(q, causal=True, return_lse=True, **more, **options)
    torch.testing.assert_close(o, expected, **TOLERANCE[dtype])
    torch.testing.assert_close(lse, expected_lse, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("packed", (False, True))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_prefixes(device, dtype, packed):
    shared(device, dtype, packed)
    shared(device, dtype, packed, score="2.0 * tanh(score / 2.0)", sink=torch.tensor([0.5, -1.0, 2.0, 0.0], device=device))
    shared(device, dtype, packed, positions=True, window_left=7)


def test_refusals(device):
    with pytest.raises(ValueError, match="positions"):
        shared(device, torch.float32, False, window_left=7)
    with pytest.raises(Exception, match="functions that do not depend on q"):
        shared(device, torch.float32, False, score="score + float(q)")
    for name in ("q", "k_pages", "v_pages"):
        others = {each: torch.zeros(1, 2, 1, 16, device=device) for each in ("q", "k_pages", "v_pages")}
        for bad, word in ((None, "NoneType"), (others["q"].long(), "int64"), (others["q"].cpu().numpy(), "ndarray")):
            with pytest.raises(TypeError, match=f"^{name} is.*{word}.*accepted"):
                shared_prefix_attention(**{**others, name: bad}, block_table=numbers(0, device=device)[None], prefixes=[],
                                        seqused_kv=numbers(1, device=device), seq_begin=numbers(0, device=device))
    refused(TypeError, lambda: shared(device, torch.float32, False, sink=[0.0] * 4), "sink", "list", "torch.Tensor")
    q = torch.randn(1, 2, 1, 16, device=device)
    call = lambda table: shared_prefix_attention(q, q, q, table, numbers(1, device=device), None, [])  # noqa: E731
    refused(TypeError, lambda: call(None), "block_table", "NoneType", "torch.Tensor")
    refused(TypeError, lambda: call(q[0, 0]), "block_table", "float32", "torch.int32")
    q = torch.randn(1, 2, 1, 16, device=device, requires_grad=True)
    with pytest.raises(RuntimeError, match="shared_prefix_attention"):
        shared_prefix_attention(q, q, q, None, None, None, [])
