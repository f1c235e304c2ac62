"""Names of advantage estimators and policy losses.

Invariant: a name means one function. Registering the same function again is fine, also from a second copy of its module
(a file that is loaded by its path and by its module name); another one under a taken name is refused for estimators and
replaces the old one for policy losses (as users of verl expect).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from enum import Enum, StrEnum
from typing import Any, TypeVar

from torch import Tensor

from rlflow.utils.spelling import nearest

F = TypeVar("F", bound=Callable[..., Any])

PolicyLossFn = Callable[..., tuple[Tensor, dict[str, Any]]]
AdvEstimatorFn = Callable[..., tuple[Tensor, Tensor]]
# rows(scores [N], group int64 [N], lengths [N], *, config, **options) -> advantages [N]; see `outcome`.
OutcomeFn = Callable[..., Tensor]

ADV_ESTIMATOR_REGISTRY: dict[str, AdvEstimatorFn] = {}
POLICY_LOSS_REGISTRY: dict[str, PolicyLossFn] = {}
# Keyed by function, not by name: whoever puts another function under a name does not inherit its core.
_OUTCOME_CORES: dict[AdvEstimatorFn, OutcomeFn] = {}


class AdvantageEstimator(StrEnum):
    """Names of the built-in estimators; a member equals its string."""

    GAE = "gae"
    GRPO = "grpo"
    REINFORCE_PLUS_PLUS = "reinforce_plus_plus"
    REINFORCE_PLUS_PLUS_BASELINE = "reinforce_plus_plus_baseline"
    REMAX = "remax"
    RLOO = "rloo"
    OPO = "opo"
    GRPO_PASSK = "grpo_passk"
    GPG = "gpg"
    RLOO_VECTORIZED = "rloo_vectorized"
    GRPO_VECTORIZED = "grpo_vectorized"
    OPTIMAL_TOKEN_BASELINE = "optimal_token_baseline"  # noqa: S105 - tokens of text
    TIR_OPTIMAL_TOKEN_BASELINE = "tir_optimal_token_baseline"  # noqa: S105
    GDPO = "gdpo"


def _name(name_or_enum: str | AdvantageEstimator) -> str:
    return name_or_enum.value if isinstance(name_or_enum, Enum) else name_or_enum


def register_adv_est(name_or_enum: str | AdvantageEstimator, outcome: OutcomeFn | None = None) -> Callable[[F], F]:
    """Decorator: make an advantage estimator selectable by `algorithm.adv_estimator`.

    The function is called with keywords: token_level_rewards [B, T], response_mask [B, T], index (uid a row, array of
    str), config (the `algorithm` node), and whatever batch fields exist; accept `**kwargs`. It returns
    (advantages [B, T], returns [B, T]).

    Args:
        name_or_enum: the name.
        outcome: the same estimator on one score a row, for those that give all tokens of a row one value:
            `outcome(scores [N], group int64 [N], lengths [N], *, config, **options) -> advantages [N]`, where lengths
            counts valid tokens. The trainer prefers it: nothing of shape [B, T] is built then.

    Raises:
        ValueError: another function has the name.
    """

    def decorator(function: F) -> F:
        name = _name(name_or_enum)
        known = ADV_ESTIMATOR_REGISTRY.get(name)
        if known is not None and known is not function:
            if _same_source(known, function):
                return function  # the first copy keeps the name
            raise ValueError(
                f"advantage estimator {name!r} is already {_origin(known)}, so {_origin(function)} cannot have that "
                f"name. Try another one, such as @register_adv_est('my_{name}')"
            )
        ADV_ESTIMATOR_REGISTRY[name] = function
        if outcome is not None:
            _OUTCOME_CORES[function] = outcome
        return function

    return decorator


def get_adv_estimator_fn(name_or_enum: str | AdvantageEstimator) -> AdvEstimatorFn:
    """The estimator of that name; ValueError lists what exists."""
    return _lookup(ADV_ESTIMATOR_REGISTRY, _name(name_or_enum), "advantage estimator", "register_adv_est")


def get_outcome_fn(function: AdvEstimatorFn) -> OutcomeFn | None:
    """The per-row form of a registered estimator, None when it has none."""
    return _OUTCOME_CORES.get(function)


def register_policy_loss(name: str) -> Callable[[F], F]:
    """Decorator: make a policy loss selectable by `actor.policy_loss.loss_mode`.

    The function is called with keywords old_log_prob, log_prob, advantages, response_mask (all [B, T]), loss_agg_mode,
    config (the actor config), rollout_is_weights ([B, T] or None) and returns (scalar loss, metrics).
    """

    def decorator(function: F) -> F:
        POLICY_LOSS_REGISTRY[name] = function
        return function

    return decorator


def get_policy_loss_fn(name: str) -> PolicyLossFn:
    """The policy loss of that name; ValueError lists what exists."""
    return _lookup(POLICY_LOSS_REGISTRY, name, "policy loss", "register_policy_loss")


def _same_source(known: Callable[..., Any], function: Callable[..., Any]) -> bool:
    """Whether two functions are one piece of a file that was executed twice, with nothing in them that could differ."""
    one, other = getattr(known, "__code__", None), getattr(function, "__code__", None)
    if one is None or one != other or one.co_freevars:
        return False
    same_file = os.path.realpath(one.co_filename) == os.path.realpath(other.co_filename)
    return same_file and _defaults(known) == _defaults(function)


def _defaults(function: Any) -> str:
    # As text: values such as tensors do not compare to one bool.
    return repr((function.__defaults__, function.__kwdefaults__))


def _origin(function: Any) -> str:
    """`module.name (file, line)`, as far as the callable knows."""
    code = getattr(function, "__code__", None)
    module = getattr(function, "__module__", type(function).__module__)
    name = f"{module}.{getattr(function, '__qualname__', type(function).__qualname__)}"
    return name if code is None else f"{name} ({code.co_filename}, line {code.co_firstlineno})"


def _lookup(registry: dict[str, Any], name: str, kind: str, decorator: str) -> Any:
    if isinstance(name, str) and name in registry:
        return registry[name]
    close = nearest(name, registry)
    hint = f" Did you mean {close!r}?" if close else ""
    raise ValueError(
        f"{kind} {name!r} is not registered.{hint} Registered: {', '.join(sorted(registry))}. "
        f"Register your own with @{decorator}({name!r}) in a module named by actor_rollout_ref.model.external_lib."
    )
