"""Names of leaves in a checkpoint, such as ``opt_state.0.mu.kernel``: keys, joined by dots."""

from collections.abc import Callable
from typing import Any

from jax.tree_util import GetAttrKey, keystr, tree_leaves_with_path

# The field that flax's boxes have is no part of a name, so that a module and a plain tree read each other.
_BOXED = GetAttrKey("value")


def named(
    tree: Any, is_leaf: Callable[[Any], bool] | None = None, name: str = ""
) -> list[tuple[str, Any]]:
    """The leaves of a tree in their order, each with its name."""
    found = []
    for path, leaf in tree_leaves_with_path(tree, is_leaf=is_leaf):
        keys = tuple(key for key in path if key != _BOXED)
        inner = keystr(keys, simple=True, separator=".")
        found.append((".".join(filter(None, (name, inner))), leaf))
    return found
