#!/usr/bin/env bash
# Makes what a cross build needs of other projects, in build/cross/TARGET: links to header-only packages of this machine,
# and GoogleTest compiled for the target. TARGET is a toolchain file of cmake/cross: mingw-w64 or aarch64-linux.
set -euo pipefail
cd "$(dirname "$0")/.."
target=${1:?"cross_packages.sh takes a toolchain: mingw-w64 or aarch64-linux"}
toolchain=$PWD/cmake/cross/$target.cmake
[[ -f "$toolchain" ]] || { echo "$0: there is no $toolchain" >&2 && exit 2; }
prefix=$PWD/build/cross/$target
[[ -d /usr/src/googletest ]] || { echo "$0: /usr/src/googletest is missing (Debian: googletest)" >&2 && exit 1; }

mkdir -p "$prefix"
cmake -DPREFIX="$prefix" -P cmake/cross/header_packages.cmake
if [[ ! -e "$prefix/lib/cmake/GTest/GTestConfig.cmake" ]]; then
  cmake -S /usr/src/googletest -B "$prefix/googletest" -G Ninja -DCMAKE_TOOLCHAIN_FILE="$toolchain" \
    -DFA_CROSS_PREFIX="$prefix" -DCMAKE_INSTALL_PREFIX="$prefix" -DCMAKE_INSTALL_LIBDIR=lib -DCMAKE_BUILD_TYPE=Release \
    -DBUILD_GMOCK=OFF -Wno-dev >/dev/null
  cmake --build "$prefix/googletest" >/dev/null
  cmake --install "$prefix/googletest" >/dev/null
fi
