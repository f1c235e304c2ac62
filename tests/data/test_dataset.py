"""From files to rows: what is kept, what is refused and in which words."""

from __future__ import annotations

import json
import logging
import pickle
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from rlflow.data import RLHFDataset, RowTable, collate_fn, create_rl_dataset, get_dataset_class
from rlflow.utils.errors import ConfigError, DataError


class WordTokenizer:
    """One token a word; the template adds one word a message and one for the generation prompt."""

    def apply_chat_template(self, messages, add_generation_prompt, tokenize, broken=False, **_):
        assert add_generation_prompt and not tokenize
        if broken:
            raise ValueError("no such filter")
        return " ".join(f"{m['role']} {m['content']}" for m in messages) + " go"

    def __call__(self, texts, add_special_tokens):
        return {"input_ids": [text.split() for text in texts]}


def row(text: str = "hello", **columns) -> dict:
    return {"prompt": [{"role": "user", "content": text}], **columns}


def write_parquet(path: Path, rows: list[dict]) -> str:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


def write_jsonl(path: Path, rows: list) -> str:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return str(path)


def make(files, max_samples=-1, **config) -> RLHFDataset:
    return RLHFDataset(files, WordTokenizer(), {"filter_overlong_prompts": False, **config}, max_samples=max_samples)


FULL = row(
    data_source="s",
    ability="math",
    reward_model={"style": "rule", "ground_truth": "4"},
    extra_info={"split": "train", "index": 3, "tools_kwargs": {"t": {"create_kwargs": {"a": 1}}}},
    note="kept",
)


@pytest.mark.parametrize("suffix", ["parquet", "jsonl", "json"])
def test_a_row_has_its_columns_and_the_derived_ones(tmp_path, suffix):
    file = tmp_path / f"data.{suffix}"
    if suffix == "parquet":
        write_parquet(file, [FULL])
    elif suffix == "jsonl":
        write_jsonl(file, [FULL])
    else:
        file.write_text(json.dumps([FULL]))
    got = make(str(file))[0]
    assert got["raw_prompt"] == [{"role": "user", "content": "hello"}]
    assert got["reward_model"] == {"style": "rule", "ground_truth": "4"}
    assert (got["data_source"], got["index"], got["note"]) == ("s", 3, "kept")
    assert got["tools_kwargs"] == {"t": {"create_kwargs": {"a": 1}}}
    assert got["interaction_kwargs"] == {}
    assert torch.equal(got["dummy_tensor"], torch.tensor([0], dtype=torch.uint8))


def test_optional_columns_have_defaults(tmp_path):
    got = make(write_jsonl(tmp_path / "d.jsonl", [row()]))[0]
    assert (got["data_source"], got["extra_info"], got["index"]) == ("unknown", {}, 0)


def test_every_access_gives_a_fresh_row(tmp_path):
    dataset = make(write_jsonl(tmp_path / "d.jsonl", [FULL]))
    dataset[0]["extra_info"]["split"] = "changed by a reward function"
    assert dataset[0]["extra_info"]["split"] == "train"


def test_files_with_different_columns_are_joined(tmp_path):
    files = [
        write_parquet(tmp_path / "a.parquet", [row("a", x=1)]),
        write_jsonl(tmp_path / "b.jsonl", [row("b", y="two")]),
    ]
    dataset = make(files)
    assert [(r["x"], r["y"]) for r in dataset.dataframe] == [(1, None), (None, "two")]
    assert dataset.dataframe.column_names == ["prompt", "x", "y"]
    assert collate_fn([dataset[0], dataset[1]])["x"].tolist() == [1, None]


def test_json_values_keep_their_types_row_by_row(tmp_path):
    rows = [row("a", reward_model={"ground_truth": 1}), row("b", reward_model={"ground_truth": ["x"]})]
    dataset = make(write_jsonl(tmp_path / "d.jsonl", rows))
    assert [dataset[i]["reward_model"]["ground_truth"] for i in (0, 1)] == [1, ["x"]]


def test_a_json_file_of_columns_or_of_lines_is_read_too(tmp_path):
    (tmp_path / "c.json").write_text(json.dumps({"prompt": [row()["prompt"]] * 2, "n": [1, 2]}))
    assert make(str(tmp_path / "c.json")).dataframe["n"] == [1, 2]
    (tmp_path / "l.json").write_text(json.dumps(row("a")) + "\n" + json.dumps(row("b")))
    assert len(make(str(tmp_path / "l.json"))) == 2


def test_nulls_that_parquet_adds_to_messages_are_dropped(tmp_path):
    rows = [row(), {"prompt": [{"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}]}]
    dataset = make(write_parquet(tmp_path / "d.parquet", rows))
    assert dataset[0]["raw_prompt"] == [{"role": "user", "content": "hello"}]
    assert dataset[1]["raw_prompt"][0]["tool_calls"] == [{"name": "f"}]


@pytest.mark.parametrize(
    ("bad", "found"),
    [
        ({"prompt": None}, "column 'prompt': found null, expected a non-empty list of messages"),
        ({}, "column 'prompt': found null"),
        ({"prompt": []}, "found an empty list"),
        ({"prompt": "What is 1+1?"}, "found str 'What is 1+1?'"),
        ({"prompt": ["hi"]}, "message 0: found str 'hi', expected an object"),
        ({"prompt": [{"content": "hi"}]}, "message 0: no role"),
        ({"prompt": [{"role": "User", "content": "hi"}]}, "found role str 'User', expected one of system, user"),
        ({"prompt": [{"role": "user", "content": None}]}, "message 0: found content null, expected a string"),
        ({"prompt": [{"role": "user", "content": 7}]}, "found content int 7"),
        (row(extra_info="{}"), "column 'extra_info': found str '{}', expected an object"),
        (row(reward_model=3), "column 'reward_model': found int 3, expected an object"),
        (row(data_source=3), "column 'data_source': found int 3, expected a string"),
        (row(images=[{"bytes": ""}]), "column 'images': found 1 items, but prompts with media are not supported"),
    ],
)
def test_a_malformed_row_is_named(tmp_path, bad, found):
    file = write_jsonl(tmp_path / "d.jsonl", [row("first"), bad])
    with pytest.raises(DataError) as error:
        make(file)
    assert "1 of 2 rows cannot be used" in str(error.value)
    assert f"{file}, line 2: " in str(error.value)
    assert found in str(error.value)


def test_a_malformed_parquet_row_is_named_by_position_and_only_the_first_few_are_listed(tmp_path):
    rows = [row("ok")] + [{"prompt": []} for _ in range(8)]
    with pytest.raises(DataError) as error:
        make(write_parquet(tmp_path / "d.parquet", rows))
    assert "d.parquet, row 1 (from 0): column 'prompt': found an empty list" in str(error.value)
    assert "8 of 9 rows" in str(error.value) and "and 3 more" in str(error.value)


def test_duplicates_are_only_reported(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        dataset = make(write_jsonl(tmp_path / "d.jsonl", [row("a"), row("b"), row("a")]))
    assert len(dataset) == 3
    assert "1 of 3 prompts repeat an earlier one" in caplog.text and "line 3 repeats" in caplog.text


def test_a_missing_file_says_what_was_looked_for_and_what_is_there(tmp_path):
    write_jsonl(tmp_path / "test.jsonl", [row()])
    with pytest.raises(DataError, match=r"no file .*train\.parquet; the folder has test\.jsonl"):
        make(str(tmp_path / "train.parquet"))
    with pytest.raises(DataError, match="the folder .*nowhere does not exist"):
        make(str(tmp_path / "nowhere" / "train.parquet"))


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("d.csv", b"a,b", "format '.csv'; expected .parquet, .json, .jsonl"),
        ("d.parquet", b"not parquet", "cannot be read as parquet"),
        ("d.jsonl", b'{"prompt": 1}\n\n{"prompt"', "line 3: not JSON"),
        ("d.jsonl", b"[1]", "line 1: found list, expected an object"),
        ("d.jsonl", b"\xff\xfe", "not UTF-8"),
        ("d.jsonl", b"", "no rows in"),
        ("d.json", b'{"a": [1], "b": [1, 2]}', "columns of different length"),
        ("d.jsonl", b'{"question": "x"}', r"no column 'prompt' \(data.prompt_key\); the files have question"),
    ],
)
def test_a_broken_file_is_named(tmp_path, name, content, match):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=match):
        make(str(tmp_path / name))


def test_remote_paths_and_empty_lists_are_refused():
    with pytest.raises(DataError, match="hdfs:// paths are not read"):
        make("hdfs://host/train.parquet")
    with pytest.raises(DataError, match="is empty"):
        make([])


def test_max_samples_takes_the_first_or_a_seeded_draw(tmp_path):
    file = write_jsonl(tmp_path / "d.jsonl", [row(str(i)) for i in range(20)])

    def texts(**config):
        return [r["prompt"][0]["content"] for r in make(file, max_samples=4, **config).dataframe]

    assert texts(shuffle=False) == ["0", "1", "2", "3"]
    expected = np.random.default_rng(5).choice(20, size=4, replace=False)
    assert texts(shuffle=True, seed=5) == [str(i) for i in expected]
    assert texts(shuffle=True, seed=None) == texts(shuffle=True, seed=None)
    assert len(make(file, max_samples=99)) == 20


def test_overlong_prompts_are_left_out(tmp_path):
    file = write_jsonl(tmp_path / "d.jsonl", [row("a b c"), row("a"), row("a b c d e f"), row("a b")])
    dataset = make(file, filter_overlong_prompts=True, max_prompt_length=5)  # role + words + "go"
    assert [r["prompt"][0]["content"] for r in dataset.dataframe] == ["a b c", "a", "a b"]
    assert dataset.dataframe.locate(2).endswith("line 4")
    with pytest.raises(DataError, match=r"all 4 prompts .*max_prompt_length=2; the shortest has 3 tokens"):
        make(file, filter_overlong_prompts=True, max_prompt_length=2)


def test_a_failing_template_is_an_error_not_an_empty_dataset(tmp_path):
    file = write_jsonl(tmp_path / "d.jsonl", [row()])
    with pytest.raises(DataError, match="line 1: the chat template fails: ValueError: no such filter"):
        make(file, filter_overlong_prompts=True, apply_chat_template_kwargs={"broken": True})


def test_length_is_that_of_the_real_template(tmp_path):
    """The batched measure equals `apply_chat_template(tokenize=True)` of a Hugging Face tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>")
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }} : {{ m.content }}\n{% endfor %}assistant :"
    prompts = [row("one two, three"), row("x " * 40)]
    dataset = RLHFDataset(write_jsonl(tmp_path / "d.jsonl", prompts), tokenizer, {"max_prompt_length": 1000})
    ids = [tokenizer.apply_chat_template(p["prompt"], add_generation_prompt=True, return_dict=False) for p in prompts]
    assert dataset._prompt_lengths(dataset.dataframe) == [len(i) for i in ids]


def test_split_and_pickle(tmp_path):
    dataset = make(write_jsonl(tmp_path / "d.jsonl", [row(str(i)) for i in range(7)]))
    parts = dataset.split(3)
    assert [[r["prompt"][0]["content"] for r in part.dataframe] for part in parts] == [
        ["0", "1"],
        ["2", "3"],
        ["4", "5"],
    ]
    assert "dataframe" not in dataset.__getstate__()  # read again from the files
    assert len(pickle.loads(pickle.dumps(dataset))) == 7
    assert len(pickle.loads(pickle.dumps(parts[1]))) == 2


def test_a_table_is_a_sequence_with_select_filter_and_columns():
    table = RowTable.from_rows([{"a": i, "b": str(i)} for i in range(5)])
    assert table[-1] == {"a": 4, "b": "4"}
    assert table.filter(lambda r: r["a"] % 2 == 0)["b"] == ["0", "2", "4"]
    assert table[1:4].select([2, 0])["a"] == [3, 1]
    with pytest.raises(IndexError):
        table[5]
    with pytest.raises(IndexError):
        table.select([5])
    with pytest.raises(KeyError, match="no column 'c'; the files have a, b"):
        table["c"]


def test_collate_stacks_tensors_and_keeps_objects():
    batch = collate_fn([{"t": torch.zeros(2), "m": [{"role": "user"}]}, {"t": torch.ones(2), "m": []}])
    assert batch["t"].shape == (2, 2)
    assert batch["m"].shape == (2,) and batch["m"].dtype == object and batch["m"][0] == [{"role": "user"}]
    assert collate_fn([]) == {}
    with pytest.raises(DataError, match="different keys: b"):
        collate_fn([{"a": 1}, {"a": 1, "b": 2}])
    with pytest.raises(DataError, match="column 't': tensors of different shapes"):
        collate_fn([{"t": torch.zeros(1)}, {"t": torch.zeros(2)}])


CUSTOM = """
from torch.utils.data import Dataset
from rlflow.data import RLHFDataset
class Shouting(RLHFDataset):
    def __getitem__(self, item):
        row = super().__getitem__(item)
        row["raw_prompt"] = [{**m, "content": m["content"].upper()} for m in row["raw_prompt"]]
        return row
class NoDataset:
    pass
"""


def test_a_class_of_the_users(tmp_path):
    (tmp_path / "mine.py").write_text(CUSTOM)
    file = write_jsonl(tmp_path / "d.jsonl", [row("quiet")])
    path = str(tmp_path / "mine.py")
    config = {"custom_cls": {"path": path, "name": "Shouting"}, "filter_overlong_prompts": False}
    assert create_rl_dataset(file, config, WordTokenizer())[0]["raw_prompt"][0]["content"] == "QUIET"
    with pytest.raises(TypeError, match="must be a subclass of torch.utils.data.Dataset"):
        get_dataset_class({"custom_cls": {"path": path, "name": "NoDataset"}})
    with pytest.raises(ConfigError, match="no Python file"):
        get_dataset_class({"custom_cls": {"path": str(tmp_path / "nope.py"), "name": "X"}})
    with pytest.raises(ConfigError, match="needs path and name"):
        get_dataset_class({"custom_cls": {"path": path, "name": None}})
    assert get_dataset_class({}) is RLHFDataset


def test_importing_the_package_loads_no_torch():
    import subprocess
    import sys

    code = "import sys, rlflow.data; assert not {'torch', 'pyarrow', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_composed_config_builds_dataset_and_loader(tmp_path):
    from hydra import compose, initialize_config_dir

    from rlflow.data import create_train_loader

    file = write_jsonl(tmp_path / "d.jsonl", [row(str(i)) for i in range(5)])
    root = Path(__file__).resolve().parents[2] / "rlflow" / "config"
    with initialize_config_dir(str(root), version_base=None):
        data = compose("ppo_trainer", overrides=[f"data.train_files={file}", "data.train_batch_size=2"]).data
    loader = create_train_loader(data, create_rl_dataset(data.train_files, data, WordTokenizer()))
    assert (len(loader), loader.batch_size) == (2, 2)


@pytest.mark.parametrize("name", ["validate", "global_steps", "sampling_params", "self"])
def test_a_column_with_a_name_of_ours_is_refused_at_load_with_the_fix(tmp_path, name):
    path = write_parquet(tmp_path / "a.parquet", [row(**{name: 1})])
    with pytest.raises(DataError) as error:
        make(path)
    text = str(error.value)
    assert f"the column {name!r}" in text and "a.parquet" in text
    assert f"df.rename(columns={{{name!r}: '{name}_'}})" in text


def test_columns_that_are_replaced_are_told(tmp_path, caplog):
    make(write_parquet(tmp_path / "a.parquet", [row(uid="x", epoch=3, note="n")]))
    assert "the columns uid, epoch are replaced by rlflow's own of that name" in caplog.text
