"""torch.optim shells: any transformation as a `torch.optim.Optimizer`, and ready classes by torch's names.

Imports: _core.contract, _core.leafwise, _core.state, _core.step, _optree, _private, _refused, checkpoint, formats,
sharding, transforms
"""

from functional_lowbit.optim._adam import (
    Adam4bit as Adam4bit,
    Adam8bit as Adam8bit,
    AdamFp8 as AdamFp8,
    AdamW4bit as AdamW4bit,
    AdamW8bit as AdamW8bit,
    AdamWFp8 as AdamWFp8,
)
from functional_lowbit.optim._lion import Lion8bit as Lion8bit
from functional_lowbit.optim._optimizer import Optimizer as Optimizer
from functional_lowbit.optim._sgd import SGD8bit as SGD8bit
