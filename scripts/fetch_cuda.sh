#!/usr/bin/env bash
# Puts the CUDA compiler into build/cuda, from PyPI, unless there is one already: in $CUDA_HOME, in
# /usr/local/cuda or in the path. Prints the folder that has bin/nvcc. 100 MB; no driver, no GPU.
set -euo pipefail
cd "$(dirname "$0")/.."

for home in "${CUDA_HOME:-}" /usr/local/cuda "$PWD/build/cuda"; do
    if [[ -n "$home" && -x "$home/bin/nvcc" ]]; then
        echo "$home"
        exit 0
    fi
done
if nvcc=$(command -v nvcc); then
    dirname "$(dirname "$(readlink -f "$nvcc")")"
    exit 0
fi
if [[ "$(uname -m)" != x86_64 ]]; then
    echo "no nvcc, and this script knows where to get one for x86-64 only" >&2
    exit 1
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
wheels=(
    nvidia-cuda-nvcc==13.0.88 56fe502eb77625a12f25172caa3cdddb4e4c8ba2c8c17dba44b164761b380f03
    nvidia-nvvm==13.0.88 c5f41ffeb6466944a026dfa5317d7d85355c119bbec279205d22f1869d1054e0
    nvidia-cuda-crt==13.0.88 2c8043c7c9e02492716426e9919fc78d2c5b3b2a7a768a88e952676b08aa55a4
    nvidia-cuda-runtime==13.0.96 7f82250d7782aa23b6cfe765ecc7db554bd3c2870c43f3d1821f1d18aebf0548
)
for ((i = 0; i < ${#wheels[@]}; i += 2)); do
    scripts/fetch_wheel.sh "${wheels[i]}" "${wheels[i + 1]}" "$work"
done
for wheel in "$work"/*.whl; do
    python3 -m zipfile -e "$wheel" "$work/unpacked"
done
# Wheels do not say what is a program.
chmod +x "$work"/unpacked/nvidia/cu13/bin/* "$work"/unpacked/nvidia/cu13/nvvm/bin/*
mkdir -p build
rm -rf build/cuda
mv "$work/unpacked/nvidia/cu13" build/cuda
echo "$PWD/build/cuda"
