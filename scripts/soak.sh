#!/usr/bin/env bash
# Long sweeps for maintainers: the tests marked `soak`. Arguments go to pytest.
set -euo pipefail
# shellcheck source=scripts/test_environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/test_environment.sh"

ensure_tests all
run_pytest all -m soak "$@"
echo "Soak tests passed: pytest -m soak ${*:-on everything}; next, run .ci/run if it has not run on this tree."
