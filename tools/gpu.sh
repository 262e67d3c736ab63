#!/usr/bin/env bash
# Everything that only a card can show, on a machine where nothing can be installed but wheels that were brought along.
#
#   tools/gpu.sh wheels        where there is a network: puts what is needed beside torch into wheels/
#   tools/gpu.sh [options]     where there is a card, with torch and its Python (PYTHON=python3.12): see tools/gpu.py
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
needed=(lark graphviz numpy "pytest>=9")
if [[ ${1:-} == wheels ]]; then
    exec "$python" -m pip download --quiet --dest wheels --only-binary=:all: \
        --python-version "${VERSION:-3.12}" --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 "${needed[@]}"
fi
# A wheel of Python alone is a zip whose files lie as they are imported: no pip is needed, and nothing is installed.
site=$PWD/out/site
"$python" - "$site" <<'PY'
import sys, zipfile
from importlib.util import find_spec
from pathlib import Path

site = Path(sys.argv[1])
site.mkdir(parents=True, exist_ok=True)
for wheel in sorted(Path("wheels").glob("*.whl")):
    if wheel.name.partition("-")[0] != "numpy" or find_spec("numpy") is None:  # torch goes with the one it has
        zipfile.ZipFile(wheel).extractall(site)
missing = [name for name in ("lark", "graphviz", "numpy", "pytest") if find_spec(name) is None and not (site / name).is_dir()]
if missing:
    sys.exit(f"gpu: {', '.join(missing)} are neither here nor in wheels/; run `tools/gpu.sh wheels` where there is a network")
PY
PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH} exec "$python" tools/gpu.py "$@"
