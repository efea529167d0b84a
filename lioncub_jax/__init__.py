"""Data-parallel training whose workers exchange votes of about one bit per parameter, for optax.

Optimizers and the training step are here. Parts to build an optimizer of are in the namespaces `quantize`,
`decide`, `wires`, `momentum` and `sync`. Other namespaces are `mesh`, `training`, `checkpoint`, `audit`
(bytes, and programs that would send more than votes), and `baselines`. Programs around the library are in
`lioncub_jax.tools`, which is imported by its name.
"""

import importlib
from typing import TYPE_CHECKING, Any

import jax

if jax.__version_info__ < (0, 10, 2):  # as pyproject.toml says, which a --no-deps does not ask
    raise ImportError(
        f"lioncub_jax needs jax 0.10.2 or newer, and this is {jax.__version__}: pip install 'jax>=0.10.2'"
    )

from lioncub_jax import audit, mesh, training
from lioncub_jax.exchange import decide, momentum, quantize, sync, wires
from lioncub_jax.exchange.sync import sync_momentum
from lioncub_jax.exchange.transform import communicate
from lioncub_jax.mesh import Workers
from lioncub_jax.optimizers import (
    distributed_lion,
    global_gradients,
    lion_cub,
    owner,
    owner_adamw,
    owner_lion,
    owner_muon,
    scale_by_lion_cub,
)
from lioncub_jax.training import (
    from_nnx,
    init_state,
    local_value_and_grad,
    make_train_step,
    map_step,
    mean_over_workers,
    metrics,
)
from lioncub_jax.version import __version__ as __version__

if TYPE_CHECKING:
    from lioncub_jax import baselines, checkpoint
    from lioncub_jax.checkpoint import Checkpoints, stop_on_sigterm

__all__ = [
    "Checkpoints",
    "Workers",
    "audit",
    "baselines",
    "checkpoint",
    "communicate",
    "decide",
    "distributed_lion",
    "from_nnx",
    "global_gradients",
    "init_state",
    "lion_cub",
    "local_value_and_grad",
    "make_train_step",
    "map_step",
    "mean_over_workers",
    "mesh",
    "metrics",
    "momentum",
    "owner",
    "owner_adamw",
    "owner_lion",
    "owner_muon",
    "quantize",
    "scale_by_lion_cub",
    "stop_on_sigterm",
    "sync",
    "sync_momentum",
    "training",
    "wires",
]

# Loaded on first use (PEP 562).
_NAMESPACES = {"baselines", "checkpoint"}
_FROM = {"Checkpoints": "checkpoint", "stop_on_sigterm": "checkpoint"}


def __getattr__(name: str) -> Any:
    if name in _NAMESPACES:
        return importlib.import_module(f"{__name__}.{name}")
    if name in _FROM:
        return getattr(importlib.import_module(f"{__name__}.{_FROM[name]}"), name)
    if name in training.GONE:
        return getattr(training, name)  # raises, and says what to write
    for module in (quantize, wires, decide, momentum, sync, mesh, training, audit):
        if name in module.__all__:
            public = module.__name__.replace("exchange.", "")
            raise AttributeError(f"{__name__} has no {name}: it is {public}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
