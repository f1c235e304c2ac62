"""The model of a reward server: a transformers classifier with one output, run over right-padded batches.

Invariants
    - A score is that of a plain transformers forward of the row alone, whatever the batch: padding is masked, and the
      pooled token is the one transformers would pool.
    - A head that is one linear layer computes in fp32, whatever the precision of the body: scores are compared.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlflow.config.reward_heads import MODEL_PATH, SEQUENCE, head_problem
from rlflow.utils.errors import ConfigError
from rlflow.workers.rollout.hf.model import arithmetic_dtype, parse_dtype

logger = logging.getLogger(__name__)


class Classifier:
    """Scores token rows.

    Args:
        module: a sequence or token classifier with one label; of the latter the last token's output counts.
        pools_sequence: whether it pools by itself (sequence classification).
    """

    def __init__(self, module: Any, *, pools_sequence: bool) -> None:
        module.config.get_text_config().use_cache = False
        self.module = module.eval().requires_grad_(False)
        self._pools_sequence = pools_sequence
        self._pad_id: int | None = module.config.get_text_config().pad_token_id
        exact_head(module)

    @property
    def dtype(self) -> torch.dtype:
        """Type of the body's activations."""
        return self.module.dtype

    @property
    def max_positions(self) -> int | None:
        """Tokens the model can read, where its config says so."""
        return getattr(self.module.config.get_text_config(), "max_position_embeddings", None)

    @torch.no_grad()
    def score(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """One score a row; rows hold at least one token."""
        lengths = torch.tensor([len(row) for row in rows])
        ids, mask = self._padded(rows, lengths)
        # Where the model has no padding token, this batch's filler is told to it: it pools the last token before.
        self.module.config.get_text_config().pad_token_id = self._filler(rows)
        logits = self.module(input_ids=ids, attention_mask=mask).logits
        if not self._pools_sequence:
            logits = logits[torch.arange(len(rows)), lengths - 1]
        return logits.float()[:, 0].tolist()

    def move(self, device: torch.device | str) -> None:
        """Put the weights there."""
        self.module.to(device)

    def _padded(self, rows: Sequence[Sequence[int]], lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Ids and mask, int64 [n, longest]."""
        width = int(lengths.max())
        ids = torch.full((len(rows), width), self._filler(rows), dtype=torch.int64)
        for i, row in enumerate(rows):
            ids[i, : len(row)] = torch.tensor(row, dtype=torch.int64)
        mask = (torch.arange(width) < lengths[:, None]).to(torch.int64)
        return ids.to(self.module.device), mask.to(self.module.device)

    def _filler(self, rows: Sequence[Sequence[int]]) -> int:
        """The model's padding token; without one, any token that no row ends with."""
        if self._pad_id is not None:
            return self._pad_id
        last = {row[-1] for row in rows}
        return next(token for token in range(len(rows) + 1) if token not in last)


def exact_head(module: Any) -> None:
    """Let the head compute in fp32 where it is one linear layer beside the body."""
    heads = [part for part in module.children() if isinstance(part, nn.Linear)]
    if len(heads) == 1:
        heads[0].float().register_forward_pre_hook(lambda _, args: (args[0].float(),))


def load_classifier(model_config: Any, rollout_config: Any, device: torch.device) -> Classifier:
    """Read the classifier that `model_config.path` names.

    Raises:
        ConfigError: no such model, one without a classification head, or with a head of several outputs.
    """
    path = str(Path(str(model_config.path)).expanduser())
    config = _classifier_config(path)
    model_class, pools_sequence = _classifier_class(config, path)
    weights = parse_dtype(rollout_config.dtype, "reward.reward_model.rollout.dtype")
    options = (rollout_config.get("engine_kwargs") or {}).get("hf") or {}
    dtype = arithmetic_dtype(weights, options.get("compute_dtype"), device)
    try:
        module, info = model_class.from_pretrained(path, config=config, dtype=weights, output_loading_info=True)
    except RuntimeError as error:  # tensors of another shape
        raise ConfigError(f"{MODEL_PATH}={path} does not hold the weights of its own config: {error}") from error
    if info["missing_keys"]:
        raise ConfigError(
            f"{MODEL_PATH}={path} lacks weights of {model_class.__name__}: {sorted(info['missing_keys'])[:4]}. A "
            "reward model must come with its trained head."
        )
    logger.info("reward model %s: weights %s, arithmetic %s on %s", path, weights, dtype, device)
    return Classifier(module.to(dtype).to(device), pools_sequence=pools_sequence)


def _classifier_config(path: str) -> Any:
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{MODEL_PATH}={path} holds no model config: {error}") from error
    if problem := head_problem(path, list(config.architectures or []), int(config.num_labels)):
        raise ConfigError(problem)
    return config


def _classifier_class(config: Any, path: str) -> tuple[Any, bool]:
    import transformers

    name = config.architectures[0]
    model_class = getattr(transformers, name, None)
    if model_class is None:
        raise ConfigError(
            f"{MODEL_PATH}={path} is a {name}, which transformers {transformers.__version__} does not have (code that "
            "comes with a checkpoint is not run). Use a model of an architecture it has."
        )
    return model_class, name.endswith(SEQUENCE)
