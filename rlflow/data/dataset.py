"""`RLHFDataset`: the prompts of a run, one row a prompt, as messages (not tokens).

Templates and truncation belong to the agent loop, which may change a prompt; here a prompt is only measured, when
overlong ones are to be left out. A class of the user's own (`data.custom_cls`) takes the same arguments.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import Dataset

from rlflow.data.checks import check_rows
from rlflow.data.sampler import DEFAULT_SEED
from rlflow.data.table import Row, RowTable, load_table
from rlflow.utils.errors import ConfigError, DataError
from rlflow.utils.import_utils import load_extern_object

logger = logging.getLogger(__name__)

_TOKENIZE_BLOCK = 512
_FILES_KEY = "data.train_files / data.val_files"


class PromptDataset(Protocol):
    """What loaders need of a dataset."""

    def __len__(self) -> int: ...

    def __getitem__(self, item: int) -> Row: ...


class RLHFDataset(Dataset):
    """Prompts from parquet, .json or .jsonl files.

    Args:
        data_files: one path or a list of paths.
        tokenizer: needed only to measure prompts (`filter_overlong_prompts`).
        config: the `data` config (a mapping with `get`).
        processor: kept for classes of users; prompts with media are refused.
        max_samples: > 0 keeps that many rows: drawn without replacement by `data.seed` when `data.shuffle`, else the
            first ones.

    Attributes that users read: data_files, original_data_files, tokenizer, processor, config, prompt_key, image_key,
    video_key, audio_key, max_prompt_length, truncation, filter_overlong_prompts, apply_chat_template_kwargs,
    mm_processor_kwargs, tool_schemas, num_workers, serialize_dataset, return_raw_chat, need_tools_kwargs,
    dataframe (a `RowTable`).

    Raises:
        DataError: missing or broken file, malformed rows, or no prompt short enough.
    """

    def __init__(
        self,
        data_files: str | Sequence[str],
        tokenizer: Any,
        config: Any,
        processor: Any = None,
        max_samples: int = -1,
    ) -> None:
        files = [data_files] if isinstance(data_files, str | os.PathLike) else list(data_files)
        self.data_files = [str(file) for file in files]
        self.original_data_files = list(self.data_files)
        self.tokenizer = tokenizer
        self.processor = processor
        self.config = config
        self.max_samples = max_samples
        self.prompt_key: str = config.get("prompt_key", "prompt")
        self.image_key: str = config.get("image_key", "images")
        self.video_key: str = config.get("video_key", "videos")
        self.audio_key: str = config.get("audio_key", "audios")
        self.max_prompt_length = int(config.get("max_prompt_length", 1024))
        self.truncation: str = config.get("truncation", "error")
        self.filter_overlong_prompts = bool(config.get("filter_overlong_prompts", True))
        self.apply_chat_template_kwargs = dict(config.get("apply_chat_template_kwargs") or {})
        self.mm_processor_kwargs = dict(config.get("mm_processor_kwargs") or {})
        self.tool_schemas: list[dict[str, Any]] | None = None
        cores = os.cpu_count() or 1
        self.num_workers = min(int(config.get("filter_overlong_prompts_workers") or max(1, cores // 4)), cores)
        self.serialize_dataset = False
        self.return_raw_chat = bool(config.get("return_raw_chat", True))
        self.need_tools_kwargs = bool(config.get("need_tools_kwargs", False))
        self.dataframe = self._load()

    def _load(self) -> RowTable:
        table = load_table(self.data_files, _FILES_KEY)
        check_rows(table, prompt_key=self.prompt_key, media_keys=self._media_keys, key=_FILES_KEY)
        if 0 < self.max_samples < len(table):
            if self.config.get("shuffle", False):
                seed = self.config.get("seed")
                rng = np.random.default_rng(DEFAULT_SEED if seed is None else seed)
                table = table.select(rng.choice(len(table), size=self.max_samples, replace=False))
            else:
                table = table.select(range(self.max_samples))
        return self.maybe_filter_out_long_prompts(table)

    @property
    def _media_keys(self) -> tuple[str, ...]:
        return (self.image_key, self.video_key, self.audio_key)

    # --- length ------------------------------------------------------------------------------------------------------

    def maybe_filter_out_long_prompts(self, dataframe: RowTable | None = None) -> RowTable:
        """The rows whose templated prompt has at most `max_prompt_length` tokens, when `filter_overlong_prompts`.

        Raises:
            DataError: the chat template fails on a row, or no row is short enough.
        """
        table = self.dataframe if dataframe is None else dataframe
        if not self.filter_overlong_prompts:
            return table
        lengths = self._prompt_lengths(table)
        kept = [i for i, length in enumerate(lengths) if length <= self.max_prompt_length]
        if not kept:
            raise DataError(
                f"all {len(table)} prompts of {', '.join(self.data_files)} are longer than "
                f"data.max_prompt_length={self.max_prompt_length}; the shortest has {min(lengths)} tokens"
            )
        if len(kept) < len(table):
            logger.info("%d of %d prompts are longer than %d tokens and left out", len(table) - len(kept), len(table),
                        self.max_prompt_length)  # fmt: skip
            table = table.select(kept)
        return table

    def _prompt_lengths(self, table: RowTable) -> list[int]:
        lengths: list[int] = []
        block: list[list[Row]] = []
        for index, row in enumerate(table):
            block.append(self._build_messages(row, self.prompt_key))
            if len(block) == _TOKENIZE_BLOCK or index + 1 == len(table):
                start = index + 1 - len(block)
                texts = [self._render(messages, table, start + nth) for nth, messages in enumerate(block)]
                # One call a block: the tokenizer runs its rows on all cores.
                lengths += [len(ids) for ids in self.tokenizer(texts, add_special_tokens=False)["input_ids"]]
                block = []
        return lengths

    def _render(self, messages: list[Row], table: RowTable, index: int) -> str:
        options = dict(self.apply_chat_template_kwargs)
        if self.tool_schemas is not None:
            options["tools"] = self.tool_schemas
        try:
            return self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **options)
        except Exception as error:  # noqa: BLE001 - a template is a program of the user's and may raise anything
            raise DataError(
                f"{table.locate(index)}: the chat template fails: {type(error).__name__}: {error}"
            ) from error

    def _build_messages(self, example: Row, key: str) -> list[Row]:
        """The messages of a row; keys that are null only because other rows of a parquet file have them are dropped."""
        return [{k: v for k, v in m.items() if v is not None or k in ("role", "content")} for m in example[key]]

    # --- rows --------------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.dataframe)

    def __getitem__(self, item: int) -> Row:
        """The row's columns plus `raw_prompt`, `index`, `tools_kwargs`, `interaction_kwargs` and a placeholder tensor.

        `raw_prompt` is the list of messages; `data_source` is "unknown" and `extra_info` {} where the file has none.
        """
        row = self.dataframe[item]
        row["raw_prompt"] = self._build_messages(row, self.prompt_key)
        for key in self._media_keys:
            row.pop(key, None)
        row["dummy_tensor"] = torch.tensor([0], dtype=torch.uint8)  # a TensorDict of a batch needs one tensor
        extra = row["extra_info"] = row.get("extra_info") or {}
        row["data_source"] = row.get("data_source") or "unknown"
        row["index"] = extra.get("index") or 0
        row["tools_kwargs"] = extra.get("tools_kwargs") or {}
        row["interaction_kwargs"] = extra.get("interaction_kwargs") or {}
        need_tools = extra.get("need_tools_kwargs")
        if (self.need_tools_kwargs if need_tools is None else need_tools) and not row["tools_kwargs"]:
            logger.warning("%s: tools_kwargs is empty", self.dataframe.locate(item))
        return row

    def split(self, num_splits: int) -> list[RLHFDataset]:
        """`num_splits` datasets of equally many consecutive rows; rows that do not fill a part are dropped."""
        size = len(self) // num_splits
        if size == 0:
            raise ValueError(f"{len(self)} rows cannot be split into {num_splits} parts")
        return [self._with(self.dataframe[n * size : (n + 1) * size]) for n in range(num_splits)]

    def _with(self, dataframe: RowTable) -> RLHFDataset:
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other.dataframe = dataframe
        other.serialize_dataset = True  # a selection cannot be read from the files again
        return other

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        if not self.serialize_dataset:
            state.pop("dataframe", None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if "dataframe" not in state:
            self.resume_dataset_state()

    def resume_dataset_state(self) -> None:
        """Read the rows from the original files again."""
        self.data_files = list(self.original_data_files)
        self.dataframe = self._load()


def get_dataset_class(data_config: Any) -> type[Dataset]:
    """`RLHFDataset`, or the class of `data.custom_cls.{path,name}`.

    Raises:
        ConfigError: path without name or the other way round, or the class cannot be loaded.
        TypeError: the class is no `torch.utils.data.Dataset`, or has no length.
    """
    custom = data_config.get("custom_cls") or {}
    path, name = custom.get("path"), custom.get("name")
    if not path and not name:
        return RLHFDataset
    if not path or not name:
        raise ConfigError(f"data.custom_cls needs path and name; path={path!r}, name={name!r}")
    try:
        found = load_extern_object(path, name)
    except (FileNotFoundError, AttributeError, RuntimeError) as error:
        raise ConfigError(f"data.custom_cls.path={path}, name={name}: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Dataset)):
        raise TypeError(f"data.custom_cls {name} of {path} must be a subclass of torch.utils.data.Dataset")
    if not hasattr(found, "__len__"):
        raise TypeError(f"data.custom_cls {name} of {path} needs __len__: prompts are addressed by row, not streamed")
    return found


def create_rl_dataset(
    data_paths: str | Sequence[str],
    data_config: Any,
    tokenizer: Any,
    processor: Any = None,
    is_train: bool = True,
    max_samples: int = -1,
) -> PromptDataset:
    """The dataset over `data_paths`, of the class that the config names; `is_train` only words the log line."""
    paths = [data_paths] if isinstance(data_paths, str) else list(data_paths)
    make: Any = get_dataset_class(data_config)
    dataset: PromptDataset = make(
        data_files=paths, tokenizer=tokenizer, processor=processor, config=data_config, max_samples=max_samples
    )
    kind = "train" if is_train else "validation"
    logger.info("%s: %d prompts from %s", kind, len(dataset), ", ".join(map(str, paths)))
    return dataset
