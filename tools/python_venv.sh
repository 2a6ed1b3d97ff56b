#!/usr/bin/env bash
# Prints the path of an interpreter that has what tests/python need: FA_PYTHON, or python3, where these have it, else one in
# build/python-venv, with what a package index gives. Where none answers it says so, and prints nothing: the tests skip themselves,
# each with its reason.
#
#   tools/python_venv.sh           NumPy and pytest
#   tools/python_venv.sh --torch   also PyTorch, transformers and mypy: PyTorch for CPUs, where its index answers, else PyPI's
set -euo pipefail
cd "$(dirname "$0")/.."
python=${FA_PYTHON:-python3}
venv=build/python-venv
wanted=(numpy pytest)
[[ ${1:-} != --torch ]] || wanted+=(torch transformers mypy)

skip() {
  echo "tests of Python that need ${wanted[*]} skip: $*" >&2
  exit 0
}

missing() {  # missing PYTHON: what it cannot import
  "$1" - "${wanted[@]}" <<<'import importlib.util, sys
print(*(name for name in sys.argv[1:] if importlib.util.find_spec(name) is None))'
}

install() {  # install PACKAGES...
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --retries 1 --timeout 20 "$@" >&2
}

command -v "$python" >/dev/null || skip "there is no $python"
lacks=$(missing "$python")
[[ -n $lacks ]] || { command -v "$python" && exit 0; }
if [[ ! -x $venv/bin/python ]]; then
  "$python" -c 'import venv, ensurepip' 2>/dev/null || skip "$python lacks $lacks, and has no venv or no pip for one"
  "$python" -m venv --system-site-packages "$venv" >&2 || skip "$python makes no $venv"
fi
read -ra lacks <<<"$(missing "$venv/bin/python")"
for name in "${lacks[@]}"; do
  [[ $name != torch ]] || install torch --index-url https://download.pytorch.org/whl/cpu 2>/dev/null || true
  install "$name" || skip "no package index answers with $name"
done
echo "$PWD/$venv/bin/python"
