"""Targets of a command line: functions in a module or a file, and models that they return."""

import functools
import importlib
import sys
import sysconfig
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

Result = TypeVar("Result")


def load(target: str) -> Callable[..., Any]:
    """Finds the function that ``MODULE:NAME`` or ``FILE.py:NAME`` names.

    A file is a module of its folder, and may import what lies beside it. Other modules are looked for in
    the working directory too.

    Args:
      target: such as ``"my_models.gpt:small"`` or ``"train.py:model"``.

    Returns:
      The function; it raises as `attempt`.

    Raises:
      ValueError: where there is no such file, module or function, or importing it fails.

    Example:
      >>> load("math:pi")
      Traceback (most recent call last):
      ValueError: math:pi: there is no function 'pi' in math; it has acos, acosh, asin, ...
    """
    place, _, name = target.rpartition(":")
    if not (place and name.isidentifier()):
        raise ValueError(f"{target!r}: give MODULE:NAME or FILE.py:NAME, such as model.py:make")
    path = Path(place)
    is_file = path.suffix == ".py"
    # For good, because the function may import more when it is called.
    sys.path.insert(0, str(path.parent.resolve()) if is_file else "")
    module_name = path.stem if is_file else place
    module = attempt(f"importing {place}", importlib.import_module, module_name)
    if is_file and Path(module.__file__ or "").resolve() != path.resolve():
        raise ValueError(f"{place}: {module_name} is {module.__file__}; give the file another name")
    functions = [n for n, value in vars(module).items() if callable(value) and n[0] != "_"]
    if name not in functions:
        raise ValueError(
            f"{target}: there is no function {name!r} in {place}; it has {', '.join(functions[:8])}"
        )
    return functools.partial(attempt, f"calling {target}", vars(module)[name])


def use_devices(count: int) -> None:
    """Makes JAX run on so many devices of the CPU.

    Raises:
      ValueError: where JAX has started already.
    """
    try:
        jax.config.update("jax_num_cpu_devices", count)  # fails if it is too late
        jax.config.update("jax_platforms", "cpu")
    except RuntimeError as started:
        raise ValueError(f"--devices {count}: jax has started already: {started}") from None


def attempt(action: str, work: Callable[..., Result], *arguments: Any) -> Result:
    """Runs a user's code; of its error one sentence is left, with the user's line.

    Args:
      action: in words, for the sentence.
      work: the code.
      arguments: of ``work``.

    Returns:
      What ``work`` returned.

    Raises:
      ValueError: where it fails. What it was raised from is not kept: the tracebacks of the frameworks
        below would hide the sentence.

    Example:
      >>> attempt("dividing", lambda: 1 / 0)
      Traceback (most recent call last):
      ValueError: dividing failed with ZeroDivisionError: division by zero
    """
    try:
        return work(*arguments)
    except (Exception, SystemExit) as error:
        message = " ".join(str(error).split()) or "(no message)"
        reason = f"{action} failed with {type(error).__name__}: {message}{_line_of(error)}"
    raise ValueError(reason)


def _line_of(error: BaseException) -> str:
    """The last line of the user's own code that an error passed through."""
    skipped = ("<", sysconfig.get_path("stdlib"), str(Path(__file__).parents[2]))
    lines = [
        f" (in {Path(frame.filename).name}, line {frame.lineno})"
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(skipped) and "-packages" not in frame.filename
    ]
    return lines[-1] if lines else ""


def shapes(target: str) -> Any:
    """Finds the shapes of the parameters of the model that a target makes; nothing is allocated.

    Args:
      target: names a function without arguments that returns an ``nnx.Module`` (its ``nnx.Param``
        count), flax linen variables (their ``"params"`` count) or any tree of arrays or
        ``jax.ShapeDtypeStruct``. It is called under ``jax.eval_shape``.

    Returns:
      A list of ``jax.ShapeDtypeStruct``.

    Raises:
      ValueError: as `load`, where the function fails, and for anything else that is returned.
    """
    function, leaves = load(target), []

    def describe() -> None:
        model = function()
        nnx = sys.modules.get("flax.nnx")  # code that makes a module has imported it
        if nnx and isinstance(model, nnx.Module):
            model = nnx.state(model, nnx.Param)
        elif isinstance(model, Mapping) and "params" in model:
            model = model["params"]
        for path, leaf in jax.tree_util.tree_leaves_with_path(model):
            leaves.append(_shape(target, jax.tree_util.keystr(path), leaf))

    jax.eval_shape(describe)
    if not leaves:
        raise ValueError(f"{target} returned no arrays: give a model or a tree of parameters")
    return leaves


def _shape(target: str, path: str, leaf: Any) -> jax.ShapeDtypeStruct:
    kind = getattr(leaf, "dtype", type(leaf).__name__)
    if not (hasattr(leaf, "dtype") and jnp.issubdtype(kind, jnp.floating)):
        where = f" at {path}" if path else ""
        raise ValueError(
            f"{target} returned {kind}{where}: give an nnx.Module, linen variables or a tree of floating "
            "arrays"
        )
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
