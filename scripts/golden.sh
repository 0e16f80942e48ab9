#!/usr/bin/env bash
# Rewrites the golden files. Look at the difference before committing it: a changed file is a
# changed promise.
#
#   scripts/golden.sh BUILD_TREE [abi|samples]
#
# abi      what the library exports, how its structs lie, what its statuses are: written by the ABI
#          tests themselves, which otherwise compare.
# samples  logits, token ids and weights from independent engines, in an environment under build/.
set -euo pipefail
cd "$(dirname "$0")/.."
tree=${1:?usage: golden.sh BUILD_TREE [abi|samples]}
what=${2:-all}

if [[ "$what" == abi || "$what" == all ]]; then
    KVRT_UPDATE_GOLDEN=1 "$tree/bin/test_abi"
fi

if [[ "$what" == samples || "$what" == all ]]; then
    environment=build/golden-environment
    if [[ ! -x "$environment/bin/python" ]]; then
        python3 -m venv "$environment"
    fi
    "$environment/bin/python" -m pip install --quiet llama-cpp-python gguf tokenizers
    "$environment/bin/python" tests/samples/golden/make_golden.py "$(scripts/fetch_model.sh)"
fi
