#!/usr/bin/env bash
# Builds fa and computes attention of a small transformer's q, k and v: on the GPU if there is one, else on the host.
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/lib.sh

install_packages
mkdir -p build
say "building"
cmake --preset release >build/configure-release.log 2>&1 || { cat build/configure-release.log; exit 1; }
cmake --build build/release -j "$jobs" --target fa_cli

fa=build/release/tools/fa
say "fa info"
"$fa" info
if has_gpu; then device="the GPU"; else device="the host: there is no NVIDIA GPU with a driver on this machine"; fi
say "causal attention on $device"
"$fa" run --input tests/data/char_transformer_layer0.safetensors --output build/demo.safetensors --causal --verify
