"""Which rows are open to a task: the views against a plain model."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rlflow.transfer_queue import fetch as fetch_module
from rlflow.transfer_queue.column import FieldHead
from rlflow.transfer_queue.fetch import Fetches
from rlflow.transfer_queue.samplers import SequentialSampler
from rlflow.transfer_queue.table import BlockHead, Table

FIELDS = ("x", "y")
TASKS = ("update", "reward")

steps = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.sampled_from("abcde"), st.sampled_from(FIELDS)),
        st.tuples(st.just("clear"), st.sampled_from("abcde"), st.none()),
        st.tuples(st.just("fetch"), st.sampled_from(TASKS), st.sampled_from([("x",), ("x", "y")])),
        st.tuples(st.just("reset"), st.sampled_from(TASKS), st.none()),
        st.tuples(st.just("drop"), st.none(), st.none()),
    ),
    max_size=40,
)


@given(steps, st.integers(1, 3), st.sampled_from([1, 64]))
def test_a_task_gets_the_oldest_rows_that_are_ready_and_new_to_it(steps, size, views):
    limit, fetch_module.MAX_VIEWS = fetch_module.MAX_VIEWS, views
    try:
        run(steps, size)
    finally:
        fetch_module.MAX_VIEWS = limit


def run(steps, size):
    table = Table()
    fetches = Fetches(table, SequentialSampler())
    rows: dict[str, set[str]] = {}  # key -> fields, oldest first
    consumed: dict[str, set[str]] = {task: set() for task in TASKS}
    for number, (kind, first, second) in enumerate(steps):
        if kind == "put":
            head = FieldHead("float32", np.zeros((1, 0), np.int64), None)
            table.put([first], "p", None, BlockHead(0, f"b{number}", {second: head}))
            fetches.committed("p", [first], [second])
            rows.setdefault(first, set()).add(second)
        elif kind == "clear":
            table.clear([first], "p")
            rows.pop(first, None)
            for marks in consumed.values():
                marks.discard(first)
        elif kind == "reset":
            table.reset_consumption("p", first)
            fetches.forget("p")
            consumed[first].clear()
        elif kind == "drop":
            fetches.drop("p")
            table.drop("p")
            rows.clear()
            consumed = {task: set() for task in TASKS}
        else:
            ready = [key for key, fields in rows.items() if fields >= set(second) and key not in consumed[first]]
            expected = ready[:size] if len(ready) >= size else None
            chosen = fetches.choose(second, size, "p", first, {})
            assert (None if chosen is None else [key for _, key in table.keys_of(chosen)]) == expected
            consumed[first] |= set(expected or ())
