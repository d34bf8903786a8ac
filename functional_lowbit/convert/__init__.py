"""Optimizer states of other libraries as states of this one, and back to torch.optim.

Imports: _core.contract, _core.state, _optree, _refused, checkpoint, formats, sharding, transforms
"""

from functional_lowbit.convert._from import (
    from_bitsandbytes as from_bitsandbytes,
    from_flashoptim as from_flashoptim,
    from_saved as from_saved,
    from_torch as from_torch,
    from_torchao as from_torchao,
)
from functional_lowbit.convert._library import library_of as library_of, params_of as params_of
from functional_lowbit.convert._to_torch import to_torch as to_torch
