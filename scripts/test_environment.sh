# Sourced by the scripts that run tests: sets up what the tests need and runs pytest, for the fast part of the suite
# ("fast") or for all of it ("all"). Progress goes to stderr.
# shellcheck shell=bash
# shellcheck source=scripts/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

# NVIDIA's packages as used here are for Linux on x86-64.
can_have_tensorrt() { [[ "$(uname -sm)" == "Linux x86_64" ]]; }

# The wheel with NVIDIA's server needs glibc 2.35 or later as well.
can_have_triton() {
  local glibc
  can_have_tensorrt || return 1
  glibc="$(getconf GNU_LIBC_VERSION 2>/dev/null)" || return 1
  [[ "$(printf '2.35\n%s\n' "${glibc##* }" | sort -V | head -n 1)" == 2.35 ]]
}

# The names that Browser in tests/conftest.py looks for.
has_browser() { command -v chromium || command -v chromium-browser || command -v google-chrome; } >/dev/null

# As SmallDisk in tests/conftest.py tries it.
has_small_disk() { unshare --user --map-root-user --mount mount -t tmpfs tmpfs /mnt 2>/dev/null; }

has_node() { command -v node && command -v npm; } >/dev/null

# The oldest packages that docs/portability.md tries are for Linux on x86-64 here; onnxruntime-web comes with npm.
can_have_portability() { [[ "$(uname -sm)" == "Linux x86_64" ]] && has_node; }

# tested_extras fast|all: what is installed into .venv. TensorRT-RTX builds engines without a GPU, and its provider for
# ONNX Runtime registers without one.
tested_extras() {
  local extras=build,cpu,test,dev,serve,openvino
  [[ "$1" == fast ]] || extras+=,sweep,serve-ray
  if can_have_tensorrt; then extras+=,rtx,ort-rtx; fi
  printf '%s\n' "$extras"
}

# has_kernels [cuda]: whether the library of the present sources is built, with CUDA kernels if that is asked for.
has_kernels() {
  "$VENV/bin/python" -c "import sys
from effexport.plugins.building.library import find_library
library = find_library()
has_cuda = library and library.info and library.info.has_cuda
raise SystemExit(library is None or library.outdated or 'cuda' in sys.argv and not has_cuda)" "$@" 2>/dev/null
}

# required_parts fast|all: the parts that tests must find, see tests/conftest.py: EFFEXPORT_REQUIRE, or by default all
# that this machine can have.
required_parts() {
  local parts=torch,onnx,ort,openvino,transformers,foreign,native,serve,model-signing
  if [[ -n "${EFFEXPORT_REQUIRE+set}" ]]; then
    printf '%s\n' "${EFFEXPORT_REQUIRE// /}"
    return
  fi
  if can_have_tensorrt; then parts+=,rtx,ort-rtx; fi
  if [[ "$1" == all ]]; then
    parts+=,ray,ray-serve,transformers5
    if has_tool nvcc; then parts+=,nvcc; fi
    if has_browser; then parts+=,browser; fi
    if has_small_disk; then parts+=,small-disk; fi
    if can_have_tensorrt; then parts+=,tensorrt; fi
    if can_have_triton; then parts+=,triton; fi
    if can_have_portability; then parts+=,portability; fi
  fi
  printf '%s\n' "$parts"
}

# missing_part SIZE PART WHAT: stops if the part is required, warns otherwise.
missing_part() {
  local parts
  parts="$(required_parts "$1")"
  case ",$parts," in
    *,"$2",*)
      parts="$(printf ',%s,' "$parts" | sed -e "s/,$2,/,/" -e 's/^,//' -e 's/,$//')"
      die "$3 could not be set up, see above; to run the tests without it: EFFEXPORT_REQUIRE=$parts $0"
      ;;
    *) say "WARNING: $3 could not be set up: tests that need it are skipped" ;;
  esac
}

# ensure_tests fast|all: everything that tests need and that can be had here.
ensure_tests() {
  local cuda=--no-cuda
  ensure_environment "$(tested_extras "$1")"
  ensure_foreign || missing_part "$1" foreign "the packages of other people's layers"
  if [[ "$1" == fast ]]; then
    # a library that has CUDA kernels as well stays selected
    has_kernels || ensure_kernels --no-cuda || missing_part fast native "the kernel library"
    return
  fi
  if has_tool nvcc; then cuda=--cuda; fi
  # one GPU is enough for tests of the library; others compile the CUDA kernels for all of them
  has_kernels cuda || EFFEXPORT_CUDA_ARCHITECTURES="${EFFEXPORT_CUDA_ARCHITECTURES:-90}" ensure_kernels "$cuda" ||
    missing_part all native "the kernel library"
  ensure_conformance || missing_part all tensorrt "the environment with TensorRT's Python packages"
  ensure_triton || missing_part all triton "the environment with tritonserver"
  ensure_transformers5 || missing_part all transformers5 "the environment with transformers 5"
  has_node || install_packages nodejs npm
  ensure_portability || missing_part all portability "the environments of other people's tools"
  has_browser || install_packages chromium
  has_browser || say "WARNING: no Chromium or Chrome on PATH: tests of pages are skipped"
}

# ensure_foreign: the packages of scripts/foreign-requirements.txt in .venv.
ensure_foreign() (
  wanted="$(sha256sum <"$ROOT/scripts/foreign-requirements.txt")"
  lock "$ROOT/scripts/foreign-requirements.txt"
  [[ "$(cat "$VENV/foreign.stamp" 2>/dev/null)" != "$wanted" ]] || return 0
  say "installing the packages whose layers models/adapters/ knows"
  "$VENV/bin/python" -m pip install --quiet --no-deps -r "$ROOT/scripts/foreign-requirements.txt" >&2 || return 1
  printf '%s\n' "$wanted" >"$VENV/foreign.stamp"
)

# run_pytest fast|all ARGUMENTS...: two workers of one thread each. No test is skipped for a missing part silently. A
# worker that crashes ends the run: pytest-xdist 3.8 would replace it, and wait without end for the tests it had.
run_pytest() {
  local size="$1" selection=()
  shift
  [[ "$size" == fast ]] || selection=(-m "not soak")
  (
    cd "$ROOT" || exit
    export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 HF_HUB_OFFLINE=1
    # without bytecode, each worker rewrites the assertions of all tests again, and each child compiles the package
    unset PYTHONDONTWRITEBYTECODE
    EFFEXPORT_REQUIRE="$(required_parts "$size")"
    export EFFEXPORT_REQUIRE
    "$VENV/bin/python" -m pytest -n 2 --max-worker-restart=0 --dist loadgroup ${selection[@]+"${selection[@]}"} "$@"
  )
}

# stamp_of FILES...: identifies what an environment is made from, and where; tests/conftest.py compares it.
stamp_of() { (cd "$ROOT" && printf '%s\n' "$ROOT" && cat "$@") | sha256sum | cut -d " " -f 1; }

# make_environment FOLDER MODULE WHAT ARRANGE FILES...: the packages of the first of FILES, and what the function ARRANGE
# does with their folder. Does nothing if it was made from the present files, and can import MODULE.
make_environment() {
  local folder="$ROOT/$1" module="$2" what="$3" arrange="$4" wanted
  shift 4
  wanted="$(stamp_of "$@")"
  if [[ "$(cat "$folder/effexport.stamp" 2>/dev/null)" == "$wanted" ]] &&
    "$folder/bin/python" -c "import $module" 2>/dev/null; then
    return
  fi
  say "creating ${folder#"$ROOT/"} with $what"
  rm -rf "$folder"
  "$VENV/bin/python" -m venv --without-pip "$folder" >&2 || return 1
  if ! "$VENV/bin/python" -m pip --python "$folder/bin/python" install --quiet --no-deps -r "$ROOT/$1" >&2; then
    say "error: $what could not be installed, see above; Python 3.11 is known to work"
    return 1
  fi
  "$arrange" "$folder" || return 1
  printf '%s\n' "$wanted" >"$folder/effexport.stamp"
}

# packages_of PYTHON: the folder of its packages.
packages_of() { "$1" -c 'import sysconfig; print(sysconfig.get_paths()["platlib"])'; }

# ensure_conformance: .venv-tensorrt/11 and /10. The packages load without a GPU and without TensorRT's builder, which a
# small library replaces. Fails if they cannot be installed.
ensure_conformance() (
  if ! can_have_tensorrt; then
    say "error: TensorRT's packages are for Linux on x86-64; this is $(uname -sm)"
    return 1
  fi
  lock "$ROOT/scripts/conformance.sh"
  for major in 11 10; do
    make_environment ".venv-tensorrt/$major" numpy "TensorRT's Python packages" arrange_conformance \
      "scripts/conformance-requirements-$major.txt" tests/plugins/tensorrt/shim.c || return 1
  done
)

# arrange_conformance FOLDER: libraries in the place of TensorRT's builder, and the LD_LIBRARY_PATH that a process needs to
# load the packages, in `library-path`.
arrange_conformance() {
  local folder="$1" major="${1##*/}" compiler candidate libraries
  compiler="$(command -v ${CC:+"$CC"} cc gcc clang | head -n 1)" || true
  if [[ -z "$compiler" ]]; then
    say "error: no C compiler found (cc, gcc or clang on PATH); on Debian and Ubuntu run: sudo apt install gcc"
    return 1
  fi
  libraries="$(packages_of "$folder/bin/python")/tensorrt_lean_libs"
  mkdir "$folder/shim"
  "$compiler" -shared -fPIC "$ROOT/tests/plugins/tensorrt/shim.c" -o "$folder/shim/libnvinfer.so.$major" \
    -Wl,--no-as-needed "$libraries/libnvinfer_lean.so.$major" -Wl,-soname,"libnvinfer.so.$major" >&2 || return 1
  for candidate in nvinfer_plugin nvonnxparser; do
    "$compiler" -shared -fPIC -x c /dev/null -o "$folder/shim/lib$candidate.so.$major" \
      -Wl,-soname,"lib$candidate.so.$major" >&2 || return 1
  done
  printf '%s\n' "$folder/shim:$libraries" >"$folder/library-path"
}

# ensure_triton: .venv-triton with tritonserver, its Python backend and its client. Fails if they cannot be installed.
ensure_triton() (
  if ! can_have_triton; then
    say "error: the wheel with tritonserver is for Linux on x86-64 with glibc 2.35 or later; this is $(uname -sm)"
    return 1
  fi
  lock "$ROOT/scripts/triton-requirements.txt"
  make_environment .venv-triton numpy "tritonserver (60 MB)" arrange_triton scripts/triton-requirements.txt
)

# ensure_transformers5: .venv-transformers5 with another transformers than .venv, whose other packages it shares. Fails
# if its packages cannot be installed.
ensure_transformers5() (
  lock "$ROOT/scripts/transformers5-requirements.txt"
  make_environment .venv-transformers5 torch "transformers 5 and sentence-transformers (60 MB)" share_packages \
    scripts/transformers5-requirements.txt
)

# share_packages FOLDER: those of .venv are found after its own.
share_packages() {
  printf 'import site; site.addsitedir("%s")\n' "$(packages_of "$VENV/bin/python")" \
    >"$(packages_of "$1/bin/python")/effexport.pth"
}

# ensure_portability: the environments of scripts/portability.py, in the user's cache. Fails if one cannot be made.
ensure_portability() { "$VENV/bin/python" "$ROOT/scripts/portability.py" --prepare >&2; }

# arrange_triton FOLDER: what the wheel's own launcher would do: makes programs executable, puts the process that runs
# Python models beside its backend, and writes the LD_LIBRARY_PATH of a server to `library-path`.
arrange_triton() {
  local site version libraries server
  site="$(packages_of "$1/bin/python")"
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
    say "error: tritonserver needs the libraries above; libpython$version.so is in the package libpython$version of" \
      "Debian and Ubuntu, and in a Python built with --enable-shared"
    return 1
  fi
  printf '%s\n' "$libraries" >"$1/library-path"
  printf '%s\n' "$server" >"$1/server"
}
