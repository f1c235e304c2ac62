#!/usr/bin/env bash
# REINFORCE++ | Qwen3-8B | FSDP | 8 GPUs of 80 GB
#
# Hu 2025: no critic and no group baseline; returns are whitened over the batch. ADV_ESTIMATOR=reinforce_plus_plus_baseline
# subtracts the mean of the group first. One optimizer step a batch.
#
# Written, never run: no machine of this size was at hand. What is checked is that every key exists and that the numbers
# fit each other. The rollout engine is the embedded one (rollout.name=hf), the only one of this version: right, but far
# slower than vLLM. INFER_BACKEND=vllm is for the version that has it.
#
#   python examples/data_preprocess/gsm8k.py --local_save_dir ~/data/gsm8k
#   bash examples/reinforce_plus_plus_trainer/run_qwen3_8b_fsdp.sh [key=value ...]
set -xeuo pipefail

HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
export PYTHONPATH="${HERE}/../..${PYTHONPATH:+:${PYTHONPATH}}"

########################### user-adjustable ###########################
MODEL_PATH=${MODEL_PATH:-Qwen/Qwen3-8B}
DATA_DIR=${DATA_DIR:-${HOME}/data/gsm8k}
DEVICE=${DEVICE:-cuda}
INFER_BACKEND=${INFER_BACKEND:-hf}
NNODES=${NNODES:-1}
NGPUS_PER_NODE=${NGPUS_PER_NODE:-8}
TRAIN_BATCH_SIZE=${TRAIN_BATCH_SIZE:-1024}
PPO_MINI_BATCH_SIZE=${PPO_MINI_BATCH_SIZE:-1024}
MAX_PROMPT_LENGTH=${MAX_PROMPT_LENGTH:-1024}
MAX_RESPONSE_LENGTH=${MAX_RESPONSE_LENGTH:-2048}
MAX_TOKENS_PER_GPU=${MAX_TOKENS_PER_GPU:-24576}
ACTOR_LR=${ACTOR_LR:-3e-6}
ENTROPY_COEFF=${ENTROPY_COEFF:-0}
ADV_ESTIMATOR=${ADV_ESTIMATOR:-reinforce_plus_plus}
ROLLOUT_TP=${ROLLOUT_TP:-1} # of the embedded engine: each replica holds the whole model
ROLLOUT_N=${ROLLOUT_N:-8}
TOTAL_EPOCHS=${TOTAL_EPOCHS:-15}
SAVE_FREQ=${SAVE_FREQ:-20}
TEST_FREQ=${TEST_FREQ:-5}
LOGGER=${LOGGER:-'[console,file]'} # '[console,wandb]' with the extra wandb
PROJECT_NAME=${PROJECT_NAME:-rlflow_reinforce_plus_plus}
EXPERIMENT_NAME=${EXPERIMENT_NAME:-qwen3_8b_fsdp}

########################### configuration #############################
DATA=(
    data.train_files="${DATA_DIR}/train.parquet"
    data.val_files="${DATA_DIR}/test.parquet"
    data.train_batch_size="${TRAIN_BATCH_SIZE}"
    data.max_prompt_length="${MAX_PROMPT_LENGTH}"
    data.max_response_length="${MAX_RESPONSE_LENGTH}"
    data.filter_overlong_prompts=true
)
MODEL=(
    actor_rollout_ref.model.path="${MODEL_PATH}"
    actor_rollout_ref.model.use_remove_padding=true
    actor_rollout_ref.model.enable_gradient_checkpointing=true
)
ACTOR=(
    actor_rollout_ref.actor.strategy=fsdp2
    actor_rollout_ref.actor.optim.lr="${ACTOR_LR}"
    actor_rollout_ref.actor.ppo_mini_batch_size="${PPO_MINI_BATCH_SIZE}"
    actor_rollout_ref.actor.use_dynamic_bsz=true
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu="${MAX_TOKENS_PER_GPU}"
    actor_rollout_ref.actor.use_kl_loss=false
    actor_rollout_ref.actor.entropy_coeff="${ENTROPY_COEFF}"
)
ROLLOUT=(
    actor_rollout_ref.rollout.name="${INFER_BACKEND}"
    actor_rollout_ref.rollout.tensor_model_parallel_size="${ROLLOUT_TP}"
    actor_rollout_ref.rollout.n="${ROLLOUT_N}"
)
ALGORITHM=(
    algorithm.adv_estimator="${ADV_ESTIMATOR}"
    algorithm.use_kl_in_reward=false
)
TRAINER=(
    trainer.device="${DEVICE}"
    trainer.nnodes="${NNODES}"
    trainer.n_gpus_per_node="${NGPUS_PER_NODE}"
    trainer.logger="${LOGGER}"
    trainer.project_name="${PROJECT_NAME}"
    trainer.experiment_name="${EXPERIMENT_NAME}"
    trainer.total_epochs="${TOTAL_EPOCHS}"
    trainer.save_freq="${SAVE_FREQ}"
    trainer.test_freq="${TEST_FREQ}"
)
EXTRA=()

########################### launch ####################################
python3 -m rlflow.trainer.main_ppo \
    "${DATA[@]}" "${MODEL[@]}" "${ACTOR[@]}" "${ROLLOUT[@]}" "${ALGORITHM[@]}" "${TRAINER[@]}" \
    "${EXTRA[@]}" "$@"
