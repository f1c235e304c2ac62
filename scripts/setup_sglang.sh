#!/usr/bin/env bash
# The Python environment of the real SGLang engine on a machine without a GPU, made outside the repository.
#
#   scripts/setup_sglang.sh FOLDER      make or update the environment in FOLDER, print the path of its interpreter
#   source scripts/setup_sglang.sh; setup_sglang FOLDER; "$RLFLOW_VENV_PYTHON" ...
#
# It holds SGLang and everything rlflow needs, but not rlflow: set PYTHONPATH to the clone. SGLang's CUDA kernels cannot be
# loaded on such a machine; scripts/sglang_cpu has two small stand-ins, which are copied into FOLDER/sglang_cpu and found
# through a .pth file. No installed package is changed. On a machine with a GPU `pip install 'rlflow[sglang]'` is enough.
#
# Mirrors, local wheels and certificates are pip's own configuration (uv is given pip's find-links and index).

# shellcheck source=scripts/setup_env.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"

install_stand_ins() {
    local site
    site="$("$RLFLOW_VENV_PYTHON" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')" || return 1
    mkdir -p "$RLFLOW_VENV/sglang_cpu"
    cp -r "$RLFLOW_REPO/scripts/sglang_cpu/." "$RLFLOW_VENV/sglang_cpu/"
    printf '%s\nimport torchvision_ops\n' "$RLFLOW_VENV/sglang_cpu" >"$site/sglang_cpu.pth"
}

sglang_stamp() {
    cat "$RLFLOW_REPO"/requirements/{sglang-cpu,sglang-cpu-no-deps,tested}.txt "$RLFLOW_REPO/pyproject.toml" \
        "$RLFLOW_REPO"/scripts/setup_sglang.sh "$RLFLOW_REPO"/scripts/sglang_cpu/*.py \
        "$RLFLOW_REPO"/scripts/sglang_cpu/*/*.py | cksum
}

# setup_sglang FOLDER: sets RLFLOW_VENV_PYTHON.
setup_sglang() {
    local python requirements="$RLFLOW_REPO/requirements"
    mkdir -p "$1" && RLFLOW_VENV="$(cd "$1" && pwd)" || return 1
    RLFLOW_VENV_PYTHON="$RLFLOW_VENV/bin/python"
    SETUP_LOG="$RLFLOW_VENV.setup.log"
    if [ "$(cat "$RLFLOW_VENV/.rlflow-sglang.stamp" 2>/dev/null)" = "$(sglang_stamp)" ]; then return 0; fi
    : >"$SETUP_LOG"
    if ! "$RLFLOW_VENV_PYTHON" -m pip --version >/dev/null 2>&1; then
        python="$(find_python)" || return 1
        setup_say "making a Python environment in $RLFLOW_VENV"
        "$python" -m venv "$RLFLOW_VENV" >>"$SETUP_LOG" 2>&1 || { setup_fail "no environment (log: $SETUP_LOG)"; return 1; }
    fi
    install_torch || return 1
    pip_install "uv" uv || return 1
    setup_say "installing SGLang for the CPU and what rlflow needs (log: $SETUP_LOG)"
    rlflow_requirements >"$RLFLOW_VENV/rlflow-requirements.txt" || return 1
    uv_install -c "$requirements/tested.txt" -r "$RLFLOW_VENV/rlflow-requirements.txt" \
        -r "$requirements/sglang-cpu.txt" || return 1
    uv_install --no-deps -r "$requirements/sglang-cpu-no-deps.txt" || return 1
    install_stand_ins || return 1
    sglang_stamp >"$RLFLOW_VENV/.rlflow-sglang.stamp"
    setup_say "done"
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then
    set -uo pipefail
    if [ $# -ne 1 ]; then
        echo "usage: scripts/setup_sglang.sh FOLDER" >&2
        exit 2
    fi
    setup_sglang "$1" || exit 1
    printf '%s\n' "$RLFLOW_VENV_PYTHON"
fi
