#!/usr/bin/env bash
# The main job on a CPU: GRPO teaches SmolLM2-135M-Instruct to add and subtract.
#
#   ./demo.sh [--quick] [--seed N] [--steps N]
#
# Sets everything up the first time (minutes), then trains and prints accuracy before and after on held-out prompts, some
# answers before and after, and where the checkpoint lies.
#   RLFLOW_DATA   where model, data and runs go   (default ~/.cache/rlflow)
set -uo pipefail
case " $* " in *" -h "* | *" --help "*)
    sed -n '2,9s/^# \{0,1\}//p' "$0"
    exit 0
    ;;
esac
cd "$(dirname "${BASH_SOURCE[0]}")" || exit 1
# shellcheck source=scripts/setup_env.sh
source scripts/setup_env.sh
setup_env demo || exit 1

python="$RLFLOW_VENV_PYTHON"
root="${RLFLOW_DATA:-$HOME/.cache/rlflow}"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" # this clone, whichever one the environment was last made for
export PYTHONUNBUFFERED=1

"$python" examples/models/make_smollm2.py --out "$root/models/SmolLM2-135M-Instruct" || exit 1
# There are 200 different sums of two one-digit numbers: half of them are for training, half are held out. Each is asked in
# two wordings, which makes 200 prompts a side.
"$python" examples/data_preprocess/reasoning_gym.py --task chain_sum --scorer last_number \
    --min-terms 2 --max-terms 2 --min-digits 1 --max-digits 1 --train-size 200 --test-size 200 --seed 0 \
    --suffix "Answer with just the number." --suffix "Write the calculation and its result." \
    --local_save_dir "$root/data/one_digit_sums" || exit 1
exec "$python" examples/demo/run_demo.py --model "$root/models/SmolLM2-135M-Instruct" \
    --data "$root/data/one_digit_sums" --runs "$root/runs" "$@"
