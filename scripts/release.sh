#!/usr/bin/env bash
# Makes a release of the commit that is checked out, and checks it: the wheel and the sdist of effexport, the wheels of
# effexport-kernels, with an nvcc that of effexport-kernels-cuda, and SHA256SUMS, bill of materials and provenance beside
# them. Two runs give the same bytes.
#
#   scripts/release.sh [FOLDER]      the folder is empty or absent; the default is dist
#
# EFFEXPORT_RELEASE_KEY is a private elliptic-curve key in PEM, with which the provenance is signed.
set -euo pipefail
# shellcheck source=scripts/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$ROOT"

[[ $# -le 1 ]] || die "release.sh takes one folder; got: $*"
out="$(realpath -m "${1:-dist}")"
[[ -z "$(ls -A "$out" 2>/dev/null)" ]] || die "$out is not empty; expected an empty folder: move its files"
[[ -z "$(git status --porcelain)" ]] || die "there are changes that are not committed; expected the files of a commit"
umask 022
SOURCE_DATE_EPOCH="$(git log -1 --format=%ct)"
export SOURCE_DATE_EPOCH
tree="$(mktemp -d)"
trap 'rm -rf "$tree"' EXIT

ensure_environment build,cpu,test,dev,kernels
ensure_release_tools
mkdir -p "$out" "$tree/source"
git archive HEAD | tar -x -C "$tree/source"
say "making the wheel and the sdist"
"$VENV/bin/python" -m build --no-isolation --outdir "$out" "$tree/source" >"$tree/log" 2>&1 || { cat "$tree/log" >&2 && exit 1; }
say "compiling the wheels of effexport-kernels"
"$VENV/bin/python" scripts/kernels_wheel.py --out "$out" >&2
if command -v nvcc >/dev/null; then
  say "compiling the wheel of effexport-kernels-cuda"
  "$VENV/bin/python" scripts/kernels_wheel.py --out "$out" cuda >&2
fi
for wheel in "$out"/*manylinux*.whl; do
  "$VENV/bin/python" -m auditwheel show "$wheel" >"$tree/audit"
  tag="manylinux_${wheel##*manylinux_}"
  grep -q "${tag%.whl}" "$tree/audit" || { cat "$tree/audit" >&2 && die "auditwheel finds another tag for $wheel"; }
done
"$VENV/bin/python" scripts/release_documents.py "$out" ${EFFEXPORT_RELEASE_KEY:+--key "$EFFEXPORT_RELEASE_KEY"} >&2
(cd "$out" && sha256sum --check --quiet SHA256SUMS)

# In empty environments, whose PATH has no compiler.
checked=()
for version in 3.11 3.12 3.13 3.14; do
  { python="$(command -v "python$version")" && has_venv "$python"; } || continue
  say "trying the wheels in Python $version"
  "$python" -m venv "$tree/$version"
  "$tree/$version/bin/python" -m pip install --quiet --find-links "$out" -c constraints.txt \
    "effexport[build,cpu,prebuilt]" >&2
  (
    export PATH="$tree/$version/bin" EFFEXPORT_CACHE_DIR="$tree/cache"
    effexport plugins info | { read -r line && [[ "$line" == *"effexport-kernels"*"up to date"* ]]; } ||
      die "effexport does not find the library of the wheel"
    effexport build --variant lsh -o "$tree/lsh-$version" >&2
    effexport verify "$tree/lsh-$version" --implementation kernel >&2
  )
  checked+=("$version")
done
[[ ${#checked[@]} -gt 0 ]] || die "no Python between 3.11 and 3.14 was found to try the wheels in"
echo "Made $out, and tried it in Python ${checked[*]}; next, compare SHA256SUMS with those of a second run."
