"""Plain helpers."""

from __future__ import annotations

import copy
import gc
import pickle

import pytest

from rlflow.utils.metric import Metric
from rlflow.utils.py_functional import DynamicEnum, append_to_dict, importing, rename_dict, union_two_dict


class Colour(DynamicEnum):
    pass


Colour.register("red")


def test_a_dynamic_enum_grows_and_its_members_are_unique():
    class Shape(DynamicEnum):
        pass

    circle = Shape.register("circle")
    assert (circle.name, Shape.CIRCLE, Shape["circle"]) == ("CIRCLE", circle, circle)
    assert list(Shape) == [circle]
    assert len(Shape) == 1
    assert circle in Shape
    assert "circle" in Shape
    assert Colour.RED not in Shape
    with pytest.raises(ValueError, match="CIRCLE exists"):
        Shape.register("Circle")
    with pytest.raises(AttributeError, match="no member 'SQUARE'"):
        _ = Shape.SQUARE
    assert Shape.remove("circle") is circle
    with pytest.raises(KeyError):
        Shape["circle"]


def test_members_survive_pickle_and_copy():
    assert pickle.loads(pickle.dumps(Colour.RED)) is Colour.RED
    assert copy.deepcopy({"a": Colour.RED})["a"] is Colour.RED


def test_values_are_appended_under_their_prefixed_names():
    data = {}
    append_to_dict(data, {"loss": 1.0, "actor/lr": 2.0, "kl": Metric("sum", 1.0)}, prefix="actor/")
    append_to_dict(data, {"loss": 3.0, "kl": Metric("sum", 2.0)}, prefix="actor/")
    assert data["actor/loss"] == [1.0, 3.0]
    assert data["actor/lr"] == [2.0]
    assert data["actor/kl"].aggregate() == 3.0


def test_prefixes_are_added_once():
    assert rename_dict({"a": 1, "p/b": 2}, "p/") == {"p/a": 1, "p/b": 2}


def test_a_union_refuses_two_values_under_one_key():
    first = {"a": 1}
    assert union_two_dict(first, {"a": 1, "b": 2}) is first
    assert first == {"a": 1, "b": 2}
    with pytest.raises(ValueError, match="'a' has the values 1 and 2"):
        union_two_dict(first, {"a": 2})


def test_garbage_is_not_looked_for_during_a_first_import_and_is_afterwards() -> None:
    try:
        with importing("a_module_that_is_not_there"):
            assert not gc.isenabled()
        assert gc.isenabled() and gc.get_freeze_count() > 0
        gc.unfreeze()
        with importing("sys"):
            assert gc.isenabled()
        assert gc.get_freeze_count() == 0, "what lives by then stays collectable"
    finally:
        gc.unfreeze()
