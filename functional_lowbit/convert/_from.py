"""from_torch, from_torchao, from_bitsandbytes, from_flashoptim, from_saved: another library's state as one of ours."""

from collections.abc import Mapping
from typing import Any

from functional_lowbit._core.contract import interrupted
from functional_lowbit._core.contract.refuse import is_transformation
from functional_lowbit._optree import Tree
from functional_lowbit._refused import WrongType, WrongValue, speaking
from functional_lowbit.convert._fill import check_step, fill, find_slots
from functional_lowbit.convert._library import OURS, READERS, any_saved, library_in
from functional_lowbit.convert._match import Shell, Sides, match, named_leaves, params_in_order, with_hyperparams
from functional_lowbit.convert._own import is_own_state
from functional_lowbit.convert._read import Read, refuse_dampening

LIKE_TORCH = ("torchao", "flashoptim")  # if all parameters are small, or nothing is compressed


def _from(library: str | None, doc: str):
    """The `from_...` of a library; of whichever one saved it, if None."""

    def convert(
        saved: Any,
        target: Any,
        params: Tree = None,
        *,
        step: int | None = None,
        fields: Mapping[str, str] | None = None,
    ) -> Any:
        with speaking("from_saved"):
            found = library or library_in(saved)
        with speaking(_name(found)):
            return _convert(found, saved, target, params, step, dict(fields or {}))

    convert.__name__ = convert.__qualname__ = _name(library or OURS)
    convert.__doc__ = doc
    return convert


def _name(library: str) -> str:
    return "from_saved" if library == OURS else f"from_{library}"


from_torch = _from(
    "torch",
    """The state of a `torch.optim` optimizer as a state of ours, in any format.

    Its moments are found in the target by what state classes declare, also inside chains and wrappers: `exp_avg` is a
    `mu`, `exp_avg_sq` and `square_avg` a `nu`, `momentum_buffer` a `trace` (Muon's a `mu`). Numbers in float32 stay as
    they are where the target keeps float32, and are rounded once where it keeps few bits. Every step counter of the
    target gets the step of the parameters that it counts for. A parameter that never had a gradient has no state in
    torch; its leaves stay as they are in the target. So do fields of other names, such as averages and accumulators.

    Args:
        saved: The optimizer; what its `state_dict()` returned, also by way of a file; or what
            `torch.distributed.checkpoint.state_dict.get_optimizer_state_dict` returned, flattened or not. Tensors may
            be DTensors of the same or another mesh, or whole on every rank.
        target: A state, for instance from `tx.init(params)`, or an `fl.optim.Optimizer`. Not written to. Parameters on
            the meta device serve as well.
        params: The tree that the state was made for: it says which parameters are the saved ones. They are found by
            themselves (if an optimizer is given, with the same parameters), else by name (`param_names` in the groups,
            or names as keys), else by number (if the tree's names are numbers), else in order, as in
            `model.parameters()`: a dict counts in the order in which it was filled. Not needed for a state with a
            moment of every parameter.
        step: Steps made, for every counter of the target, instead of the saved ones. torch's SGD saves none: without
            this, counters stay as they are in the target.
        fields: Field of the target's state, by entry of torch, for entries and fields of other names.

    Returns:
        For a state, a new state of the same structure, which shares no memory with `saved` or `target`. For an
        optimizer, a dict for its `load_state_dict`, with the hyperparameters of the saved groups where its own groups
        have the name.

    Raises:
        TypeError: if `saved` is no saved optimizer, or `target` no state and no optimizer of ours.
        ValueError: for a state of another model (names, shapes, number of parameters), of another kind of optimizer, or
            of another library; for entries that are missing or not understood; and if parameters that share a counter
            have made different numbers of steps. Nothing is made before.

    Example:
        >>> import torch, functional_lowbit as fl
        >>> model = torch.nn.Linear(64, 64)
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        >>> model(torch.ones(64)).sum().backward()
        >>> optimizer.step()
        >>> params = dict(model.named_parameters())
        >>> state = fl.convert.from_torch(optimizer.state_dict(), fl.adamw8bit(1e-3).init(params), params)
        >>> state[0].step, state[0].mu["weight"]
        (tensor(1), QuantizedTensor(companded8, shape=(64, 64), block_size=256))

        As an optimizer:

        >>> ours = fl.optim.Optimizer(model.named_parameters(), fl.adamw8bit(1e-3), backend="eager")
        >>> ours.load_state_dict(fl.convert.from_torch(optimizer, ours))
    """,
)

from_torchao = _from(
    "torchao",
    """The state of torchao's Adam and AdamW in 8 bits, 4 bits or FP8 as a state of ours, in any format.

    Codes are kept as they are where the target has the same format (`dynamic8` for 8 bits, `dynamic4`, `e4m3`) and none
    of its blocks crosses one of torchao's, which run over the flattened tensor: so it is if rows are a multiple of the
    block, or divide it. Else the numbers are read and written once more. Of 4 bits, the code for 15/16 of a second
    moment's block becomes 1, as `dynamic4` has none.

    Arguments, result and errors are those of `from_torch`. `saved` may also be of `fully_shard`ed parameters, whose
    DTensors hold a quantized shard each; codes and scales that do not fit are refused.

    Example:
        torchao keeps small parameters in float32, so this one looks like torch's.

        >>> import torch, functional_lowbit as fl
        >>> saved = {
        ...     "state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2)}},
        ...     "param_groups": [{"params": [0]}],
        ... }
        >>> fl.convert.from_torchao(saved, fl.adam(1e-3).init({"w": torch.zeros(2)}))[0].mu
        {'w': tensor([1., 1.])}
    """,
)

from_bitsandbytes = _from(
    "bitsandbytes",
    """The state of bitsandbytes' Adam, AdamW, Lion and SGD, in 8 or 32 bits, paged or not, as a state of ours.

    `state1` is a `mu`, or SGD's `trace`; `state2` a `nu`. A single `state1` is told by its group: SGD's second beta is
    0. Codes are kept as in `from_torchao`, for `dynamic8`; bitsandbytes' blocks have 256 elements.

    Arguments, result and errors are those of `from_torch`; `fields` are for "state1" and "state2". State that is not
    blockwise is refused, and that of AdEMAMix.

    Example:
        >>> import torch, functional_lowbit as fl
        >>> saved = {
        ...     "state": {0: {"step": 3, "state1": torch.ones(2)}},
        ...     "param_groups": [{"params": [0], "betas": (0.9, 0.99), "eps": 0.0}],
        ... }
        >>> fl.convert.from_bitsandbytes(saved, fl.lion(1e-4).init({"w": torch.zeros(2)}))[0]
        ScaleByLionState(step=tensor(3), mu={'w': tensor([1., 1.])})
    """,
)

from_flashoptim = _from(
    "flashoptim",
    """The state of FlashOptim's Adam, AdamW, Lion and SGD, compressed or not, as a state of ours, in any format.

    The codes of a first moment are kept by `companded8` where none of its blocks crosses one of FlashOptim's groups of
    32 (`block_size=32`); all else is read and written once more. Where the target has `master_weights`, what parameters
    lack of their masters is taken over too; that needs `params` as FlashOptim left them. Without, it is dropped.

    Arguments, result and errors are those of `from_torch`. Codes, scales and errors that do not fit are refused.

    Example:
        >>> import torch, functional_lowbit as fl
        >>> codes, scales = torch.tensor([127, -127], dtype=torch.int8), torch.ones(1, dtype=torch.float16)
        >>> saved = {
        ...     "state": {0: {"momentum_buffer::quantized": codes, "momentum_buffer::scales": scales}},
        ...     "param_groups": [{"params": [0], "master_bytewidth": 0}],
        ... }
        >>> fl.convert.from_flashoptim(saved, fl.sgd(0.1, 0.9).init({"w": torch.zeros(2)}))[0].trace
        {'w': tensor([ 1., -1.])}
    """,
)

from_saved = _from(
    None,
    """The state of whichever library `library_of` finds. Also what this one saved, into another transformation.

    `fl.load_state_dict` wants the same structure. This one goes by moments and parameters: from `adamw` into
    `chain(clip, masked(adam))`, from an `fl.optim` optimizer into a functional state.

    Arguments and result are those of `from_torch`, `saved` as in `library_of`; errors those of the library's own
    function.

    Example:
        >>> import torch, functional_lowbit as fl
        >>> params = {"w": torch.zeros(64, 64)}
        >>> saved = fl.state_dict(fl.adamw8bit(1e-3).init(params))
        >>> fl.convert.from_saved(saved, fl.chain(fl.clip(1.0), fl.scale_by_adam()).init(params))[1].mu["w"].shape
        torch.Size([64, 64])
    """,
)


def _convert(library: str, saved: Any, target: Any, params: Tree, step: int | None, fields: Mapping[str, str]) -> Any:
    check_step(step)
    found = library_in(saved)
    if found != library and not (found == "torch" and library in LIKE_TORCH):
        raise WrongValue(f"saved is from {found}; use fl.convert.{_name(found)}")
    source, reader = any_saved(saved), READERS[library]
    sides = Sides(unordered="saved" if is_own_state(saved) else "")

    if not isinstance(target, Shell):
        interrupted.refuse(target)
        places = _targets(target, params, named=all(p.name is not None for p in source.params))
        parts = [(target, places)]
    elif params is not None:
        raise WrongValue("params must be None for an optimizer, which knows its own")
    else:
        places, parts = params_in_order(target), target.parts()
    found = match(sides, source.params, places)
    reads = {name: reader(p, source.groups[p.group], fields) for name, p in found.items()}
    _refuse_nothing([state for state, _ in parts], reads)
    refuse_dampening(reads.values(), source.groups, target, step)
    new = [fill(state, {n: r for n, r in reads.items() if n in own}, step, own) for state, own in parts]
    if not isinstance(target, Shell):
        return new[0]
    return with_hyperparams(target.state_dict_with(new), [found.get(n) for n in places], source.groups)


def _targets(state: Any, params: Tree, named: bool) -> dict[str, Any]:
    """The target's parameters by name, in order; None where they are not known."""
    is_leaf = any(path == "" for path, _ in named_leaves(state))
    if state is None or is_leaf or is_transformation(state):
        raise WrongType(
            f"target must be a state, as tx.init(params) returns it, or an fl.optim optimizer, got "
            f"{type(state).__name__}"
        )
    slots = find_slots(state)
    if params is None:
        if not slots.whole and not named:
            raise WrongValue(
                "params is needed, since masks have taken parameters out of the target's moments, and "
                "saved has no names; pass the tree that the state was made for"
            )
        return dict.fromkeys(slots.owners())
    places = {name: leaf for name, leaf in named_leaves(params) if leaf is not None}
    for owner in slots.owners():
        if owner not in places:
            raise WrongValue(
                f"the target has a moment of {owner!r}, which params has not; pass the tree that the state was made for"
            )
    return places


def _refuse_nothing(states: list[Any], reads: Mapping[str, Read]) -> None:
    """Refuse what has no state at all, but of an optimizer that keeps none."""
    if any(read.moments or read.step is not None for read in reads.values()):
        return
    if any(find_slots(state).slots for state in states):
        raise WrongValue("saved has no state of any parameter; the optimizer has made no step, or keeps no moments")
