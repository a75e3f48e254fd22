#!/usr/bin/env bash
# mypy on the package as users import it. The folders are named otherwise than the packages (exporter/ is effexport),
# and mypy does not follow editable installs, so it is shown the installed layout through links.
set -euo pipefail
# shellcheck source=scripts/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$ROOT"

tree="$(mktemp -d)"
trap 'rm -rf "$tree"' EXIT
mkdir "$tree/effexport"
ln -s "$ROOT"/exporter/* "$ROOT/models" "$ROOT/plugins" "$tree/effexport/"
# errors are reported under the names of the real files
MYPYPATH="$tree" "$VENV/bin/python" -m mypy "$@" |
  sed -e "s#^.*/effexport/models/#models/#" -e "s#^.*/effexport/plugins/#plugins/#" -e "s#^.*/effexport/#exporter/#"
