"""DTensor in, DTensor out, from the global shape and stride.

Imports: _optree, _private, _refused, formats
"""

from functional_lowbit.sharding._local import (
    check_shard as check_shard,
    from_local as from_local,
    local_of as local_of,
    part_of as part_of,
    to_local as to_local,
    wrap as wrap,
)
from functional_lowbit.sharding._spec import ShardSpec as ShardSpec, contiguous_stride as contiguous_stride
