#!/usr/bin/env bash
# Several versions of NVRTC from PyPI: kernels of every family, and what the store makes of two compilers. Needs no GPU.
#
#   tools/nvrtc_tests.sh [ARGUMENTS...]    of tools/nvrtc_versions.py: --whole compiles all kernels of the long lists
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/lib.sh

install_packages
cmake --preset release -DBUILD_SHARED_LIBS=ON -DFA_PRECOMPILE=ON >/dev/null
cmake --build build/release -j "$jobs" --target fa_spec_cubins fa_cli
tools/nvrtc_versions.py "$@" --jobs "$jobs" --json build/nvrtc.json --markdown build/nvrtc.md
cat build/nvrtc.md

say "the store's policy, with two compilers"
store=$PWD/build/nvrtc-store  # the store takes no relative folder
rm -rf "$store"
problem=(--arch sm_80 --head-dim 64 --dtype bf16 --causal yes --directory "$store")
by() {  # by VERSION POLICY
  FA_NVRTC_PATH=$(dirname "$(compgen -G "build/nvrtc/$1/nvidia/*/lib/libnvrtc.so.*" | head -1)") \
    FA_CACHE_COMPILERS=$2 build/release/tools/fa compile "${problem[@]}"
}
expect() {  # expect WORD VERSION POLICY: whether it compiles or finds what is stored
  local said
  said=$(by "$2" "$3" 2>&1) || { echo "failed: NVRTC $2 under '$3'" && echo "$said" && exit 1; }
  grep -q "^$1" <<<"$said" || { echo "failed: NVRTC $2 under '$3': '$1' expected" && echo "$said" && exit 1; }
  echo "pass: NVRTC $2 under '$3': $1"
}
expect compiled 12.0 ''
expect cached 12.8 ''        # any compiler's kernel serves
expect cached 12.8 12.0
expect compiled 12.8 '>=12.4'  # what is stored is too old, and replaced
expect cached 12.0 '>=12.4'
say_time nvrtc
