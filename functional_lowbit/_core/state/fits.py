"""Trees that do not fit each other are refused: which argument, the rule, the value got, the way out."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from functional_lowbit import _optree
from functional_lowbit._core.contract import interrupted
from functional_lowbit._optree import Tree
from functional_lowbit._refused import WrongType, WrongValue, name_at
from functional_lowbit.sharding import check_shard

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def params(paths: Sequence[str], leaves: Sequence[Any]) -> None:
    """Refuse parameters that no gradient step can be taken on."""
    for path, leaf in zip(paths, leaves, strict=True):
        if not isinstance(leaf, Tensor):
            hint = "; pass dict(model.named_parameters())" if isinstance(leaf, (Module, Iterator)) else ""
            raise WrongType.at("params", path, f"must be a tensor, got {type(leaf).__name__}{hint}")
        if leaf.layout is not torch.strided:
            raise WrongType.at("params", path, f"is sparse ({leaf.layout}); only dense parameters are supported")
        if leaf.dtype not in FLOATS:
            rule = f"must be float16, bfloat16, float32 or float64, got {leaf.dtype}"
            raise WrongType.at("params", path, f"{rule}; leave it out of the tree or mask it with fl.masked")
        check_shard(leaf, "params", path)


def updates(paths: Sequence[str], leaves: Sequence[Any], like: Sequence[Any]) -> None:
    """Refuse updates that do not fit the parameters. None is allowed: that leaf is skipped."""
    for path, u, p in zip(paths, leaves, like, strict=True):
        if u is None:
            continue
        if not isinstance(u, Tensor):
            raise WrongType.at("updates", path, f"must be a tensor or None, got {type(u).__name__}")
        if u.layout is not torch.strided:
            rule = f"is sparse ({u.layout}); only dense gradients are supported, call .to_dense() first"
            raise WrongType.at("updates", path, rule)
        if u.dtype not in FLOATS:
            raise WrongType.at("updates", path, f"must be float16, bfloat16, float32 or float64, got {u.dtype}")
        if isinstance(p, Tensor) and u.shape != p.shape:
            shapes = f"has shape {tuple(u.shape)}, but its parameter has {tuple(p.shape)}"
            raise WrongValue.at("updates", path, shapes)
        if isinstance(p, Tensor) and u.device != p.device:  # a native kernel would read addresses of another memory
            devices = f"is on {u.device}, but its parameter is on {p.device}; move it there"
            raise WrongValue.at("updates", path, devices)
        if isinstance(p, Tensor) and hasattr(p, "device_mesh") != hasattr(u, "device_mesh"):
            kinds = ["DTensor" if hasattr(x, "device_mesh") else "plain tensor" for x in (u, p)]
            raise WrongType.at("updates", path, f"is a {kinds[0]}, but its parameter is a {kinds[1]}")
        if hasattr(p, "device_mesh") and u.device_mesh != p.device_mesh:  # type: ignore[attr-defined]
            meshes = f"lies on {u.device_mesh}, but its parameter on {p.device_mesh}"  # type: ignore[attr-defined]
            raise WrongValue.at("updates", path, meshes)
        check_shard(u, "updates", path, partial=True)


def distinct(paths: Sequence[str], locals: Sequence[Tensor]) -> None:
    """Refuse one tensor under two names where it would be written twice."""
    seen: dict[int, str] = {}
    for path, x in zip(paths, locals, strict=True):
        if x.numel() and x.device.type != "meta":
            first = seen.setdefault(x.data_ptr(), path)
            if first != path:
                raise WrongValue(
                    f"{name_at('params', first)} and {name_at('params', path)} are one tensor, and donated buffers are "
                    "written in place; leave one out (named_parameters does), or compile with donate=False",
                    path,
                )


def same_structure(what: str, treedef: _optree.TreeDef, tree: Tree) -> list[Any]:
    """The subtrees of `tree` at the leaves of the parameters' structure, or an error that says what differs."""
    try:
        return _optree.flatten_up_to(treedef, tree)
    except ValueError as error:
        raise WrongValue(
            f"{what} must have the structure of the parameters, but {_optree.difference(treedef, tree) or error}; if "
            "the model changed, make a new state with init(params)"
        ) from error


def state_class(state: Any, expected: type) -> None:
    """Refuse the state of another transformation, and one that was left half-updated."""
    interrupted.refuse(state)
    if not isinstance(state, expected):
        article = "an" if expected.__name__[0] in "AEIOU" else "a"
        raise WrongValue(
            f"the state must be {article} {expected.__name__}, got {type(state).__name__}; it was made for another "
            "transformation"
        )


def moments(field: str, paths: Sequence[str], leaves: Sequence[Any], values: Sequence[Any]) -> None:
    """Refuse the moments of other parameters, and stored moments outside `low_bit`."""
    for path, leaf, value in zip(paths, leaves, values, strict=True):
        if not isinstance(value, Tensor):
            raise WrongValue.at(
                f"state.{field}",
                path,
                f"must be a tensor, got {type(value).__name__}; a state in few bits belongs to the low_bit "
                "transformation that made it",
            )
        moment_shape(field, path, leaf, value)


def moment_shape(field: str, path: str, leaf: Any, value: Any, offloaded: bool = False) -> None:
    """Refuse a moment that was made for a parameter of another shape, sharding or device, or for none.

    One that is offloaded has to be on the CPU, or on the meta device as its parameter is.
    """
    what = f"state.{field}"
    if not hasattr(value, "shape"):
        rule = f"must be a moment, got {type(value).__name__}"
        raise WrongValue.at(what, path, f"{rule}; the state was made for other parameters or with another mask")
    if tuple(value.shape) != tuple(leaf.shape):
        shapes = f"has shape {tuple(value.shape)}, but its parameter has {tuple(leaf.shape)}"
        raise WrongValue.at(what, path, f"{shapes}; the state was made for other parameters")
    if isinstance(value, Tensor) and value.dtype != torch.float32:
        rule = f"must be float32 for every dtype of parameters, got {value.dtype}"
        raise WrongType.at(what, path, f"{rule}; to store it in fewer bits, use fl.low_bit")
    device = value.device if isinstance(value, Tensor) else value.codes.device
    if offloaded and leaf.device.type != "meta":
        if device.type != "cpu":
            raise not_on_cpu(what, path, device)
    elif device != leaf.device:
        raise not_beside(what, path, device, leaf)
    sharding(what, path, leaf, value)


def not_beside(what: str, path: str, device: torch.device, param: Tensor) -> WrongValue:
    """For a part of a state that is on another device than its parameter."""
    rule = f"is on {device}, but its parameter is on {param.device}"
    return WrongValue.at(what, path, f"{rule}; make the state with init(params) after the parameters are moved")


def not_on_cpu(what: str, path: str, device: torch.device) -> WrongValue:
    """For a part of a state that was not made by `offload`."""
    rule = f"is on {device}, but fl.offload keeps it on the CPU"
    return WrongValue.at(what, path, f"{rule}; make the state with init(params) of the offloaded transformation")


def sharding(what: str, path: str, leaf: Any, value: Any) -> None:
    """Refuse a part of a state that is sharded unlike its parameter: kernels would read and write behind its end."""
    got, expected = getattr(value, "placements", None), getattr(leaf, "placements", None)
    if got is None and expected is None:
        return
    got, expected = (x or "none (a plain tensor)" for x in (got, expected))
    if got == expected:
        got, expected = mesh_of(value), mesh_of(leaf)
    if got != expected:
        raise WrongValue.at(
            what,
            path,
            f"has sharding {got}, but its parameter has {expected}; make the state with init(params) after the "
            "parameters are sharded",
        )


def mesh_of(x: Any) -> Any:
    """The mesh of a DTensor or of what is stored of one; None for a plain tensor."""
    spec = getattr(getattr(x, "layout", None), "spec", None)
    return spec.mesh if spec is not None else getattr(x, "device_mesh", None)
