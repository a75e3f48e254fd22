#!/usr/bin/env bash
# Long sweeps for maintainers: the tests marked `soak`, the attacks of scripts/campaign.py, then the whole of
# scripts/portability.py. Arguments go to pytest; with any, only the tests run.
set -euo pipefail
# shellcheck source=scripts/test_environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/test_environment.sh"

ensure_tests all
ensure_release_tools
run_pytest all -m soak "$@"
# all attacks, whose figures docs/security.md has
[[ $# -gt 0 ]] || "$VENV/bin/python" "$ROOT/scripts/campaign.py"
# the whole matrix of docs/portability.md; the suite has a part of it
[[ $# -gt 0 ]] || "$VENV/bin/python" "$ROOT/scripts/portability.py"
# NVIDIA ModelOpt needs other releases of onnx and onnxruntime than we do
opinion="$ROOT/.venv-modelopt"
if [[ $# -eq 0 ]]; then
  if [[ ! -f "$opinion/complete" ]]; then
    "$VENV/bin/python" -m venv --clear "$opinion"
    "$opinion/bin/pip" install -q "$(grep ^torch== "$ROOT/constraints.txt")" -r "$ROOT/scripts/modelopt-requirements.txt"
    "$opinion/bin/pip" install -q --no-deps nvidia-modelopt==0.47.0
    touch "$opinion/complete"
  fi
  "$VENV/bin/python" "$ROOT/scripts/modelopt_opinion.py" "$opinion/bin/python"
fi
echo "Soak tests passed: pytest -m soak ${*:-on everything}; next, run .ci/run if it has not run on this tree."
