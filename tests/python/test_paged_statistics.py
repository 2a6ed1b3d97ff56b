"""Statistics of requests over a KV cache, beside `attention_statistics` of each request's own keys."""

import pytest
from conftest import refused

torch = pytest.importorskip("torch")

from cache_cases import E4M3, I8, Pages, StoredPages, numbers, read  # noqa: E402
from fa_attention.torch import attention_statistics, paged_attention, paged_statistics  # noqa: E402

LENGTHS, BEGIN, H_Q, ROWS, TOP = (13, 0, 20, 7), (2, 0, 11, 0), 4, 3, 9
WANTED = {"max_logit": "softmax", "entropy": True, "column_sums": "kv_heads", "top_keys": TOP}


def expect_own(got, q, k, v, i, begin, rows=slice(None), lse_rows=None, **options):
    """`got` of request i is what attention_statistics tells of q [s_q, h_q, d] over k and v [s_kv, h_kv, d]."""
    one = [t.transpose(0, 1)[None] for t in (q, k[begin:], v[begin:])]
    own = attention_statistics(*one, **WANTED, **options)
    end = begin + one[1].shape[2]
    sums = torch.zeros_like(got.column_sums[i])
    sums[:, begin:end] = own.column_sums[0]
    torch.testing.assert_close(got.column_sums[i], sums, atol=2e-3, rtol=2e-3)
    expected = torch.where(own.top_keys[0] < 0, -1, own.top_keys[0] + begin)
    assert torch.equal(got.top_keys[i] < 0, expected < 0)
    for found, wanted, row in zip(got.top_keys[i].long(), expected.long(), sums):
        found, wanted = found[found >= 0], wanted[wanted >= 0]
        assert found.numel() == found.unique().numel() and ((found >= begin) & (found < end)).all()
        torch.testing.assert_close(row[found], row[wanted], atol=2e-3, rtol=2e-3)
    return own


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
def test_requests_have_the_statistics_of_their_keys(device, layout, dtype, causal):
    pages = Pages(LENGTHS, device, dtype, layout)
    q = torch.randn(len(LENGTHS), H_Q, ROWS, 16, dtype=dtype, device=device)
    got = paged_statistics(q, pages.k, pages.v, pages.table, pages.used, layout=layout, causal=causal, **WANTED,
                           seq_begin=numbers(*BEGIN, device=device))
    assert got.column_sums.shape == (len(LENGTHS), 2, pages.table.shape[1] * 4) and got.top_keys.shape == (len(LENGTHS), 2, TOP)
    for i, begin in enumerate(BEGIN):
        own = expect_own(got, q[i].transpose(0, 1), pages.rows(pages.k, i), pages.rows(pages.v, i), i, begin, causal=causal)
        torch.testing.assert_close(got.max_logit[i], own.max_logit[0], atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(got.entropy[i], own.entropy[0], atol=2e-3, rtol=2e-3)
    o, lse = paged_attention(q, pages.k, pages.v, pages.table, pages.used, layout=layout, causal=causal, return_lse=True,
                             seq_begin=numbers(*BEGIN, device=device))
    torch.testing.assert_close(got.o, o, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(got.lse, lse, atol=1e-3, rtol=1e-3)


def test_packed_queries_of_a_contiguous_cache(device):
    torch.manual_seed(5)
    k, v = (torch.randn(3, 21, 2, 16, device=device) for _ in range(2))
    used, cu = numbers(13, 21, 5, device=device), numbers(0, 4, 4, 5, device=device)
    q = torch.randn(5, H_Q, 16, device=device)
    got = paged_statistics(q, k, v, None, used, cu_seqlens_q=cu, max_s_q=4, max_s_kv=21, causal=True, **WANTED)
    assert got.column_sums.shape == (3, 2, 21) and got.max_logit.shape == (H_Q, 5)
    for i in (0, 2):
        rows = slice(int(cu[i]), int(cu[i + 1]))
        own = expect_own(got, q[rows], k[i, : int(used[i])], v[i, : int(used[i])], i, 0, causal=True)
        torch.testing.assert_close(got.entropy[:, rows], own.entropy[0], atol=1e-4, rtol=1e-4)
    assert (got.column_sums[1] == 0).all() and (got.top_keys[1] == -1).all()


@pytest.mark.parametrize("kinds", [(E4M3, I8), (I8, None), (None, E4M3)])
def test_caches_of_8_bits(device, kinds):
    pages = StoredPages(LENGTHS, kinds, device)
    q = torch.randn(len(LENGTHS), H_Q, ROWS, 16, dtype=torch.bfloat16, device=device)
    got = paged_statistics(q, pages.k, pages.v, pages.table, pages.used, causal=True, k_scale=pages.k_scale,
                           v_scale=pages.v_scale, **WANTED)
    k, v = (read(t, s).float() for t, s in ((pages.k, pages.k_scale), (pages.v, pages.v_scale)))
    for i in range(len(LENGTHS)):
        expect_own(got, q[i].transpose(0, 1).float(), pages.rows(k, i), pages.rows(v, i), i, 0, causal=True)


def test_functions_and_top_keys_alone(device):
    pages = Pages(LENGTHS, device)
    q = torch.randn(len(LENGTHS), H_Q, ROWS, 16, device=device)
    more = {"score": "score * gain[h]", "mask": "kv % 3 != 1", "captures": {"gain": torch.linspace(1, 2, H_Q, device=device)},
            "sink": torch.linspace(-1, 1, H_Q, device=device)}
    sums = paged_statistics(q, pages.k, pages.v, pages.table, pages.used, column_sums="query_heads", **more).column_sums
    alone = paged_statistics(q, pages.k, pages.v, pages.table, pages.used, top_keys=3, **more)
    assert alone.column_sums is None and alone.entropy is None
    for i, keys in enumerate(LENGTHS):
        order = sums[i, :, :keys].sort(dim=-1, descending=True, stable=True).indices[:, :3]
        assert torch.equal(alone.top_keys[i].long(), order if keys else torch.full_like(alone.top_keys[i], -1).long())


def test_what_is_refused(device):
    pages = Pages(LENGTHS, device)
    q = torch.randn(len(LENGTHS), H_Q, ROWS, 16, device=device)
    call = lambda **more: paged_statistics(q, pages.k, pages.v, pages.table, pages.used, **more)  # noqa: E731
    refused(ValueError, lambda: call(top_keys=1025), "top_keys")
    refused(ValueError, lambda: call(column_sums="rows"), "column_sums")
    refused(ValueError, lambda: call(layout="HNDX"), "layout")
    refused(ValueError, lambda: call(captures={"x": 1.0}), "x")
    refused(TypeError, lambda: paged_statistics(q.to(I8), pages.k, pages.v, pages.table, pages.used), "q", "int8")
    refused(TypeError, lambda: paged_statistics(q, pages.k, pages.v, pages.table.long(), pages.used), "block_table")
    refused(RuntimeError, lambda: paged_statistics(q.requires_grad_(), pages.k, pages.v, pages.table, pages.used, top_keys=1),
            "paged_statistics")
