#!/usr/bin/env bash
# Sets everything up and passes the tests: style, types, layers, then pytest.
#
#   ./test.sh                    the whole suite, as CI runs it
#   ./test.sh tests/data -k x    arguments go to pytest; style, types and layers are left out
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")" || exit 1
# shellcheck source=scripts/setup_env.sh
source scripts/setup_env.sh
setup_env test || exit 1
ensure_chromium

bin="$(dirname "$RLFLOW_VENV_PYTHON")"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" # this clone, whichever one the environment was last made for
export PYTHONUNBUFFERED=1
failed=()

check() {
    local name="$1"
    shift
    echo "== $name"
    "$@" || failed+=("$name")
}

if [ $# -eq 0 ]; then
    check "ruff" "$bin/ruff" check .
    check "ruff format" "$bin/ruff" format --check .
    check "mypy" "$bin/mypy"
    check "import-linter" "$bin/lint-imports"
fi
if [ $# -eq 0 ]; then
    # What needs the machine for itself: tests/conftest.py.
    check "pytest, two side by side" "$bin/python" -m pytest -n 2 --dist loadfile --alone without
    check "pytest, one by one" "$bin/python" -m pytest --alone only
else
    check "pytest" "$bin/python" -m pytest "$@"
fi

if [ ${#failed[@]} -gt 0 ]; then
    echo "test.sh: failed: ${failed[*]}" >&2
    exit 1
fi
