"""One leaf of one update: what its function is given of it, and what becomes of the result."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from functional_lowbit.sharding import ShardSpec, part_of, wrap


@dataclass(frozen=True)
class Task:
    """A leaf with all that its function is given."""

    path: str
    update: Tensor
    fields: Mapping[str, Any]  # moments and statistics, as they rest
    param: Tensor | None

    @property
    def spec(self) -> ShardSpec | None:
        """Of the leaf; None for a plain tensor."""
        return ShardSpec.of(self.update)

    def parts(self) -> list[Tensor]:
        """What this rank holds of the update, the fields and the parameter: float32."""
        tensors = [self.update, *self.fields.values(), *([] if self.param is None else [self.param])]
        return [part_of(x).float() for x in tensors]

    def specs(self) -> list[ShardSpec]:
        """Of the update and the fields, all of them sharded; the parameter's is the update's."""
        found = [ShardSpec.of(x) for x in (self.update, *self.fields.values())]
        return [spec for spec in found if spec is not None]

    def wrapped(self, update: Tensor, new: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """The new update, in the old one's dtype, and the new fields, sharded as the old ones."""
        wrapped = {name: wrap(x, ShardSpec.of(self.fields[name])) for name, x in new.items()}
        return wrap(update.to(self.update.dtype), self.spec), wrapped
