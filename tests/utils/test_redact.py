"""Secrets do not survive `redact`; everything else does."""

from __future__ import annotations

import io
import logging
import string
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlflow.utils import redact as module
from rlflow.utils.redact import RedactingFilter, is_secret_key, redact, redact_text, remember_secrets

CANARY = "canary-7f3a9b"


@pytest.fixture(autouse=True)
def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_remembered", set())
    monkeypatch.setattr(module, "_pattern", None)


@pytest.mark.parametrize(
    "key",
    "api_key apiKey OPENAI_API_KEY hf_token token access_token auth-token secret client_secret AWS_SECRET_ACCESS_KEY "
    "password db.password PGPASSWORD_ADMIN_PASSWORD passwd private_key Authorization credentials".split(),
)
def test_a_text_under_a_key_that_says_so_is_hidden(key: str) -> None:
    assert is_secret_key(key)
    assert redact({key: CANARY}) == {key: "***"}
    assert redact({"a": [{key: {"deeper": [CANARY]}}]}) == {"a": [{key: {"deeper": ["***"]}}]}


@pytest.mark.parametrize(
    "key",
    "max_tokens eos_token pad_token_id tokenizer tokenizer_path ppo_max_token_len_per_gpu prompt_tokens key keys uid "
    "path secret_name password_file use_shm total_num_tokens trust_remote_code project_name".split(),
)
def test_ordinary_keys_keep_their_values(key: str) -> None:
    assert redact({key: "value"}) == {key: "value"}


def test_numbers_and_nothing_stay_under_any_key() -> None:
    assert redact({"token": None, "secret": 3, "password": False, "api_key": ""}) == {
        "token": None,
        "secret": 3,
        "password": False,
        "api_key": "",
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"http://user:{CANARY}@host:80/v1", "http://***@host:80/v1"),
        (f"cannot reach postgres://{CANARY}@db/x.", "cannot reach postgres://***@db/x."),
        (f"reward_kwargs.api_key={CANARY} is wrong", "reward_kwargs.api_key=*** is wrong"),
        (f"{{'api_key': '{CANARY}', 'n': 3}}", "{'api_key': '***', 'n': 3}"),
        (f'{{"hf_token": "{CANARY}"}}', '{"hf_token": "***"}'),
        (f"error: DataError: password={CANARY}, n=3", "error: DataError: password=***, n=3"),
        (f"a: b: c: {{x: y, 'api_key': '{CANARY}'}}", "a: b: c: {x: y, 'api_key': '***'}"),
        (f"GET /x?token={CANARY}&n=3", "GET /x?token=***&n=3"),
        ("401 for sk-abcdefghijklmnop0123", "401 for ***"),
        ("Authorization: Bearer abcdefgh.ijkl", "Authorization: *** ***"),
        ("eos_token=</s>, max_tokens=5, token: < unexpected", "eos_token=</s>, max_tokens=5, token: < unexpected"),
        ("api_key=null password=None", "api_key=null password=None"),
        ("mail me@host or see http://host/a@b", "mail me@host or see http://host/a@b"),
    ],
)
def test_text(text: str, expected: str) -> None:
    assert redact_text(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "a: b ",
        "password=",
        "x=y",
        "token:'",
        '"a:',
        "a.b-",
        "a:a:",
        "x" * 9 + "=",
        "://a",
        "eyJ-",
        "sk-",
        "k='v\"",
        "@:",
    ],
)
def test_long_texts_take_no_longer_than_their_length(text: str) -> None:
    started = time.process_time()
    redact_text(text * (400_000 // len(text)))
    redact_text("x=" + text[0] * 400_000)
    assert time.process_time() - started < 4


def test_a_remembered_value_is_hidden_wherever_it_appears() -> None:
    config = {"reward": {"kwargs": {"api_key": CANARY, "url": "http://me:pass-word@host"}, "model": "m"}}
    remember_secrets(config, {"WANDB_API_KEY": "0123456789", "HOME": "/home/me", "SHORT_TOKEN": "abc"})
    assert redact_text(f"the server said: unknown key {CANARY}!") == "the server said: unknown key ***!"
    assert redact([("x", "0123456789"), "pass-word /home/me abc"]) == [("x", "***"), "*** /home/me abc"]


def test_log_records_are_redacted_with_their_tracebacks() -> None:
    remember_secrets({"password": CANARY}, {})
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.addFilter(RedactingFilter())
    log = logging.getLogger("test_redact")
    log.propagate = False
    log.addHandler(handler)
    try:
        raise ValueError(f"refused {CANARY}")
    except ValueError:
        log.error("with %s", CANARY, exc_info=True)
    log.error("plain %d", 3)
    text = stream.getvalue()
    assert CANARY not in text
    assert "with ***" in text and "ValueError: refused ***" in text and "plain 3" in text


names = st.sampled_from(["api_key", "token", "password", "client_secret"])
values = st.text(alphabet=string.ascii_letters + string.digits + "-_", min_size=6, max_size=20)
plain = st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False), st.lists, max_leaves=5)


@given(names, values, plain)
def test_no_shape_of_container_lets_a_secret_through(name: str, value: str, other: object) -> None:
    secret = f"Z{value}Q"
    shapes: list[object] = [{name: secret}, [{"x": {name: (secret, [secret])}}], ({"y": f"{name}={secret}"},)]
    for shape in shapes:
        assert secret not in repr(redact({"a": shape, "b": other}))
    assert redact({"b": other}) == {"b": other}
