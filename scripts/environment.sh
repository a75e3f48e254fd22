# Sourced by the other scripts: finds Python, sets up .venv and builds the kernel library. Progress goes to stderr.
# shellcheck shell=bash

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
VENV="$ROOT/.venv"

export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
unset PYTHONHOME PYTHONPATH

say() { printf '%s\n' "$*" >&2; }

die() {
  say "error: $*"
  exit 2
}

# lock FILE: only one process at a time continues, until file descriptor 9 is closed. No lock where flock is missing.
lock() {
  exec 9<"$1"
  if command -v flock >/dev/null; then flock 9; fi
}

# install_packages NAMES...: with apt, if this user may; whether it worked shows in what is found afterwards.
install_packages() {
  [[ "$(id -u)" == 0 ]] && command -v apt-get >/dev/null || return 0
  say "installing $*"
  { apt-get update -qq && apt-get install -y -qq --no-install-recommends "$@"; } >&2 || true
}

is_recent_python() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

# Debian packages venv without ensurepip, so importing venv alone proves nothing.
has_venv() { "$1" -c 'import ensurepip, venv' >/dev/null 2>&1; }

# Prints a Python that can create a virtual environment.
find_python() {
  local candidate candidates=(python3.11 python3.12 python3.13 python3) without_venv=""
  # EFFEXPORT_PYTHON is used or refused, never replaced by another Python
  [[ -z "${EFFEXPORT_PYTHON:-}" ]] || candidates=("$EFFEXPORT_PYTHON")
  for candidate in "${candidates[@]}"; do
    is_recent_python "$candidate" || continue
    if has_venv "$candidate"; then
      printf '%s\n' "$candidate"
      return
    fi
    without_venv="${without_venv:-$candidate}"
  done
  if [[ -n "$without_venv" ]]; then
    install_packages python3-venv
    if has_venv "$without_venv"; then
      printf '%s\n' "$without_venv"
      return
    fi
    die "$without_venv cannot create virtual environments; on Debian and Ubuntu run: sudo apt install python3-venv" \
      "(or set EFFEXPORT_PYTHON to another Python)"
  fi
  [[ -z "${EFFEXPORT_PYTHON:-}" ]] || die "EFFEXPORT_PYTHON is $EFFEXPORT_PYTHON; expected Python 3.11 or later"
  die "no Python 3.11 or later found; install one, or set EFFEXPORT_PYTHON to its path"
}

# A moved or copied environment is broken too: its programs still start the Python of the old place.
venv_is_healthy() {
  local pip_of_python pip_of_script
  is_recent_python "$VENV/bin/python" || return 1
  pip_of_python="$("$VENV/bin/python" -c 'import os, pip; print(os.path.dirname(pip.__file__))' 2>/dev/null)" || return 1
  pip_of_script="$("$VENV/bin/pip" --version 2>/dev/null)" || return 1
  pip_of_script="${pip_of_script#* from }"
  [[ "${pip_of_script% (python*}" -ef "$pip_of_python" ]]
}

# Changes when the requirements do.
fingerprint() {
  "$VENV/bin/python" - "$1" "$ROOT/pyproject.toml" "$ROOT/constraints.txt" <<'PYTHON'
import hashlib
import sys
from pathlib import Path

digest = hashlib.sha256(sys.argv[1].encode())
for path in sys.argv[2:]:
    digest.update(b"\0" + Path(path).read_bytes())
print(digest.hexdigest())
PYTHON
}

install_extras() { (cd "$ROOT" && "$VENV/bin/python" -m pip install --quiet -c constraints.txt -e ".[$1]") >&2; }

# ensure_environment EXTRAS: .venv with effexport installed in place, in the versions of constraints.txt.
ensure_environment() {
  local extras="$1" python stamp wanted slow
  lock "$ROOT/pyproject.toml"
  if ! venv_is_healthy; then
    python="$(find_python)"
    say "creating .venv with $("$python" --version)"
    rm -rf "$VENV"
    "$python" -m venv "$VENV" >&2
  fi
  stamp="$VENV/effexport-${extras//,/-}.stamp"
  wanted="$(fingerprint "$extras")"
  if [[ ! -f "$stamp" || "$(<"$stamp")" != "$wanted" ]]; then
    [[ "$extras" != *build* ]] || slow=" (some minutes the first time: PyTorch is large)"
    say "installing effexport[$extras] into .venv${slow:-}"
    install_extras "$extras"
    printf '%s\n' "$wanted" >"$stamp"
  fi
  exec 9<&-
}

# has_tool NAME: whether a build would find a compiler, an nvcc.
has_tool() {
  "$VENV/bin/python" -c "from effexport.plugins.building import toolchain as t; raise SystemExit(t.find_$1() is None)"
}

# has_cmake: whether a build would find a cmake that is new enough.
has_cmake() {
  "$VENV/bin/python" -c "from effexport.plugins.building.toolchain import require_cmake; require_cmake()" 2>/dev/null
}

# ensure_release_tools: what makes the wheels of effexport-kernels, in .venv.
ensure_release_tools() {
  "$VENV/bin/python" -m pip install --quiet -r "$ROOT/scripts/release-requirements.txt" >&2
}

# ensure_build_tools: cmake in .venv and the system's C++ compiler, if they are missing and can be installed.
ensure_build_tools() {
  if ! has_cmake; then
    say "installing cmake into .venv"
    (lock "$ROOT/pyproject.toml" && install_extras kernels) || true
  fi
  if [[ -z "${CXX:-}" ]] && ! { has_tool compiler && { command -v ninja || command -v make; } >/dev/null; }; then
    install_packages g++ make
  fi
}

# install_kernels_wheel: the wheel of effexport-kernels that was made from the present sources, if it lies in dist or in
# the user's cache. Fails without one, and where CUDA kernels can be compiled, which it lacks.
install_kernels_wheel() {
  local folder wheel
  folder="$("$VENV/bin/python" -c "from effexport.plugins.building import library, toolchain
if toolchain.find_nvcc() and toolchain.kernel_gpus(): raise SystemExit(1)
print(library.cache_folder() / 'wheels')")" || return 1
  wheel="$("$VENV/bin/python" "$ROOT/scripts/kernels_wheel.py" --find "$ROOT/dist" "$folder")" || return 1
  say "installing $wheel"
  "$VENV/bin/python" -m pip install --quiet --no-index --no-deps --force-reinstall "$wheel" >&2
}

# ensure_kernels [OPTIONS...]: the kernel library for ONNX Runtime, in the user's cache. Fails if it cannot be built;
# the build itself names missing tools.
ensure_kernels() {
  ensure_build_tools
  "$VENV/bin/effexport" plugins build "$@" >&2
}
