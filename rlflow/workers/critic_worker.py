"""`CriticWorker`: the value model of PPO on one rank.

A `TrainingWorker` of model type "value_model" that is built from the `critic` node and writes the queue's fields. It
lives in the processes of the policy's workers and shares their process group.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

from tensordict import TensorDict

from rlflow.config import FSDPCriticConfig, FSDPEngineConfig, TrainingWorkerConfig, omega_conf_to_dataclass
from rlflow.single_controller.base import Dispatch, WorkerContext, mesh, register
from rlflow.utils import tensordict_utils as tu
from rlflow.workers.losses import value_loss
from rlflow.workers.training_worker import TrainingWorker


class CriticWorker(TrainingWorker):
    """The critic of a run.

    Args:
        config: the resolved `critic` node.
        response_length: longest response in tokens; the constant of seq-mean-token-sum-norm when none is set.
        context: place in the group; None: from the environment.
    """

    def __init__(
        self, config: Any, response_length: int | None = None, *, context: WorkerContext | None = None
    ) -> None:
        critic = omega_conf_to_dataclass(config, FSDPCriticConfig)
        if critic.loss_agg_mode == "seq-mean-token-sum-norm" and critic.loss_scale_factor is None:
            # The padded width of a micro-batch would make the scale depend on the split.
            critic = dataclasses.replace(critic, loss_scale_factor=response_length)
        self.critic_config = critic
        super().__init__(
            TrainingWorkerConfig(
                model_type="value_model",
                model_config=critic.model,
                engine_config=_engine_config(critic),
                optimizer_config=critic.optim,
                checkpoint_config=critic.checkpoint,
            ),
            context=context,
        )
        self.set_dispatch_collect("critic", **self.get_dispatch_collect("train"))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the model and set its loss."""
        self.reset()
        self.set_loss_fn(partial(value_loss, config=self.critic_config))

    @register(
        dispatch_mode=mesh("critic"),
        reads=("input_ids", "responses"),
        optional_reads=("position_ids",),
        writes=("values",),
    )
    def compute_values(self, data: TensorDict) -> TensorDict | None:
        """Values of the states in which the response tokens were chosen.

        Returns jagged rows aligned with `responses`: `values` fp32 [N, j].
        """
        data = data.copy()
        tu.assign_non_tensor_whole(data, {"compute_loss": False})
        output = self.infer_batch(data)
        return None if output is None else tu.get_tensordict({"values": output["values"]})

    @register(
        dispatch_mode=mesh("critic"),
        reads=("input_ids", "responses", "response_mask", "values", "returns"),
        optional_reads=("position_ids",),
    )
    def update_critic(self, data: TensorDict) -> TensorDict | None:
        """Train on the rows; see `TrainingWorker.train_mini_batch`. Returns `metrics` only."""
        return self.train_mini_batch(data)


def _engine_config(critic: FSDPCriticConfig) -> FSDPEngineConfig:
    """The engine's options with the sizes of the critic; the config itself stays as it is."""
    return dataclasses.replace(
        critic.fsdp,
        strategy=critic.strategy,
        use_remove_padding=critic.model.use_remove_padding,
        use_dynamic_bsz=critic.use_dynamic_bsz,
        max_token_len_per_gpu=critic.ppo_max_token_len_per_gpu,
        micro_batch_size_per_gpu=critic.ppo_micro_batch_size_per_gpu,
        infer_max_token_len_per_gpu=critic.forward_max_token_len_per_gpu,
        infer_micro_batch_size_per_gpu=critic.forward_micro_batch_size_per_gpu,
    )
