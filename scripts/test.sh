#!/usr/bin/env bash
# Runs the tests; arguments go to pytest: scripts/test.sh tests/models -k lsh
set -euo pipefail
# shellcheck source=scripts/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

ensure_environment "$(tested_extras)"
ensure_tested_kernels
ensure_tested_conformance
ensure_browser
ensure_tested_triton
run_pytest "$@"
echo "Tests passed: pytest ${*:-on everything but the soak tests}; next, run .ci/run for lint and types as well."
