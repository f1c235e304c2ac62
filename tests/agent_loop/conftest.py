"""A tiny tokenizer, a scripted LLM client and a config: the inputs of agent loops."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

CHAT_TEMPLATE = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nBe brief.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer():
    """Bytes are tokens; ChatML template with a default system prompt."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


@pytest.fixture(scope="session")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="session")
def model_path(tmp_path_factory, tokenizer):
    path = tmp_path_factory.mktemp("model")
    tokenizer.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="session")
def make_config(model_path):
    """The part of a resolved config that agent loops read; keywords update `actor_rollout_ref.rollout`."""

    def make(**rollout):
        return OmegaConf.create(
            {
                "actor_rollout_ref": {
                    "model": {"path": model_path, "tokenizer_path": None, "external_lib": None},
                    "rollout": {
                        "name": "hf",
                        "n": 2,
                        "prompt_length": 256,
                        "response_length": 64,
                        "seed": 42,
                        "agent": {"num_workers": 1},
                        **rollout,
                    },
                },
                "data": {"apply_chat_template_kwargs": {}},
                "reward": {"num_workers": 1, "timeout_s": 1.0},
            }
        )

    return make


def token_output(token_ids, log_probs=None, stop_reason="stop", **versions):
    """What a rollout server answers."""
    if log_probs is None:
        log_probs = [-0.5] * len(token_ids)
    from rlflow.workers.rollout.base import TokenOutput

    return TokenOutput(
        token_ids=list(token_ids),
        log_probs=log_probs,
        stop_reason=stop_reason,
        num_preempted=0,
        extra_fields=versions,
    )


class RecordingClient:
    """Answers with the outputs given, in order, and keeps the requests."""

    def __init__(self, *outputs):
        self.outputs = list(outputs)
        self.requests = []

    async def generate(self, request_id, *, prompt_ids, sampling_params, **kwargs):
        self.requests.append(SimpleNamespace(request_id=request_id, prompt_ids=prompt_ids, params=sampling_params))
        output = self.outputs.pop(0)
        if isinstance(output, BaseException):
            raise output
        return output


@pytest.fixture
def recording_client():
    return RecordingClient


@pytest.fixture(scope="session")
def output_of():
    return token_output
