"""The calls that are timed: buffers and torch.distributed functions of each collective, as TorchRec uses them.

TorchRec calls ``all_to_all_single`` for pooled embeddings, ``reduce_scatter_tensor`` and
``all_gather_into_tensor`` for row-wise shards whose ranks have equal batches, on gloo as on NCCL, and leaves
data_parallel gradients to DistributedDataParallel, which calls ``all_reduce`` on each bucket.
"""

from __future__ import annotations

from typing import Callable

import torch
import torch.distributed as dist

from torchrec_neuroshard.measure.specs import CollectiveSpec

ELEMENT_BYTES = 4


def split_sizes(spec: CollectiveSpec, rank: int) -> tuple[list[int], list[int]]:
    """Floats that a rank sends to and receives from each rank in an all-to-all: (input, output splits), [ranks] each.

    Forward: a rank holds its own columns for the global batch and sends every rank that rank's samples; it
    receives everybody's columns for its own samples. Backward is the reverse.

    Raises:
        ValueError: the spec is not of an all-to-all.
    """
    if spec.name != "all_to_all":
        raise ValueError(f"only an all_to_all has split sizes, this is {spec.name}")
    own_columns = [spec.batch_size_per_rank * spec.dims[rank]] * spec.world_size
    own_samples = [spec.batch_size_per_rank * dim for dim in spec.dims]
    return (own_columns, own_samples) if spec.direction == "forward" else (own_samples, own_columns)


def buffer_sizes(spec: CollectiveSpec, rank: int) -> tuple[int, int]:
    """Floats of a rank's (input, output) buffer; an all-reduce works in place, so they are one buffer."""
    if spec.name == "all_to_all":
        inputs, outputs = split_sizes(spec, rank)
        return sum(inputs), sum(outputs)
    own = spec.batch_size_per_rank * spec.dims[0]
    if spec.name == "all_reduce":
        return own, own
    return (own * spec.world_size, own) if spec.name == "reduce_scatter" else (own, own * spec.world_size)


def prepared_call(spec: CollectiveSpec, rank: int, device: torch.device) -> Callable[[], object]:
    """Allocates a rank's buffers and returns the call on the default process group that is to be timed."""
    input_size, output_size = buffer_sizes(spec, rank)
    sent = torch.ones(input_size, device=device)
    if spec.name == "all_reduce":
        return lambda: dist.all_reduce(sent)
    received = torch.empty(output_size, device=device)
    if spec.name == "all_to_all":
        inputs, outputs = split_sizes(spec, rank)
        return lambda: dist.all_to_all_single(received, sent, outputs, inputs)
    function = _function(spec.name)
    return lambda: function(received, sent)


def _function(name: str) -> Callable[..., object]:
    """The tensor form of a collective, under the name that this torch does not warn of."""
    new, old = {
        "reduce_scatter": ("reduce_scatter_single", "reduce_scatter_tensor"),
        "all_gather": ("all_gather_single", "all_gather_into_tensor"),
    }[name]
    function: Callable[..., object] = getattr(dist, new) if hasattr(dist, new) else getattr(dist, old)
    return function
