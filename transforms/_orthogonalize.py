"""Orthogonalization: replace a matrix by the nearest one whose singular values are 1, roughly. What Muon is made of."""

from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from functional_lowbit import _optree
from functional_lowbit._core.contract import refuse
from functional_lowbit._core.contract.base import GradientTransformation, Hyper, Signed
from functional_lowbit._core.leafwise.leafwise import leafwise
from functional_lowbit._optree import Tree
from functional_lowbit._refused import WrongValue, speaking
from functional_lowbit.transforms._chain import chain
from functional_lowbit.transforms._masked import masked

QUINTIC = (3.4445, -4.7750, 2.0315)
"""Coefficients of Jordan's iteration, https://kellerjordan.github.io/posts/muon: after five steps most singular
values lie between 0.7 and 1.2. They are not driven to 1, which would take more steps and train no better."""


class ScaleByMuonState(NamedTuple):
    """The running mean of the gradient."""

    step: Tensor  # int64[]; updates made so far
    mu: Signed  # float32, like params; running mean of g


@speaking("orthogonalize")
def orthogonalize(
    ns_coeffs: tuple[float, float, float] = QUINTIC, ns_steps: int = 5, eps: float = 1e-8
) -> GradientTransformation:
    """Replace each matrix of updates by a nearly orthogonal one with the same singular vectors.

    `X = G / (|G| + eps)`, and then `ns_steps` times `X = a X + (b A + c A A) X` with `A = X Xᵀ` (Newton–Schulz), on the
    transpose if there are more rows than columns, in float32. Only leaves of two dimensions; the others pass through.

    A sharded matrix is gathered on one rank, and the matrices are spread over the ranks. As the same code runs on the
    same numbers, results have the same bits on every mesh, as long as torch uses the same number of threads.

    Args:
        ns_coeffs: (a, b, c).
        ns_steps: Iterations, >= 1.
        eps: Added to the norm, >= 0; in units of the updates.

    Raises:
        ValueError: for other than three coefficients, a number of steps below 1, or a negative eps.

    References:
        Jordan et al., 2024, https://kellerjordan.github.io/posts/muon; optax.contrib.orthogonalize_via_newton_schulz.

    Example:
        >>> import torch, functional_lowbit as fl
        >>> tx = fl.orthogonalize()
        >>> updates, _ = tx.update(torch.tensor([[3.0, 0.0], [0.0, -2.0]]), tx.init(torch.zeros(2, 2)))
        >>> torch.linalg.svdvals(updates)
        tensor([1.1171, 0.6821])
    """
    if len(ns_coeffs) != 3:
        raise WrongValue(f"ns_coeffs must be three numbers, got {ns_coeffs!r}")
    if not isinstance(ns_steps, int) or ns_steps < 1:
        raise WrongValue(f"ns_steps must be an int of at least 1, got {ns_steps!r}")
    refuse.hyperparameter("eps", eps, at_least=0.0)
    rule = leafwise(
        partial(_newton_schulz, tuple(map(float, ns_coeffs)), ns_steps, float(eps)),
        elementwise=False,
        name="orthogonalize",
    )
    return masked(rule, _matrices)


def _matrices(updates: Tree) -> Tree:
    return _optree.map_leaves(lambda x: x.ndim == 2, updates)


def _newton_schulz(
    coeffs: tuple[float, ...], steps: int, eps: float, g: Tensor, s: Any, p: Tensor, c: Any
) -> tuple[Tensor, Any]:
    a, b, c3 = coeffs
    x = g.T if g.shape[0] > g.shape[1] else g
    x = x / (x.norm() + eps)
    for _ in range(steps):
        square = x @ x.T
        x = a * x + (b * square + c3 * square @ square) @ x
    return (x.T if g.shape[0] > g.shape[1] else x), s


@speaking("scale_by_muon")
def scale_by_muon(
    ns_coeffs: tuple[float, float, float] = QUINTIC,
    ns_steps: int = 5,
    beta: Hyper = 0.95,
    eps: float = 1e-8,
    *,
    nesterov: bool = True,
) -> GradientTransformation:
    """Replace matrices of updates by their orthogonalized running mean (Muon).

    Leaves that are no matrices are replaced by their running mean; mask them to treat them otherwise.
    Only `mu` belongs to the running mean, so `chain(low_bit(...))` of it keeps few bits, and only updates are gathered.

    Args:
        ns_coeffs: As for `orthogonalize`.
        ns_steps: As for `orthogonalize`.
        beta: Decay per step of the running mean, in [0, 1).
        eps: As for `orthogonalize`.
        nesterov: Look one step ahead in the mean.

    Returns:
        A chain: its state is that of the running mean (`ScaleByMuonState`) and that of `orthogonalize`.

    Raises:
        TypeError, ValueError: for a hyperparameter that is no number or out of its range.

    References:
        Jordan et al., 2024, https://kellerjordan.github.io/posts/muon; optax.contrib.scale_by_muon, whose bias
        corrections these are.

    Example:
        >>> import torch, functional_lowbit as fl
        >>> tx = fl.chain(fl.scale_by_muon(), fl.scale_by_learning_rate(0.02))
        >>> tx.init({"w": torch.zeros(2, 3)})[0][0].mu["w"].shape
        torch.Size([2, 3])
    """
    refuse.hyperparameter("beta", beta, at_least=0.0, below=1.0)
    mean = leafwise(
        _ahead if nesterov else _mean,
        state=ScaleByMuonState,
        hyperparams={"beta": beta},
        scalars=_scalars,
        name="scale_by_muon",
    )
    return chain(mean, orthogonalize(ns_coeffs, ns_steps, eps))


def _scalars(s: ScaleByMuonState, h: Any) -> dict[str, Tensor]:
    step = s.step + 1
    return {
        "new": 1 - h.beta,
        "correction": 1 / (1 - h.beta**step),
        "mu_ahead": h.beta / (1 - h.beta ** (step + 1)),
        "g_ahead": (1 - h.beta) / (1 - h.beta**step),
    }


def _mean(g: Tensor, s: ScaleByMuonState, p: Tensor, c: Any) -> tuple[Tensor, ScaleByMuonState]:
    mu = c.beta * s.mu + c.new * g
    return c.correction * mu, s._replace(mu=mu)


def _ahead(g: Tensor, s: ScaleByMuonState, p: Tensor, c: Any) -> tuple[Tensor, ScaleByMuonState]:
    mu = c.beta * s.mu + c.new * g
    return c.mu_ahead * mu + c.g_ahead * g, s._replace(mu=mu)
