"""crosscut: train one PyTorch model on many ranks, with every collective derived, shown and proven.

Names are imported on first use, so that `import crosscut` and what needs no torch (layouts, explain) start at once.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOME = {
    "Boundary": "crosscut.layout.spec",
    "Context": "crosscut.comm.context",
    "Dims": "crosscut.layout.spec",
    "DistributedModel": "crosscut.parallel.distribute",
    "Group": "crosscut.comm.group",
    "Layout": "crosscut.layout.layout",
    "LayoutError": "crosscut.layout.errors",
    "Ledger": "crosscut.comm.ledger",
    "Mesh": "crosscut.layout.mesh",
    "ShardedOptimizer": "crosscut.parallel.standalone.sharded_optimizer",
    "batches": "crosscut.parallel.batch",
    "check_model": "crosscut.parallel.check_model",
    "checked": "crosscut.comm.checked.stock",
    "clip_grad_norm_": "crosscut.parallel.standalone.full",
    "data_parallel": "crosscut.parallel.standalone.data_parallel",
    "derive": "crosscut.layout.rules",
    "distribute": "crosscut.parallel.distribute",
    "full_parameters": "crosscut.parallel.standalone.full",
    "full_optimizer_state_dict": "crosscut.parallel.standalone.full",
    "full_state_dict": "crosscut.parallel.standalone.full",
    "fully_shard": "crosscut.parallel.standalone.fully_shard",
    "load_full_optimizer_state_dict": "crosscut.parallel.standalone.full",
    "load_full_state_dict": "crosscut.parallel.standalone.full",
    "local_batch": "crosscut.parallel.batch",
    "no_sync": "crosscut.parallel.standalone.data_parallel",
    "register_shm": "crosscut.comm.shm.register",
    "spawn": "crosscut.comm.launch",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'crosscut' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
