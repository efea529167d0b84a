"""Names of leaves in a checkpoint, such as ``opt_state.0.mu.kernel``: keys, joined by dots."""

from collections.abc import Callable
from typing import Any

import jax

# How files name a field that is called otherwise in its class, {"its name": "its name in files"}: one that
# gets another name one day stands here. The field that flax's boxes have is no part of a name, so that a
# module and a plain tree read each other.
NAMES = {"value": ""}


def named(
    tree: Any, is_leaf: Callable[[Any], bool] | None = None, name: str = ""
) -> list[tuple[str, Any]]:
    """The leaves of a tree in their order, each with its name."""
    found = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf):
        parts = [name]
        for key in path:
            part = jax.tree_util.keystr((key,), simple=True)
            field = isinstance(key, jax.tree_util.GetAttrKey)
            parts.append(NAMES.get(part, part) if field else part)
        found.append((".".join(filter(None, parts)), leaf))
    return found
