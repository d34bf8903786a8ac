"""A state as names and files: written whole or not at all, read on any number of ranks.

Imports: _core, _core.contract, _core.state, _optree, _refused, formats, sharding
"""

from functional_lowbit.checkpoint._load import load as load
from functional_lowbit.checkpoint._safetensors import (
    load_safetensors as load_safetensors,
    save_safetensors as save_safetensors,
)
from functional_lowbit.checkpoint._save import async_save as async_save, save as save
