"""Attention of fa for PyTorch, with gradients.

    from fa_attention.torch import attention, varlen_attention
    o = attention(q, k, v, causal=True)                  # [b, h, s, d] in any memory order
    o, lse = attention(q, k, v, return_lse=True)         # lse is differentiable too
    o = attention(q, k, v, score="score + bias[h, q, kv]", captures={"bias": bias})
    o = attention(q, k, v, dropout=0.1)                  # seeded by torch.manual_seed
    o = varlen_attention(q, k, v, cu_seqlens_q, cu_seqlens_kv)  # [total, h, d]
    memory = schedule(q, k_pages, v_pages, block_table, seqused_kv, causal=True)  # once a step, for paged_attention(schedule=)
    append(k, v, k_pages, v_pages, seqused_kv, block_table=block_table)  # new keys and values, in place
    o = paged_attention(q, k_pages, v_pages, block_table, seqused_kv, causal=True)
    o, lse = merge_states([(o, lse), (o2, lse2)])        # of partial results over different keys, differentiable
    accumulate(q, k, v, o, lse)                          # adds keys to a partial result, in place
    quantized_attention(q, k, v, q_scale=q_scale)        # of 8-bit floats, or int8; quantize(q, k, v).attention()
    attention_statistics(q, k, v, max_logit="softmax", max_logit_by_head=True).max_logit  # [h_q], for QK-clip
    paged_statistics(q, k_pages, v_pages, block_table, seqused_kv, top_keys=256).top_keys  # positions that count most
    o = shared_prefix_attention(q, k_pages, v_pages, block_table, seqused_kv, seq_begin, [SharedPrefix(...)], causal=True)

`scaled_dot_product_attention` has PyTorch's signature, and `register_flash_attention` makes fa the flash backend of PyTorch's
own. `Attention` is a module, `KVCache` names the tensors of a cache, in pages or contiguous. `ContextParallel` is attention of rows
that ranks share. All work on CUDA tensors (fp16, bf16, fp32; the current stream; no copies while the head dim is contiguous) and on
CPU tensors (fp64 too; the host device).

Under torch.compile, torch.export, fake tensors and torch.func a call is an operator of torch.ops.fa_attention. A plain eager call
goes to the library without the dispatcher.
"""

from ._accumulate import accumulate
from ._attention import attention, varlen_attention
from ._cache import KVCache, append, paged_attention
from ._flash_backend import register_flash_attention
from ._merge import merge_states
from ._module import Attention
from ._paged_statistics import paged_statistics
from ._parallel import ContextParallel
from ._quantized import Quantized, quantize, quantized_attention
from ._schedule import schedule
from ._sdpa import scaled_dot_product_attention
from ._shared import SharedPrefix, shared_prefix_attention
from ._statistics import AttentionStatistics, attention_statistics

__all__ = ["Attention", "AttentionStatistics", "ContextParallel", "KVCache", "Quantized", "SharedPrefix", "accumulate", "append",
           "attention", "attention_statistics", "merge_states", "paged_attention", "paged_statistics", "quantize",
           "quantized_attention", "register_flash_attention", "scaled_dot_product_attention", "schedule",
           "shared_prefix_attention", "varlen_attention"]
