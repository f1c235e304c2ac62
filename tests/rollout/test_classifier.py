"""Scores of batches against plain transformers, row by row; the queue that makes the batches."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch
import transformers

from rlflow.config import HFModelConfig
from rlflow.config.reward import RewardModelRolloutConfig
from rlflow.utils.errors import ConfigError
from rlflow.workers.rollout.hf.classifier import load_classifier
from rlflow.workers.rollout.hf.score_queue import ScoreQueue

PAD = 7
GENERATOR = torch.Generator().manual_seed(0)
ROWS = [torch.randint(8, 60, (n,), generator=GENERATOR).tolist() for n in (5, 1, 17, 9, 2)]


def save(folder, family, head, **options):
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.3,
    }
    config = getattr(transformers, f"{family}Config")(**sizes, **{"num_labels": 1, "pad_token_id": PAD} | options)
    model = getattr(transformers, f"{family}For{head}")(config)
    model.save_pretrained(folder)
    return str(folder)


def load(path, dtype="float32"):
    return load_classifier(HFModelConfig(path=path), RewardModelRolloutConfig(dtype=dtype), torch.device("cpu"))


def plain(path, rows):
    """What transformers says to each row alone; of a token classifier its last token counts."""
    architecture = transformers.AutoConfig.from_pretrained(path).architectures[0]
    model = getattr(transformers, architecture).from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        return [model(torch.tensor([row])).logits.flatten()[-1].item() for row in rows]


@pytest.mark.parametrize(
    ("family", "head", "options"),
    [
        ("Llama", "SequenceClassification", {}),
        ("Qwen2", "SequenceClassification", {"pad_token_id": None}),
        ("Mistral", "SequenceClassification", {"sliding_window": 6}),
        ("Gemma2", "SequenceClassification", {"head_dim": 8, "sliding_window": 6}),
        ("Llama", "TokenClassification", {}),
        ("Bert", "SequenceClassification", {}),
        ("Roberta", "SequenceClassification", {"pad_token_id": 1}),
    ],
)
def test_a_batch_is_what_transformers_says_row_by_row(tmp_path, family, head, options):
    path = save(tmp_path, family, head, **options)
    expected = plain(path, ROWS)
    assert max(expected) - min(expected) > 0.05, "the rows must differ"
    assert load(path).score(ROWS) == pytest.approx(expected, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("pad", [PAD, None])
def test_the_pooled_token_is_that_of_transformers_where_a_row_ends_with_padding_tokens(tmp_path, pad):
    path = save(tmp_path, "Llama", "SequenceClassification", pad_token_id=pad)
    rows = [[*ROWS[0], PAD], [*ROWS[2], 0], ROWS[3], [0], [1], [2]]
    assert load(path).score(rows) == pytest.approx(plain(path, rows), rel=1e-5, abs=1e-5)


def test_the_head_computes_in_fp32_whatever_the_body(tmp_path):
    path = save(tmp_path, "Llama", "SequenceClassification")
    model = load(path, "bfloat16")
    model.module.model.to(torch.bfloat16)  # as on a device with bfloat16 matrix units
    scores = torch.tensor(model.score(ROWS))
    assert scores.tolist() == pytest.approx(plain(path, ROWS), rel=0.1, abs=0.05)
    assert not torch.equal(scores, scores.bfloat16().float())


@pytest.mark.parametrize(
    ("family", "head", "options", "message"),
    [
        ("Llama", "CausalLM", {}, "no classification head, and generative"),
        ("Llama", "SequenceClassification", {"num_labels": 3}, "3 labels"),
        ("Bert", "MaskedLM", {}, "needs a head"),
    ],
)
def test_what_cannot_score_says_so(tmp_path, family, head, options, message):
    with pytest.raises(ConfigError, match=message):
        load(save(tmp_path, family, head, **options))


def test_a_head_that_the_checkpoint_does_not_have_is_refused(tmp_path):
    path = save(tmp_path, "Llama", "CausalLM")
    config = transformers.AutoConfig.from_pretrained(path, num_labels=1)
    config.architectures = ["LlamaForSequenceClassification"]
    config.save_pretrained(path)
    with pytest.raises(ConfigError, match=r"lacks weights.*score\.weight"):
        load(path)


# ---- the queue -------------------------------------------------------------------------------------------------------


class Model:
    """Scores by length, and keeps the batches; `gate` holds a batch back."""

    def __init__(self):
        self.batches: list[list[int]] = []
        self.gate = threading.Event()
        self.gate.set()

    def score(self, rows):
        assert self.gate.wait(10)
        self.batches.append([len(row) for row in rows])
        if any(row == [13] for row in rows):
            raise ValueError("no memory")
        return [float(len(row)) for row in rows]


def in_queue(test, max_rows=3, max_tokens=20):
    async def run():
        model = Model()
        await test(ScoreQueue(model.score, max_rows, max_tokens), model)

    asyncio.run(run())


def test_batches_keep_both_limits_and_like_lengths_together():
    async def test(queue, model):
        model.gate.clear()
        lengths = [2, 9, 2, 8, 1, 30, 2]
        calls = [asyncio.create_task(queue.submit([1] * n, 10)) for n in lengths]
        await asyncio.sleep(0)
        model.gate.set()
        assert await asyncio.gather(*calls) == lengths
        assert sorted(n for batch in model.batches for n in batch) == sorted(lengths)
        assert all(len(batch) <= 3 and max(batch) * len(batch) <= 20 for batch in model.batches if batch != [30])
        assert model.batches[0] == [2, 2, 2] and [9, 8] in model.batches and [30] in model.batches

    in_queue(test)


def test_nothing_runs_while_closed_and_what_waited_runs_after():
    async def test(queue, model):
        await queue.close()
        call = asyncio.create_task(queue.submit([1, 2], 10))
        await asyncio.sleep(0.05)
        assert not call.done() and model.batches == [] and queue.status()["asleep"]
        queue.open()
        await queue.close()
        await asyncio.sleep(0.05)
        assert model.batches == [], "open for no time at all is closed"
        queue.open()
        assert await call == 2.0

    in_queue(test)


def test_a_deadline_drops_the_request_and_a_failing_batch_only_itself():
    async def test(queue, model):
        await queue.close()
        with pytest.raises(TimeoutError):
            await queue.submit([1, 2, 3], 0.05)
        queue.open()
        with pytest.raises(ValueError, match="no memory"):
            await queue.submit([13], 10)
        assert await queue.submit([1, 2], 10) == 2.0
        assert model.batches == [[1], [2]], "the request that timed out is not computed"

    in_queue(test)
