"""aten operations as C++ expressions, rounded as torch rounds them.

Only operations whose bits are fixed by IEEE 754 are here: arithmetic, comparisons, selections, roots, rounding, and
work on bits. `exp` or a sum is none of them, and raises `Unsupported`.
"""

from math import isinf, isnan
from typing import Any

import torch
from torch import fx

from functional_lowbit._private import TO_COPY

CTYPES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "_Float16",
    torch.bfloat16: "bf16",
    torch.bool: "bool",
    torch.uint8: "uint8_t",
    torch.int8: "int8_t",
    torch.int16: "int16_t",
    torch.int32: "int32_t",
    torch.int64: "int64_t",
}
HALF = {torch.bfloat16: "as_bf16", torch.float16: "as_f16"}  # and how a float is rounded to one

ARITHMETIC = {
    "add": "({0} + {1})",
    "sub": "({0} - {1})",
    "rsub": "({1} - {0})",
    "mul": "({0} * {1})",
    "div": "({0} / {1})",
    "bitwise_and": "({0} & {1})",
    "bitwise_or": "({0} | {1})",
    "bitwise_xor": "({0} ^ {1})",
    "__and__": "({0} & {1})",
    "__or__": "({0} | {1})",
    "__xor__": "({0} ^ {1})",
    "__lshift__": "({0} << {1})",
    "__rshift__": "({0} >> {1})",
    "bitwise_left_shift": "({0} << {1})",
    "bitwise_right_shift": "({0} >> {1})",
    "logical_and": "({0} & {1})",
    "logical_or": "({0} | {1})",
    "maximum": "(({0} > {1}) | ({0} != {0}) ? {0} : {1})",
    "minimum": "(({0} < {1}) | ({0} != {0}) ? {0} : {1})",
    "clamp_min": "({0} < {1} ? {1} : {0})",
    "clamp_max": "({0} > {1} ? {1} : {0})",
    "neg": "(-{0})",
    "reciprocal": "(1 / {0})",
    "square": "({0} * {0})",
    "abs": "({0} < 0 ? -{0} : {0})",  # of integers
    "sign": "({0} > 0 ? 1 : {0} < 0 ? -1 : 0)",
    "logical_not": "(!{0})",
    "bitwise_not": "(~{0})",
}
FLOAT_ONLY = {  # (float, double)
    "abs": ("__builtin_fabsf({0})", "__builtin_fabs({0})"),
    "sqrt": ("__builtin_sqrtf({0})", "__builtin_sqrt({0})"),
    "floor": ("__builtin_floorf({0})", "__builtin_floor({0})"),
    "ceil": ("__builtin_ceilf({0})", "__builtin_ceil({0})"),
    "trunc": ("__builtin_truncf({0})", "__builtin_trunc({0})"),
    "round": ("__builtin_rintf({0})", "__builtin_rint({0})"),  # ties to even
    "copysign": ("__builtin_copysignf({0}, {1})", "__builtin_copysign({0}, {1})"),
}
COMPARISONS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
SAME = {"alias", "detach", "clone", "lift_fresh_copy", "contiguous"}


class Unsupported(Exception):
    """An operation that is not known here; the caller takes another backend."""


def name_of(node: fx.Node) -> str:
    """The C++ variable of a node's value."""
    return f"v_{node.name}"


def ctype_of(dtype: torch.dtype) -> str:
    """The C++ type of a value while it is worked on: narrow ones are widened."""
    if dtype in HALF:
        return "float"
    return "int32_t" if dtype.itemsize < 4 and dtype != torch.bool else CTYPES[dtype]


def operation_of(node: fx.Node) -> str:
    """`mul` for aten.mul.Tensor."""
    return str(getattr(node.target, "__name__", node.target)).split(".")[0]


def expression(node: fx.Node) -> str:
    """The value of a call as a C++ expression of the variables of its arguments."""
    args, dtype, name = node.args, node.meta["val"].dtype, operation_of(node)
    if name in SAME:
        return cast(args[0], dtype)
    if name == "_to_copy":
        root = _root_in_double(args[0], dtype)
        return f"__builtin_sqrtf({name_of(root)})" if root is not None else cast(args[0], dtype)
    if name == "view" and isinstance(args[1], torch.dtype):
        if min(dtype.itemsize, args[0].meta["val"].dtype.itemsize) < 4:  # type: ignore[union-attr]
            raise Unsupported(f"{node.target} of {dtype}")
        return f"bitcast<{CTYPES[dtype]}>({name_of(args[0])})"  # type: ignore[arg-type]
    if name == "where":
        return f"({cast(args[0], torch.bool)} ? {cast(args[1], dtype)} : {cast(args[2], dtype)})"
    if name in COMPARISONS:
        a, b = (x.meta["val"] if isinstance(x, fx.Node) else x for x in args)
        common = torch.result_type(a, b)  # type: ignore[arg-type]
        return f"({cast(args[0], common)} {COMPARISONS[name]} {cast(args[1], common)})"
    if dtype in HALF or node.kwargs:
        raise Unsupported(f"{node.target} in {dtype}, {node.kwargs}")
    if name in ("clamp_min", "clamp_max") and isinstance(args[1], fx.Node):
        name = "maximum" if name == "clamp_min" else "minimum"
    if name.startswith("clamp") and any(isinstance(bound, float) and isnan(bound) for bound in args[1:]):
        raise Unsupported(f"{node.target} by NaN")
    if name == "clamp":
        x = cast(args[0], dtype)
        # A bound that is a tensor may be NaN, and then the result is; one that is a number is not.
        for bound, ops in zip(args[1:], (("clamp_min", "maximum"), ("clamp_max", "minimum")), strict=False):
            if bound is not None:
                x = ARITHMETIC[ops[isinstance(bound, fx.Node)]].format(x, cast(bound, dtype))
        return x
    if name == "pow" and args[1] == 2:
        return ARITHMETIC["square"].format(cast(args[0], dtype))
    if name in FLOAT_ONLY and dtype in (torch.float32, torch.float64):
        return FLOAT_ONLY[name][dtype == torch.float64].format(*[cast(a, dtype) for a in args])
    if name == "bitwise_not" and dtype == torch.bool:
        name = "logical_not"
    if name not in ARITHMETIC or len(args) > 2:
        raise Unsupported(str(node.target))
    if name in ("div", "reciprocal") and not dtype.is_floating_point:
        raise Unsupported(f"{node.target} of integers")
    operands = [cast(a, dtype) for a in args]
    text = ARITHMETIC[name].format(*operands)
    return text if dtype.is_floating_point else f"({CTYPES[dtype]}){text}"


def cast(x: Any, dtype: torch.dtype) -> str:
    """A node's value, or a Python number, converted as torch converts it."""
    if not isinstance(x, fx.Node):
        return literal(x, dtype)
    own, name = x.meta["val"].dtype, name_of(x)
    if own == dtype:
        return name
    if dtype.is_floating_point and _was_float(x):
        raise Unsupported("a float cast to an integer and back")  # which g++ takes for trunc, and that has a -0
    if own in HALF:
        own = torch.float32
        if dtype == torch.float32:
            return name
    if dtype in HALF:
        return f"{HALF[dtype]}((float){name})"
    if dtype == torch.bool:
        return f"({name} != 0)"
    if own == torch.bool:  # a plain cast would not be vectorized
        return f"({name} ? {literal(1, dtype)} : {literal(0, dtype)})"
    if own.is_floating_point and dtype in (torch.uint8, torch.int8, torch.int16):
        return f"(int32_t){name}"  # it is in range, or torch does not say what it becomes
    return f"({CTYPES[dtype]}){name}"


def _was_float(x: fx.Node) -> bool:
    """Whether a value is an integer that was cast from a float."""
    if x.target != TO_COPY or x.meta["val"].dtype in (torch.bool, *HALF):
        return False
    return not x.meta["val"].dtype.is_floating_point and x.args[0].meta["val"].dtype.is_floating_point  # type: ignore[union-attr]


def literal(value: Any, dtype: torch.dtype) -> str:
    """A Python number as C++, rounded to the dtype as torch rounds it."""
    if dtype == torch.bool:
        return "true" if value else "false"
    if dtype in HALF:
        raise Unsupported(f"a constant of {dtype}")
    if not dtype.is_floating_point:
        return f"(({CTYPES[dtype]}){int(value)})"
    value, suffix = float(value), "f" if dtype == torch.float32 else ""
    if suffix:
        value = torch.tensor(value, dtype=torch.float32).item()
    if isnan(value):
        return f'__builtin_nan{suffix}("")'
    if isinf(value):
        return f"({'-' if value < 0 else ''}__builtin_inf{suffix}())"
    return f"({value.hex()}{suffix})"


def is_number(x: Any) -> bool:
    """Whether a value is surely not NaN. `where(y < c, y, 0)` is not, since no NaN is below anything."""
    aten = torch.ops.aten
    if x.target != aten.where.self:
        return False
    condition, chosen, other = x.args
    return (
        condition.target in (aten.lt.Scalar, aten.le.Scalar)
        and condition.args[0] is chosen
        and other.target == aten.scalar_tensor.default
        and not isnan(other.args[0])
    )


def _root_in_double(x: Any, dtype: torch.dtype) -> fx.Node | None:
    """The float32 `y` of `y.double().sqrt().float()`: that is y's correctly rounded root, which C has for float."""
    aten = torch.ops.aten
    if dtype != torch.float32 or getattr(x, "target", None) != aten.sqrt.default:
        return None
    wide = x.args[0]
    if getattr(wide, "target", None) != TO_COPY:
        return None
    y = wide.args[0]
    return y if wide.meta["val"].dtype == torch.float64 and y.meta["val"].dtype == torch.float32 else None
