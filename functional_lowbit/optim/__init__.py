"""torch.optim shells: any transformation as a `torch.optim.Optimizer`."""

from functional_lowbit.optim._optimizer import Optimizer as Optimizer
