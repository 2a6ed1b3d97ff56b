"""Decodes of tools/compare.py --decode: fa beside cuDNN, FlashAttention-2, FlashAttention-3 and FlashInfer.

Method: every library's calls are captured into a CUDA graph, 100 of them or as many as fill a round; a round replays the
graph of one library for --ms milliseconds. Rounds of all libraries are interleaved in random order, and the median of
--rounds counts. TB/s = bytes of K, V, Q and O / time. Before a row is timed, fa's output is held to float64 in the first and the last
head of the first and the last request, and the peers' to fa's. Contiguous requests of different lengths are packed.
"""

import importlib
import random
import statistics
import subprocess
import sys
import tempfile

import torch

import compare_decode_rows as decode_rows
from compare_rows import BOUNDS, DEVICE, errors, output_of, peer_attention, reference, scratch
from fa_attention import capi

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}
GRAPH_CALLS, FEWEST_CALLS, L2_CACHES = 100, 4, 4
PEER_SLACK = 4  # both are rounded, and P too
FLASHINFER_BYTES = 256 << 20


def int32(values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def cumulative(values):
    return int32([0, *torch.tensor(values).cumsum(0).tolist()])


def module(name):
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


class Tensors:
    """What a call reads and writes: q and o [b, s_q, h_q, d] or packed [total, h_q, d]; k and v alike, or pages [pages,
    page_size, h_kv, d], or a contiguous cache [b, s_kv, h_kv, d]."""

    def __init__(self, spec, seed):
        generator = torch.Generator(DEVICE).manual_seed(seed)
        dtype, heads = DTYPES[spec.dtype], (spec.h_kv, spec.d)
        normal = lambda *shape: torch.randn(*shape, device=DEVICE, dtype=dtype, generator=generator)  # noqa: E731
        if spec.page_size:
            shape = (spec.pages(), spec.page_size, *heads)
        else:
            shape = (sum(spec.keys), *heads) if spec.packed else (spec.b, spec.s_kv, *heads)
        self.q = normal(*((sum(spec.rows),) if spec.packed else (spec.b, spec.s_q)), spec.h_q, spec.d)
        self.k, self.v = normal(*shape), normal(*shape)
        self.o = torch.full_like(self.q, float("nan"))
        if spec.page_size:
            pages = torch.randperm(spec.pages(), generator=torch.Generator().manual_seed(seed)).tolist()
            width = -(-spec.s_kv // spec.page_size)
            counts = [-(-keys // spec.page_size) for keys in spec.keys]
            self.lists = [[pages.pop() for _ in range(count)] for count in counts]
            self.table = int32([pages + [-1] * (width - len(pages)) for pages in self.lists])

    def head(self, spec, request, h):
        """q, k, v and o of a query head of a request, [1, 1, s, d]."""
        h_kv = h * spec.h_kv // spec.h_q
        first_q, first_k = sum(spec.rows[:request]), sum(spec.keys[:request])
        rows = lambda t: t[first_q : first_q + spec.rows[request], h] if spec.packed else t[request, :, h]  # noqa: E731
        if spec.page_size:
            pages = torch.tensor(self.lists[request], device=DEVICE)
            keys = lambda t: t[pages, :, h_kv].reshape(-1, spec.d)[: spec.keys[request]]  # noqa: E731
        elif spec.packed:
            keys = lambda t: t[first_k : first_k + spec.keys[request], h_kv]  # noqa: E731
        else:
            keys = lambda t: t[request, : spec.keys[request], h_kv]  # noqa: E731
        return [t[None, None] for t in (rows(self.q), keys(self.k), keys(self.v), rows(self.o))]


class Checked:
    """What rows are held to: `spec`, and `sets` of tensors with `o` and `head`, of which the first is looked at."""

    def check(self):
        """fa's output in two heads of two requests against float64."""
        spec, bound = self.spec, BOUNDS[DTYPES[self.spec.dtype]]
        for request in {0, spec.b - 1}:
            for h in {0, spec.h_q - 1}:
                q, k, v, o = self.sets[0].head(spec, request, h)
                expected = reference(q, k, v, spec.causal)[0]
                _, largest = errors(o, expected)
                if largest > bound * expected.abs().max().item():
                    raise SystemExit(f"fa is wrong on {spec.name()}: max abs error {largest}")

    def agrees(self, result):
        ours = self.sets[0].o
        largest = (result.reshape(ours.shape).double() - ours.double()).abs().max().item()  # NaN agrees with nothing
        return largest <= PEER_SLACK * BOUNDS[ours.dtype] * ours.abs().max().item()


class Row(Checked):
    """A spec with its tensors, of which there are several where calls rotate over them. A peer is a callable that returns o."""

    def __init__(self, library, spec, stream, sets=1):
        self.spec, self.stream = spec, stream
        self.sets = [Tensors(spec, seed) for seed in range(sets)]
        self.used, self.cu_q, self.cu_k = int32(spec.keys), cumulative(spec.rows), cumulative(spec.keys)
        self.attention = capi.Attention(library, spec.d, DTYPES[spec.dtype], spec.causal, tune="cached", varlen=spec.packed,
                                        page_size=-1 if spec.contiguous else spec.page_size)
        self.lengths = self._lengths()

    def _lengths(self):
        spec = self.spec
        longest = {"max_s_q": spec.s_q, "max_s_kv": spec.s_kv}
        if spec.page_size and spec.packed:
            return capi.requests(self.used, self.cu_q, **longest)
        if spec.page_size or spec.contiguous:
            return capi.requests(self.used, max_s_kv=spec.s_kv)
        return capi.sequences(self.cu_q, self.cu_k, **longest) if spec.packed else None

    def fa(self):
        spec = self.spec
        totals = (sum(spec.rows), 0 if spec.page_size else sum(spec.keys)) if spec.packed else ()
        memory = scratch(self.attention.workspace_size(spec.b, spec.h_q, spec.h_kv, spec.s_q, spec.s_kv, *totals))
        by_heads = lambda t, dense: t.transpose(1, 2) if dense else t  # noqa: E731
        calls = []
        for t in self.sets:
            q, o = (by_heads(x, not spec.packed) for x in (t.q, t.o))
            k, v = (by_heads(x, spec.page_size or not spec.packed) for x in (t.k, t.v))
            cache = capi.paged_cache(t.table) if spec.page_size else None
            calls.append(self.attention.bind_forward(q, k, v, o, None, self.stream.cuda_stream, memory,
                                                     sequences=self.lengths, cache=cache))
        return calls

    def _sdpa(self, peer):
        """cuDNN and FlashAttention-2 as PyTorch has them: not over pages."""
        spec = self.spec
        if spec.page_size or ((spec.packed or spec.contiguous) and peer == "cudnn"):
            return None
        if spec.contiguous:  # packed rows of the cache, of which some count
            starts = int32([n * spec.s_kv for n in range(spec.b + 1)])
            return [lambda t=t: torch.ops.aten._flash_attention_forward(
                t.q.flatten(0, 1), t.k.flatten(0, 1), t.v.flatten(0, 1), self.cu_q, starts, spec.s_q, spec.s_kv, 0.0,
                spec.causal, False, seqused_k=self.used)[0].view_as(t.q) for t in self.sets]
        if spec.packed:
            return [lambda t=t: torch.ops.aten._flash_attention_forward(
                t.q, t.k, t.v, self.cu_q, self.cu_k, spec.s_q, spec.s_kv, 0.0, spec.causal, False)[0] for t in self.sets]
        return [lambda t=t: peer_attention(peer, *(x.transpose(1, 2) for x in (t.q, t.k, t.v)), spec.causal).transpose(1, 2)
                for t in self.sets]

    def _fa3(self, fa3):
        spec = self.spec
        if fa3 is None or spec.elements() > decode_rows.FA3_ELEMENTS:
            return None
        if spec.packed and not spec.page_size:
            return [lambda t=t: output_of(fa3.flash_attn_varlen_func(
                t.q, t.k, t.v, self.cu_q, self.cu_k, spec.s_q, spec.s_kv, causal=spec.causal)) for t in self.sets]
        packed = {"cu_seqlens_q": self.cu_q, "max_seqlen_q": spec.s_q} if spec.packed else {}
        return [lambda t=t, paged={"page_table": t.table} if spec.page_size else {}: output_of(fa3.flash_attn_with_kvcache(
            t.q, t.k, t.v, cache_seqlens=self.used, causal=spec.causal, **packed, **paged)) for t in self.sets]

    def _flashinfer(self, flashinfer):
        """Over pages. It plans on the host, which is not timed."""
        spec, dtype = self.spec, DTYPES[self.spec.dtype]
        if flashinfer is None or not spec.page_size:
            return None
        calls, memory = [], torch.empty(FLASHINFER_BYTES, dtype=torch.uint8, device=DEVICE)
        for t in self.sets:
            counts = [len(pages) for pages in t.lists]
            pages = (cumulative(counts), int32([page for pages in t.lists for page in pages]),
                     int32([(keys - 1) % spec.page_size + 1 for keys in spec.keys]))
            heads = (spec.h_q, spec.h_kv, spec.d, spec.page_size)
            if spec.s_q == 1:
                wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(memory, "NHD", use_tensor_cores=True)
                wrapper.plan(*pages, *heads, q_data_type=dtype, kv_data_type=dtype)
                calls.append(lambda t=t, w=wrapper: w.run(t.q[:, 0], (t.k, t.v)).unsqueeze(1))
            else:
                wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(memory, "NHD")
                wrapper.plan(self.cu_q, *pages, *heads, causal=True, q_data_type=dtype)
                calls.append(lambda t=t, w=wrapper: w.run(t.q.view(-1, spec.h_q, spec.d), (t.k, t.v)).view_as(t.q))
        return calls

    def peer(self, name, args):
        """A list of calls, one for each set; None where the peer has no such call."""
        if name == "fa3":
            return self._fa3(module(args.fa3))
        return self._flashinfer(module("flashinfer")) if name == "flashinfer" else self._sdpa(name)


def once_ms(calls):
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    calls[0]()
    start.record()
    for call in (calls * 2)[:2]:
        call()
    stop.record()
    torch.cuda.synchronize()
    return max(start.elapsed_time(stop) / 2, 1e-3)


class Graph:
    """Calls in a graph, which rotate over those given."""

    def __init__(self, calls, stream, target_ms):
        self.calls = calls  # they own the workspace and the schedule that replays use
        once = once_ms(calls)
        self.count = max(FEWEST_CALLS, min(GRAPH_CALLS, round(target_ms / once)))
        self.replays = max(1, round(target_ms / (once * self.count)))
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local"):
            for i in range(self.count):
                calls[i % len(calls)]()

    def microseconds(self):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.graph.replay()
        start.record()
        for _ in range(self.replays):
            self.graph.replay()
        stop.record()
        torch.cuda.synchronize()
        return start.elapsed_time(stop) * 1e3 / (self.count * self.replays)


def captured(row, args, peers):
    """A graph for fa, and for each peer that can do the row and agrees."""
    calls = row.fa()
    for call in calls:
        call()
    torch.cuda.synchronize()
    row.check()
    graphs = {"fa": Graph(calls, row.stream, args.ms)}
    for name in peers:
        try:
            calls = row.peer(name, args)
            if calls is None:
                continue
            if not row.agrees(calls[0]()):
                print(f"{name} disagrees with fa, and is left out: {row.spec.name()}", flush=True)
                continue
            graphs[name] = Graph(calls, row.stream, args.ms)
        except Exception as problem:  # noqa: BLE001: whatever a peer throws
            print(f"{name} is left out: {row.spec.name()}: {type(problem).__name__}: {str(problem)[:200]}", flush=True)
    return graphs


def sets_of(spec, args):
    """How many tensors calls rotate over."""
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    return min(GRAPH_CALLS, -(-L2_CACHES * l2 // int(spec.bytes())) + 1) if args.cold else 1


def time_rounds(graphs, rounds):
    """The median of each, in microseconds."""
    times, order, shuffle = {name: [] for name in graphs}, list(graphs), random.Random(0).shuffle
    for _ in range(rounds):
        shuffle(order)
        for name in order:
            times[name].append(graphs[name].microseconds())
    return {name: statistics.median(t) for name, t in times.items()}


def measure(library, spec, args, stream):
    graphs = captured(Row(library, spec, stream, sets_of(spec, args)), args, args.peers)
    return decode_rows.entry(spec, time_rounds(graphs, args.rounds), args.cold)


class Watch:
    """Samples clocks, power and temperature once a second, by nvidia-smi, until it is stopped."""

    @staticmethod
    def gpu():
        """The device that is current, as nvidia-smi names it: its own numbers know no CUDA_VISIBLE_DEVICES."""
        uuid = getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "uuid", None)
        return str(torch.cuda.current_device()) if uuid is None else f"GPU-{uuid}"

    def __init__(self):
        self.file = tempfile.TemporaryFile("w+")
        command = ["nvidia-smi", "--query-gpu=" + ",".join(decode_rows.CONDITIONS.values()), "--format=csv,noheader,nounits",
                   "--loop=1", f"--id={self.gpu()}"]
        try:
            self.process = subprocess.Popen(command, stdout=self.file, stderr=subprocess.DEVNULL)
        except OSError as problem:
            print(f"clocks and power are not recorded: {problem}", flush=True)
            self.process = None

    def stop(self):
        if self.process:
            self.process.terminate()
            self.process.wait()

    def conditions(self):
        self.file.seek(0)
        return decode_rows.conditions(self.file.read())


def measure_all(library, specs, args, entries, measure=measure, print_entry=decode_rows.print_entry):
    """Adds to `entries`, one by one."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for spec in specs:
            try:
                entries.append(measure(library, spec, args, stream))
            except (capi.Unsupported, torch.OutOfMemoryError) as refusal:
                print(f"{spec.name()}: {refusal}", file=sys.stderr, flush=True)
                continue
            print_entry(entries[-1], lambda text: print(text, flush=True))
            torch.cuda.empty_cache()
