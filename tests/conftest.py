"""Fixtures of the whole suite: one Ray cluster, one tiny model. And what may run beside other tests.

`./test.sh` makes two passes: two processes side by side (`-n 2 --alone without`), each with a Ray cluster of its own,
for all tests but those that need the machine for themselves (`--alone only`): whole runs, which use all cores anyway,
and tests marked `alone`, whose processes are killed or whose deadlines are short.
"""

from __future__ import annotations

import os
import tempfile

# Side by side, two threads each would spin against one another.
os.environ.setdefault("OMP_NUM_THREADS", "1" if "PYTEST_XDIST_WORKER" in os.environ else "2")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "2000")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("RAY_DEDUP_LOGS", "0")
# Runs in other processes would leave their numbers in the working directory.
os.environ.setdefault("RLFLOW_FILE_LOGGER_ROOT", tempfile.mkdtemp(prefix="rlflow_test_numbers_"))

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# On a shared machine a slow example says nothing about the code.
settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")


ALONE_FOLDERS = {"e2e", "faults"}


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "only: the tests that need the machine for themselves; without: the others (default: all)"
    parser.addoption("--alone", choices=("only", "without"), help=text)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    choice = config.getoption("--alone")
    if choice is None:
        return
    chosen = [item for item in items if needs_the_machine(item) == (choice == "only")]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(chosen)])
    items[:] = chosen


def needs_the_machine(item: pytest.Item) -> bool:
    folder = item.path.relative_to(Path(__file__).parent).parts[0]
    return folder in ALONE_FOLDERS or item.get_closest_marker("alone") is not None


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A local Ray instance shared by all tests of the session."""
    import ray

    if not ray.is_initialized():
        ray.init(num_cpus=4, include_dashboard=False, namespace="rlflow-test", log_to_driver=False)
    yield
    ray.shutdown()


CHAT_TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random 2-layer Llama (hidden 64, vocab 512, tied embeddings) and a byte-level tokenizer."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tiny_model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<pad>": 0, "<s>": 1, "</s>": 2} | {char: number + 3 for number, char in enumerate(alphabet)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token=None))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<pad>", "<s>", "</s>"])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>", chat_template=CHAT_TEMPLATE
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


REWARD_TEMPLATE = "{% for m in messages %}<s>[{{ m['role'] }}] {{ m['content'] }}</s>{% endfor %}"


@pytest.fixture(scope="session")
def tiny_reward_model_dir(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random classifier of one label (2-layer Qwen2), the policy's alphabet and an own template."""
    import torch
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForSequenceClassification

    folder = tmp_path_factory.mktemp("tiny_reward_model")
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    tokenizer.chat_template = REWARD_TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(1)
    config = Qwen2Config(
        vocab_size=512,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        pad_token_id=0,
        num_labels=1,
        initializer_range=0.3,
    )
    Qwen2ForSequenceClassification(config).save_pretrained(folder)
    return folder
