"""The program of a transformation that was made anew with other numbers: the same operations, for the same kernels.

A kernel is keyed by its leaf functions. A factory that defines one inside makes another function object at each call;
as long as it is the same code with the same values around it, the old object stays, and nothing is compiled again.
"""

from dataclasses import replace
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor

from functional_lowbit._core.leafwise.update import Leafwise
from functional_lowbit._core.state.parts import Composite, Part
from functional_lowbit._core.step.program import OpaqueOp, Program, RenewOp
from functional_lowbit._refused import WrongValue


def renewed(program: Program, update: Any) -> Program:
    """The program of `update`, with the leaf functions of the old one where they are the same.

    A leaf function that holds another number than before is another one: it is compiled anew.
    """
    old, own = program.update, program.own
    if old is update:
        return program
    _compare_parts(old, update)
    if isinstance(old, Leafwise):
        update = _with_old_function(old, update, not isinstance(own, OpaqueOp))
    if isinstance(own, OpaqueOp):
        compare(old, update)
    if own is not None:
        own = replace(own, part=update)
    inside = update.inner if program.inner else ()  # an opaque one's stays closed
    inner = tuple(renewed(p, tx.update) for p, tx in zip(program.inner, inside, strict=True))
    return Program(update, own, inner)


def renews(program: Program) -> bool:
    """Whether something inside is made anew from numbers in the state."""
    return any(isinstance(op, RenewOp) for op in program.ops())


def at_(program: Program, state: Any, moved: list[Any]) -> Program:
    """The program with this step's numbers, where transformations are made of numbers in the state.

    Args:
        program: As it was at the last step.
        state: Of this step.
        moved: Takes the new state of each `RenewOp`, in order.

    Raises:
        TypeError, ValueError: for numbers that cannot be meant, and for a structure that changes with them.
    """
    if not renews(program):
        return program
    update, numbers, inner = program.update, program.numbers, program.inner
    if isinstance(program.own, RenewOp):
        now, new = update.advance(state)
        moved.append(new)
        numbers = tuple(float(x) for x in now.values())
        if numbers != program.numbers:
            # Copies: the program stays for as long as the numbers do, whatever becomes of the state's tensors.
            made = update.make({name: x.detach().clone() for name, x in now.items()})
            inner = (renewed(inner[0], made.update),)
    inner = tuple(at_(p, s, moved) for p, s in zip(inner, update.split(state), strict=True))
    return Program(update, program.own, inner, numbers)


def compare(old: Any, new: Any) -> None:
    """Refuse an update function whose states are not those of the old one, inner ones included."""
    _compare_parts(old, new)
    if isinstance(old, Composite):
        for a, b in zip(old.inner, new.inner, strict=True):
            if a.update is not b.update:
                compare(a.update, b.update)


def _compare_parts(old: Any, new: Any) -> None:
    """Refuse a part whose state is not that of the old one."""
    what = ""
    if type(old) is not type(new):
        what = f"{_name(old)} became {_name(new)}"
    elif isinstance(old, Part) and old.structure() != new.structure():
        if isinstance(old, Leafwise):
            what = f"{_name(old)} with {old.state_class.__name__} became {_name(new)} with {new.state_class.__name__}"
        else:
            what = f"{_name(old)} had {old.structure()} and has {new.structure()}"
    elif isinstance(old, Composite) and len(old.inner) != len(new.inner):
        what = f"{_name(old)} had {len(old.inner)} parts and has {len(new.inner)}"
    if what:
        raise WrongValue(
            "the transformation that the function makes must not change its structure with its hyperparameters, but "
            f"{what}; make another one for that"
        )


def _name(update: Any) -> str:
    return update.name if isinstance(update, Leafwise) else type(update).__name__


def _with_old_function(old: Leafwise, new: Leafwise, is_fused: bool) -> Leafwise:
    """The new rule, with the old one's leaf function if that is the same."""
    if new.update_leaf is old.update_leaf:
        return new
    if same(old.update_leaf, new.update_leaf):
        # Watched once for each shape, also if the rule is made anew at each step.
        return replace(new, update_leaf=old.update_leaf, _watched=old._watched)
    if is_fused and not new.check_declaration():
        raise WrongValue(
            f"the leaf function of {new.name} cannot be tried by itself any more, as it could with other "
            "hyperparameters; declare it with elementwise=False"
        )
    return new


def same(a: Any, b: Any, inside: tuple[Any, ...] = ()) -> bool:
    """Whether two values, among them functions, are the same for a kernel that was compiled with the first.

    A tensor in a function's closure never is: its number may be a part of the compiled code. A list or dict that both
    hold is not either, since it may have been changed in between; an object of a class of its own is taken to be what
    it was.

    Args:
        a: The first value.
        b: The second value.
        inside: Pairs of functions whose closures are being compared.
    """
    if isinstance(a, Tensor) or type(a) is not type(b):
        return False
    if isinstance(a, FunctionType):
        return a is b or (a, b) in inside or _same_function(a, b, (*inside, (a, b)))
    if isinstance(a, MethodType):
        return a.__self__ is b.__self__ and same(a.__func__, b.__func__, inside)
    if isinstance(a, partial):
        return all(same(getattr(a, x), getattr(b, x), inside) for x in ("func", "args", "keywords"))
    if isinstance(a, float):
        return a.hex() == b.hex()  # 0.0 is not -0.0
    if isinstance(a, tuple):
        return len(a) == len(b) and all(same(x, y, inside) for x, y in zip(a, b, strict=True))
    if isinstance(a, list):
        return a is not b and same(tuple(a), tuple(b), inside)
    if isinstance(a, dict):
        return a is not b and a.keys() == b.keys() and all(same(a[k], b[k], inside) for k in a)
    return a is b or (isinstance(a, (int, complex, str, bytes)) and a == b)


def _same_function(a: FunctionType, b: FunctionType, inside: tuple[Any, ...]) -> bool:
    if a.__code__ is not b.__code__ or a.__globals__ is not b.__globals__:
        return False
    parts = ("__defaults__", "__kwdefaults__", "__dict__")
    return all(same(getattr(a, x), getattr(b, x), inside) for x in parts) and same(_cells(a), _cells(b), inside)


def _cells(function: FunctionType) -> tuple[Any, ...]:
    """What a function has around it; None for a name that has no value yet."""
    found = []
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:
            found.append(None)
    return tuple(found)
