"""The one error: what it carries, its text, and who puts his name to it."""

import copy
import pickle

import pytest

from functional_lowbit import _refused as refused
from functional_lowbit._refused import (
    NoAccess,
    NotInstalled,
    NotThere,
    Refused,
    WrongState,
    WrongType,
    WrongValue,
    kind_of,
    speaking,
    words_of,
)

KINDS = [
    (WrongValue, ValueError),
    (WrongType, TypeError),
    (WrongState, RuntimeError),
    (NoAccess, OSError),
    (NotThere, FileNotFoundError),
    (NotInstalled, ImportError),
]
EACH = pytest.mark.parametrize(("kind", "python"), KINDS)


def fields(error):
    return error.speaker, error.leaf, error.reason, str(error)


def test_every_kind_is_listed_here():
    ours = {x for x in vars(refused).values() if isinstance(x, type) and issubclass(x, Refused)}
    assert ours == {Refused, *(kind for kind, _ in KINDS)}


@EACH
def test_it_is_an_error_of_pythons_with_three_fields(kind, python):
    with pytest.raises(python) as caught:
        raise kind("w must be small, got 7", "a.w", "adam")
    assert fields(caught.value) == ("adam", "a.w", "w must be small, got 7", "adam: w must be small, got 7")
    assert kind_of(caught.value) == python.__name__


@EACH
def test_a_leaf_of_a_tree_names_itself(kind, python):
    error = kind.at("params", "a.w", "must be a tensor, got int")
    assert fields(error) == (None, "a.w", "params['a.w'] must be a tensor, got int", str(error))
    assert str(error) == error.reason
    assert str(kind.at("params", "", "must be a tensor")) == "params must be a tensor"


@EACH
@pytest.mark.parametrize("again", [lambda x: pickle.loads(pickle.dumps(x)), copy.copy, copy.deepcopy])
def test_it_survives_a_pickle_and_a_copy(kind, python, again):
    error = kind("w must be small, got 7", "a.w", "adam")
    error.add_note("a note")
    assert type(again(error)) is kind
    assert fields(again(error)) == fields(error)
    assert again(error).__notes__ == ["a note"]
    assert fields(again(kind("so"))) == (None, "", "so", "so")


def test_the_innermost_boundary_speaks():
    @speaking("chain.update")
    def inner():
        raise WrongValue("no")

    with pytest.raises(WrongValue, match=r"^chain\.update: no$"), speaking("compile(tx)"):
        inner()
    with pytest.raises(WrongValue, match=r"^compile\(tx\): no$"), speaking("compile(tx)"):
        raise WrongValue("no")
    with pytest.raises(WrongValue, match=r"^adam: no$"), speaking("compile(tx)"):
        raise WrongValue("no", speaker="adam")


def test_a_boundary_leaves_other_errors_and_results_alone():
    with pytest.raises(ValueError, match=r"^no$"), speaking("compile(tx)"):
        raise ValueError("no")
    boundary = speaking("compile(tx)")

    @boundary
    def depth(n):
        """Called inside itself."""
        return 0 if n == 0 else 1 + depth(n - 1)

    assert depth(3) == 3
    assert depth.__doc__ == "Called inside itself."


def test_whoever_says_it_again_may_leave_the_speaker_out():
    error = WrongValue("no", speaker="Step.renew")
    assert words_of(error, "Step.renew") == "no"
    assert words_of(error, "adam") == "Step.renew: no"
    assert words_of(ValueError("Step.renew: no"), "Step.renew") == "Step.renew: no"
    assert kind_of(KeyError("no")) == "KeyError"
