"""Policy losses, one file each; importing a file registers its loss. Also the losses of critic and entropy."""

from __future__ import annotations

from rlflow.trainer.ppo.core_algos.losses.bypass import compute_policy_loss_bypass_mode
from rlflow.trainer.ppo.core_algos.losses.cispo import compute_policy_loss_cispo
from rlflow.trainer.ppo.core_algos.losses.clip_cov import compute_policy_loss_clip_cov
from rlflow.trainer.ppo.core_algos.losses.deprecated import compute_policy_loss
from rlflow.trainer.ppo.core_algos.losses.dppo import compute_policy_loss_dppo_kl, compute_policy_loss_dppo_tv
from rlflow.trainer.ppo.core_algos.losses.dro import compute_policy_loss_dro
from rlflow.trainer.ppo.core_algos.losses.entropy import compute_entropy_loss
from rlflow.trainer.ppo.core_algos.losses.geo_mean import compute_policy_loss_geo_mean
from rlflow.trainer.ppo.core_algos.losses.gpg import compute_policy_loss_gpg
from rlflow.trainer.ppo.core_algos.losses.gspo import compute_policy_loss_gspo
from rlflow.trainer.ppo.core_algos.losses.kl_cov import compute_policy_loss_kl_cov
from rlflow.trainer.ppo.core_algos.losses.reinforce import compute_policy_loss_reinforce
from rlflow.trainer.ppo.core_algos.losses.sapo import compute_policy_loss_sapo
from rlflow.trainer.ppo.core_algos.losses.value import compute_value_loss
from rlflow.trainer.ppo.core_algos.losses.vanilla import compute_policy_loss_vanilla

__all__ = [
    "compute_entropy_loss",
    "compute_policy_loss",
    "compute_policy_loss_bypass_mode",
    "compute_policy_loss_cispo",
    "compute_policy_loss_clip_cov",
    "compute_policy_loss_dppo_kl",
    "compute_policy_loss_dppo_tv",
    "compute_policy_loss_dro",
    "compute_policy_loss_geo_mean",
    "compute_policy_loss_gpg",
    "compute_policy_loss_gspo",
    "compute_policy_loss_kl_cov",
    "compute_policy_loss_reinforce",
    "compute_policy_loss_sapo",
    "compute_policy_loss_vanilla",
    "compute_value_loss",
]
