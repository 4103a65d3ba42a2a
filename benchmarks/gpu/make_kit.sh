#!/usr/bin/env bash
# Fetches what a bare machine with a GPU lacks beside torch (README.md beside this file):
#
#   benchmarks/gpu/make_kit.sh KITDIR [fbgemm.xz]
#
# PYTHON_VERSION (default 3.12) is that machine's; TORCHREC (default 1.6.1) goes with its torch.
set -eu
[ $# -ge 1 ] || { sed -n '2,6p' "$0" >&2; exit 2; }
kit=$1
mkdir -p "$kit"
cd "$(dirname "$0")/../.."
python=python3
[ -x .venv/bin/python ] && python=.venv/bin/python
"$python" -m pip download --quiet --no-deps --only-binary=:all: --python-version "${PYTHON_VERSION:-3.12}" --dest "$kit" \
    "torchrec==${TORCHREC:-1.6.1}" tensordict torchmetrics==1.0.3 lightning-utilities pyre-extensions typing-inspect \
    mypy-extensions pyvers cloudpickle orjson importlib-metadata zipp packaging psutil tqdm safetensors
[ $# -lt 2 ] || cp "$2" "$kit/fbgemm.xz"
du -sh "$kit"
