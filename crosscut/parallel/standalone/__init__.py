"""Parallelism that stands alone: any nn.Module, any training loop, no dims table.

`data_parallel` (gradients averaged), `ShardedOptimizer` (ZeRO-1: optimizer state kept in parts) and `fully_shard`
(ZeRO-3: parameters, gradients and optimizer state kept in parts). Here, and only here, gradients are AVERAGED over the
ranks, since each rank's loss is a mean over its own rows; the engine of `distribute` sums.
"""
