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
echo "Soak tests passed: pytest -m soak ${*:-on everything}; next, run .ci/run if it has not run on this tree."
