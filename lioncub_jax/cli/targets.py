"""What a command line names: a function in a module or a file, called, and what it returned."""

import functools
import importlib
import importlib.machinery
import statistics
import sys
import sysconfig
import time
import traceback
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

Result = TypeVar("Result")


def load(target: str) -> Callable[[], Any]:
    """Finds the function that ``MODULE:NAME`` or ``FILE.py:NAME`` names.

    A file is run, but not as ``__main__``, and may import what lies beside it. Modules are looked for in
    the working directory too.

    Args:
      target: such as ``"my_models.gpt:small"`` or ``"train.py:model"``.

    Returns:
      The function, to be called without arguments; it raises as `attempt`.

    Raises:
      ValueError: where there is no such file, module or function, or importing it fails.

    Example:
      >>> load("math:pi")
      Traceback (most recent call last):
      ValueError: math:pi is a float: give a function
    """
    place, colon, name = target.rpartition(":")
    if not (place and colon and name.isidentifier()):
        raise ValueError(f"{target!r}: give MODULE:NAME or FILE.py:NAME, such as model.py:make")
    found = _file(place) if place.endswith(".py") else _module(place)
    if name not in found:
        functions = [n for n, value in found.items() if callable(value) and not n.startswith("_")]
        known = f"; it has {', '.join(functions[:8])}" if functions else ""
        raise ValueError(f"{target}: there is no {name!r} in {place}{known}")
    if not callable(found[name]):
        raise ValueError(f"{target} is a {type(found[name]).__name__}: give a function")
    return functools.partial(attempt, f"calling {target} without arguments", found[name])


def _file(place: str) -> Mapping[str, Any]:
    path = Path(place)
    if not path.is_file():
        raise ValueError(f"{place}: there is no such file; give a path from the working directory")
    _look_in(str(path.resolve().parent))
    name = f"target_{path.stem}"  # not to take the place of a module that has the file's name
    loader = importlib.machinery.SourceFileLoader(name, place)
    module = types.ModuleType(name)
    module.__file__ = place
    sys.modules[name] = module  # dataclasses and flax look their classes' modules up
    attempt(f"running {place}", lambda: loader.exec_module(module))
    return vars(module)


def _module(place: str) -> Mapping[str, Any]:
    _look_in("")  # the working directory, as `python -m` does
    return vars(attempt(f"importing {place}", lambda: importlib.import_module(place)))


def _look_in(folder: str) -> None:
    """For good, because the function may import more when it is called."""
    if folder not in sys.path:
        sys.path.insert(0, folder)


def attempt(what: str, work: Callable[[], Result]) -> Result:
    """Does what runs a user's code; of its error one sentence is left, with the user's line.

    Args:
      what: is done, for the sentence.
      work: does it.

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
        return work()
    except (Exception, SystemExit) as error:
        said = " ".join(str(error).split()) or "(no message)"
        reason = f"{what} failed with {type(error).__name__}: {said}{_line_of(error)}"
    raise ValueError(reason)


def _line_of(error: BaseException) -> str:
    """The last line of the user's own code that an error passed through."""
    skipped = ("<", sysconfig.get_path("stdlib"), str(Path(__file__).parents[1]))
    lines = [
        f" (in {Path(frame.filename).name}, line {frame.lineno})"
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(skipped) and "-packages" not in frame.filename
    ]
    return lines[-1] if lines else ""


def shapes(target: str) -> Any:
    """The parameters of the model that a target makes, by shape: nothing is allocated.

    Args:
      target: names a function without arguments that returns an ``nnx.Module`` (its ``nnx.Param``
        count), flax linen variables (their ``"params"`` count) or any tree of arrays or
        ``jax.ShapeDtypeStruct``. It is called under ``jax.eval_shape``.

    Returns:
      A list of ``jax.ShapeDtypeStruct``.

    Raises:
      ValueError: as `load`, where the function fails, and for anything else that is returned.
    """
    function, found = load(target), []

    def described() -> None:
        made = function()
        nnx = sys.modules.get("flax.nnx")  # who made a module has imported it
        if nnx and isinstance(made, nnx.Module):
            made = nnx.state(made, nnx.Param)
        elif isinstance(made, Mapping) and "params" in made:
            made = made["params"]
        for path, leaf in jax.tree_util.tree_leaves_with_path(made):
            found.append(_shape(target, jax.tree_util.keystr(path), leaf))

    jax.eval_shape(described)
    if not found:
        raise ValueError(f"{target} returned no arrays: give a model or a tree of parameters")
    return found


def _shape(target: str, path: str, leaf: Any) -> jax.ShapeDtypeStruct:
    kind = "array" if isinstance(leaf, jax.Array) else type(leaf).__name__
    where = f"{target} returned {kind}{f' at {path}' if path else ''}"
    if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
        raise ValueError(f"{where}: give an nnx.Module, linen variables or a tree of arrays")
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        raise ValueError(f"{where} of {leaf.dtype}: parameters are floating; leave others out")
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


def measure(target: str, *, warm_up: int = 2, runs: int = 7) -> float:
    """Times what a target does.

    Args:
      target: names a function without arguments that does one step of one worker, without communication,
        and returns arrays; they are waited for.
      warm_up: calls that are not timed: the first compiles.
      runs: calls that are.

    Returns:
      Seconds, the median.

    Raises:
      ValueError: as `load`, where the function fails, and where no array is returned, for then nothing can
        be waited for.
    """
    function, times = load(target), []
    for _ in range(warm_up):
        done = jax.tree.leaves(jax.block_until_ready(function()))
        if not any(isinstance(leaf, jax.Array) for leaf in done):
            raise ValueError(
                f"{target} returned no jax array to wait for: return what a step makes"
            )
    for _ in range(runs):
        start = time.perf_counter()
        jax.block_until_ready(function())
        times.append(time.perf_counter() - start)
    return statistics.median(times)
