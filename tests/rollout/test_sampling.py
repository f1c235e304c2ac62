import numpy as np
import pytest
import torch

from rlflow.workers.rollout.hf.sampling import RowSettings, sample, uniform

CPU = torch.device("cpu")


def settings(rows, vocab):
    """rows: dicts of temperature, top_k, top_p, penalty, seed."""
    table = RowSettings(len(rows))
    for slot, row in enumerate(rows):
        values = {"seed": slot, "temperature": 1.0, "top_k": -1, "top_p": 1.0, "penalty": 1.0} | row
        table.put(slot, **values)
    return table.compile(len(rows), vocab, CPU)


def reference(logits, *, temperature=1.0, top_k=-1, top_p=1.0):
    """Log-probabilities [vocab] after temperature, top-k and top-p, the slow and obvious way (float64)."""
    logits = logits.double() / temperature
    order = torch.argsort(logits, descending=True)
    keep = torch.zeros_like(logits, dtype=torch.bool)
    keep[order[: top_k if top_k > 0 else len(logits)]] = True
    probs = torch.softmax(logits.masked_fill(~keep, float("-inf")), dim=-1)
    mass = 0.0
    for index in order.tolist():
        if mass >= top_p and mass > 0:
            probs[index] = 0.0
        else:
            mass += float(probs[index])
    return (probs / probs.sum()).log()


@pytest.mark.parametrize("vocab", [37, 256, 512, 1000])
def test_the_sampled_token_is_the_inverse_cdf_of_one_uniform_number(vocab):
    torch.manual_seed(0)
    logits = torch.randn(50, vocab) * 3
    positions = np.arange(50)
    compiled = settings([{"seed": i} for i in range(50)], vocab)
    tokens, log_probs = sample(logits.clone(), compiled, positions)
    u = torch.from_numpy(uniform(np.arange(50, dtype=np.uint64), positions))
    cdf = torch.softmax(logits.double(), -1).cumsum(-1)
    expected = torch.searchsorted(cdf, u[:, None], right=True)[:, 0]
    assert torch.equal(tokens, expected)
    torch.testing.assert_close(
        log_probs, torch.log_softmax(logits, -1).gather(1, tokens[:, None])[:, 0], atol=1e-5, rtol=1e-5
    )


def test_sampled_frequencies_follow_the_distribution():
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5]).repeat(4000, 1)
    compiled = settings([{"seed": i} for i in range(4000)], 5)
    counts = torch.zeros(5)
    for step in range(5):
        tokens, _ = sample(logits.clone(), compiled, np.full(4000, step))
        counts += torch.bincount(tokens, minlength=5)
    expected = torch.softmax(logits[0], -1)
    assert torch.allclose(counts / counts.sum(), expected, atol=0.01)


@pytest.mark.parametrize(
    "row",
    [
        {"top_k": 5},
        {"top_p": 0.7},
        {"top_k": 20, "top_p": 0.5},
        {"top_k": 3, "temperature": 0.5},
        {"top_p": 0.9, "temperature": 2.0},
        {"top_k": 1},
        {"top_p": 1e-6},
    ],
)
def test_truncated_rows_have_the_log_probs_of_the_truncated_distribution(row):
    torch.manual_seed(1)
    logits = torch.randn(300) * 2
    expected = reference(logits, **row)
    table = settings([row | {"seed": i} for i in range(500)], 300)
    tokens, log_probs = sample(logits.repeat(500, 1), table, np.zeros(500, dtype=np.int64))
    torch.testing.assert_close(log_probs.double(), expected[tokens], atol=1e-5, rtol=1e-5)
    seen = set(tokens.tolist())
    allowed = set(torch.isfinite(expected).nonzero()[:, 0].tolist())
    assert seen <= allowed
    likely = {i for i in allowed if expected[i].exp() > 0.05}
    assert likely <= seen


def test_top_p_over_a_flat_distribution_looks_beyond_the_first_candidates():
    logits = torch.zeros(5000)
    logits[0] = 0.1
    table = settings([{"top_p": 0.9, "seed": i} for i in range(200)], 5000)
    tokens, log_probs = sample(logits.repeat(200, 1), table, np.zeros(200, dtype=np.int64))
    assert tokens.max() > 1500
    assert torch.allclose(log_probs.exp(), torch.tensor(1 / 4500), rtol=0.2)


def test_rows_with_different_settings_do_not_disturb_one_another():
    torch.manual_seed(2)
    logits = torch.randn(6, 400) * 2
    rows = [
        {"temperature": 0.0},
        {},
        {"top_k": 7},
        {"temperature": 0.3},
        {"top_p": 0.4},
        {"penalty": 1.5},
    ]
    rows = [row | {"seed": i} for i, row in enumerate(rows)]
    seen = [[1, 2, 3]] * 6
    positions = np.arange(6) + 10
    tokens, log_probs = sample(logits.clone(), settings(rows, 400), positions, seen)
    for i, row in enumerate(rows):
        alone, alone_log = sample(
            logits[i : i + 1].clone(), settings([row], 400), positions[i : i + 1], seen[i : i + 1]
        )
        assert tokens[i] == alone[0]
        assert torch.allclose(log_probs[i], alone_log[0])


def test_greedy_takes_the_likeliest_token_and_reports_the_plain_log_prob():
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0]])
    tokens, log_probs = sample(
        logits.clone(), settings([{"temperature": 0.0, "top_k": 2, "top_p": 0.1}], 4), np.zeros(1)
    )
    assert tokens.tolist() == [1]
    assert torch.allclose(log_probs, torch.log_softmax(logits, -1)[:, 1])


def test_a_repetition_penalty_lowers_tokens_that_occurred():
    logits = torch.tensor([[2.0, -1.0, 0.5, 0.1]])
    table = settings([{"penalty": 2.0, "temperature": 0.0}], 4)
    _, log_probs = sample(logits.clone(), table, np.zeros(1), [[1, 2, 2]])
    assert torch.allclose(log_probs, torch.log_softmax(torch.tensor([2.0, -2.0, 0.25, 0.1]), -1)[:1])


def test_uniform_numbers_depend_on_seed_and_position_only_and_look_uniform():
    seeds = np.repeat(np.arange(200, dtype=np.uint64), 50)
    positions = np.tile(np.arange(50), 200)
    u = uniform(seeds, positions)
    assert u.min() >= 0 and u.max() < 1
    assert abs(u.mean() - 0.5) < 0.01
    assert len(np.unique(u)) == len(u)
    order = np.random.default_rng(0).permutation(len(u))
    assert np.array_equal(uniform(seeds[order], positions[order]), u[order])
    # Neighbouring seeds are unrelated.
    grid = u.reshape(200, 50)
    assert abs(np.corrcoef(grid[:-1].ravel(), grid[1:].ravel())[0, 1]) < 0.03


def test_a_number_next_to_one_never_picks_an_impossible_token(monkeypatch):
    import rlflow.workers.rollout.hf.sampling as sampling

    monkeypatch.setattr(sampling, "uniform", lambda seeds, positions: np.full(len(seeds), 1 - 2.0**-53))
    logits = torch.full((3, 1000), float("-inf"))
    logits[0, 10] = 0.0
    logits[1, [0, 999]] = 0.0
    logits[2, [3, 700]] = torch.tensor([0.0, -60.0])
    tokens, log_probs = sample(logits, settings([{}, {}, {}], 1000), np.zeros(3))
    assert tokens[0] == 10 and tokens[1] == 999
    assert torch.isfinite(log_probs).all()
