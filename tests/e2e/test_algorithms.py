"""Every estimator and every policy loss trains under the default trainer, two steps each, on one live run.

The run swaps estimator and loss before each step. Its optimizer is plain SGD, so that (before - after) / lr is the
gradient; it is compared with autograd through the formula of tests/e2e/algorithm_oracles.py on the same rows. What the
estimators are given (greedy baselines, squared probabilities, reward components, values) is recomputed as well.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import rlflow.transfer_queue as tq
from rlflow.config import FSDPActorConfig, omega_conf_to_dataclass
from rlflow.config.rollout_correction import RolloutCorrectionConfig
from rlflow.trainer.ppo import core_algos
from rlflow.trainer.ppo.core_algos import AdvantageEstimator
from rlflow.trainer.ppo.trainer_sync import PPOTrainerSync
from rlflow.utils import tensordict_utils as tu
from rlflow.utils.import_utils import load_module
from rlflow.utils.nested import nested_lengths
from rlflow.workers.losses import ppo_loss

sys.path.insert(0, str(Path(__file__).parent))

import algorithm_oracles as oracles

LR = 0.02
# The losses are tested off policy; there "ppo" stands for vanilla, whose alias it is.
ESTIMATORS = [name.value for name in AdvantageEstimator]
CASES = [(name, "vanilla") for name in ESTIMATORS] + [("rloo", name) for name in oracles.LOSSES if name != "vanilla"]
WHITENED = {"gae", "gdpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"}
FIELDS = (
    *("prompts", "responses", "response_mask", "rm_scores", "old_log_probs", "sum_pi_squared", "values"),
    *("advantages", "returns", "extra_fields"),
)
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    # Hardly ever the same for two answers, so that every group has something to learn from.
    code = sum((place + 1) * ord(char) for place, char in enumerate(solution_str))
    return {"score": (code % 97) / 96, "acc": float(code % 2), "length": float(len(solution_str))}
"""


class Swapping(PPOTrainerSync):
    """Takes the next case before each step, and keeps what the update read and what it changed."""

    folder: Path
    seen: list[dict[str, Any]]

    def case(self) -> tuple[str, str]:
        return CASES[(self.global_steps - 1) // 2]

    def on_train_begin(self) -> None:
        self.keep_weights()

    def on_step_begin(self) -> None:
        estimator, loss = self.case()
        self.config.algorithm.adv_estimator = estimator
        self.config.algorithm.gdpo_reward_keys = ["acc", "length"] if estimator == "gdpo" else None
        self.config.algorithm.gdpo_reward_weights = [1.0, 0.5] if estimator == "gdpo" else None
        mode, _, loss_type = loss.partition(":")
        actor = omega_conf_to_dataclass(self.config.actor_rollout_ref.actor, FSDPActorConfig)
        options = {"loss_mode": mode, **oracles.OPTIONS.get(mode, {})}
        if loss_type:
            options["rollout_correction"] = RolloutCorrectionConfig(loss_type=loss_type, **oracles.BYPASS)
        for name, value in options.items():
            object.__setattr__(actor.policy_loss, name, value)
        self.runtime.actor_wg.set_loss_fn(partial(ppo_loss, config=actor))

    def _compute_old_log_prob(self, batch: Any, metrics: Any) -> Any:
        batch = super()._compute_old_log_prob(batch, metrics)
        if self.global_steps > 2 * len(ESTIMATORS):
            # As after several optimizer steps: ratios around 1, on both sides of every bound.
            old = tq.kv_batch_get(batch.keys, "train", ["old_log_probs"])["old_log_probs"]
            generator = torch.Generator().manual_seed(self.global_steps)
            moved = old.values() + 0.4 * torch.randn(old.values().shape, generator=generator)
            tq.kv_batch_put(
                batch.keys, "train", fields=tu.get_tensordict({"old_log_probs": tu.nested_like(moved, old)})
            )
        return batch

    def _update_actor(self, batch: Any, metrics: Any) -> None:
        data = tq.kv_batch_get(batch.keys, "train", FIELDS, missing_ok=("sum_pi_squared",))
        super()._update_actor(batch, metrics)
        tags = [dict(tag) for tag in batch.tags]
        self.seen.append({"case": self.case(), "keys": list(batch.keys), "tags": tags, "data": data})
        self.keep_weights()

    def keep_weights(self) -> None:
        self.runtime.actor_wg.save_checkpoint(str(self.folder / str(self.global_steps)), None, self.global_steps, None)


@pytest.fixture(scope="module")
def swapped(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Filled by the first test, which runs; the others look at it."""
    return {"folder": tmp_path_factory.mktemp("weights")}


@pytest.mark.timeout(280)
def test_every_estimator_and_loss_trains_two_steps(
    run_trainer: Callable[..., Any],
    tiny_overrides: list[str],
    tiny_model_dir: Path,
    read_metrics: Callable[[], list[dict[str, Any]]],
    tmp_path: Path,
    swapped: dict[str, Any],
) -> None:
    (tmp_path / "reward.py").write_text(REWARD)
    Swapping.folder, Swapping.seen = swapped["folder"], []
    run_trainer(
        [
            *tiny_overrides,
            f"trainer.total_training_steps={2 * len(CASES)}",
            "trainer.trace.trajectories_per_step=0",
            "algorithm.adv_estimator=gae",
            "algorithm.gamma=0.9",
            "algorithm.lam=0.8",
            f"critic.model.path={tiny_model_dir}",
            "critic.model.enable_gradient_checkpointing=false",
            "critic.fsdp.dtype=float32",
            "actor_rollout_ref.actor.checkpoint.save_contents=[model]",
            "actor_rollout_ref.actor.optim.optimizer=SGD",
            "actor_rollout_ref.actor.optim.weight_decay=0",
            "actor_rollout_ref.actor.optim.clip_grad=null",
            f"actor_rollout_ref.actor.optim.lr={LR}",
        ],
        Swapping,
    )
    lines = read_metrics()
    swapped |= {"steps": Swapping.seen, "lines": lines, "model": tiny_model_dir, "run": tmp_path / "checkpoints"}
    swapped["score"] = load_module(str(tmp_path / "reward.py")).compute_score
    assert [step["case"] for step in Swapping.seen] == [case for case in CASES for _ in range(2)]
    assert all(line["data"]["actor/grad_norm"] > 0 and line["data"]["actor/skipped_steps"] == 0 for line in lines)
    assert all("rollout_corr/k3_kl" in line["data"] for line in lines), "measured in every run"


def weights(folder: Path, step: int) -> dict[str, Tensor]:
    [file] = (folder / str(step) / "model").glob("*.safetensors")
    return {name.removeprefix("hf_model."): value for name, value in load_file(file).items()}


def dense(data: Any, name: str) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(data[name].unbind()), batch_first=True).double()


def steps_of(swapped: dict[str, Any], case: tuple[str, str]) -> list[tuple[int, dict[str, Any]]]:
    assert "steps" in swapped, "the run did not end"
    return [(number, step) for number, step in enumerate(swapped["steps"], 1) if step["case"] == case]


def relative_error(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    a, b = (torch.cat([side[name].double().flatten() for name in sorted(theirs)]) for side in (ours, theirs))
    return float((a - b).norm() / b.norm())


@pytest.fixture(scope="module")
def policy(swapped: dict[str, Any]) -> oracles.Policy:
    return oracles.Policy(swapped["model"])


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(case))
def test_the_gradient_is_that_of_the_formula(
    swapped: dict[str, Any], policy: oracles.Policy, case: tuple[str, str]
) -> None:
    for number, step in steps_of(swapped, case):
        before, after = weights(swapped["folder"], number - 1), weights(swapped["folder"], number)
        policy.load(before)
        data = step["data"]
        new = policy.log_probs(list(data["prompts"].unbind()), list(data["responses"].unbind()))
        old, advantages, mask = (dense(data, name) for name in ("old_log_probs", "advantages", "response_mask"))
        loss = oracles.LOSSES[case[1]](new, old, advantages, mask)
        update = {name: (before[name].double() - after[name].double()) / LR for name in before}
        assert relative_error(update, policy.gradient(loss)) < 2e-3, number


@pytest.mark.parametrize("name", ESTIMATORS)
def test_the_advantages_are_those_of_the_estimator_on_what_the_trainer_gave_it(
    swapped: dict[str, Any], policy: oracles.Policy, name: str
) -> None:
    for number, step in steps_of(swapped, (name, "vanilla")):
        data, uids = step["data"], [key.rsplit("_", 2)[0] for key in step["keys"]]
        mask, scores = dense(data, "response_mask").float(), dense(data, "rm_scores").float()
        given: dict[str, Any] = {"norm_adv_by_std_in_grpo": True, "gamma": 0.9, "lam": 0.8}
        if name == "gae":
            given["values"] = dense(data, "values").float()
        if "optimal" in name:
            given |= {field: dense(data, field).float() for field in ("old_log_probs", "sum_pi_squared")}
        if name == "remax":
            given["reward_baselines"] = torch.tensor([tag["reward_baseline"] for tag in step["tags"]])
        config = {"gamma": 0.9, "norm_adv_by_std_in_grpo": True}
        if name == "gdpo":
            config |= {"gdpo_reward_keys": ["acc", "length"], "gdpo_reward_weights": [1.0, 0.5]}
            infos = [extra["reward_extra_info"] for extra in tu.get(data, "extra_fields")]
            given["non_tensor_batch"] = {key: np.array([info[key] for info in infos]) for key in ("acc", "length")}
            given["batch"] = {
                "prompts": torch.zeros(len(uids), 0),
                "attention_mask": mask.long(),
            }
        advantages, _ = core_algos.get_adv_estimator_fn(name)(
            token_level_rewards=scores,
            response_mask=mask,
            index=np.array(uids, dtype=object),
            config=_Node(config),
            **given,
        )
        torch.testing.assert_close(dense(data, "advantages").float() * mask, advantages * mask, atol=1e-4, rtol=1e-4)
        if name not in WHITENED:
            assert torch.equal(nested_lengths(data["advantages"]), nested_lengths(data["responses"])), number


class _Node(dict[str, Any]):
    """A configuration node: attributes and `get`."""

    __getattr__ = dict.__getitem__


def test_the_squared_probabilities_are_those_of_the_policy(swapped: dict[str, Any], policy: oracles.Policy) -> None:
    number, step = steps_of(swapped, ("optimal_token_baseline", "vanilla"))[0]
    policy.load(weights(swapped["folder"], number - 1))
    prompts, responses = (list(step["data"][name].unbind()) for name in ("prompts", "responses"))
    for row, found in enumerate(step["data"]["sum_pi_squared"].unbind()):
        ids = torch.cat([prompts[row], responses[row]]).unsqueeze(0)
        p = policy.model(ids).logits[0, len(prompts[row]) - 1 : -1].softmax(-1)
        torch.testing.assert_close(found.double(), p.square().sum(-1).detach(), atol=1e-5, rtol=1e-4)
    assert all("sum_pi_squared" not in step["data"].keys() for _, step in steps_of(swapped, ("rloo", "vanilla")))


def test_the_baseline_is_the_score_of_the_greedy_answer_and_its_session_is_no_sample(
    swapped: dict[str, Any], policy: oracles.Policy
) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(swapped["model"])
    issued = [json.loads(line) for line in (swapped["run"] / "events.jsonl").read_text().splitlines()]
    for number, step in steps_of(swapped, ("remax", "vanilla")):
        policy.load(weights(swapped["folder"], number - 1))
        baselines = {}
        for row, key in enumerate(step["keys"]):
            answer = tokenizer.decode(policy.greedy(step["data"]["prompts"].unbind()[row], 8), skip_special_tokens=True)
            baselines[key.rsplit("_", 2)[0]] = swapped["score"]("", answer, "")["score"]
            assert step["tags"][row]["reward_baseline"] == pytest.approx(baselines[key.rsplit("_", 2)[0]])
        assert sorted(int(key.rsplit("_", 2)[1]) for key in step["keys"]) == [0, 0, 1, 1, 2, 2]
        numbers = swapped["lines"][number - 1]["data"]
        assert numbers["remax/baseline_score/mean"] == pytest.approx(sum(baselines.values()) / 2)
        assert {line["sessions"] for line in issued if line["event"] == "issued" and line["step"] == number} == {3}
    assert "reward_baseline" not in swapped["steps"][0]["tags"][0]


def test_components_and_variance_proxies_are_reported_where_they_are_known(swapped: dict[str, Any]) -> None:
    lines = {step["case"]: line["data"] for step, line in zip(swapped["steps"], swapped["lines"], strict=True)}
    gdpo, otb = lines["gdpo", "vanilla"], lines["optimal_token_baseline", "vanilla"]
    assert {f"gdpo/{name}/{stat}" for name in ("acc", "length") for stat in ("mean", "std", "max", "min")} <= set(gdpo)
    assert otb["variance_proxy/proxy2_total_power"] > 0
    assert otb["variance_proxy/proxy1_signal_strength"] == pytest.approx(otb["actor/grad_norm"] ** 2, rel=1e-4)
    assert not any(name.startswith(("gdpo/", "variance_proxy/", "remax/")) for name in lines["rloo", "vanilla"])
    assert lines["rloo", "bypass_mode:ppo_clip"]["rollout_corr/rollout_rs_masked_fraction"] > 0
