from __future__ import annotations

import numpy as np
import pytest
import torch
from jinja2 import TemplateError

from rlflow.utils.errors import ConfigError
from rlflow.utils.tokenizer import (
    apply_chat_template,
    extract_system_prompt_and_generation,
    hf_tokenizer,
    initialize_system_prompt,
    initialize_turn_separator,
    normalize_token_ids,
)

NEEDS_USER = (
    "{% if messages | selectattr('role', 'equalto', 'user') | list | length == 0 %}"
    "{{ raise_exception('no user turn') }}{% endif %}"
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}\n{% endfor %}"
)


@pytest.mark.parametrize(
    "ids",
    [
        [1, 2],
        (1, 2),
        [[1, 2]],
        torch.tensor([1, 2]),
        torch.tensor([[1, 2]]),
        np.array([1, 2]),
        {"input_ids": [[1, 2]], "attention_mask": [[1, 1]]},
    ],
)
def test_token_ids_of_all_shapes_become_a_list(ids):
    assert normalize_token_ids(ids) == [1, 2]


@pytest.mark.parametrize("bad", ["12", None, [[1], [2]], ["a"], {"ids": [1]}, 3, [True]])
def test_anything_else_is_refused(bad):
    with pytest.raises(TypeError):
        normalize_token_ids(bad)


def test_one_token_is_one_token():
    assert normalize_token_ids([7]) == [7] and normalize_token_ids([]) == []


def test_system_prompt_generation_prompt_and_separator_come_from_the_template(tokenizer):
    system, generation = extract_system_prompt_and_generation(tokenizer)
    assert tokenizer.decode(system) == "<|im_start|>system\nBe brief.<|im_end|>\n"
    assert tokenizer.decode(generation) == "<|im_start|>assistant\n"
    assert tokenizer.decode(initialize_turn_separator(tokenizer)) == "\n"


def test_a_template_that_wants_a_user_turn_gets_one_that_is_cut_off_again(model_path):
    tokenizer = hf_tokenizer(model_path)
    tokenizer.chat_template = NEEDS_USER
    assert tokenizer.decode(apply_chat_template(tokenizer, [{"role": "tool", "content": "42"}])) == "[tool]42\n"
    tokenizer.chat_template = "{{ raise_exception('never') }}"
    with pytest.raises(TemplateError):
        apply_chat_template(tokenizer, [{"role": "tool", "content": "42"}])
    assert initialize_system_prompt(tokenizer) == initialize_turn_separator(tokenizer) == []


def test_a_tokenizer_without_template_or_file_is_a_config_error(model_path, tmp_path):
    tokenizer = hf_tokenizer(model_path)
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="no chat template"):
        apply_chat_template(tokenizer, [{"role": "user", "content": ""}])
    with pytest.raises(ConfigError, match="no tokenizer can be loaded"):
        hf_tokenizer(str(tmp_path))


def test_a_missing_pad_token_becomes_the_eos_token(tokenizer, tmp_path):
    from copy import deepcopy

    bare = deepcopy(tokenizer)
    bare.pad_token = None
    bare.save_pretrained(tmp_path)
    assert hf_tokenizer(str(tmp_path)).pad_token == "<|im_end|>"
    assert hf_tokenizer(str(tmp_path), correct_pad_token=False).pad_token is None
