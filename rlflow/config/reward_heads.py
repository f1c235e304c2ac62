"""Which checkpoints can score, told by the names in their config; imports neither torch nor transformers."""

from __future__ import annotations

from collections.abc import Sequence

MODEL_PATH = "reward.reward_model.model_path"
SEQUENCE, TOKEN = "ForSequenceClassification", "ForTokenClassification"


def head_problem(path: str, architectures: Sequence[str], num_labels: int) -> str | None:
    """Why a model of these architectures cannot score, or None."""
    name = architectures[0] if architectures else "no architecture"
    if name.endswith((SEQUENCE, TOKEN)):
        if num_labels == 1:
            return None
        return (
            f"{MODEL_PATH}={path} has {num_labels} labels; a score is one number.\n"
            "    try:    a reward model saved with num_labels=1"
        )
    if name.endswith(("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")):
        return (
            f"{MODEL_PATH}={path} is a {name}: it has no classification head, and generative reward models are not "
            f"in this version.\n    try:    a ...{SEQUENCE} with one label, or a reward function that asks a judge of "
            "yours"
        )
    return f"{MODEL_PATH}={path} holds {name}: a reward model needs a head.\n    try:    a ...{SEQUENCE} with one label"
