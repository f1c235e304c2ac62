#!/usr/bin/env bash
# PPO with a critic | Qwen2.5-0.5B-Instruct | FSDP | 1 GPU of 24 GB
#
# Written, never run on a GPU. What is checked is that every key exists and that the numbers fit each other. The rollout
# engine is the embedded one (rollout.name=hf), the only one of this version: right, but far slower than vLLM.
# INFER_BACKEND=vllm is for the version that has it.
#
#   python examples/data_preprocess/gsm8k.py --local_save_dir ~/data/gsm8k
#   bash examples/ppo_trainer/run_qwen2_5_0_5b_fsdp.sh [key=value ...]
set -xeuo pipefail

HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
export PYTHONPATH="${HERE}/../..${PYTHONPATH:+:${PYTHONPATH}}"

########################### user-adjustable ###########################
MODEL_PATH=${MODEL_PATH:-Qwen/Qwen2.5-0.5B-Instruct}
CRITIC_MODEL_PATH=${CRITIC_MODEL_PATH:-${MODEL_PATH}}
DATA_DIR=${DATA_DIR:-${HOME}/data/gsm8k}
DEVICE=${DEVICE:-cuda}
INFER_BACKEND=${INFER_BACKEND:-hf}
NNODES=${NNODES:-1}
NGPUS_PER_NODE=${NGPUS_PER_NODE:-1}
TRAIN_BATCH_SIZE=${TRAIN_BATCH_SIZE:-256}
PPO_MINI_BATCH_SIZE=${PPO_MINI_BATCH_SIZE:-64}
MAX_PROMPT_LENGTH=${MAX_PROMPT_LENGTH:-512}
MAX_RESPONSE_LENGTH=${MAX_RESPONSE_LENGTH:-512}
MAX_TOKENS_PER_GPU=${MAX_TOKENS_PER_GPU:-8192}
ACTOR_LR=${ACTOR_LR:-1e-6}
CRITIC_LR=${CRITIC_LR:-1e-5}
CRITIC_WARMUP=${CRITIC_WARMUP:-0}
KL_COEF=${KL_COEF:-0.001}
ENTROPY_COEFF=${ENTROPY_COEFF:-0}
ROLLOUT_TP=${ROLLOUT_TP:-1} # of the embedded engine: each replica holds the whole model
ROLLOUT_N=${ROLLOUT_N:-1}
TOTAL_EPOCHS=${TOTAL_EPOCHS:-15}
SAVE_FREQ=${SAVE_FREQ:-20}
TEST_FREQ=${TEST_FREQ:-5}
LOGGER=${LOGGER:-'[console,file]'} # '[console,wandb]' with the extra wandb
PROJECT_NAME=${PROJECT_NAME:-rlflow_ppo_gsm8k}
EXPERIMENT_NAME=${EXPERIMENT_NAME:-qwen2_5_0_5b_fsdp}

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
REF=(
    actor_rollout_ref.ref.log_prob_use_dynamic_bsz=true
    actor_rollout_ref.ref.log_prob_max_token_len_per_gpu="${MAX_TOKENS_PER_GPU}"
)
CRITIC=(
    critic.model.path="${CRITIC_MODEL_PATH}"
    critic.model.use_remove_padding=true
    critic.model.enable_gradient_checkpointing=true
    critic.strategy=fsdp2
    critic.optim.lr="${CRITIC_LR}"
    critic.ppo_max_token_len_per_gpu="${MAX_TOKENS_PER_GPU}"
)
ALGORITHM=(
    algorithm.adv_estimator=gae
    algorithm.gamma=1.0
    algorithm.lam=1.0
    algorithm.use_kl_in_reward=true
    algorithm.kl_penalty=kl
    algorithm.kl_ctrl.kl_coef="${KL_COEF}"
)
TRAINER=(
    trainer.device="${DEVICE}"
    trainer.nnodes="${NNODES}"
    trainer.n_gpus_per_node="${NGPUS_PER_NODE}"
    trainer.logger="${LOGGER}"
    trainer.project_name="${PROJECT_NAME}"
    trainer.experiment_name="${EXPERIMENT_NAME}"
    trainer.critic_warmup="${CRITIC_WARMUP}"
    trainer.total_epochs="${TOTAL_EPOCHS}"
    trainer.save_freq="${SAVE_FREQ}"
    trainer.test_freq="${TEST_FREQ}"
)
EXTRA=()

########################### launch ####################################
python3 -m rlflow.trainer.main_ppo \
    "${DATA[@]}" "${MODEL[@]}" "${ACTOR[@]}" "${ROLLOUT[@]}" "${REF[@]}" "${CRITIC[@]}" "${ALGORITHM[@]}" \
    "${TRAINER[@]}" "${EXTRA[@]}" "$@"
