from __future__ import annotations

import pickle
import re

import pytest

from rlflow.checkpoint_engine.canary import canary_tokens
from rlflow.checkpoint_engine.phases import Phase, PhaseTimeouts
from rlflow.checkpoint_engine.receipt import WeightReceipt, require_modules
from rlflow.utils.errors import WeightSyncError

SENT = WeightReceipt(4, 3, 200, 0xAB)


@pytest.mark.parametrize(
    ("loaded", "words", "tensors"),
    [
        (("a", "b"), "1 missing (c)", ("c",)),
        (("a", "b", "c", "d"), "1 that nobody sent (d)", ("d",)),
        (("a", "x", "b"), "1 missing (c); 1 that nobody sent (x)", ("c", "x")),
    ],
)
def test_names_that_an_engine_reports_are_compared_with_those_sent(loaded, words, tensors):
    got = WeightReceipt(4, 3, 200, 0xAB, holder="Rollout replica 1", names=loaded)
    with pytest.raises(WeightSyncError, match="Rollout replica 1 did not load.*" + re.escape(words)) as caught:
        SENT.require_same(got, {"a", "b", "c"})
    assert caught.value.tensors == tensors and caught.value.phase == "verify"


def test_an_engine_that_only_counts_is_believed():
    SENT.require_same(WeightReceipt(4, 3, 200, 0xAB), {"a", "b", "c"})


@pytest.mark.parametrize("modules", [None, ()])
def test_an_adapter_that_is_bound_to_nothing_is_an_error(modules):
    with pytest.raises(WeightSyncError, match="bound it to no module"):
        require_modules(modules, "Rollout replica 0")
    require_modules(("q_proj",), "Rollout replica 0")


def test_the_error_keeps_its_facts_between_processes():
    error = WeightSyncError("text", phase="transfer", replicas=(2,), tensors=("a",), lost=True)
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.phase, copy.replicas, copy.tensors, copy.lost) == ("text", "transfer", (2,), ("a",), True)


def test_deadlines_come_from_the_configuration():
    limits = PhaseTimeouts.from_config({"transfer_timeout_s": 7, "pause_timeout_s": None})
    assert limits.of(Phase.TRANSFER) == 7 and limits.of(Phase.PAUSE) == PhaseTimeouts().pause


@pytest.mark.parametrize("vocab", [3, 512, 49152, 151936])
def test_the_canary_is_fixed_by_the_vocabulary(vocab):
    tokens = canary_tokens(vocab)
    assert tokens == canary_tokens(vocab) and all(0 <= token < vocab for token in tokens)
    assert len(set(tokens)) == min(vocab, len(tokens))
