#!/usr/bin/env python3
"""Make a random, tiny model with a tokenizer: everything a run needs of a model, in a second, without a network.

    python examples/models/make_tiny.py --out ~/models/tiny
    python examples/models/make_tiny.py --out ~/models/tiny-qwen3 --family qwen3 --untied
    python examples/models/make_tiny.py --out ~/models/tiny-reward --reward

The model knows nothing: it is for tests, smoke runs and debugging, where only the machinery counts. Its tokenizer has a
token for each byte and a chat template, so that any text can be asked. The same options give the same weights.

The folder appears whole or not at all. A second run with the same options does nothing; a folder of something else is
left alone. Exit codes: 0 done, 1 with one line on stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

MARKER = "rlflow_source.json"
FORMAT_VERSION = 1
FAMILIES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}
PAD, START, END = "<|pad|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class UserError(Exception):
    """Something the user can fix; shown as one line."""


def make_tokenizer() -> PreTrainedTokenizerBase:
    """Three special tokens and one token a byte; no merges, so nothing had to be trained."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = [PAD, START, END]
    vocab = {token: number for number, token in enumerate([*special, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(special)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=PAD, bos_token=START, eos_token=END, chat_template=CHAT_TEMPLATE
    )


def make_model(args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    import torch
    import transformers

    name = FAMILIES[args.family]
    heads = 4
    config = getattr(transformers, f"{name}Config")(
        vocab_size=len(tokenizer),
        hidden_size=args.hidden_size,
        intermediate_size=2 * args.hidden_size,
        num_hidden_layers=args.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=args.hidden_size // heads,
        max_position_embeddings=2048,
        tie_word_embeddings=not args.untied,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        # Larger than real models have: at 0.02 so small a model answers the same to every prompt.
        initializer_range=0.2,
    )
    torch.manual_seed(args.seed)
    if args.reward:
        config.num_labels = 1
        return getattr(transformers, f"{name}ForSequenceClassification")(config)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model


def is_made_by(out: Path, source: dict[str, Any]) -> bool:
    """True when `out` is a whole folder made by this script with the same options."""
    try:
        return json.loads((out / MARKER).read_text()) == source and (out / "model.safetensors").is_file()
    except (OSError, ValueError):
        return False


def make(args: argparse.Namespace) -> bool:
    """Build the folder; returns False when it was already there."""
    out = Path(args.out).expanduser().resolve()
    if args.hidden_size % 8:
        raise UserError(f"--hidden-size {args.hidden_size} must be a multiple of 8: 4 heads of an even width")
    options = {key: getattr(args, key) for key in ("family", "layers", "hidden_size", "untied", "seed")}
    options |= {"reward": True} if args.reward else {}
    source = {"format": FORMAT_VERSION, "made_by": "make_tiny", **options}
    if is_made_by(out, source):
        return False
    if out.exists() and any(out.iterdir()):
        raise UserError(f"{out} exists and is not the model of these options; choose another --out, or remove it")
    out.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{out.name}.part-", dir=out.parent))
    try:
        tokenizer = make_tokenizer()
        make_model(args, tokenizer).save_pretrained(str(staging))
        tokenizer.save_pretrained(str(staging))
        (staging / MARKER).write_text(json.dumps(source, indent=2) + "\n")
        for path in staging.iterdir():
            path.chmod(0o644)  # safetensors creates files that only the owner can read
        staging.chmod(0o755)
        if out.exists():
            out.rmdir()
        staging.rename(out)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return True


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    default_root = os.environ.get("RLFLOW_DATA", "~/.cache/rlflow")
    parser = argparse.ArgumentParser(description="Make a random, tiny model with a byte-level tokenizer.")
    parser.add_argument("--out", default=f"{default_root}/models/tiny", help="folder to create (default %(default)s)")
    parser.add_argument("--family", choices=sorted(FAMILIES), default="llama", help="default %(default)s")
    parser.add_argument("--layers", type=positive, default=2, help="default %(default)s")
    parser.add_argument("--hidden-size", type=positive, default=64, help="default %(default)s")
    parser.add_argument("--untied", action="store_true", help="an output head of its own, not the input embedding")
    parser.add_argument("--reward", action="store_true", help="a reward model: a classifier of one label")
    parser.add_argument("--seed", type=int, default=0, help="of the weights (default %(default)s)")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything is local: never wait for a hub
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        made = make(args)
    except (UserError, OSError) as error:
        print(f"make_tiny: {error}", file=sys.stderr)
        return 1
    print(f"{'made' if made else 'already there'}: {Path(args.out).expanduser().resolve()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
