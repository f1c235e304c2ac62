#!/usr/bin/env bash
# The tests that need a real rollout engine, on a machine without a GPU: makes the engines' environments, runs their tests.
#
#   tests/run_engines.sh [vllm] [sglang] [-- ARGS]      no engine named: both; ARGS go to pytest
#
# What may be set:
#   RLFLOW_ENGINES       where the environments lie          (default ~/.cache/rlflow/engines; 4 GB and 3 GB)
# Their versions are pinned in requirements/. The same tests of the embedded engine are part of ./test.sh.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
# shellcheck source=scripts/setup_vllm.sh
source scripts/setup_vllm.sh
# shellcheck source=scripts/setup_sglang.sh
source scripts/setup_sglang.sh

engines=()
while [ $# -gt 0 ]; do
    case "$1" in
    -h | --help) sed -n '2,8s/^# \{0,1\}//p' "$0"; exit 0 ;;
    --) shift; break ;;
    vllm | sglang) engines+=("$1"); shift ;;
    *) break ;;
    esac
done
[ ${#engines[@]} -gt 0 ] || engines=(vllm sglang)

folder="${RLFLOW_ENGINES:-$HOME/.cache/rlflow/engines}"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONUNBUFFERED=1
failed=()
for engine in "${engines[@]}"; do
    echo "== $engine"
    "setup_$engine" "$folder/$engine" || { failed+=("$engine (setup)"); continue; }
    # Only these files: others need packages that an engine's environment does not have.
    mapfile -t files < <(grep -rlE "mark\.$engine\b" --include='test_*.py' tests)
    "$RLFLOW_VENV_PYTHON" -m pytest -m "$engine" --timeout 900 tests/rollout/contract "${files[@]}" "$@" ||
        failed+=("$engine")
done
if [ ${#failed[@]} -gt 0 ]; then
    echo "run_engines.sh: failed: ${failed[*]}" >&2
    exit 1
fi
