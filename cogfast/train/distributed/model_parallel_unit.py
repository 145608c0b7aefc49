"""What DeepSpeed asks of Megatron's model parallel unit (`mpu`), answered for our mesh."""

from __future__ import annotations

import torch.distributed as dist

from cogfast.train.distributed.process_groups import ProcessGroups


class ModelParallelUnit:
    """The names are DeepSpeed's; groups: with a tensor axis."""

    def __init__(self, groups: ProcessGroups) -> None:
        assert groups.tensor is not None, "every rank has a model of its own"
        self.groups = groups

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self.groups.data

    def get_data_parallel_group_ranks(self) -> list[int]:
        return dist.get_process_group_ranks(self.groups.data)

    def get_data_parallel_world_size(self) -> int:
        return self.groups.data_size

    def get_data_parallel_rank(self) -> int:
        return self.groups.data_rank

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        return self.groups.tensor.process_group

    def get_model_parallel_world_size(self) -> int:
        return self.groups.tensor_size

    def get_model_parallel_rank(self) -> int:
        return self.groups.tensor_rank

    get_tensor_model_parallel_group = get_model_parallel_group
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_rank = get_model_parallel_rank
