"""Which workers have the same array, for each result of a traced step: proven from its jaxpr.

For each array of the program there is a partition of the workers: those in one class hold the same. Of a
collective of groups, ``out_w = f(x_m for m in group of w)``, two workers have the same result if the
members of their groups are in the same classes, in order. Of any other operation they have the same if
they are in one class for each of its operands. So what is not known here counts as different, never as the
same.

Names and parameters of JAX's operations are read only here; tests/test_differ.py asks each of them of the
JAX that is installed.
"""

import functools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, jaxprs_in_params
from jax.sharding import NamedSharding

from lioncub_jax.exchange.mapped import GRADIENT
from lioncub_jax.mesh.axes import Axes
from lioncub_jax.mesh.placement import Workers
from lioncub_jax.mesh.specs import axes_in, without

# The class of each worker, by its number; the first class that appears is 0, the next 1.
Classes: TypeAlias = tuple[int, ...]

_SAME_IN_A_GROUP = {
    "psum", "psum_invariant", "pmax", "pmin", "all_gather", "all_gather_invariant",
}  # fmt: skip
_PARTS_OF_A_GROUP = {"reduce_scatter", "all_to_all", "axis_index"}
_CASTS = {"pvary", "pcast"}
_OF_A_HOST = {"io_callback", "infeed", "rng_uniform"}  # may be another on each
_HANGS = (
    "workers communicate inside of a cond or a loop whose predicate differs between them, such as whether "
    "a worker's gradient is finite: those who skip the exchange never come, and the others wait for ever. "
    "Decide by what all workers agree on, a count of steps or lioncub_jax.mean_over_workers; a worker "
    "whose gradient is not finite abstains by itself"
)


class Walk:
    """A walk through a jaxpr with a value for each array, of which subclasses know what it means.

    Attributes:
      constant: the value of literals, and of what was computed before the program.
    """

    constant: Any

    def join(self, *values: Any) -> Any:
        """The value of what depends on arrays with these values."""
        raise NotImplementedError

    def plain(self, eqn: JaxprEqn, given: list[Any]) -> Any:
        """The value of the results of an operation without programs in it."""
        return self.join(*given)

    def decided(self, eqn: JaxprEqn, by: Any) -> None:
        """Called for a ``cond`` or ``while`` with the value of its predicate."""

    def results(self, jaxpr: Jaxpr, given: Sequence[Any]) -> list[Any]:
        """The values of the results, from those of the arguments."""
        known: dict[Any, Any] = dict(zip(jaxpr.invars, given, strict=True))

        def read(arrays: Sequence[Any]) -> list[Any]:
            constant = self.constant
            return [constant if isinstance(x, Literal) else known.get(x, constant) for x in arrays]

        for eqn in jaxpr.eqns:
            known |= zip(eqn.outvars, self._of(eqn, read(eqn.invars)), strict=True)
        return read(jaxpr.outvars)

    def _of(self, eqn: JaxprEqn, given: list[Any]) -> list[Any]:
        name, params = eqn.primitive.name, eqn.params
        inner = [*jaxprs_in_params(params)]
        if name == "cond":
            by, *rest = given
            branches = [self.results(one, rest) for one in inner]
            self.decided(eqn, by)
            return [self.join(by, *each) for each in zip(*branches, strict=True)]
        if name == "while":
            of_test = params["cond_nconsts"]
            body, test = params["body_jaxpr"].jaxpr, params["cond_jaxpr"].jaxpr
            constants = params["body_nconsts"]

            def turn(carry: list[Any]) -> list[Any]:
                [by] = self.results(test, [*given[:of_test], *carry])
                self.decided(eqn, by)
                after = self.results(body, [*given[of_test : of_test + constants], *carry])
                return [self.join(by, x) for x in after]

            return self._repeated(turn, given[of_test + constants :])
        if name == "scan":
            # Versions of JAX name these numbers differently; what is scanned has a dimension more outside.
            carried = _equal_ranks(eqn.outvars, inner[0].outvars)
            at = _equal_ranks(eqn.invars, inner[0].invars) - carried
            results: list[Any] = []

            def step(carry: list[Any]) -> list[Any]:
                results[:] = self.results(inner[0], [*given[:at], *carry, *given[at + carried :]])
                return results[:carried]

            carry = self._repeated(step, given[at : at + carried])
            return results if params["length"] else [*carry, *results[carried:]]
        sizes = [(len(x.invars), len(x.outvars)) for x in inner]
        if sizes == [(len(given), len(eqn.outvars))]:  # a call, a nested shard_map
            return self.results(inner[0], given)
        return [self.plain(eqn, given)] * len(eqn.outvars)

    def _repeated(self, turn: Callable[[list[Any]], list[Any]], carry: list[Any]) -> list[Any]:
        """What a loop carries, after any number of turns."""
        while True:
            pairs = zip(carry, turn(carry), strict=True)
            after = [self.join(x, y) for x, y in pairs]
            if after == carry:
                return after
            carry = after


def _equal_ranks(outside: Sequence[Any], inside: Sequence[Any]) -> int:
    pairs = zip(outside, inside, strict=True)
    return sum(x.aval.ndim == y.aval.ndim for x, y in pairs)


@functools.lru_cache(maxsize=4096)
def _joined(*classes: Classes) -> Classes:
    return _numbered(zip(*classes, strict=True))


def _numbered(keys: Iterable[Hashable]) -> Classes:
    first: dict[Hashable, int] = {}
    return tuple([first.setdefault(key, len(first)) for key in keys])


class Differences(Walk):
    """The classes of workers that hold the same of each array.

    Attributes:
      constant: all workers in one class.
      each: every worker in a class of its own.
      shapes: of the gradients that exchanges are given, by path.
      draws_alike: True if the step makes a key, the same for all, and draws by it before the first
      exchange.

    Raises:
      ValueError: from ``results``, where workers communicate in a branch that one of them decides on.
    """

    def __init__(self, workers: Workers):
        self._axes = workers.axes
        self._grid = np.arange(workers.num_gradients).reshape(
            [workers.mesh.shape[n] for n in workers.axes]
        )
        self.constant = (0,) * workers.num_gradients
        self.each: Classes = tuple(range(workers.num_gradients))
        self._gradients: dict[int, tuple[str, str, Classes]] = {}  # by equation
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.draws_alike = self._seeded = False

    def gradients(self) -> list[dict[str, Classes]]:
        """Of each exchange that was met, the path and the classes of each gradient that it was given."""
        exchanges: list[dict[str, Classes]] = []
        for number, path, classes in self._gradients.values():
            if number == "0":
                exchanges.append({})
            exchanges[-1][path] = classes
        return exchanges

    def over(self, axes: Iterable[str]) -> Classes:
        """Workers with the same place along some of their axes are in one class."""
        own = [i for i, n in enumerate(self._axes) if n in set(axes)]
        places = np.indices(self._grid.shape).reshape(self._grid.ndim, -1)[own]
        return _numbered(map(tuple, places.T.tolist()))

    def axes_of(self, classes: Classes) -> Axes:
        """The axes along which classes change."""
        grid, named = np.array(classes).reshape(self._grid.shape), enumerate(self._axes)
        return tuple([n for i, n in named if (grid != grid.take([0], axis=i)).any()])

    def join(self, *values: Classes) -> Classes:
        """Workers are in one class if they are for each array."""
        different = {x for x in values if x != self.constant}
        return _joined(*different) if len(different) > 1 else next(iter(different), self.constant)

    def plain(self, eqn: JaxprEqn, given: list[Classes]) -> Classes:
        """The classes of an operation's results."""
        name, operands = eqn.primitive.name, self.join(*given)
        if _is_gradient(eqn):
            _, number, path = eqn.params["name"].split(" ", 2)
            self._gradients[id(eqn)] = number, path, operands
            self.shapes[path] = eqn.outvars[0].aval.shape  # type: ignore[attr-defined]
        if operands == self.constant:
            self._seeded |= name == "random_seed"
            self.draws_alike |= name == "random_bits" and self._seeded and not self._gradients
        is_ref = any(hasattr(x.aval, "inner_aval") for x in eqn.outvars)  # may be written later
        talks = any(map(self._named, _equations(jaxprs_in_params(eqn.params))))
        if is_ref or talks or name in _OF_A_HOST:
            return self.each
        if name in _CASTS or not self._named(eqn):
            return operands
        groups = self._groups(eqn)
        known = _SAME_IN_A_GROUP | _PARTS_OF_A_GROUP | {"ppermute"}
        if groups is None or name not in known:
            return self.each
        sources = {target: source for source, target in eqn.params.get("perm", ())}
        keys: list[Any] = [None] * len(operands)
        for group in groups:
            members = tuple([operands[m] for m in group])
            for place, worker in enumerate(group):
                if name in _SAME_IN_A_GROUP:
                    keys[worker] = members
                elif name in _PARTS_OF_A_GROUP:
                    keys[worker] = members, place
                elif place in sources:  # else it has zeros
                    keys[worker] = members[sources[place]]
        return _numbered(keys)

    def decided(self, eqn: JaxprEqn, by: Classes) -> None:
        """Raises for a predicate that divides workers who talk in the branches or the loop."""
        if by == self.constant:
            return
        for one in _equations(jaxprs_in_params(eqn.params)):
            if one.primitive.name in (*_CASTS, "axis_index") or not self._named(one):
                continue
            groups = self._groups(one) or [list(self.each)]
            if any(len({by[m] for m in group}) > 1 for group in groups):
                raise ValueError(_HANGS)

    def _named(self, eqn: JaxprEqn) -> list[str]:
        """The workers' axes that an operation names."""
        return [n for n in named_axes(eqn) if n in self._axes]

    def _groups(self, eqn: JaxprEqn) -> list[list[int]] | None:
        """Workers that take part in a collective together, in order; None where that is not known."""
        named = self._named(eqn)
        places = [self._axes.index(n) for n in named]
        lines = np.moveaxis(self._grid, places, range(-len(places), 0))
        rows = lines.reshape(-1, np.prod(lines.shape[-len(places) :])).tolist()
        parts = eqn.params.get("axis_index_groups")
        if parts is None:
            return rows  # type: ignore[no-any-return]
        if len(named) < len(named_axes(eqn)):
            return None
        return [[row[i] for i in part] for row in rows for part in parts]


def named_axes(eqn: JaxprEqn) -> Axes:
    """The mesh axes that an operation names."""
    named = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    all_named = (named,) if isinstance(named, str) else named or ()
    return tuple(n for n in all_named if isinstance(n, str))


def _equations(jaxprs: Iterable[Jaxpr]) -> Iterator[JaxprEqn]:
    """All equations, also of programs inside."""
    for jaxpr in jaxprs:
        for eqn in jaxpr.eqns:
            yield eqn
            yield from _equations(jaxprs_in_params(eqn.params))


class Increments(Walk):
    """Whether a result is ``x + increment`` of one argument ``x``, on which the increment does not depend.

    Of each array ``NO``, it does not depend on ``x``; ``PLUS``, it is ``x`` plus such; or ``OTHER``.
    """

    NO, PLUS, OTHER = range(3)
    constant = NO

    def join(self, *values: int) -> int:
        """The largest."""
        return max(values, default=self.NO)

    def plain(self, eqn: JaxprEqn, given: list[int]) -> int:
        """A sum stays one; all else that depends on ``x`` is something else."""
        name = eqn.primitive.name
        sums = {"add": given.count(self.PLUS) == 1, "sub": given[1:] == [self.NO]}
        sums |= {"select_n": set(given[1:]) == {self.PLUS} and given[0] == self.NO}
        kept = name in ("copy", "copy_p", "pvary", "name") or sums.get(name, False)
        return self.join(*given) if kept or self.PLUS not in given else self.OTHER


def is_increment(jaxpr: Jaxpr, argument: int, result: int) -> bool:
    """True where a result is the argument plus what does not depend on it."""
    given = [Increments.PLUS if i == argument else Increments.NO for i in range(len(jaxpr.invars))]
    return Increments().results(jaxpr, given)[result] == Increments.PLUS


# --- What makes a number

_SHAPE_STAYS = {"convert_element_type", "copy", "copy_p", "pvary"}
_KEEPS = {*_SHAPE_STAYS, "reshape", "squeeze", "broadcast_in_dim"}
# What picks one of many, and the word of ``out`` that picks one of the workers'.
PICKS = {
    "reduce_max": "max", "argmax": "max", "reduce_or": "max",
    "reduce_min": "min", "argmin": "min", "reduce_and": "min",
}  # fmt: skip


def last_equation(jaxpr: Jaxpr, x: Any) -> JaxprEqn | None:
    """The one that makes an array, in front of casts; None of arguments and constants."""
    for eqn in reversed(jaxpr.eqns):
        if isinstance(x, Literal) or x not in eqn.outvars:
            continue
        name, inner = eqn.primitive.name, [*jaxprs_in_params(eqn.params)]
        if len(inner) == 1 and name not in ("scan", "while"):
            return last_equation(inner[0], inner[0].outvars[eqn.outvars.index(x)])
        return last_equation(jaxpr, eqn.invars[0]) if name in _KEEPS else eqn
    return None


def last_operation(jaxpr: Jaxpr, x: Any) -> str:
    """The name of what makes an array, in front of casts; "" of arguments and constants."""
    eqn = last_equation(jaxpr, x)
    return "" if eqn is None else str(eqn.primitive.name)


def added(jaxpr: Jaxpr) -> list[float]:
    """For each result the number that its last operation adds to another, or 0."""
    found = []
    for x in jaxpr.outvars:
        eqn = last_equation(jaxpr, x)
        terms = eqn.invars if eqn is not None and eqn.primitive.name == "add" else ()
        numbers = [x.val for x in terms if isinstance(x, Literal) and not np.ndim(x.val)]
        found.append(float(numbers[0]) if numbers else 0.0)
    return found


def constant(closed: ClosedJaxpr, i: int) -> Any:
    """The value of a result that is a constant, or None."""
    x = closed.jaxpr.outvars[i]
    if isinstance(x, Literal):
        return x.val
    known = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    return known.get(x)


# --- Where arrays come from


class Origins(Walk):
    """The arguments that an array comes from, by their places.

    Attributes:
      keys: arguments that raw keys come from: JAX's random functions take them, also by way of other
        ``uint32[2]``, such as the state of a seed generator of Keras and its count.
      scanned: arguments over which a scan runs that has an exchange in it.
    """

    constant = frozenset[int]()

    def __init__(self) -> None:
        self.keys, self.scanned = set[int](), set[int]()

    def _of(self, eqn: JaxprEqn, given: list[frozenset[int]]) -> list[frozenset[int]]:
        came = self.join(*given)
        if not came:
            return [came] * len(eqn.outvars)
        inner = [*jaxprs_in_params(eqn.params)]
        if eqn.primitive.name == "scan" and any(map(_is_gradient, _equations(inner))):
            for x, outside, inside in zip(given, eqn.invars, inner[0].invars, strict=True):
                if outside.aval.ndim > inside.aval.ndim:  # type: ignore[attr-defined]
                    self.scanned |= x
        kinds: list[Any] = [x.aval for x in eqn.outvars]
        may_be_key = [x.shape == (2,) and x.dtype == "uint32" for x in kinds]
        pairs = zip(super()._of(eqn, given), may_be_key, strict=True)
        return [came if is_so else x for x, is_so in pairs]

    def join(self, *values: frozenset[int]) -> frozenset[int]:
        """All of them."""
        return self.constant.union(*values)

    def plain(self, eqn: JaxprEqn, given: list[frozenset[int]]) -> frozenset[int]:
        """An array of another dtype comes from the same arguments."""
        came = self.join(*given)
        if eqn.primitive.name in ("random_wrap", "threefry2x32"):
            self.keys |= came
        return came if eqn.primitive.name in _SHAPE_STAYS else self.constant


def _is_gradient(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name == "name" and str(eqn.params["name"]).startswith(GRADIENT)


# --- Constraints of a model that name the workers


def without_axes(closed: ClosedJaxpr, taken: Sequence[str]) -> ClosedJaxpr:
    """The same program, but that sharding constraints do not name the workers' axes, which are manual."""
    jaxpr = _without(closed.jaxpr, frozenset(taken))
    return closed if jaxpr is closed.jaxpr else ClosedJaxpr(jaxpr, closed.consts)


def _without(jaxpr: Jaxpr, taken: frozenset[str]) -> Jaxpr:
    if not any(_constrains(eqn, taken) for eqn in _equations([jaxpr])):
        return jaxpr
    eqns = []
    for eqn in jaxpr.eqns:
        params = dict(eqn.params)
        if _constrains(eqn, taken):
            lies = params["sharding"]
            params["sharding"] = lies.update(spec=without(lies.spec, tuple(taken)))
        elif any(jaxprs_in_params(eqn.params)):
            for name, x in params.items():  # a program, or several, such as the branches of a cond
                params[name] = jax.tree.map(functools.partial(_inside, taken), x)
        eqns.append(eqn.replace(params=params))
    return jaxpr.replace(eqns=eqns)


def _inside(taken: frozenset[str], x: Any) -> Any:
    if isinstance(x, ClosedJaxpr):
        return ClosedJaxpr(_without(x.jaxpr, taken), x.consts)
    return _without(x, taken) if isinstance(x, Jaxpr) else x


def _constrains(eqn: JaxprEqn, taken: frozenset[str]) -> bool:
    lies = eqn.params.get("sharding") if eqn.primitive.name == "sharding_constraint" else None
    return isinstance(lies, NamedSharding) and not taken.isdisjoint(axes_in(lies.spec))
