"""Programs that vote: noted when JAX lowers them, and read when XLA has compiled them.

JAX has no public place where a library may refuse a compiled program. This file takes two that it has:

* Votes pass through an operation of our own, the identity. JAX calls its lowering rule for each program
  that contains it, also where the trace was cached. The rule notes the program's name.
* Listeners of ``jax.monitoring`` are called before and after each compilation. For a noted program they
  list the programs of all backends before and after it, and give the new ones to `watch.look`. An error
  that it raises ends the compilation.

Nothing is registered by an import: `listen` does it when the first transform is built in which workers
communicate. An error by default, because nothing else sees gradients that the compiler averages in full
precision before the vote, and such a run trains well, only without saving anything. tests/test_watch.py
asks for both of the JAX that is installed.
"""

import contextlib
import functools
import re
import threading
from collections.abc import Iterator
from typing import Any

import jax
from jax.extend import backend
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from lioncub_jax.programs.watch import look

_COMPILED = "/jax/core/compile/backend_compile_duration"
_LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"
_NOT_SHOWN = AttributeError, jax.errors.JaxRuntimeError  # by a plugin, which need not have either

_set = {"mode": "raise"}
_voting = dict[str, bool]()  # names of programs that vote; False if the newest of the name does not
_before = dict[int, set[Any]]()  # by thread, what was compiled when its compilation began


def mode(wanted: str | None = None) -> str:
    """Sets what is done where workers send floats, have the same gradients, or drift.

    Args:
      wanted: "raise" (default), "warn", or "allow", with which nothing is looked at: programs that are
        compiled meanwhile are not read, nor later, and those that are traced under ``pmap`` have no
        checksums. None to ask only.

    Returns:
      The mode before.

    Raises:
      ValueError: for another mode.

    Example:
      >>> import lioncub_jax as lc
      >>> before = lc.audit.mode("warn")
      >>> lc.audit.mode(before)
      'warn'

    Source: this library.
    """
    before = _set["mode"]
    if wanted not in (None, "raise", "warn", "allow"):
        raise ValueError(f"mode({wanted!r}): give 'raise', 'warn' or 'allow'")
    _set["mode"] = wanted or before
    return before


@functools.cache
def listen() -> None:
    """Registers the listeners, once in a process."""
    jax.monitoring.register_scalar_listener(_on_start)
    jax.monitoring.register_event_duration_secs_listener(_on_end)


def mark_vote(message: Any) -> Any:
    """Arrays that are voted with, the same ones; their program is read when it is compiled."""
    if not jax.sharding.get_abstract_mesh().shape:  # workers of a vmap are on no mesh
        return message
    first, *rest = jax.tree.leaves(message)
    return jax.tree.unflatten(jax.tree.structure(message), [_vote.bind(first), *rest])


_vote = Primitive("lioncub_vote")


@_vote.def_impl
@_vote.def_abstract_eval
def _identity(x: Any) -> Any:
    return x


def _in_batches(arrays: Any, dims: Any) -> tuple[Any, Any]:
    return _vote.bind(*arrays), dims[0]


def _lowered(context: mlir.LoweringRuleContext, x: Any) -> list[Any]:
    name = context.module_context.module.operation.attributes["sym_name"]
    _voting[name.value] = True  # type: ignore[attr-defined]
    return [x]


batching.primitive_batchers[_vote] = _in_batches
mlir.register_lowering(_vote, _lowered)


def _program(about: dict[str, Any]) -> str:
    """The name of a program in its lowered text, of its name in an event, such as ``jit(step)``."""
    return re.sub(r"[^\w.-]", "_", str(about.get("fun_name", ""))).rstrip("_")


def _on_start(event: str, value: float, **about: str | int) -> None:
    if _program(about) not in _voting:
        return
    if event == _LOWERED:
        _voting[_program(about)] = False
    elif event == _COMPILED and mode() != "allow":
        _before[threading.get_ident()] = compiled_programs()


def _on_end(event: str, duration_secs: float, **about: str | int) -> None:
    if event != _COMPILED or threading.get_ident() not in _before:
        return
    new = compiled_programs() - _before.pop(threading.get_ident())
    name = str(about.get("fun_name", "")).partition("(")[2].removesuffix(")")
    look(name, list(texts_of(new)), _voting[_program(about)], mode())


def compiled_programs() -> set[Any]:
    """All that is compiled by now, on any backend."""
    programs: set[Any] = set()
    for client in backend.backends().values():
        with contextlib.suppress(*_NOT_SHOWN):
            programs.update(client.live_executables())
    return programs


def texts_of(programs: set[Any]) -> Iterator[str]:
    """Their texts, of those whose backend shows them."""
    for program in programs:
        with contextlib.suppress(*_NOT_SHOWN):
            yield from (module.to_string() for module in program.hlo_modules())
