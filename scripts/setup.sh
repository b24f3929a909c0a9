#!/bin/sh
# Finds a Python >= 3.12 and has it make .venv (scripts/setup_venv.py). Quick when nothing changed.
# PYTHON=/path/to/python chooses one.
set -eu
cd "$(dirname "$0")/.."
[ -x .venv/bin/python ] && .venv/bin/python scripts/setup_venv.py --check 2>/dev/null && exit

# Every candidate is tried by running it: pyenv puts commands on PATH that fail unless their version is selected.
suits() {
    "$1" - "$2" >/dev/null 2>&1 <<'PYTHON_CODE'
import os, sys, sysconfig
usual = sys.implementation.name == "cpython" and not sysconfig.get_config_var("Py_GIL_DISABLED")
ours = os.path.realpath(sys.prefix) == os.path.realpath(".venv")
sys.exit(not (usual and not ours and (3, 12) <= sys.version_info[:2] < tuple(map(int, sys.argv[1].split(".")))))
PYTHON_CODE
}

candidates() {
    printf '%s\n' "$PATH" | tr ':' '\n' | while read -r folder; do
        for name in python3.12 python3.13 python3.14 python3 python; do
            [ -x "$folder/$name" ] && printf '%s\n' "$folder/$name"
        done
    done
    pyenv_root=${PYENV_ROOT:-$( (pyenv root || printf '%s' "${HOME:-}/.pyenv") 2>/dev/null)}
    for found in "$pyenv_root"/versions/*/bin/python3; do
        [ -x "$found" ] && printf '%s\n' "$found"
    done
    uv python find --system --no-python-downloads '>=3.12' 2>/dev/null || true
}

find_python() {
    # Releases the pinned packages are known to support come first, then anything newer.
    for below in 3.15 4.0; do
        candidates | while read -r found; do
            if suits "$found" "$below"; then printf '%s\n' "$found"; break; fi
        done | grep . && return
    done
}

if [ -n "${PYTHON:-}" ]; then
    suits "$PYTHON" 4.0 || { echo "donorloader needs Python 3.12 or newer (CPython); PYTHON=$PYTHON is not" >&2; exit 1; }
    python=$PYTHON
else
    python=$(find_python) || {
        echo "donorloader needs Python 3.12 or newer and found none: install one (apt install python3.12-venv, brew install python@3.12, pyenv install 3.12 or uv python install 3.12) and run this again" >&2
        exit 1
    }
fi
exec "$python" scripts/setup_venv.py
