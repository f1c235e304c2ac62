#!/usr/bin/env bash
# GRPO with a LoRA adapter | Qwen3-8B | FSDP | 2 GPUs of 80 GB
#
# Trains an adapter; the model without it is its own reference, so no second model is loaded. docs/lora.md.
#
# Written, never run: no machine of this size was at hand. What is checked is that every key exists and that the numbers
# fit each other. The rollout engine is the embedded one (rollout.name=hf), the only one of this version: right, but far
# slower than vLLM. INFER_BACKEND=vllm is for the version that has it.
#
#   python examples/data_preprocess/gsm8k.py --local_save_dir ~/data/gsm8k
#   bash examples/lora_trainer/run_qwen3_8b_fsdp.sh [key=value ...]
set -xeuo pipefail

HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
export PYTHONPATH="${HERE}/../..${PYTHONPATH:+:${PYTHONPATH}}"

########################### user-adjustable ###########################
MODEL_PATH=${MODEL_PATH:-Qwen/Qwen3-8B}
DATA_DIR=${DATA_DIR:-${HOME}/data/gsm8k}
DEVICE=${DEVICE:-cuda}
INFER_BACKEND=${INFER_BACKEND:-hf}
NNODES=${NNODES:-1}
NGPUS_PER_NODE=${NGPUS_PER_NODE:-2}
TRAIN_BATCH_SIZE=${TRAIN_BATCH_SIZE:-64}
PPO_MINI_BATCH_SIZE=${PPO_MINI_BATCH_SIZE:-16}
MAX_PROMPT_LENGTH=${MAX_PROMPT_LENGTH:-1024}
MAX_RESPONSE_LENGTH=${MAX_RESPONSE_LENGTH:-2048}
MAX_TOKENS_PER_GPU=${MAX_TOKENS_PER_GPU:-24576}
ACTOR_LR=${ACTOR_LR:-3e-5}
KL_LOSS_COEF=${KL_LOSS_COEF:-0.001}
ENTROPY_COEFF=${ENTROPY_COEFF:-0}
LORA_RANK=${LORA_RANK:-32}
LORA_ALPHA=${LORA_ALPHA:-64}
ROLLOUT_TP=${ROLLOUT_TP:-1} # of the embedded engine: each replica holds the whole model
ROLLOUT_N=${ROLLOUT_N:-5}
TOTAL_EPOCHS=${TOTAL_EPOCHS:-15}
SAVE_FREQ=${SAVE_FREQ:-20}
TEST_FREQ=${TEST_FREQ:-5}
LOGGER=${LOGGER:-'[console,file]'} # '[console,wandb]' with the extra wandb
PROJECT_NAME=${PROJECT_NAME:-rlflow_grpo_lora}
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
    actor_rollout_ref.model.lora_rank="${LORA_RANK}"
    actor_rollout_ref.model.lora_alpha="${LORA_ALPHA}"
    actor_rollout_ref.model.target_modules=all-linear
    actor_rollout_ref.model.enable_gradient_checkpointing=true
)
ACTOR=(
    actor_rollout_ref.actor.strategy=fsdp2
    actor_rollout_ref.actor.optim.lr="${ACTOR_LR}"
    actor_rollout_ref.actor.ppo_mini_batch_size="${PPO_MINI_BATCH_SIZE}"
    actor_rollout_ref.actor.use_dynamic_bsz=true
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu="${MAX_TOKENS_PER_GPU}"
    actor_rollout_ref.actor.use_kl_loss=true
    actor_rollout_ref.actor.kl_loss_coef="${KL_LOSS_COEF}"
    actor_rollout_ref.actor.kl_loss_type=low_var_kl
    actor_rollout_ref.actor.entropy_coeff="${ENTROPY_COEFF}"
)
ROLLOUT=(
    actor_rollout_ref.rollout.name="${INFER_BACKEND}"
    actor_rollout_ref.rollout.tensor_model_parallel_size="${ROLLOUT_TP}"
    actor_rollout_ref.rollout.n="${ROLLOUT_N}"
    actor_rollout_ref.rollout.load_format=safetensors
)
REF=(
    actor_rollout_ref.ref.log_prob_use_dynamic_bsz=true
    actor_rollout_ref.ref.log_prob_max_token_len_per_gpu="${MAX_TOKENS_PER_GPU}"
)
ALGORITHM=(
    algorithm.adv_estimator=grpo
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
    "${DATA[@]}" "${MODEL[@]}" "${ACTOR[@]}" "${ROLLOUT[@]}" "${REF[@]}" "${ALGORITHM[@]}" "${TRAINER[@]}" \
    "${EXTRA[@]}" "$@"
