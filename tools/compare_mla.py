"""Multi-head latent attention of tools/compare.py --mla: absorbed decodes of fa beside FlashMLA.

Method: as --decode has it (tools/compare_decode.py): graphs of calls, whose rounds are interleaved. What FlashMLA finds out of the
lengths (get_mla_metadata) and fa's schedule are made once and serve all calls, as the layers of a model's step do; neither is
timed. Both write log-sum-exps too. Before a row is timed, fa's output is held to float64 in the first and the last head of the
first and the last request, and FlashMLA's to fa's everywhere.
"""

import torch

import compare_mla_rows as mla_rows
from compare_decode import DTYPES, Checked, captured, int32, module, sets_of, time_rounds
from compare_rows import DEVICE, scratch
from fa_attention import capi

D_QK, D_V, H_KV = mla_rows.D_QK, mla_rows.D_V, mla_rows.H_KV


class Tensors:
    """What a call reads and writes: q and o [b, s_q, h_q, d], pages [pages, page_size, 1, 576] and the block table."""

    def __init__(self, spec, seed):
        generator = torch.Generator(DEVICE).manual_seed(seed)
        normal = lambda *shape: torch.randn(*shape, device=DEVICE, dtype=DTYPES[spec.dtype], generator=generator)  # noqa: E731
        self.q = normal(spec.b, spec.s_q, spec.h_q, D_QK)
        pages = spec.b * spec.pages_each
        self.k = normal(pages, spec.page_size, H_KV, D_QK)
        self.o = torch.full((spec.b, spec.s_q, spec.h_q, D_V), float("nan"), device=DEVICE, dtype=self.q.dtype)
        self.lse = torch.empty(spec.b, spec.h_q, spec.s_q, device=DEVICE)
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(seed))
        self.table = order.to(device=DEVICE, dtype=torch.int32).view(spec.b, spec.pages_each)

    def head(self, spec, request, h):
        """q, k, v and o of a query head of a request, [1, 1, s, d]."""
        k = self.k[self.table[request].long()].reshape(-1, D_QK)[: spec.s_kv]
        return [t[None, None] for t in (self.q[request, :, h], k, k[:, :D_V], self.o[request, :, h])]


class Row(Checked):
    """A spec with its tensors, of which there are several where calls rotate over them. A peer is a callable that returns o."""

    def __init__(self, library, spec, stream, sets=1):
        self.spec, self.stream = spec, stream
        self.sets = [Tensors(spec, seed) for seed in range(sets)]
        self.used = int32([spec.s_kv] * spec.b)
        self.attention = capi.Attention(library, D_QK, DTYPES[spec.dtype], spec.causal, tune="cached", page_size=spec.page_size,
                                        value_in_key=D_V)
        self.requests = capi.requests(self.used, max_s_kv=spec.s_kv)

    def _schedule(self, sizes):
        """None where calls of these limits take none."""
        size = self.attention.schedule_size(*sizes)
        if not size:
            return None
        schedule = capi.schedule_memory(scratch(size))
        self.attention.bind_schedule(schedule, sizes, self.requests, stream=self.stream.cuda_stream)()
        return schedule

    def fa(self):
        spec = self.spec
        sizes = (spec.b, spec.h_q, H_KV, spec.s_q, spec.s_kv)
        memory, schedule = scratch(self.attention.workspace_size(*sizes)), self._schedule(sizes)
        return [self.attention.bind_forward(t.q.transpose(1, 2), t.k.transpose(1, 2), None, t.o.transpose(1, 2), t.lse,
                                            self.stream.cuda_stream, memory, sequences=self.requests,
                                            cache=capi.paged_cache(t.table), schedule=schedule) for t in self.sets]

    def peer(self, name, args):
        """A list of calls, one for each set; None where there is no such call. The first call makes the metadata."""
        flash_mla, spec = module(args.flash_mla), self.spec
        if name != "flashmla" or flash_mla is None or spec.page_size != mla_rows.PEER_PAGE_SIZE:
            return None
        metadata = flash_mla.get_mla_metadata()[0]
        return [lambda t=t: flash_mla.flash_mla_with_kvcache(t.q, t.k, t.table, self.used, D_V, metadata, causal=spec.causal)[0]
                for t in self.sets]


def measure(library, spec, args, stream):
    row = Row(library, spec, stream, sets_of(spec, args))
    graphs = captured(row, args, mla_rows.PEERS)
    return mla_rows.entry(spec, time_rounds(graphs, args.rounds), args.cold)
