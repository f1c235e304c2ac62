#!/usr/bin/env bash
# GRPO | random tiny Llama and reward model (made here) | FSDP | one CPU process, under a minute
#
# A model scores: a random classifier of one label, so only the machinery counts. OWN_POOL=false lets it share the devices
# of training, where it scores each batch after sampling. Needs no network.
#
#   bash examples/reward_model/run_tiny_fsdp.sh [key=value ...]
#   OWN_POOL=false bash examples/reward_model/run_tiny_fsdp.sh
set -xeuo pipefail

HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
export PYTHONPATH="${HERE}/../..${PYTHONPATH:+:${PYTHONPATH}}"

########################### user-adjustable ###########################
OWN_POOL=${OWN_POOL:-true}
RLFLOW_DATA=${RLFLOW_DATA:-${HOME}/.cache/rlflow}
MODEL_PATH=${MODEL_PATH:-${RLFLOW_DATA}/models/tiny}
REWARD_MODEL_PATH=${REWARD_MODEL_PATH:-${RLFLOW_DATA}/models/tiny-reward}
DATA_DIR=${DATA_DIR:-${RLFLOW_DATA}/data/sums}
DEVICE=${DEVICE:-cpu}
INFER_BACKEND=${INFER_BACKEND:-hf}
NGPUS_PER_NODE=${NGPUS_PER_NODE:-1}
TRAIN_BATCH_SIZE=${TRAIN_BATCH_SIZE:-8}
PPO_MINI_BATCH_SIZE=${PPO_MINI_BATCH_SIZE:-8}
MAX_PROMPT_LENGTH=${MAX_PROMPT_LENGTH:-64}
MAX_RESPONSE_LENGTH=${MAX_RESPONSE_LENGTH:-8}
ROLLOUT_N=${ROLLOUT_N:-4}
ACTOR_LR=${ACTOR_LR:-1e-3}
TOTAL_STEPS=${TOTAL_STEPS:-3}
PROJECT_NAME=${PROJECT_NAME:-rlflow_examples}
EXPERIMENT_NAME=${EXPERIMENT_NAME:-reward_model_$(date +%Y%m%d_%H%M%S)}
RUN_DIR=${RUN_DIR:-${RLFLOW_DATA}/runs/${EXPERIMENT_NAME}}

########################### model and data ############################
[[ -f "${MODEL_PATH}/config.json" ]] || python3 "${HERE}/../models/make_tiny.py" --out "${MODEL_PATH}"
[[ -f "${REWARD_MODEL_PATH}/config.json" ]] ||
    python3 "${HERE}/../models/make_tiny.py" --reward --seed 1 --out "${REWARD_MODEL_PATH}"
[[ -f "${DATA_DIR}/train.parquet" ]] || python3 "${HERE}/../data_preprocess/sums.py" --local_save_dir "${DATA_DIR}"

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
    actor_rollout_ref.actor.optim.lr="${ACTOR_LR}"
    actor_rollout_ref.actor.ppo_mini_batch_size="${PPO_MINI_BATCH_SIZE}"
    actor_rollout_ref.actor.use_dynamic_bsz=true
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096
    actor_rollout_ref.actor.fsdp_config.dtype=float32
)
ROLLOUT=(
    actor_rollout_ref.rollout.name="${INFER_BACKEND}"
    actor_rollout_ref.rollout.n="${ROLLOUT_N}"
    actor_rollout_ref.rollout.dtype=float32
    actor_rollout_ref.rollout.tensor_model_parallel_size=1
    actor_rollout_ref.rollout.agent.num_workers=1
)
REWARD=(
    reward.reward_model.enable=true
    reward.reward_model.enable_resource_pool="${OWN_POOL}"
    reward.reward_model.n_gpus_per_node=1
    reward.reward_model.nnodes=1
    reward.reward_model.model_path="${REWARD_MODEL_PATH}"
    reward.reward_model.rollout.name="${INFER_BACKEND}"
    reward.reward_model.rollout.dtype=float32
    reward.num_workers=1
)
ALGORITHM=(
    algorithm.adv_estimator=grpo
)
TRAINER=(
    trainer.device="${DEVICE}"
    trainer.nnodes=1
    trainer.n_gpus_per_node="${NGPUS_PER_NODE}"
    trainer.logger='[console,file]'
    trainer.project_name="${PROJECT_NAME}"
    trainer.experiment_name="${EXPERIMENT_NAME}"
    trainer.default_local_dir="${RUN_DIR}"
    trainer.total_epochs=1000
    trainer.total_training_steps="${TOTAL_STEPS}"
    trainer.save_freq="${TOTAL_STEPS}"
    trainer.test_freq="${TOTAL_STEPS}"
)
EXTRA=(
    transfer_queue.backend.SimpleStorage.num_data_storage_units=1
)

########################### launch ####################################
python3 -m rlflow.trainer.main_ppo \
    "${DATA[@]}" "${MODEL[@]}" "${ACTOR[@]}" "${ROLLOUT[@]}" "${REWARD[@]}" "${ALGORITHM[@]}" "${TRAINER[@]}" \
    "${EXTRA[@]}" "$@"
