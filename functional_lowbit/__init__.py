"""Functional optimizers with low-bit state for PyTorch."""

from functional_lowbit import (
    checkpoint as checkpoint,
    convert as convert,
    formats as formats,
    optim as optim,
    rounding as rounding,
    schedules as schedules,
    sharding as sharding,
    tree as tree,
)
from functional_lowbit._core.contract.base import (
    EmptyState as EmptyState,
    GradientTransformation as GradientTransformation,
    NonNegative as NonNegative,
    Signed as Signed,
    Statistic as Statistic,
    StepState as StepState,
)
from functional_lowbit._core.contract.masked_node import MaskedNode as MaskedNode
from functional_lowbit._core.leafwise import reduce as reduce
from functional_lowbit._core.leafwise.leafwise import leafwise as leafwise
from functional_lowbit._core.leafwise.norm import global_norm as global_norm
from functional_lowbit._core.report import plot as plot
from functional_lowbit._core.report.describe import describe as describe
from functional_lowbit._core.report.memory_plan import memory_plan as memory_plan
from functional_lowbit._core.report.recorded import (
    QuantizationErrorState as QuantizationErrorState,
    recorded_quantization_error as recorded_quantization_error,
)
from functional_lowbit._core.state.quantized import QuantizedTensor as QuantizedTensor, quantize as quantize
from functional_lowbit._core.step.apply import apply_updates as apply_updates
from functional_lowbit._core.step.step import compile as compile
from functional_lowbit._core.version import __version__ as __version__
from functional_lowbit.checkpoint._state_dict import load_state_dict as load_state_dict, state_dict as state_dict
from functional_lowbit.formats._exact import sqrt as sqrt
from functional_lowbit.transforms._adabelief import (
    ScaleByBeliefState as ScaleByBeliefState,
    adabelief as adabelief,
    scale_by_belief as scale_by_belief,
)
from functional_lowbit.transforms._adam import (
    ScaleByAdamState as ScaleByAdamState,
    adam as adam,
    adamw as adamw,
    scale_by_adam as scale_by_adam,
)
from functional_lowbit.transforms._centralize import centralize as centralize
from functional_lowbit.transforms._chain import (
    chain as chain,
    identity as identity,
    named_chain as named_chain,
    stateless as stateless,
)
from functional_lowbit.transforms._clip import clip as clip, clip_by_global_norm as clip_by_global_norm
from functional_lowbit.transforms._decay import add_decayed_weights as add_decayed_weights
from functional_lowbit.transforms._factored import (
    FactoredState as FactoredState,
    scale_by_factored_rms as scale_by_factored_rms,
)
from functional_lowbit.transforms._finite import (
    ApplyIfFiniteState as ApplyIfFiniteState,
    apply_if_finite as apply_if_finite,
)
from functional_lowbit.transforms._freeze import (
    freeze as freeze,
    selective_transform as selective_transform,
    set_to_zero as set_to_zero,
)
from functional_lowbit.transforms._inject import (
    InjectHyperparamsState as InjectHyperparamsState,
    inject_hyperparams as inject_hyperparams,
)
from functional_lowbit.transforms._lion import (
    ScaleByLionState as ScaleByLionState,
    lion as lion,
    scale_by_lion as scale_by_lion,
)
from functional_lowbit.transforms._low_bit import low_bit as low_bit
from functional_lowbit.transforms._masked import MaskedState as MaskedState, masked as masked
from functional_lowbit.transforms._master import (
    MasterWeightsState as MasterWeightsState,
    master_params as master_params,
    master_weights as master_weights,
)
from functional_lowbit.transforms._multi_steps import MultiStepsState as MultiStepsState, multi_steps as multi_steps
from functional_lowbit.transforms._offload import offload as offload
from functional_lowbit.transforms._orthogonalize import (
    ScaleByMuonState as ScaleByMuonState,
    orthogonalize as orthogonalize,
    scale_by_muon as scale_by_muon,
)
from functional_lowbit.transforms._partition import (
    PartitionState as PartitionState,
    multi_transform as multi_transform,
    partition as partition,
)
from functional_lowbit.transforms._recipes import (
    adam4bit as adam4bit,
    adam8bit as adam8bit,
    adamfp8 as adamfp8,
    adamw4bit as adamw4bit,
    adamw8bit as adamw8bit,
    adamwfp8 as adamwfp8,
    lion8bit as lion8bit,
    sgd8bit as sgd8bit,
)
from functional_lowbit.transforms._record_error import (
    quantization_error as quantization_error,
    record_quantization_error as record_quantization_error,
)
from functional_lowbit.transforms._scale import (
    scale as scale,
    scale_by_learning_rate as scale_by_learning_rate,
    scale_by_schedule as scale_by_schedule,
)
from functional_lowbit.transforms._sgd import TraceState as TraceState, sgd as sgd, trace as trace
from functional_lowbit.transforms._trust_ratio import scale_by_trust_ratio as scale_by_trust_ratio
