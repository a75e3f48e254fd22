# Sourced by the other scripts: finds Python, keeps .venv in order, runs pytest. Progress goes to stderr.
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

is_recent_python() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

# Debian packages venv without ensurepip, so importing venv alone proves nothing.
has_venv() { "$1" -c 'import ensurepip, venv' >/dev/null 2>&1; }

# Prints a Python that can make a virtual environment.
find_python() {
  local candidate without_venv=""
  for candidate in ${EFFEXPORT_PYTHON:+"$EFFEXPORT_PYTHON"} python3.11 python3.12 python3.13 python3; do
    if is_recent_python "$candidate"; then
      if has_venv "$candidate"; then
        printf '%s\n' "$candidate"
        return
      fi
      without_venv="${without_venv:-$candidate}"
    fi
    # an explicit choice is kept or refused, never replaced
    [[ -z "${EFFEXPORT_PYTHON:-}" ]] || break
  done
  if [[ -n "$without_venv" ]]; then
    # Debian ships Python without the means to make environments; with the right to, add them
    if [[ "$(id -u)" == 0 ]] && command -v apt-get >/dev/null; then
      say "installing python3-venv, which $without_venv needs to create .venv"
      { apt-get update -qq && apt-get install -y -qq --no-install-recommends python3-venv; } >&2 || true
      if has_venv "$without_venv"; then
        printf '%s\n' "$without_venv"
        return
      fi
    fi
    die "$without_venv cannot create virtual environments; on Debian and Ubuntu run: sudo apt install python3-venv" \
      "(or set EFFEXPORT_PYTHON to another Python)"
  fi
  if [[ -n "${EFFEXPORT_PYTHON:-}" ]]; then
    die "EFFEXPORT_PYTHON is $EFFEXPORT_PYTHON; expected a Python 3.11 or later that runs"
  fi
  die "no Python 3.11 or later found; install one, or set EFFEXPORT_PYTHON to its path"
}

# An environment that was moved or copied is broken too: its programs name the Python of the old place.
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

# ensure_environment EXTRAS: .venv with effexport installed in place, at the versions of constraints.txt.
ensure_environment() {
  local extras="$1" python stamp wanted
  # one set-up at a time, where the system has the means; two at once would spoil each other's .venv
  exec 9<"$ROOT/pyproject.toml"
  if command -v flock >/dev/null; then flock 9; fi
  if ! venv_is_healthy; then
    python="$(find_python)"
    say "creating .venv with $("$python" --version)"
    rm -rf "$VENV"
    "$python" -m venv "$VENV" >&2
  fi
  stamp="$VENV/effexport-${extras//,/-}.stamp"
  wanted="$(fingerprint "$extras")"
  if [[ ! -f "$stamp" || "$(<"$stamp")" != "$wanted" ]]; then
    say "installing effexport[$extras] into .venv (some minutes the first time: PyTorch is large)"
    (cd "$ROOT" && "$VENV/bin/python" -m pip install --quiet -c constraints.txt -e ".[$extras]") >&2
    printf '%s\n' "$wanted" >"$stamp"
  fi
  exec 9<&-
}

# has_tool NAME: whether a build would find a cmake that is new enough, a compiler, an nvcc.
has_tool() {
  "$VENV/bin/python" -c "from effexport.plugins import toolchain; raise SystemExit(toolchain.find_$1() is None)"
}

# has_browser: whether a browser is there that tests can drive, by the names of tests/conftest.py.
has_browser() { command -v chromium || command -v chromium-browser || command -v google-chrome; } >/dev/null

# ensure_build_tools: cmake in .venv and the system's C++ compiler, where they are missing and can be added.
ensure_build_tools() {
  if ! has_tool cmake; then
    say "installing cmake into .venv"
    (
      exec 9<"$ROOT/pyproject.toml"
      if command -v flock >/dev/null; then flock 9; fi
      cd "$ROOT" && "$VENV/bin/python" -m pip install --quiet -c constraints.txt -e ".[kernels]"
    ) >&2 || true
  fi
  if [[ -z "${CXX:-}" ]] && ! { has_tool compiler && { command -v ninja || command -v make; } >/dev/null; } &&
    [[ "$(id -u)" == 0 ]] && command -v apt-get >/dev/null; then
    say "installing g++ and make, which the kernel library is compiled with"
    { apt-get update -qq && apt-get install -y -qq --no-install-recommends g++ make; } >&2 || true
  fi
}

# ensure_kernels: the kernel library for ONNX Runtime, in the user's cache. Fails when it cannot be built.
ensure_kernels() {
  # what cannot be added here is missed, with its remedy, by the build itself
  ensure_build_tools
  "$VENV/bin/effexport" plugins build >&2
}

# can_have_tensorrt: NVIDIA's packages are for Linux on x86-64, as far as we use them.
can_have_tensorrt() { [[ "$(uname -sm)" == "Linux x86_64" ]]; }

# tested_extras: what the tests are run with; TensorRT-RTX, which builds engines without a GPU, where it can be had.
tested_extras() {
  if can_have_tensorrt; then printf '%s\n' cpu,test,dev,sweep,serve-ray,rtx; else printf '%s\n' cpu,test,dev,sweep,serve-ray; fi
}

# conformance_stamp MAJOR: what .venv-tensorrt/MAJOR is made from, and where; tests/conftest.py compares it.
conformance_stamp() {
  { printf '%s\n' "$ROOT" && cat "$ROOT/scripts/conformance-requirements-$1.txt" "$ROOT/tests/plugins/tensorrt/shim.c"; } |
    sha256sum | cut -d " " -f 1
}

# ensure_conformance: .venv-tensorrt/11 and /10 with TensorRT's own Python packages, for the tests of its plugins. They
# load without a GPU and without TensorRT's builder, for which a small library stands in. Fails when it cannot be made.
ensure_conformance() (
  if ! can_have_tensorrt; then
    say "error: TensorRT's packages are for Linux on x86-64; this is $(uname -sm)"
    return 1
  fi
  exec 8<"$ROOT/scripts/conformance.sh"
  if command -v flock >/dev/null; then flock 8; fi
  for major in 11 10; do
    make_conformance "$major" || return 1
  done
)

# make_conformance MAJOR: does nothing when the environment is there and was made from the present files.
make_conformance() {
  local major="$1" folder="$ROOT/.venv-tensorrt/$1" compiler="" candidate libraries
  if "$folder/bin/python" -c "import numpy" 2>/dev/null &&
    [[ "$(cat "$folder/effexport.stamp" 2>/dev/null)" == "$(conformance_stamp "$major")" ]]; then
    return
  fi
  for candidate in ${CC:+"$CC"} cc gcc clang; do
    if command -v "$candidate" >/dev/null; then
      compiler="$candidate"
      break
    fi
  done
  if [[ -z "$compiler" ]]; then
    say "error: no C compiler found (cc, gcc or clang on PATH); on Debian and Ubuntu run: sudo apt install gcc"
    return 1
  fi
  say "creating .venv-tensorrt/$major with TensorRT's Python packages"
  rm -rf "$folder"
  "$VENV/bin/python" -m venv "$folder" >&2 || return 1
  if ! "$folder/bin/python" -m pip install --quiet --no-deps -r "$ROOT/scripts/conformance-requirements-$major.txt" >&2; then
    say "error: TensorRT's Python packages were not installed, see above; Python 3.11 is known to work"
    return 1
  fi
  libraries="$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["platlib"])')/tensorrt_lean_libs"
  mkdir "$folder/shim"
  "$compiler" -shared -fPIC "$ROOT/tests/plugins/tensorrt/shim.c" -o "$folder/shim/libnvinfer.so.$major" \
    -Wl,--no-as-needed "$libraries/libnvinfer_lean.so.$major" -Wl,-soname,"libnvinfer.so.$major" >&2 || return 1
  for candidate in nvinfer_plugin nvonnxparser; do
    "$compiler" -shared -fPIC -x c /dev/null -o "$folder/shim/lib$candidate.so.$major" \
      -Wl,-soname,"lib$candidate.so.$major" >&2 || return 1
  done
  # what a process needs to load them, for whoever starts one
  printf '%s\n' "$folder/shim:$libraries" >"$folder/library-path"
  conformance_stamp "$major" >"$folder/effexport.stamp"
}

# ensure_tested_conformance: as ensure_tested_kernels, for the tests of the TensorRT plugins.
ensure_tested_conformance() {
  local parts
  ensure_conformance && return
  parts="$(required_parts)"
  case ",${parts// /}," in
    *,tensorrt,*)
      die "the environments for TensorRT's plugins were not made, see above; to run the tests without them:" \
        "EFFEXPORT_REQUIRE=torch,onnx,ort,transformers,native $0"
      ;;
    *) say "WARNING: no environment for TensorRT's plugins: tests that need it are skipped" ;;
  esac
}

# can_have_triton: the wheel with NVIDIA's server is for Linux on x86-64 with glibc 2.35 or later.
can_have_triton() {
  local glibc
  can_have_tensorrt || return 1
  glibc="$(getconf GNU_LIBC_VERSION 2>/dev/null)" || return 1
  [[ "$(printf '2.35\n%s\n' "${glibc##* }" | sort -V | head -n 1)" == 2.35 ]]
}

# triton_stamp: what .venv-triton is made from, and where; tests/conftest.py compares it.
triton_stamp() {
  { printf '%s\n' "$ROOT" && cat "$ROOT/scripts/triton-requirements.txt"; } | sha256sum | cut -d " " -f 1
}

# ensure_triton: .venv-triton with the real tritonserver, its Python backend and its client. Fails when it cannot be made.
ensure_triton() (
  folder="$ROOT/.venv-triton"
  if ! can_have_triton; then
    say "error: the wheel with tritonserver is for Linux on x86-64 with glibc 2.35 or later; this is $(uname -sm)"
    return 1
  fi
  exec 8<"$ROOT/scripts/triton-requirements.txt"
  if command -v flock >/dev/null; then flock 8; fi
  if [[ "$(cat "$folder/effexport.stamp" 2>/dev/null)" == "$(triton_stamp)" ]] &&
    "$folder/bin/python" -c "import numpy" 2>/dev/null; then
    return
  fi
  say "creating .venv-triton with tritonserver (60 MB)"
  rm -rf "$folder"
  "$VENV/bin/python" -m venv "$folder" >&2 || return 1
  if ! "$folder/bin/python" -m pip install --quiet --no-deps -r "$ROOT/scripts/triton-requirements.txt" >&2; then
    say "error: tritonserver was not installed, see above; Python 3.11 is known to work"
    return 1
  fi
  arrange_triton "$folder" || return 1
  triton_stamp >"$folder/effexport.stamp"
)

# arrange_triton FOLDER: the wheel means its own launcher to do this: programs are made executable, the process that
# runs Python models is put beside its backend, and `library-path` says what a server needs to load.
arrange_triton() {
  local site version libraries server
  site="$("$1/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["platlib"])')"
  version="$("$1/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
  libraries="$site/nvidia_pytriton.libs:$("$1/bin/python" -c 'import sysconfig; print(sysconfig.get_config_var("LIBDIR"))')"
  server="$site/pytriton/tritonserver"
  if ! cp "$server/python_backend_stubs/$version/triton_python_backend_stub" "$server/backends/python/"; then
    say "error: tritonserver has no Python backend for Python $version; set EFFEXPORT_PYTHON to another, such as 3.11"
    return 1
  fi
  chmod +x "$server/bin/tritonserver" "$server/backends/python/triton_python_backend_stub"
  if LD_LIBRARY_PATH="$libraries" ldd "$server/bin/tritonserver" "$server/backends/python/triton_python_backend_stub" |
    grep "not found" >&2; then
    say "error: tritonserver misses the libraries above; libpython$version.so is in the package libpython$version of" \
      "Debian and Ubuntu, and in a Python that was built with --enable-shared"
    return 1
  fi
  printf '%s\n' "$libraries" >"$1/library-path"
  printf '%s\n' "$server" >"$1/server"
}

# ensure_tested_triton: as ensure_tested_kernels, for the tests with the real tritonserver.
ensure_tested_triton() {
  local parts
  ensure_triton && return
  parts="$(required_parts)"
  case ",${parts// /}," in
    *,triton,*)
      die "the environment with tritonserver was not made, see above; to run the tests without it:" \
        "EFFEXPORT_REQUIRE=${parts//,triton/} $0"
      ;;
    *) say "WARNING: no tritonserver: tests that need it are skipped" ;;
  esac
}

# The parts that tests must find: all of them, those that a machine may lack where it has them; or what the user says.
required_parts() {
  local parts=torch,onnx,ort,transformers,native,ray,serve,ray-serve
  if [[ -n "${EFFEXPORT_REQUIRE+set}" ]]; then
    printf '%s\n' "$EFFEXPORT_REQUIRE"
    return
  fi
  if has_tool nvcc; then parts+=,nvcc; fi
  if has_browser; then parts+=,browser; fi
  if can_have_tensorrt; then parts+=,tensorrt,rtx; fi
  if can_have_triton; then parts+=,triton; fi
  printf '%s\n' "$parts"
}

# ensure_browser: Chromium, where it is missing and can be added; without one, the tests of pages are skipped.
ensure_browser() {
  has_browser && return
  if [[ "$(id -u)" == 0 ]] && command -v apt-get >/dev/null; then
    say "installing chromium, which the tests of pages drive"
    { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium; } >&2 || true
  fi
  has_browser || say "WARNING: no Chromium or Chrome on PATH: tests of pages are skipped"
}

# ensure_tested_kernels: the library is built; without it the tests are not run, unless the user requires other parts.
ensure_tested_kernels() {
  local parts
  ensure_kernels && return
  parts="$(required_parts)"
  case ",${parts// /}," in
    *,native,*)
      die "the kernel library was not built, see above; to run the tests without it:" \
        "EFFEXPORT_REQUIRE=torch,onnx,ort,transformers $0"
      ;;
    *) say "WARNING: the kernel library was not built: tests that need it are skipped" ;;
  esac
}

# run_pytest ARGUMENTS...: two workers of one thread each; what is required must be there: no test is skipped silently.
run_pytest() {
  (
    cd "$ROOT" || exit
    export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 HF_HUB_OFFLINE=1
    EFFEXPORT_REQUIRE="$(required_parts)"
    export EFFEXPORT_REQUIRE
    "$VENV/bin/python" -m pytest -n 2 --dist loadgroup "$@"
  )
}
