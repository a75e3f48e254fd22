#!/usr/bin/env bash
# Runs the fast part of the suite, or with --all also the tests marked `slow`. Other arguments go to pytest:
# scripts/test.sh tests/models -k lsh
set -euo pipefail
# shellcheck source=scripts/test_environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/test_environment.sh"

size=fast
if [[ "${1:-}" == --all ]]; then
  size=all
  shift
fi
ensure_tests "$size"
run_pytest "$size" "$@"
if [[ "$size" == fast ]]; then
  echo "Tests passed: pytest ${*:-on the fast part}; next, run .ci/run for the slow part, lint and types as well."
else
  echo "Tests passed: pytest ${*:-on everything but the soak tests}; next, run .ci/run for lint and types as well."
fi
