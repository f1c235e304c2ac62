"""A tiny causal LM, and batches of trajectories for it; shared by tests and by the processes that they start."""

from __future__ import annotations

from pathlib import Path

import torch
from model_families import tiny_model
from tensordict import TensorDict

from rlflow.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from rlflow.utils import tensordict_utils as tu

VOCAB = 512


def save_tiny_model(folder: Path, *, family: str = "Llama", tied: bool = True, **options: object) -> str:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    torch.manual_seed(0)
    model = tiny_model(
        family,
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        **{"tie_word_embeddings": tied} | options,
    )
    # Weights large enough that attention across rows would show.
    for param in model.parameters():
        if param.dim() > 1:
            param.data.mul_(4)
    model.save_pretrained(folder)
    words = {f"w{i}": i for i in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w3"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "w0", "bos_token": "w1", "eos_token": "w2"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    return str(folder)


def save_adapter(path: str, folder: Path, *, rank: int = 4, **options: object) -> str:
    """A trained-looking adapter (B is not zero) on every linear layer, saved by PEFT; returns its folder."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(3)
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    chosen = {"target_modules": "all-linear"} | options
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", r=rank, lora_alpha=8, **chosen))  # type: ignore[arg-type]
    for name, param in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(param, std=0.05)
    model.save_pretrained(folder)
    return str(folder)


def make_batch(rows: int = 8, seed: int = 0, *, group: int = 2, min_r: int = 1, max_r: int = 9) -> TensorDict:
    """`group` rows share a prompt. The last row is a padding row: one prompt and one response token, mask 0."""
    g = torch.Generator().manual_seed(seed)

    def ints(low: int, high: int, n: int) -> torch.Tensor:
        return torch.randint(low, high, (n,), generator=g)

    fields: dict[str, list[torch.Tensor]] = {k: [] for k in ("prompts", "responses", "input_ids", "response_mask")}
    floats: dict[str, list[torch.Tensor]] = {k: [] for k in ("old_log_probs", "ref_log_prob", "advantages")}
    prompt = ints(3, VOCAB, 5)
    for i in range(rows):
        if i % group == 0:
            prompt = ints(3, VOCAB, int(ints(2, 14, 1)))
        response = ints(3, VOCAB, int(ints(min_r, max_r + 1, 1)))
        mask = (torch.rand(len(response), generator=g) > 0.2).long()
        row_prompt = prompt
        if i == rows - 1:
            row_prompt, response, mask = torch.tensor([0]), torch.tensor([0]), torch.tensor([0])
        fields["prompts"].append(row_prompt)
        fields["responses"].append(response)
        fields["input_ids"].append(torch.cat([row_prompt, response]))
        fields["response_mask"].append(mask)
        for name in floats:
            noise = torch.randn(len(response), generator=g)
            floats[name].append(noise if name == "advantages" else -4 + noise)
    return tu.get_tensordict({k: tu.nested_from_list(v) for k, v in (fields | floats).items()})


def with_values(data: TensorDict, seed: int = 0) -> TensorDict:
    """Add what the update of a critic reads: `values`, `returns`."""
    g = torch.Generator().manual_seed(1000 + seed)
    for name in ("values", "returns"):
        data.set(name, tu.nested_like(torch.randn(data["responses"].values().numel(), generator=g), data["responses"]))
    return data


def configs(
    path: str,
    *,
    dtype: str = "float32",
    optimizer: str = "SGD",
    lr: float = 0.5,
    recompute: bool = True,
    model: dict[str, object] | None = None,
    **engine: object,
) -> tuple[HFModelConfig, FSDPEngineConfig, FSDPOptimizerConfig]:
    options: dict[str, object] = {"dtype": dtype, "max_token_len_per_gpu": 4096} | engine
    extra = {} if optimizer != "SGD" else {"override_optimizer_config": {"fused": False}}
    return (
        HFModelConfig(path=path, enable_gradient_checkpointing=recompute, **(model or {})),  # type: ignore[arg-type]
        FSDPEngineConfig(**options),  # type: ignore[arg-type]
        FSDPOptimizerConfig(
            lr=lr, optimizer=optimizer, weight_decay=0.0, clip_grad=None, total_training_steps=10, **extra
        ),
    )
