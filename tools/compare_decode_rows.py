"""What tools/compare.py --decode measures, and what becomes of it in a results file. Needs neither PyTorch nor a GPU."""

import argparse
import dataclasses
import random
import re
import statistics

PAGE_SIZES = (0, 16, 64)  # 0: contiguous
MOST_BYTES = 24e9  # of K and V
ELEMENT_BYTES = {"bf16": 2, "f16": 2}
FA3_ELEMENTS = 2**31  # of k: beyond them FlashAttention-3 reads elsewhere, which ends in an illegal access
PEERS = ("cudnn", "fa2", "fa3", "flashinfer")
# What a run without --decode leaves as it is in a results file.
DECODE_KEYS = ("decode", "decode_templates", "decode_commit", "decode_method", "decode_conditions")


@dataclasses.dataclass(frozen=True)
class Spec:
    """One row: requests with `rows` queries and `keys` keys each, in pages or not."""

    group: str
    rows: tuple
    keys: tuple
    h_q: int = 32
    h_kv: int = 8
    d: int = 128
    dtype: str = "bf16"
    page_size: int = 0
    variant: str = ""  # what rows and keys are, where requests differ

    @property
    def b(self):
        return len(self.keys)

    @property
    def s_q(self):
        return max(self.rows)

    @property
    def s_kv(self):
        return max(self.keys)

    @property
    def causal(self):
        return self.s_q > 1

    @property
    def contiguous(self):
        """Whether k and v are a cache [b, s_kv, h_kv, d] of other lengths, unless that takes too much memory."""
        ragged = self.page_size == 0 and len(set(self.rows)) == 1 and len(set(self.keys)) > 1
        return ragged and 2 * self.b * self.s_kv * self.h_kv * self.d * ELEMENT_BYTES[self.dtype] <= MOST_BYTES

    @property
    def packed(self):
        """Whether a contiguous row, or the queries of one in pages, needs cumulative lengths."""
        return len(set(self.rows)) > 1 or (self.page_size == 0 and len(set(self.keys)) > 1 and not self.contiguous)

    def problem(self):
        """What the results file says of it."""
        return {"b": self.b, "h_q": self.h_q, "h_kv": self.h_kv, "s_q": self.s_q, "s_kv": self.s_kv, "d_qk": self.d,
                "d_v": self.d, "dtype": self.dtype, "page_size": self.page_size, "variant": self.variant}

    def kv_bytes(self):
        return 2 * sum(self.keys) * self.h_kv * self.d * ELEMENT_BYTES[self.dtype]

    def bytes(self):
        """K, V, Q and O, each once."""
        return self.kv_bytes() + 2 * sum(self.rows) * self.h_q * self.d * ELEMENT_BYTES[self.dtype]

    def pages(self):
        return sum(-(-keys // self.page_size) for keys in self.keys)

    def elements(self):
        """Of k, and of v, as they lie in memory."""
        if self.page_size:
            keys = self.pages() * self.page_size
        else:
            keys = self.b * self.s_kv if self.contiguous else sum(self.keys)
        return keys * self.h_kv * self.d

    def name(self):
        """What --rows is matched with."""
        return (f"{self.group} b={self.b} h={self.h_q}/{self.h_kv} s_q={self.s_q} s_kv={self.s_kv} d={self.d} "
                f"page={self.page_size} {self.variant}").rstrip()


def even(group, b, s_kv, s_q=1, **more):
    return Spec(group, (s_q,) * b, (s_kv,) * b, **more)


def log_uniform(count, least, most, seed=0):
    """Seeded lengths whose logarithms are uniform."""
    generator = random.Random(seed)
    return tuple(min(most, int(least * ((most + 1) / least) ** generator.random())) for _ in range(count))


def contiguous_rows():
    rows = [  # the rows of the table in docs/performance.md
        even("table", 1, 8192), even("table", 8, 8192), even("table", 64, 8192), even("table", 1, 131072),
        even("table", 256, 1024), even("table", 16, 4096, h_kv=32), even("table", 32, 8192, h_q=16, h_kv=1),
        even("table", 8, 8192, s_q=4), even("table", 16, 8192, d=64), even("table", 16, 8192, h_q=16, h_kv=8, d=256)]
    rows += [even("grid", b, s_kv) for b in (1, 4, 16, 64, 256) for s_kv in (1024, 8192, 32768, 131072)]
    rows += [even("heads", 16, 8192, h_q=h_q, h_kv=h_kv) for h_q, h_kv in ((64, 8), (32, 32), (16, 1))]
    rows += [even("heads", 16, 8192, d=d) for d in (64, 256)]
    rows += [Spec("ragged", (1,) * 128, log_uniform(128, 16, 32768), variant="ragged=log-uniform:16:32768"),
             Spec("ragged", (1,) * 128, (131072,) + (512,) * 127, variant="ragged=131072,512*127"),
             Spec("mixed", (2048,) * 2 + (1,) * 128, (2048,) * 130, variant="mixed=2*2048+128*1")]
    return [row for row in rows if row.kv_bytes() <= MOST_BYTES]


def all_rows(page_sizes=PAGE_SIZES):
    """Every row once, though two groups have it: the first one's."""
    seen, rows = set(), []
    for row in contiguous_rows():
        for page_size in page_sizes:
            row = dataclasses.replace(row, page_size=page_size)
            problem = tuple(row.problem().items())
            if problem not in seen:
                seen.add(problem)
                rows.append(row)
    return rows


def quick(row):
    return row.group in ("table", "mixed") or "log-uniform" in row.variant


def selected(rows, args):
    """Those that --quick and --rows leave."""
    return matching([row for row in rows if not args.quick or (quick(row) and row.page_size in (0, 16))], args)


def matching(rows, args):
    """Those that --rows leaves."""
    patterns = [re.compile(pattern) for pattern in args.rows]
    return [row for row in rows if not patterns or any(pattern.search(row.name()) for pattern in patterns)]


def whole_numbers(text):
    numbers = [int(part) for part in text.split(",")]
    if any(number < 0 for number in numbers):
        raise argparse.ArgumentTypeError(f"{text!r}: accepted are whole numbers from 0 on")
    return numbers


def peer_names(text):
    names = [part for part in text.split(",") if part]
    for name in names:
        if name not in PEERS:
            raise argparse.ArgumentTypeError(f"{name!r}: accepted are {', '.join(PEERS)}")
    return names


def pattern(text):
    try:
        re.compile(text)
    except re.error as problem:
        raise argparse.ArgumentTypeError(f"{text!r}: {problem}")
    return text


def add_options(parser):
    group = parser.add_argument_group("decodes over a KV cache")
    group.add_argument("--decode", action="store_true", help="instead: decodes, contiguous and in pages, in TB/s")
    group.add_argument("--quick", action="store_true", help="the table's rows, one ragged and the mixed one; pages of 16")
    group.add_argument("--rows", type=pattern, action="append", default=[],
                       help="only rows whose name matches, as 'grid b=1 ' or 'page=16$'; may be repeated")
    group.add_argument("--list", action="store_true", help="print the names of the rows, and measure nothing")
    group.add_argument("--page-sizes", type=whole_numbers, default=list(PAGE_SIZES), help="0: contiguous")
    group.add_argument("--peers", type=peer_names, default=list(PEERS), help="of " + ",".join(PEERS))
    group.add_argument("--fa3", default="flash_attn_interface", help="the module of FlashAttention-3")
    group.add_argument("--cold", action="store_true",
                       help="calls rotate over as many tensors as fill four L2 caches; recorded as variant cold")


def variant_of(row, cold):
    return "+".join(part for part in (row.variant, "cold" if cold else "") if part)


def entry(row, microseconds, cold=False):
    """A row of the results; `microseconds` of a call by library."""
    return {**row.problem(), "variant": variant_of(row, cold),
            "tbps": {name: round(row.bytes() / us / 1e6, 3) for name, us in microseconds.items()},
            "us": {name: round(us, 2) for name, us in microseconds.items()}}


def print_entry(result, print_line=print):
    peers = {name: rate for name, rate in result["tbps"].items() if name != "fa"}
    best = f"  of the best {result['tbps']['fa'] / max(peers.values()):.2f}" if peers else ""
    rates = "  ".join(f"{name} {rate:5.2f} ({result['us'][name]:.1f} us)" for name, rate in result["tbps"].items())
    print_line(f"b {result['b']:<4} {result['h_q']}/{result['h_kv']} s_q {result['s_q']:<4} s_kv {result['s_kv']:<7} "
               f"d {result['d_qk']:<3} page {result['page_size']:<3} {rates}{best} {result['variant']}".rstrip())


def summary(entries):
    """The geometric mean of fa's rate by that of the best peer, over rows that have peers; None without any."""
    ratios = [row["tbps"]["fa"] / max(rate for name, rate in row["tbps"].items() if name != "fa")
              for row in entries if len(row["tbps"]) > 1]
    return statistics.geometric_mean(ratios) if ratios else None


# ---- what a results file says besides ----

CONDITIONS = {"sm_mhz": "clocks.sm", "memory_mhz": "clocks.mem", "power_w": "power.draw", "power_limit_w": "power.limit",
              "temperature_c": "temperature.gpu"}


def conditions(samples):
    """Least, median and greatest of what nvidia-smi printed line by line, "1980, 2619, 512.3, 700.00, 45"; what it does not
    know, as "[N/A]", is left out."""
    columns = {name: [] for name in CONDITIONS}
    for line in samples.splitlines():
        cells = line.split(",")
        if len(cells) != len(CONDITIONS):
            continue
        for name, cell in zip(CONDITIONS, cells):
            try:
                columns[name].append(float(cell))
            except ValueError:
                pass
    return {name: [min(values), statistics.median(values), max(values)] for name, values in columns.items() if values}


def problem(row):
    """What makes two rows the same."""
    return tuple(sorted((key, value) for key, value in row.items() if isinstance(value, (str, int, bool))))


def kept(old, new):
    """Rows of an earlier run that this run did not measure again, before those that it did."""
    replaced = {problem(row) for row in new}
    return [row for row in old if problem(row) not in replaced] + new


def merged(results, entries, templates, ceilings, facts, part="decode"):
    """A results file with decodes, whose other parts stay as they are. Decodes of other templates are dropped; `ceilings`
    that are there already belong to the other parts."""
    old = results.get(part, []) if results.get(f"{part}_templates") == templates else []
    return {**ceilings, "templates": templates, "attention": [], "accuracy": [], "latency": {}, **results, **facts,
            f"{part}_templates": templates, part: kept(old, entries)}


def warnings(built, tree, results):
    """What somebody has to know of the templates in the library, in the tree and in an earlier results file."""
    texts = []
    if tree and built != tree:
        texts.append(f"the library has templates {built}, the tree {tree}: what is measured is not what is there")
    for key, what in (("templates", "attention"), ("decode_templates", "decode"), ("mla_templates", "mla")):
        if results.get(key) and results[key] != built:
            texts.append(f"the results of {what} are of templates {results[key]}, the library has {built}")
    return texts
