"""Every transformation, once: all that the tests of all of them are made of. A new one is one row of `CASES`."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from helpers import averaged, delayed
from torch import Tensor

import functional_lowbit as fl

LR, B1, B2, EPS, DECAY = 0.01, 0.9, 0.99, 1e-6, 0.1


class Case(NamedTuple):
    """One transformation, and what it is compared with."""

    make: Callable[[], Any]
    every_format: bool = False  # whether its moments are tried in every format (test_contract)
    naive: Callable[[Tensor], Any] | None = None  # of a parameter: `update(g, p, t)` in float64, a loop (test_oracles)
    torch: Callable[[Any], Any] | None = None  # of a list of parameters: the same in torch.optim (test_oracles)
    optax: Callable[[Any], Any] | None = None  # of either library: the transformation under its name there (parity)
    ranks: tuple[str, ...] = ()  # ways to step that have the plain run's bits at W = 1 to 4 (test_every_world_size)


def naive_adam(p: Tensor, nesterov: bool = False, decay: float = 0.0) -> Callable[[Tensor, Tensor, int], Tensor]:
    m, v = torch.zeros_like(p), torch.zeros_like(p)

    def update(g: Tensor, p: Tensor, t: int) -> Tensor:
        m.mul_(B1).add_((1 - B1) * g)
        v.mul_(B2).add_((1 - B2) * g * g)
        m_hat, v_hat = m / (1 - B1**t), v / (1 - B2**t)
        if nesterov:
            m_hat = B1 * m / (1 - B1 ** (t + 1)) + (1 - B1) * g / (1 - B1**t)
        return -LR * (m_hat / (v_hat.sqrt() + EPS) + decay * p)

    return update


def naive_adabelief(p: Tensor, nesterov: bool = False) -> Callable[[Tensor, Tensor, int], Tensor]:
    m, v = torch.zeros_like(p), torch.zeros_like(p)

    def update(g: Tensor, p: Tensor, t: int) -> Tensor:
        m.mul_(B1).add_((1 - B1) * g)
        v.mul_(B2).add_((1 - B2) * (g - m) ** 2 + EPS)
        m_hat = m / (1 - B1**t)
        if nesterov:
            m_hat = B1 * m / (1 - B1 ** (t + 1)) + (1 - B1) * g / (1 - B1**t)
        return -LR * m_hat / ((v / (1 - B2**t)).sqrt() + EPS)

    return update


def naive_sgd(p: Tensor, momentum: float = 0.0, nesterov: bool = False) -> Callable[[Tensor, Tensor, int], Tensor]:
    m = torch.zeros_like(p)

    def update(g: Tensor, p: Tensor, t: int) -> Tensor:
        m.mul_(momentum).add_(g)
        return -LR * (g + momentum * m if nesterov else m)

    return update


def naive_lion(p: Tensor) -> Callable[[Tensor, Tensor, int], Tensor]:
    m = torch.zeros_like(p)

    def update(g: Tensor, p: Tensor, t: int) -> Tensor:
        u = torch.sign(B1 * m + (1 - B1) * g)
        m.mul_(B2).add_((1 - B2) * g)
        return -LR * (u + DECAY * p)

    return update


SMALL_MASK = {"w": True, "v": False, "b": True}


def _decay_of(params: Any) -> Any:
    return fl.tree.map(lambda p: p.ndim > 1, params)


CASES: dict[str, Case] = {
    "identity": Case(fl.identity),
    "stateless": Case(lambda: fl.stateless(lambda updates, params: fl.tree.scale(0.5, updates))),
    "clip": Case(lambda: fl.clip(0.5)),
    "clip_by_global_norm": Case(lambda: fl.clip_by_global_norm(0.5)),
    "scale": Case(lambda: fl.scale(-0.5)),
    "scale_by_learning_rate": Case(lambda: fl.scale_by_learning_rate(0.1)),
    "scale_by_schedule": Case(lambda: fl.scale_by_schedule(fl.schedules.linear_schedule(0.0, 1.0, 7))),
    "add_decayed_weights": Case(lambda: fl.add_decayed_weights(0.1)),
    "add_decayed_weights masked": Case(lambda: fl.add_decayed_weights(0.1, _decay_of)),
    "masked": Case(lambda: fl.masked(fl.scale_by_adam(), SMALL_MASK)),
    "scale_by_adam": Case(fl.scale_by_adam),
    "adam": Case(
        lambda: fl.adam(LR, B1, B2, EPS),
        naive=naive_adam,
        torch=lambda ps: torch.optim.Adam(ps, LR, (B1, B2), EPS),
        optax=lambda o: o.adam(0.01),
        every_format=True,
    ),
    "adam nesterov": Case(
        lambda: fl.adam(LR, B1, B2, EPS, nesterov=True), naive=lambda p: naive_adam(p, nesterov=True)
    ),  # torch's NAdam has a momentum schedule of its own
    "adamw": Case(lambda: fl.adamw(fl.schedules.cosine_decay_schedule(0.01, 10), eps_root=1e-8), every_format=True),
    "adamw decayed": Case(
        lambda: fl.adamw(LR, B1, B2, EPS, weight_decay=DECAY),
        naive=lambda p: naive_adam(p, decay=DECAY),
        torch=lambda ps: torch.optim.AdamW(ps, LR, (B1, B2), EPS, weight_decay=DECAY),
    ),
    "adamw nesterov": Case(
        lambda: fl.adamw(LR, B1, B2, EPS, weight_decay=DECAY, nesterov=True),
        naive=lambda p: naive_adam(p, nesterov=True, decay=DECAY),
    ),
    "adamw masked": Case(lambda: fl.adamw(0.01, weight_decay=0.1, mask=_decay_of)),
    "adabelief": Case(
        lambda: fl.adabelief(LR, B1, B2, EPS, EPS),
        naive=naive_adabelief,
        optax=lambda o: o.adabelief(LR),
        every_format=True,
        ranks=("native", "pure"),
    ),
    "adabelief nesterov": Case(
        lambda: fl.adabelief(LR, B1, B2, EPS, EPS, nesterov=True),
        naive=lambda p: naive_adabelief(p, nesterov=True),
        optax=lambda o: o.adabelief(LR, nesterov=True),
    ),
    "adam8bit": Case(lambda: fl.adam8bit(0.01)),
    "adamw8bit": Case(lambda: fl.adamw8bit(0.01, weight_decay=0.1)),
    "adam4bit": Case(lambda: fl.adam4bit(0.01)),
    "adamw4bit": Case(lambda: fl.adamw4bit(0.01, weight_decay=0.1)),
    "adamfp8": Case(lambda: fl.adamfp8(0.01)),
    "adamwfp8": Case(lambda: fl.adamwfp8(0.01, weight_decay=0.1)),
    "trace": Case(lambda: fl.trace(0.9), every_format=True),
    "sgd": Case(
        lambda: fl.sgd(LR), naive=naive_sgd, torch=lambda ps: torch.optim.SGD(ps, LR), optax=lambda o: o.sgd(LR)
    ),
    "sgd momentum": Case(
        lambda: fl.sgd(LR, 0.9),
        naive=lambda p: naive_sgd(p, 0.9),
        torch=lambda ps: torch.optim.SGD(ps, LR, momentum=0.9),
    ),
    "sgd nesterov": Case(
        lambda: fl.sgd(LR, 0.9, nesterov=True),
        naive=lambda p: naive_sgd(p, 0.9, nesterov=True),
        torch=lambda ps: torch.optim.SGD(ps, LR, momentum=0.9, nesterov=True),
        every_format=True,
    ),
    "sgd8bit": Case(lambda: fl.sgd8bit(0.1)),
    "scale_by_lion": Case(fl.scale_by_lion),
    "lion": Case(
        lambda: fl.lion(LR, B1, B2, DECAY), naive=naive_lion, optax=lambda o: o.lion(LR), every_format=True
    ),  # torch has none
    "lion8bit": Case(lambda: fl.lion8bit(0.01, weight_decay=0.1), ranks=("native", "eager")),
    "centralize": Case(fl.centralize),
    "scale_by_trust_ratio": Case(fl.scale_by_trust_ratio),
    "scale_by_factored_rms": Case(fl.scale_by_factored_rms),
    "orthogonalize": Case(fl.orthogonalize),
    "scale_by_muon": Case(fl.scale_by_muon),
    "chain with a trust ratio": Case(
        lambda: fl.chain(fl.low_bit(fl.scale_by_adam()), fl.scale_by_trust_ratio(), fl.scale(-0.01))
    ),
    "apply_if_finite": Case(lambda: fl.apply_if_finite(fl.adamw(0.01)), every_format=True),
    "set_to_zero": Case(fl.set_to_zero),
    "freeze (mask)": Case(lambda: fl.chain(fl.adamw(0.01), fl.freeze(lambda path, leaf: path == "b"))),
    "selective_transform (mask)": Case(
        lambda: fl.selective_transform(fl.adamw8bit(0.01), freeze_mask={**SMALL_MASK, "b": False})
    ),
    "named_chain": Case(lambda: fl.named_chain(("clip", fl.clip_by_global_norm(0.5)), ("adamw", fl.adamw8bit(0.01)))),
    "partition (mask)": Case(
        lambda: fl.partition(
            {"matrix": fl.adamw8bit(0.01, weight_decay=0.1), "rest": fl.adamw(0.01)},
            lambda path, leaf: "matrix" if path == "w" else "rest",
        )
    ),
    "inject_hyperparams": Case(
        lambda: fl.inject_hyperparams(fl.adamw8bit)(fl.schedules.cosine_decay_schedule(0.01, 10), weight_decay=0.1)
    ),
    "multi_steps": Case(lambda: fl.multi_steps(fl.adamw(0.01), 2), every_format=True),
    "master_weights": Case(lambda: fl.master_weights(fl.adamw8bit(0.01))),  # see test_master.py for bfloat16
    "offload": Case(lambda: fl.offload(fl.adamw8bit(0.01))),  # see test_offload.py for another device
    "record_quantization_error": Case(lambda: fl.record_quantization_error(fl.adamw8bit(0.01), every=2)),
    "chain": Case(lambda: fl.chain(fl.clip_by_global_norm(0.5), fl.adamw8bit(0.01))),
    "chain of nothing": Case(fl.chain),
    "a user's pair": Case(lambda: fl.chain(averaged(), fl.scale_by_learning_rate(0.1)), every_format=True),
    "a user's pair in few bits": Case(lambda: fl.low_bit(fl.chain(fl.clip(1.0), averaged(), fl.sgd(0.1)))),
    "a user's pair that returns its own state": Case(lambda: fl.chain(delayed(), fl.scale_by_learning_rate(0.1))),
    "a user's pair that returns the params": Case(lambda: fl.chain(fl.stateless(lambda u, p: p), fl.adam8bit(0.1))),
}
