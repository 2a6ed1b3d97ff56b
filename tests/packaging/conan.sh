#!/usr/bin/env bash
# Runs the Conan recipe and its test package, with stand-ins for the dependencies. Exit status 77: Conan is not installed.
set -euo pipefail
cd "$(dirname "$0")/../.."
command -v conan >/dev/null || { echo "conan is not installed"; exit 77; }
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
export CONAN_HOME=$scratch/conan
conan profile detect >/dev/null 2>&1
for dependency in fmt/10.2.1 spdlog/1.14.1 nlohmann_json/3.11.3 xxhash/0.8.2 cli11/2.4.2; do
  cp tests/packaging/stand_in.py "$scratch/conanfile.py"
  conan create "$scratch" --name "${dependency%/*}" --version "${dependency#*/}" --no-remote >"$scratch/log" 2>&1 ||
    { cat "$scratch/log"; exit 1; }
done
for shared in ${SHARED:-True False}; do
  conan create packaging/conan --no-remote -s compiler.cppstd=20 -o "fa/*:shared=$shared" "$@"
done
