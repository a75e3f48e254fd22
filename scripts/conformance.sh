#!/usr/bin/env bash
# Tries the TensorRT plugins with TensorRT's own Python packages; needs no GPU. Arguments go to pytest.
set -euo pipefail
# shellcheck source=scripts/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

ensure_environment "$(tested_extras)"
ensure_conformance || die "the environments for TensorRT's plugins were not made, see above"
EFFEXPORT_REQUIRE="${EFFEXPORT_REQUIRE-torch,onnx,tensorrt}" run_pytest tests/plugins/test_tensorrt_plugins.py "$@"
echo "Conformance tests passed: TensorRT takes the plugins as they are; next, run .ci/run if it has not run on this tree."
