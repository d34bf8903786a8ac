"""How one leaf of a state is read from what was saved of it: in which parts, and what is made of them."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import Replicate

from functional_lowbit import formats
from functional_lowbit._core.state.named import Named
from functional_lowbit._core.state.quantized import Layout, QuantizedTensor, encode, zeros
from functional_lowbit._core.state.resting import is_pinned
from functional_lowbit._refused import WrongValue
from functional_lowbit.checkpoint import _schema
from functional_lowbit.formats._format import pack
from functional_lowbit.sharding import ShardSpec, contiguous_stride, local_of, wrap

META = torch.device("meta")
WAY_OUT = "pass convert=True to convert it"


class Reading(NamedTuple):
    """What has to be read for a leaf, and how the leaf is made of it."""

    likes: dict[str, Any]  # ending of the entry's name -> a tensor of its dtype, shape and sharding, or a number
    build: Callable[[Mapping[str, Any]], Any]  # entries by ending -> the leaf
    device: torch.device | None = None  # of the leaf; None for a number
    pinned: bool = False  # whether the leaf lies in pinned memory


def reading(named: Named, own: Any, saved: Mapping[str, Any], convert: bool) -> Reading:
    """How `own` is read from a leaf that the schema describes as `saved`."""
    found = _reading(named, own, saved, convert)
    part = own.codes if isinstance(own, QuantizedTensor) else own
    if not isinstance(part, Tensor):
        return found
    return found._replace(device=local_of(part).device, pinned=is_pinned(part))


def _reading(named: Named, own: Any, saved: Mapping[str, Any], convert: bool) -> Reading:
    path = named.path

    def refuse(what: str, was: Any, has: Any, way_out: str = "") -> WrongValue:
        text = f"leaf {path!r} was saved with {what} {was!r}, but the state has {has!r}"
        return WrongValue(f"{text}; {way_out}" if way_out else text)

    mine = _schema.describe(named, own)
    for what in ("field", "param"):
        if what in mine and saved.get(what, mine[what]) != mine[what]:
            raise refuse(what, saved[what], mine[what])
    kinds = {saved["kind"], mine["kind"]}
    if not kinds <= {"tensor", "quantized"}:
        if len(kinds) > 1:
            raise refuse("kind", saved["kind"], mine["kind"])
        return Reading({"": own}, lambda parts: _schema.plain(parts[""]))
    if saved["shape"] != mine["shape"]:
        raise refuse("shape", saved["shape"], mine["shape"])
    if len(kinds) > 1:
        # float32 and few bits are two ways to keep the same numbers; another dtype is something else.
        plain = next(x for x in (mine, saved) if x["kind"] == "tensor")["parts"][""]
        way_out = WAY_OUT if plain == "float32" else ""
        if not convert or not way_out:
            raise refuse("kind", saved["kind"], mine["kind"], way_out)
    if saved["kind"] == "tensor":
        if isinstance(own, QuantizedTensor):
            return _from_values(own.layout, "")
        if saved["parts"] != mine["parts"]:
            raise refuse("dtype", saved["parts"].get(""), mine["parts"][""])
        return Reading({"": own}, lambda parts: parts[""])
    if isinstance(own, QuantizedTensor):
        if saved["signed"] != mine["signed"]:
            raise refuse("signed", saved["signed"], mine["signed"])
        for what in ("format", "block_size"):
            if saved[what] != mine[what] and not convert:
                raise refuse(what, saved[what], mine[what], WAY_OUT)
        if saved["stored"] == "values":
            return _from_values(own.layout, _schema.VALUES)
        alike = saved["format"] == mine["format"] and saved["block_size"] == mine["block_size"]
        if alike and not own.layout.cut:
            return _as_it_is(own)
        return _from_codes(own, saved_layout(path, own.layout.spec, saved, own.layout.format))
    if saved["stored"] == "values":
        return Reading({_schema.VALUES: own}, lambda parts: parts[_schema.VALUES])
    return _from_codes(own, saved_layout(path, ShardSpec.of(own), saved, None))


def _as_it_is(own: QuantizedTensor) -> Reading:
    """The codes of the same format, blocks and sharding."""
    likes = {".codes": own.codes} if own.scales is None else {".codes": own.codes, ".scales": own.scales}
    return Reading(likes, lambda parts: QuantizedTensor(parts[".codes"], parts.get(".scales"), own.layout))


def _from_values(layout: Layout, ending: str) -> Reading:
    """Numbers that are written in the layout: those of another mesh, or of a state in float32."""
    stride = contiguous_stride(layout.shape) if layout.spec is None else layout.spec.stride
    local = torch.empty(layout.local_shape(), dtype=torch.float32, device=META)
    like = torch.empty_strided(layout.shape, stride, dtype=torch.float32, device=META)
    like = like if layout.spec is None else layout.spec.wrap(local)
    return Reading({ending: like}, lambda parts: write_again(local_of(parts[ending]), layout))


def _from_codes(own: Any, layout: Layout) -> Reading:
    """Codes of another format, block size or mesh: read as float32, written as `own` is."""
    empty = zeros(layout, META)
    likes = {".codes": empty.codes} if empty.scales is None else {".codes": empty.codes, ".scales": empty.scales}
    spec = own.layout.spec if isinstance(own, QuantizedTensor) else ShardSpec.of(own)

    def build(parts: Mapping[str, Any]) -> Any:
        local = local_of(QuantizedTensor(parts[".codes"], parts.get(".scales"), layout).dequantize())
        if spec is not None and layout.spec is not None and layout.spec.placements != spec.placements:  # read whole
            places = zip(spec.local_offset(), spec.local_shape(), strict=True)
            local = local[tuple(slice(first, first + n) for first, n in places)]
        local = local.contiguous()
        return write_again(local, own.layout) if isinstance(own, QuantizedTensor) else wrap(local, spec)

    return Reading(likes, build)


def saved_layout(path: str, spec: ShardSpec | None, saved: Mapping[str, Any], own: formats.Format | None) -> Layout:
    """The layout of codes that were saved whole. Where this mesh would cut their blocks, each rank reads all."""
    name = saved["format"]
    if own is not None and own.name == name:
        format = own
    elif name in formats.names():
        format = formats.get(name)
    else:
        raise WrongValue(f"leaf {path!r} was saved with the format {name!r}, which formats.names() lacks")
    layout = Layout(format, saved["signed"], tuple(saved["shape"]), saved["block_size"], spec)
    if spec is None or not layout.cut:
        return layout
    return layout._replace(spec=ShardSpec(spec.mesh, (Replicate(),) * spec.mesh.ndim, spec.shape, spec.stride))


def expected(path: str, saved: Mapping[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name of the dtype, and whole shape, of each tensor of a leaf that was saved, by the ending of its name."""
    if saved["kind"] != "quantized" or saved["stored"] == "values":
        return {ending: (dtype, tuple(saved["shape"])) for ending, dtype in saved["parts"].items()}
    like = zeros(saved_layout(path, None, saved, None), META)
    parts = {".codes": like.codes, ".scales": like.scales}
    return {ending: (_schema.name_of(x.dtype), tuple(x.shape)) for ending, x in parts.items() if x is not None}


def joined(path: str, saved: Mapping[str, Any], parts: Mapping[str, Any]) -> Any:
    """The leaf that was saved, of plain tensors that are as expected: a `QuantizedTensor`, or float32 of a cut one."""
    if ".codes" not in parts:
        return next(iter(parts.values()))
    return QuantizedTensor(parts[".codes"], parts.get(".scales"), saved_layout(path, None, saved, None))


def numbers(leaf: QuantizedTensor) -> Tensor:
    """What a leaf stands for, contiguous: `dequantize` may return a view that leaves out padding."""
    return wrap(local_of(leaf.dequantize()).contiguous(), leaf.layout.spec)


def write_again(local: Tensor, layout: Layout) -> QuantizedTensor:
    """Write numbers of this rank, with the codes that they had if they were read in the same layout.

    Most formats do so by themselves. The signed maps of dynamic8 and dynamic4 hold 1 but not -1: a block whose largest
    number is negative reads as one that reaches less far, and would be written with a smaller scale. So the scale that
    it may have had is tried, and taken if every number of the block reads as it was.
    """
    fresh = encode(local, layout)
    codec = layout.format.codec(layout.signed)
    if codec.idempotent or local.numel() == 0:
        return fresh
    blocks = layout.local_grid().to_blocks(local.float())
    codes, scales = fresh.local_blocks()
    assert scales is not None
    reach = codec.decode(*codec.encode(torch.tensor([[-1.0]], device=local.device))).abs()  # of a scale of 1
    wanted = (blocks.abs().amax(-1, keepdim=True) / reach).view(torch.int32)
    right = (codec.read(codes, scales, blocks.shape[-1]) == blocks).all(-1, keepdim=True)
    for ulps in (0, 1, -1, 2, -2):
        scale = (wanted + ulps).view(torch.float32)
        tried, tried_scales = codec.encode(torch.cat([blocks, scale], -1))  # one number more, which sets the scale
        assert tried_scales is not None
        tried = tried[:, :-1]
        found = ~right & (codec.decode(tried, tried_scales) == blocks).all(-1, keepdim=True)
        codes = torch.where(found, tried if codec.packing == 1 else pack(tried), codes)
        scales = torch.where(found, tried_scales, scales)
        right |= found
    return layout.store(codes, scales)
