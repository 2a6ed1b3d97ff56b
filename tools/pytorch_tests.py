#!/usr/bin/env python3
"""PyTorch's own tests of scaled_dot_product_attention, with fa in its place: which pass, which fail, and why.

    tools/pytorch_tests.py --lib build/release/libfa.so                      # what PyTorch's wheel has, on the CPU
    tools/pytorch_tests.py --suite transformers --lib build/release/libfa.so # test_transformers.py, downloaded
    tools/pytorch_tests.py --suite transformers --device cuda --lib build/release/libfa.so

The suite `opinfo` is what PyTorch's wheel has: the samples of the operator, forward and gradients,. The suite
`transformers` is test/test_transformers.py of PyTorch's public repository at the tag of the PyTorch that is installed. It is
kept in a folder that git ignores; --file names one that is here already.

On a GPU fa is registered as PyTorch's flash backend, where this PyTorch has a registry. Else, and with --patch, fa's
scaled_dot_product_attention takes the place of PyTorch's function, but for calls under SDPBackend.MATH alone and of nested
tensors: the former are what tests compare with. --plain leaves PyTorch as it is, for what fails without fa too. Ends with 1
where a test failed.

--part 3/8 takes each eighth test, from the third on: eight processes take all. --limit 100 begins none after 100 seconds, and says
how many were left.
"""

import argparse
import collections
import fnmatch
import functools
import importlib
import os
import pathlib
import re
import sys
import time
import traceback
import unittest
import urllib.request

try:
    import torch
    import torch.nn.functional as functional
except ImportError as problem:
    print(f"skipped: {problem}")
    sys.exit(77)

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "python"))
import fa_attention  # noqa: E402
from fa_attention.torch import register_flash_attention  # noqa: E402
from fa_attention.torch import scaled_dot_product_attention as ours  # noqa: E402

OWN = functional.scaled_dot_product_attention
SOURCE = "https://raw.githubusercontent.com/pytorch/pytorch/v{version}/test/{name}.py"
ROOM = 4 << 30  # bytes, that a process keeps of a GPU between tests
CHOSEN = ["*SDPA*", "*sdpa*", "*scaled_dot_product*", "*AttnBias*", "*flash*"]


def in_place_of(calls):
    """fa's function with the exceptions that this page of help names."""
    from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends

    @functools.wraps(OWN)
    def attention(query, key, value, *arguments, **options):
        tensors = (query, key, value)
        math = list(_cur_sdpa_kernel_backends()) == [SDPBackend.MATH]
        if math or any(getattr(t, "is_nested", False) or type(t) not in (torch.Tensor, torch.nn.Parameter) for t in tensors):
            return OWN(query, key, value, *arguments, **options)
        calls["fa"] += 1
        return ours(query, key, value, *arguments, **options)

    return attention


def place(device, patch, plain, calls):
    """How fa takes PyTorch's place, in words."""
    if plain:
        return "in place of nothing"
    if device == "cuda" and not patch:
        try:
            register_flash_attention()
            return "registered as the flash backend"
        except fa_attention.Unsupported:
            pass
    functional.scaled_dot_product_attention = in_place_of(calls)
    return "in place of torch.nn.functional.scaled_dot_product_attention"


class Result(unittest.TestResult):
    """Names and reasons."""

    def __init__(self):
        super().__init__()
        self.rows = []

    def row(self, kind, test, reason=""):
        name = test.id().split(".", 1)[-1] if hasattr(test, "id") else str(test)
        self.rows.append((kind, name, " ".join(str(reason).split())[:300]))

    def addSuccess(self, test):  # noqa: N802
        self.row("passed", test)

    def addSkip(self, test, reason):  # noqa: N802
        self.row("skipped", test, reason)

    def addExpectedFailure(self, test, error):  # noqa: N802
        self.row("passed", test, "fails as PyTorch's does")

    def addUnexpectedSuccess(self, test):  # noqa: N802
        self.row("passed", test, "where PyTorch's fails")

    def addFailure(self, test, error):  # noqa: N802
        self.row("failed", test, "".join(traceback.format_exception_only(*error[:2])))

    addError = addFailure  # noqa: N815

    def addDuration(self, test, elapsed):  # noqa: N802
        """Python 3.12 would ask for names that cases of functions do not have."""

    def addSubTest(self, test, subtest, error):  # noqa: N802
        if error is not None:
            self.addFailure(subtest, error)


def gradients(function, sample, dtype):
    tensors = [t.detach().to(dtype).requires_grad_() for t in (sample.input, *sample.args)]
    options = {name: value.detach().to(dtype) if isinstance(value, torch.Tensor) else value
               for name, value in sample.kwargs.items()}
    o = function(*tensors, **options)
    torch.manual_seed(1)
    dout = torch.randn(o.shape, dtype=torch.float32).to(o.device, dtype)
    return (o, *torch.autograd.grad(o, tensors, dout)), dout


# Of torch.testing.assert_close; of float32, what PyTorch's description of the operator says instead.
TOLERANCES = {torch.float16: (1e-3, 1e-3), torch.bfloat16: (1.6e-2, 1e-5), torch.float32: (5e-6, 5e-5),
              torch.float64: (1e-7, 1e-7)}


def of_rounded_o(sample, o, dout, dtype):
    """What it costs at most that backward is given an o of `dtype`, by the sum of dout o of each row: errors of dq and dk."""
    q, k = sample.input, sample.args[0]
    row = torch.finfo(dtype).eps / 2 * (dout.double() * o).abs().sum(-1).max() * q.shape[-1] ** -0.5
    rows = o.shape[:-1].numel() // q.shape[:-1].numel(), o.shape[:-1].numel() // k.shape[:-2].numel()  # that are summed up
    return row * rows[0] * k.abs().max().double(), row * rows[1] * q.abs().max().double()


def opinfo_case(sample, device, dtype):
    """Results beside PyTorch's by products of matrices in float64: as near as its tolerances and the rounding of o say, or no
    more than twice as far as PyTorch's own choice of a kernel in the same dtype."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.MATH):
        wanted, dout = gradients(OWN, sample, torch.float64)
    peers, _ = gradients(OWN, sample, dtype)
    results, _ = gradients(functional.scaled_dot_product_attention, sample, dtype)
    relative, absolute = TOLERANCES[dtype]
    more = dict(zip(("dq", "dk"), of_rounded_o(sample, wanted[0], dout, dtype)))
    for name, result, right, peer in zip(("o", "dq", "dk", "dv"), results, wanted, peers):
        assert result.shape == right.shape and result.dtype == dtype, f"{name} is {list(result.shape)} {result.dtype}"
        if sample.kwargs.get("dropout_p"):  # other random bits
            assert result.isfinite().all(), f"{name} is not finite"
            continue
        error, own = ((t.double() - right).abs() for t in (result, peer))
        worst = (error - absolute - relative * right.abs()).max() - more.get(name, 0)
        assert worst <= 0 or error.max() <= 2 * own.max(), f"the error of {name} is {error.max():.3g}, PyTorch's {own.max():.3g}"


class Turn:
    """Whether a test is one of this process's, and there is time for it."""

    def __init__(self, part, limit, skipped):
        self.index, self.count = (int(n) for n in part.split("/"))
        self.end = time.monotonic() + limit if limit else None
        self.skipped = skipped
        self.seen, self.left = 0, 0

    def comes(self, name):
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in self.skipped):
            return False
        self.seen += 1
        if (self.seen - self.index) % self.count:
            return False
        late = self.end is not None and time.monotonic() > self.end
        self.left += late
        return not late


def opinfo(device, result, patterns, turn):
    """The samples of PyTorch's own description of the operator."""
    try:
        from torch.testing._internal.common_methods_invocations import op_db
    except ImportError as error:
        print(f"{error}: PyTorch's own tests need expecttest and numpy")
        sys.exit(77)
    info = next(op for op in op_db if op.name == "nn.functional.scaled_dot_product_attention")
    for dtype in TOLERANCES if device == "cpu" else (torch.float16, torch.bfloat16):
        for n, sample in enumerate(info.sample_inputs(device, dtype, requires_grad=True)):
            words = [f"{name}={'tensor' if isinstance(value, torch.Tensor) else value}" for name, value in sample.kwargs.items()]
            shapes = " ".join(str(list(t.shape)) for t in (sample.input, *sample.args))
            name = f"opinfo {str(dtype).removeprefix('torch.')} sample {n}: {shapes} {' '.join(words)}"
            if not any(fnmatch.fnmatch(name, pattern) for pattern in patterns or ["*"]) or not turn.comes(name):
                continue
            case = unittest.FunctionTestCase(functools.partial(opinfo_case, sample, device, dtype), description=name)
            case.id = lambda name=name: f"torch.{name}"
            case.run(result)


def download(name, folder):
    path = folder / f"{name}.py"
    if not path.is_file():
        version = re.match(r"\d+\.\d+\.\d+", torch.__version__).group()
        url = SOURCE.format(version=version, name=name)
        print(f"fetching {url}", flush=True)
        try:
            with urllib.request.urlopen(url, timeout=60) as answer:
                text = answer.read()
        except OSError as error:
            sys.exit(f"{url} cannot be fetched ({error}); --file names a test_transformers.py that is here already")
        folder.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text)


def tests_of(suite):
    for test in suite:
        yield from tests_of(test) if isinstance(test, unittest.TestSuite) else (test,)


def transformers(device, result, patterns, turn, file, folder):
    """test_transformers.py, with what it imports of its folder."""
    if file is None:
        download("test_transformers", folder)
    else:
        folder = file.resolve().parent
    os.environ["PYTORCH_TESTING_DEVICE_ONLY_FOR"] = device
    sys.path.insert(0, str(folder))
    sys.argv = sys.argv[:1]
    while True:
        try:
            module = importlib.import_module(file.stem if file else "test_transformers")
            break
        except ModuleNotFoundError as error:  # a module of the same folder
            if file is not None or not str(error.name).startswith("test_"):
                raise
            download(error.name, folder)
    for test in tests_of(unittest.defaultTestLoader.loadTestsFromModule(module)):
        if any(fnmatch.fnmatchcase(test.id(), pattern) for pattern in patterns or CHOSEN) and turn.comes(test.id()):
            test.run(result)
            if device == "cuda" and torch.cuda.memory_reserved() > ROOM:
                torch.cuda.empty_cache()  # other processes test beside


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=["opinfo", "transformers"], default="opinfo")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--patch", action="store_true", help="do not register as the flash backend, on a GPU too")
    parser.add_argument("--plain", action="store_true", help="PyTorch without fa")
    parser.add_argument("--match", action="append", metavar="PATTERN", help="of names: these alone")
    parser.add_argument("--skip", action="append", metavar="PATTERN", default=[], help="of names: not these")
    parser.add_argument("--file", type=pathlib.Path, help="a test_transformers.py")
    parser.add_argument("--folder", type=pathlib.Path, default=ROOT / ".scratch" / "pytorch_tests" / torch.__version__)
    parser.add_argument("--lib", type=pathlib.Path)
    parser.add_argument("--part", default="1/1", metavar="I/N")
    parser.add_argument("--limit", type=float, metavar="SECONDS")
    parser.add_argument("--list", action="store_true", help="name also what passed")
    args = parser.parse_args()
    fa_attention.load(args.lib)
    calls, result = collections.Counter(), Result()
    how = place(args.device, args.patch, args.plain, calls)
    print(f"torch {torch.__version__}, {args.device}, fa {how}", flush=True)
    turn = Turn(args.part, args.limit, args.skip)
    if args.suite == "opinfo":
        opinfo(args.device, result, args.match, turn)
    else:
        transformers(args.device, result, args.match, turn, args.file, args.folder)
    for kind, name, reason in result.rows:
        if kind == "failed" or args.list:
            print(f"{kind:<8}{name}{': ' + reason if reason else ''}")
    counted = collections.Counter(kind for kind, _, _ in result.rows)
    for reason, count in collections.Counter(reason for kind, _, reason in result.rows if kind == "skipped").most_common(12):
        print(f"skipped {count}: {reason}")
    print(f"{counted['passed']} passed, {counted['failed']} failed, {counted['skipped']} skipped"
          + (f"; {calls['fa']} calls of fa" if calls else "") + (f"; {turn.left} left for want of time" if turn.left else ""))
    if not counted["passed"] + counted["failed"]:
        sys.exit("no test ran")
    sys.exit(1 if counted["failed"] else 0)


if __name__ == "__main__":
    main()
