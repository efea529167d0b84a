"""Values of a traced program that differ between workers although their types call them the same.

JAX types the results of ``cond``, ``switch`` and ``while`` by their branches and not by their predicate
(jax issue 40823). Where one worker decides by itself, a collective in a branch hangs, and a result with the
type "the same on all workers" is not. Names and parameters of JAX's operations are read only here;
tests/test_chains.py asks each of them of the JAX that is installed.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from lioncub_jax.exchange.traced import jaxprs_in, named_axes
from lioncub_jax.mesh.axes import Axes

_CAST = "pvary"
_SEND_NOTHING = {_CAST, "axis_index"}  # though they name an axis


def has_branches(jaxpr: Jaxpr) -> bool:
    """True where a jaxpr has a ``cond``, ``switch`` or ``while``, at any depth.

    Without one, types say all, and `differing` need not be called.
    """
    jaxprs = [jaxpr]  # a loop and not `jaxprs_in`: each step that is traced pays for it
    while jaxprs:
        for eqn in jaxprs.pop().eqns:
            if eqn.primitive.name in ("cond", "while"):
                return True
            for value in eqn.params.values():
                inner = value if isinstance(value, (tuple, list)) else (value,)
                for x in inner:
                    if isinstance(x, (Jaxpr, ClosedJaxpr)):
                        jaxprs.append(x.jaxpr if isinstance(x, ClosedJaxpr) else x)
    return False


def differing(jaxpr: Jaxpr, over: Axes, given: Sequence[bool]) -> list[bool]:
    """Results that differ between workers: made of what does, or by a branch that such a value chose.

    Args:
      jaxpr: of a traced update, or a part of it.
      over: the workers' axes.
      given: for each argument whether it differs.

    Raises:
      ValueError: where workers communicate in a branch or loop that one of them decides on.
    """
    known = {x: varies(x, over) for x in jaxpr.constvars}
    known |= zip(jaxpr.invars, given, strict=True)
    for eqn in jaxpr.eqns:
        known |= zip(eqn.outvars, _results(eqn, over, _read(known, eqn.invars)), strict=True)
    return _read(known, jaxpr.outvars)


def varies(x: Var | Literal, over: Axes) -> bool:
    """True for an array of a traced program that varies over some of the axes, by its type."""
    kind = getattr(x.aval, "manual_axis_type", None)
    return kind is not None and not kind.varying.isdisjoint(over)


def _read(known: dict[Var, bool], arrays: Iterable[Var | Literal]) -> list[bool]:
    return [isinstance(x, Var) and known.get(x, False) for x in arrays]  # literals are the same


def _results(eqn: JaxprEqn, over: Axes, given: list[bool]) -> list[bool]:
    name, inner, params, decided = eqn.primitive.name, jaxprs_in(eqn), eqn.params, False
    if name == "cond":
        decided, *rest = given
        branches = [differing(branch, over, rest) for branch in inner]
        results = [any(each) for each in zip(*branches, strict=True)]
    elif name == "while":
        of_test, carried = params["cond_nconsts"], len(eqn.outvars)
        body = params["body_jaxpr"].jaxpr
        results = _looped(body, over, given[of_test:], params["body_nconsts"], carried)
        test = list(given[:of_test])
        for before, after in zip(given[-carried:], results, strict=True):
            test.append(before or after)
        [decided] = differing(params["cond_jaxpr"].jaxpr, over, test)
    elif name == "scan":
        # Versions of JAX name these numbers differently; what is scanned has one dimension more outside.
        carried = _count_equal_ranks(eqn.outvars, inner[0].outvars)
        at = _count_equal_ranks(eqn.invars, inner[0].invars) - carried
        results = _looped(inner[0], over, given, at, carried)
    elif len(inner) == 1 and len(inner[0].invars) == len(given):  # a call
        results = differing(inner[0], over, given)
    else:
        results = _plain(eqn, over, given)
    if decided and any(communicates(one, over) for one in inner):
        raise ValueError(
            "workers communicate inside of a cond or a loop whose predicate differs between them, such as "
            "whether a worker's gradient is finite: those who skip the exchange never come, and the others "
            "wait for ever. Decide by what all workers agree on, a count of steps or a psum; a worker "
            "whose gradient is not finite abstains by itself. A count in a plain tuple, in front of the "
            "state of the exchange, is each worker's own, as in optax.chain: keep both in a NamedTuple"
        )
    return [decided or x for x in results]


def _count_equal_ranks(outside: Sequence[Any], inside: Sequence[Any]) -> int:
    """The number of arrays that have as many dimensions outside of a loop as in it."""
    pairs = zip(outside, inside, strict=True)
    return sum(len(x.aval.shape) == len(y.aval.shape) for x, y in pairs)


def _looped(body: Jaxpr, over: Axes, args: list[bool], at: int, carried: int) -> list[bool]:
    """Results of a loop: each turn takes the results of the turn before from place ``at`` on."""
    while True:
        results = differing(body, over, args)
        after = list(args)
        for i in range(carried):
            after[at + i] = args[at + i] or results[i]
        if after == args:
            return results
        args = after


def _plain(eqn: JaxprEqn, over: Axes, given: list[bool]) -> list[bool]:
    """Results of an operation without programs in it; a collective ends a difference."""
    typed = [varies(x, over) for x in eqn.invars]
    made = any(given) or (eqn.primitive.name != _CAST and not any(typed))
    hidden = any(x and not by_type for x, by_type in zip(given, typed, strict=True))
    return [made and (hidden or varies(x, over)) for x in eqn.outvars]


def communicates(jaxpr: Jaxpr, over: Axes) -> bool:
    """True where workers send anything in a traced jaxpr."""
    for eqn in jaxpr.eqns:
        sends = eqn.primitive.name not in _SEND_NOTHING
        if sends and not set(over).isdisjoint(named_axes(eqn)):
            return True
        if any(communicates(one, over) for one in jaxprs_in(eqn)):
            return True
    return False


def without_casts(
    closed: ClosedJaxpr, args: Sequence[jax.Array], results: Sequence[int]
) -> list[jax.Array]:
    """Results, computed without the casts that made their types vary, such as updates of frozen leaves.

    Args:
      closed: a traced update.
      args: what it is called with.
      results: places of results that are the same on all workers.
    """
    jaxpr, uncast = closed.jaxpr, dict[Var, Var | Literal]()
    wanted = [jaxpr.outvars[i] for i in results]
    needed, needed_eqns, kept = {x for x in wanted if isinstance(x, Var)}, list[JaxprEqn](), []
    for eqn in reversed(jaxpr.eqns):
        if not needed.isdisjoint(eqn.outvars):
            needed.update(x for x in eqn.invars if isinstance(x, Var))
            needed_eqns.append(eqn)

    def read(arrays: Iterable[Var | Literal]) -> list[Var | Literal]:
        return [uncast.get(x, x) if isinstance(x, Var) else x for x in arrays]

    for eqn in reversed(needed_eqns):
        if eqn.primitive.name == _CAST:
            uncast |= zip(eqn.outvars, read(eqn.invars), strict=True)
        else:
            kept.append(eqn.replace(invars=read(eqn.invars)))
    part = jaxpr.replace(eqns=kept, outvars=read(wanted))
    return jax.core.eval_jaxpr(part, closed.consts, *args)
