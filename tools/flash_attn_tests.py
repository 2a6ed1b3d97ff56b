#!/usr/bin/env python3
"""FlashAttention's own test of flash_attn_with_kvcache, with fa_attention.flash_attn in the package's place.

    tools/flash_attn_tests.py --file .../flash-attention/tests/test_flash_attn.py --lib build/release/libfa.so
    tools/flash_attn_tests.py --file ... --lib ... --device cuda --count 2000 --seed 7

The test has some hundred thousand combinations of its parameters. --count of them are drawn, and those that it skips are not
counted. It needs PyTorch, pytest and einops, not flash_attn. Ends with 1 where one failed.
"""

import argparse
import collections
import contextlib
import io
import os
import pathlib
import random
import sys
import time
import types

try:
    import einops  # noqa: F401  the test's
    import pytest
    import torch
except ImportError as problem:
    print(f"skipped: {problem}")
    sys.exit(77)

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "python"))
import fa_attention  # noqa: E402
from fa_attention import flash_attn  # noqa: E402

TEST = "test_flash_attn_kvcache"


def rotated(x, cos, sin, interleaved=False, seqlen_offsets=0, **_):
    """x [b, s, h, d], its first columns turned by angles of [positions, columns / 2], from each entry's offset on."""
    half, length = cos.shape[-1], x.shape[1]
    first, rest = x[..., : 2 * half].float(), x[..., 2 * half:]
    offsets = torch.as_tensor(seqlen_offsets, device=x.device).expand(x.shape[0])
    at = offsets.long()[:, None] + torch.arange(length, device=x.device)
    c, s = (t[at][:, :, None].float() for t in (cos, sin))
    a, b = (first[..., ::2], first[..., 1::2]) if interleaved else (first[..., :half], first[..., half:])
    turned = a * c - b * s, a * s + b * c
    whole = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    return torch.cat((whole.to(x.dtype), rest), -1)


def take_the_place():
    """Modules that the test imports. What other tests of the file want is not there when it is called."""

    def module(name, **members):
        made = types.ModuleType(name)
        made.__dict__.update(members)
        sys.modules[name] = made

    module("flash_attn", **{name: getattr(flash_attn, name) for name in flash_attn.__all__}, __path__=[])
    module("flash_attn.layers", __path__=[])
    module("flash_attn.layers.rotary", apply_rotary_emb=rotated)
    module("flash_attn.bert_padding", pad_input=None, unpad_input=None)
    module("flash_attn.flash_attn_interface", _get_block_size_n=None, USE_TRITON_ROCM=False)


def load(file, device):
    """The file as a module; its tests ask for "cuda", and for what that is."""
    text = file.read_text()
    text = text.replace('device = "cuda"', f'device = "{device}"')
    if device == "cpu":
        text = text.replace('torch.cuda.get_device_capability("cuda")', "(9, 0)")
    module = types.ModuleType("flash_attention_tests")
    exec(compile(text, str(file), "exec"), module.__dict__)
    return module


def parameters_of(test):
    """[(names, values)] of its pytest.mark.parametrize."""
    marks = [mark for mark in test.pytestmark if mark.name == "parametrize"]
    return [([name.strip() for name in mark.args[0].split(",")], list(mark.args[1])) for mark in marks]


def draw(parameters, longest):
    chosen = {}
    for names, values in parameters:
        value = random.choice([v for v in values if not isinstance(v, tuple) or max(v) <= longest])
        chosen.update(zip(names, value if len(names) > 1 else (value,)))
    return chosen


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=pathlib.Path, required=True, help="FlashAttention's tests/test_flash_attn.py")
    parser.add_argument("--lib", type=pathlib.Path)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=1e9, metavar="SECONDS", help="draw none after that")
    parser.add_argument("--longest", type=int, default=1 << 30, help="rows of the longest cache")
    args = parser.parse_args()
    fa_attention.load(args.lib)
    os.environ.pop("PYTEST_CURRENT_TEST", None)
    take_the_place()
    test = getattr(load(args.file, args.device), TEST)
    parameters = parameters_of(test)
    random.seed(args.seed)
    counted, end = collections.Counter(), time.monotonic() + args.limit
    while counted["passed"] + counted["failed"] < args.count and time.monotonic() < end:
        chosen = draw(parameters, args.longest)
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                test(**chosen)
            counted["passed"] += 1
        except pytest.skip.Exception:
            counted["skipped"] += 1
        except Exception as error:  # whatever it is, it is a failure
            counted["failed"] += 1
            print(f"failed: {chosen}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}", flush=True)
    print(f"torch {torch.__version__}, {args.device}: {counted['passed']} passed, {counted['failed']} failed, "
          f"{counted['skipped']} skipped by the test itself")
    sys.exit(1 if counted["failed"] or not counted["passed"] else 0)


if __name__ == "__main__":
    main()
