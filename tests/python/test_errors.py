"""Calls as a user might get them wrong: each error is a TypeError, ValueError or RuntimeError that names the argument and what is
accepted."""

import pytest
from conftest import refused

torch = pytest.importorskip("torch")

import fa_attention.flash_attn as flash  # noqa: E402
from fa_attention import functions  # noqa: E402
from fa_attention.torch import (  # noqa: E402
    Attention, KVCache, accumulate, append, attention, attention_statistics, merge_states, paged_attention, quantize,
    quantized_attention, scaled_dot_product_attention, varlen_attention)

Q, K, SQUARE = torch.ones(1, 4, 8, 16), torch.ones(1, 2, 8, 16), torch.ones(8, 8)
PACKED, CU = torch.ones(8, 4, 16), torch.tensor([0, 4, 8], dtype=torch.int32)
PAGES, TABLE, USED = torch.ones(4, 4, 2, 16), torch.tensor([[0, 1]], dtype=torch.int32), torch.tensor([5], dtype=torch.int32)
META = Q.to("meta")


def attend(**options):
    return lambda: attention(Q, K, K, **options)


def masked(mask):
    return attend(mask="m[q, kv] > 0.0", captures={"m": mask})


def paged(q=Q[:, :, :1], table=TABLE, used=USED, **options):
    return lambda: paged_attention(q, PAGES, PAGES, table, used, **options)


def appended(k=K[:, :, :1], **options):
    return lambda: append(k, k, PAGES.clone(), PAGES.clone(), USED, block_table=TABLE, **options)


def sdpa(mask, **options):
    return lambda: scaled_dot_product_attention(Q, Q, Q, attn_mask=mask, **options)


ROWS = Q.transpose(1, 2)
BAD = {
    "list": (lambda: attention([1], K, K), TypeError, "q is a builtins.list", "torch.Tensor"),
    "two axes": (lambda: attention(Q[0, 0], K, K), ValueError, "q has shape [8, 16]", "[b, h_q, s_q, d_qk]"),
    "int64": (lambda: attention(Q.long(), K.long(), K.long()), TypeError, "q is torch.int64", "torch.float16"),
    "mixed dtypes": (lambda: attention(Q, K.half(), K), TypeError, "k is torch.float16", "torch.float32"),
    "mixed devices": (lambda: attention(Q, K.to("meta"), K), ValueError, "k is on meta", "cpu"),
    "sparse": (lambda: attention(Q.to_sparse(), K, K), TypeError, "q is of torch.sparse_coo", "torch.strided"),
    "heads": (lambda: attention(Q[:, :3], K, K), ValueError, "h_q = 3", "a multiple of h_kv = 2"),
    "keys of v": (lambda: attention(Q, K, K[:, :, :5]), ValueError, "v = shape [1, 2, 5, 16]"),
    "head dim": (lambda: attention(Q[..., :12], K[..., :12], K), ValueError, "head_dim = 12", "a multiple of 8"),
    "scale": (attend(scale="big"), TypeError, "scale is a builtins.str", "a number"),
    "scale without a hash": (attend(scale=[1.0]), TypeError, "scale is a builtins.list", "a number"),
    "causal": (attend(causal="yes"), TypeError, "causal is a builtins.str", "a bool"),
    "causal tensor": (attend(causal=torch.tensor(True)), TypeError, "causal is a torch.Tensor", "a bool"),
    "window": (attend(window_left=1.5), TypeError, "window_left is a builtins.float", "an integer"),
    "dropout": (attend(dropout=1.5), ValueError, "dropout = 1.5", "0 to below 1"),
    "mask tensor": (attend(mask=SQUARE), TypeError, "mask is a torch.Tensor", "an expression"),
    "mask with a gradient": (masked(SQUARE.clone().requires_grad_()), ValueError, "captures['m'] requires a gradient",
                             "a mask has none"),
    "bool capture": (masked(SQUARE.bool()), TypeError, "m is torch.bool", "torch.int32"),
    "captures": (attend(mask="m[q, kv] > 0.0", captures=[SQUARE]), TypeError, "captures is a builtins.list", "a mapping"),
    "rank of a capture": (masked(SQUARE[0]), ValueError, "captures[m] = shape [8]", "rank 2"),
    "sink": (attend(sink=1.0), TypeError, "sink is a builtins.float", "torch.Tensor"),
    "length of a sink": (attend(sink=torch.zeros(3)), ValueError, "sink = shape [3]", "[h_q] = [4]"),
    "rng_state": (attend(dropout=0.1, rng_state=5), TypeError, "rng_state is a builtins.int", "(seed, offset)"),
    "invariance": (attend(invariance="all"), ValueError, "invariance is all", "batch"),
    "cu_seqlens of int64": (lambda: varlen_attention(PACKED, PACKED, PACKED, CU.long(), CU), TypeError,
                            "cu_seqlens_q is torch.int64"),
    "max_s_q": (lambda: varlen_attention(PACKED, PACKED, PACKED, CU, CU, max_s_q="4"), TypeError, "max_s_q is a builtins.str",
                "an integer"),
    "dense for packed": (lambda: varlen_attention(Q, Q, Q, CU, CU), ValueError, "q has shape", "[total_q, h_q, d_qk]"),
    "layout": (paged(layout="BHSD"), ValueError, "layout is 'BHSD'", "NHD"),
    "table": (paged(table=TABLE[0]), ValueError, "block_table has shape [2]", "two axes"),
    "lengths": (paged(used=5), TypeError, "seqused_kv is a builtins.int", "torch.Tensor"),
    "max_s_kv": (paged(max_s_kv=1.5), TypeError, "max_s_kv is a builtins.float", "an integer"),
    "sparse over pages": (paged(q=Q[:, :, :1].to_sparse()), TypeError, "q is of torch.sparse_coo"),
    "gradients over pages": (paged(q=Q[:, :, :1].clone().requires_grad_()), RuntimeError, "q requires a gradient",
                             "torch.no_grad()"),
    "rotary_cos": (appended(rotary_cos=1.0, rotary_sin=1.0), TypeError, "rotary_cos is a builtins.float", "torch.Tensor"),
    "rotary_dims": (appended(rotary_dims=7), ValueError, "rotary.dims = 7", "an even number"),
    "slots": (appended(slots=torch.zeros(1)), TypeError, "slots is torch.float32", "torch.int32"),
    "heads of new keys": (appended(k=K[:, :1, :1]), ValueError, "k_cache = shape [4, 2, 4, 16]", "[4, 1, 4, 16]"),
    "states of a number": (lambda: merge_states(5), TypeError, "states is a builtins.int", "a list of pairs"),
    "cap": (lambda: functions.softcap("a"), TypeError, "cap is a builtins.str", "a positive number"),
    "cache of lists": (lambda: KVCache([1], [1], USED).attention(Q), TypeError, "k_cache is a builtins.list", "torch.Tensor"),
    "values in keys": (lambda: paged_attention(Q[:, :, :1], PAGES, None, TABLE, USED, value_in_key="8"), TypeError,
                       "value_in_key is a builtins.str", "an integer"),
    "states": (lambda: merge_states(Q), TypeError, "states[0] is a torch.Tensor", "a pair"),
    "state to add to": (lambda: accumulate(Q, K, K, None, SQUARE), TypeError, "o is a builtins.NoneType"),
    "wide codes": (lambda: quantized_attention(Q, K, K), TypeError, "q is torch.float32", "torch.int8"),
    "codes": (lambda: quantize(Q, dtype=torch.float16), TypeError, "dtype is torch.float16", "torch.int8"),
    "top_keys": (lambda: attention_statistics(Q, K, K, top_keys=1.5), TypeError, "top_keys is a builtins.float", "an integer"),
    "scale of statistics": (lambda: attention_statistics(Q, K, K, scale="x"), TypeError, "scale is a builtins.str", "a number"),
    "max_logit": (lambda: attention_statistics(Q, K, K, max_logit=True), ValueError, "max_logit is True", "'softmax'"),
    "mask of a list": (sdpa([[True]]), TypeError, "attn_mask is a builtins.list", "torch.Tensor"),
    "mask of int32": (sdpa(SQUARE.int()), TypeError, "attn_mask is torch.int32", "torch.bool"),
    "mask elsewhere": (sdpa(SQUARE.to("meta")), ValueError, "attn_mask is on meta", "cpu"),
    "mask of other rows": (sdpa(SQUARE[:7]), ValueError, "attn_mask has shape [7, 8]", "[1, 4, 8, 8]"),
    "two masks": (sdpa(SQUARE.bool(), is_causal=True), ValueError, "attn_mask and is_causal", "one of them"),
    "heads of the module": (lambda: Attention("4", 16), TypeError, "heads is a builtins.str", "an integer"),
    "q of the module": (lambda: Attention(4, 16)([1], ROWS, ROWS), TypeError, "q is a builtins.list", "torch.Tensor"),
    "order of the module": (lambda: Attention(4, 16)(Q, Q, Q), ValueError, "q has shape [1, 4, 8, 16]", "[b, s, 4, 16]"),
    "cache of the module": (lambda: Attention(4, 16)(ROWS, ROWS, ROWS, (1, 2)), TypeError, "cache is a builtins.tuple",
                            "a KVCache"),
    "flash: three axes": (lambda: flash.flash_attn_func(PACKED, PACKED, PACKED), ValueError, "q has shape [8, 4, 16]",
                          "[b, s, h, d]"),
    "flash: list": (lambda: flash.flash_attn_func([1], ROWS, ROWS), TypeError, "q is a builtins.list", "torch.Tensor"),
    "flash: window": (lambda: flash.flash_attn_func(ROWS, ROWS, ROWS, window_size=3), TypeError, "window_size is 3", "a pair"),
    "flash: slopes": (lambda: flash.flash_attn_func(ROWS, ROWS, ROWS, alibi_slopes=torch.zeros(3)), ValueError,
                      "alibi_slopes has shape [3]", "h_q = 4"),
    "flash: packed": (lambda: flash.flash_attn_qkvpacked_func(ROWS), ValueError, "qkv has shape", "[b, s, 3, h, d]"),
    "flash: four axes": (lambda: flash.flash_attn_varlen_func(Q, Q, Q, CU, CU, 4, 4), ValueError, "q has shape", "[total, h, d]"),
}


@pytest.mark.parametrize("name", list(BAD))
def test_bad_calls_are_named(name):
    call, kind, *words = BAD[name]
    refused(kind, call, *words)


def test_devices_are_compared_in_every_call():
    """Also where an equal call has been served."""
    sink, gain = torch.zeros(4), torch.ones(4)
    options = {"sink": sink, "score": "score * gain[h]", "captures": {"gain": gain}}
    attention(Q, K, K, **options)
    refused(ValueError, lambda: attention(Q, K, K, **{**options, "sink": sink.to("meta")}), "sink is on meta", "cpu")
    refused(ValueError, lambda: attention(Q, K, K, **{**options, "captures": {"gain": gain.to("meta")}}), "gain is on meta", "cpu")
