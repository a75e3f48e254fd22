#!/usr/bin/env bash
# Loads the TensorRT plugins with TensorRT's own Python packages; needs no GPU. Arguments go to pytest.
set -euo pipefail
# shellcheck source=scripts/test_environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/test_environment.sh"

ensure_environment "$(tested_extras all)"
ensure_conformance || die "the environments with TensorRT's Python packages could not be set up, see above"
EFFEXPORT_REQUIRE="${EFFEXPORT_REQUIRE-torch,onnx,tensorrt}" run_pytest all tests/plugins/test_tensorrt_plugins.py "$@"
echo "Conformance tests passed: TensorRT accepts the plugins; next, run .ci/run if it has not run on this tree."
