#!/usr/bin/env bash
# Long sweeps for maintainers: the tests marked `soak`. Arguments go to pytest.
set -euo pipefail
# shellcheck source=scripts/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

ensure_environment "$(tested_extras)"
ensure_tested_kernels
ensure_tested_conformance
ensure_browser
run_pytest -m soak "$@"
echo "Soak tests passed: pytest -m soak ${*:-on everything}; next, run .ci/run if it has not run on this tree."
