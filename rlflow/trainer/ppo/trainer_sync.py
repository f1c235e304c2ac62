"""Sync mode: generate, train, sync weights, repeat. Every trajectory is sampled from the newest weights."""

from __future__ import annotations

from typing import Any

from rlflow.trainer.ppo.trainer_base import PPOTrainer, register_trainer


@register_trainer("sync")
class PPOTrainerSync(PPOTrainer):
    """Actor and rollout take turns on the same devices."""

    def on_init_end(self) -> None:
        """The servers start with no weights of their own: send the actor's."""
        receipt = self.runtime.checkpoint_manager.update_weights(self.global_steps)
        self.recorder.weights(self.global_steps, receipt or {})

    def on_sample_end(self) -> None:
        """Free the servers' memory for training."""
        self.runtime.checkpoint_manager.sleep_replicas()

    def on_step_end(self, metrics: dict[str, Any], timing: dict[str, float]) -> None:
        """The next step samples from the weights of this one."""
        with self._stage("update_weights", timing):
            receipt = self.runtime.checkpoint_manager.update_weights(self.global_steps) or {}
        self.recorder.weights(self.global_steps, receipt)
        metrics.update({name if "/" in name else f"weight_sync/{name}": value for name, value in receipt.items()})
