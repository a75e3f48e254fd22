#!/usr/bin/env bash
# From a fresh clone to a first artifact: makes .venv with the kernel library, exports the LSH variant and checks it. A
# wheel with the library of these sources, made by scripts/release.sh or scripts/kernels_wheel.py, saves compiling it.
# EFFEXPORT_PYTHON selects the Python (3.11 or later).
set -euo pipefail
# shellcheck source=scripts/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$ROOT"

[[ $# -eq 0 ]] || die "quickstart.sh takes no arguments; got: $*"
ensure_environment cpu
if install_kernels_wheel; then
  ensure_environment build,cpu,text
else
  # The compiler needs no PyTorch, so it runs meanwhile. A build that fails is tried again below, and says why.
  ensure_build_tools
  set -m # a process group of its own, to be ended as a whole
  "$VENV/bin/effexport" plugins build >/dev/null 2>&1 &
  set +m
  trap 'kill -- "-$!" 2>/dev/null || true' EXIT
  ensure_environment build,cpu,text
  wait
  trap - EXIT
  ensure_kernels ||
    say "WARNING: no kernel library, for the reason above: custom operators run as their ONNX function bodies, which" \
      "is slower. Everything else works; try again with: .venv/bin/effexport plugins build"
fi
"$VENV/bin/effexport" build --variant lsh --force >&2
echo "Made artifacts/lsh: model.onnx, golden values and a parity report; next, open artifacts/lsh/report.html or run: .venv/bin/effexport verify artifacts/lsh"
