"""What tools/compare.py --mla measures, and what becomes of it in a results file. Needs neither PyTorch nor a GPU."""

import argparse
import dataclasses

import compare_decode_rows as decode_rows

D_QK, D_V, H_KV = 576, 512, 1
PAGE_SIZES = (64, 16)
PEER_PAGE_SIZE = 64  # FlashMLA has no other
PEERS = ("flashmla",)
PART = "mla"
# What a run without --mla leaves as it is in a results file.
KEYS = tuple(PART + end for end in ("", "_templates", "_commit", "_method", "_conditions"))


@dataclasses.dataclass(frozen=True)
class Spec:
    """One row: requests of one length over pages, whose latents are K, and V in their first columns."""

    h_q: int
    b: int
    s_kv: int
    s_q: int = 1
    page_size: int = 64
    dtype: str = "bf16"

    @property
    def causal(self):
        return self.s_q > 1

    @property
    def pages_each(self):
        return -(-self.s_kv // self.page_size)

    def problem(self):
        """What the results file says of it."""
        return {"b": self.b, "h_q": self.h_q, "h_kv": H_KV, "s_q": self.s_q, "s_kv": self.s_kv, "d_qk": D_QK, "d_v": D_V,
                "dtype": self.dtype, "page_size": self.page_size, "variant": "value_in_key"}

    def bytes(self):
        """K, Q and O, each once."""
        return decode_rows.ELEMENT_BYTES[self.dtype] * self.b * (self.s_kv * D_QK + self.s_q * self.h_q * (D_QK + D_V))

    def products(self):
        """Of Q K^T and P V, of the pairs that the causal mask leaves, two operations each."""
        hidden = self.s_q * (self.s_q - 1) // 2
        return 2 * self.b * self.h_q * (self.s_q * self.s_kv - hidden) * (D_QK + D_V)

    def name(self):
        """What --rows is matched with."""
        return f"mla b={self.b} h={self.h_q}/{H_KV} s_q={self.s_q} s_kv={self.s_kv} page={self.page_size}"


def all_rows(page_sizes=PAGE_SIZES):
    rows = [Spec(16, b, s_kv) for b in (64, 128) for s_kv in (4096, 32768)]
    rows += [Spec(128, 128, s_kv, s_q) for s_q in (1, 2) for s_kv in (4096, 32768)]
    rows += [Spec(h_q, b, 32768) for h_q in (16, 128) for b in (1, 4)]
    return [dataclasses.replace(row, page_size=page_size) for page_size in page_sizes for row in rows]


def page_sizes(text):
    sizes = decode_rows.whole_numbers(text)
    if 0 in sizes:
        raise argparse.ArgumentTypeError(f"{text!r}: accepted are page sizes from 1 on")
    return sizes


def add_options(parser):
    group = parser.add_argument_group("multi-head latent attention over pages")
    group.add_argument("--mla", action="store_true", help="instead: absorbed decodes beside FlashMLA, in TB/s and TFLOP/s; --rows, "
                                                          "--list and --cold are as with --decode")
    group.add_argument("--mla-page-sizes", type=page_sizes, default=list(PAGE_SIZES), help="the peer has pages of 64")
    group.add_argument("--flash-mla", default="flash_mla", help="the module of FlashMLA")


def selected(args):
    """Those that --rows leaves."""
    return decode_rows.matching(all_rows(args.mla_page_sizes), args)


def entry(row, microseconds, cold=False):
    """A row of the results; `microseconds` of a call by library."""
    variant = "+".join([row.problem()["variant"], *(["cold"] if cold else [])])
    return {**row.problem(), "variant": variant,
            "us": {name: round(us, 2) for name, us in microseconds.items()},
            "tbps": {name: round(row.bytes() / us / 1e6, 3) for name, us in microseconds.items()},
            "tflops": {name: round(row.products() / us / 1e6, 1) for name, us in microseconds.items()}}


def print_entry(result, print_line=print):
    peers = {name: us for name, us in result["us"].items() if name != "fa"}
    best = f"  of the best {min(peers.values()) / result['us']['fa']:.2f}" if peers else ""
    rates = "  ".join(f"{name} {us:8.1f} us {result['tbps'][name]:5.2f} TB/s {result['tflops'][name]:5.0f} TFLOP/s"
                      for name, us in result["us"].items())
    cold = " cold" if result["variant"].endswith("cold") else ""
    print_line(f"b {result['b']:<4} {result['h_q']:>3}/{result['h_kv']} s_q {result['s_q']} s_kv {result['s_kv']:<6} "
               f"page {result['page_size']:<3} {rates}{best}{cold}")
