"""What comes out of a mapped step: what is the same stays; what differs is joined, or is an error."""

import itertools
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from lioncub_jax.exchange import wires, xla
from lioncub_jax.exchange.bits import common_dtype
from lioncub_jax.mesh.axes import all_finite
from lioncub_jax.mesh.boxes import find_nodes
from lioncub_jax.mesh.hosts import is_key
from lioncub_jax.training import differ, graphs
from lioncub_jax.training.arguments import Arguments, Own, Role, as_static, is_array, opened
from lioncub_jax.training.differ import Classes, Differences, is_increment
from lioncub_jax.training.worker import as_count

_LOOKS = (
    "What only looks like it, as returned gradients do, is said by a name in the result: map_step(..., "
    "out={'grads': 'mean'})"
)
SAID = {
    "rows": Role.ROWS, "mean": Role.MEAN, "sum": Role.SUM, "max": Role.LARGEST, "min": Role.SMALLEST,
    "each": Role.OWN,
}  # fmt: skip


class Result(NamedTuple):
    """An array that a step returns.

    Attributes:
      name: as a user would write it.
      before: the place, among the arrays of the arguments, of that which it goes on from; or None.
      kind: of the variable of nnx that holds it, "own" in a box that the step made, or "".
    """

    name: str
    before: int | None = None
    kind: str = ""


class _Shape(jax.ShapeDtypeStruct):
    """A shape that is equal to itself alone."""

    __eq__, __hash__ = object.__eq__, object.__hash__  # type: ignore[assignment]


class _Slots(dict[object, int]):
    """Places of arrays, by the bare objects that stand for them in a tree.

    JAX itself puts such objects into trees, so constructors of foreign classes let them pass. Those that do
    not, as GPJax's `Dataset`, look at shapes.
    """

    def new(self, place: int, shape: jax.ShapeDtypeStruct | None = None) -> object:
        slot = object() if shape is None else _Shape(shape.shape, shape.dtype)
        self[slot] = place
        return slot

    def of_all(self, arguments: Arguments) -> Any:
        """The arguments with a slot for each array; see `Arguments.with_statics`."""
        leaves = [*enumerate(arguments.leaves)]
        try:
            return arguments.with_statics([self.new(i) for i, _ in leaves])
        except (AttributeError, TypeError, ValueError, AssertionError):
            return arguments.with_statics([self.new(i, x.shape) for i, x in leaves])

    def has(self, x: object) -> bool:
        return type(x) in (object, _Shape) and x in self


class _Fixed(NamedTuple):
    value: Any


class Results:
    """The results of a step on one worker.

    Attributes:
      arrays: of the results, traced.
      each: a `Result` for each.
    """

    def __init__(self, arguments: Arguments, nodes: list[Any], out: Any, said: Collection[str]):
        self.arrays, self.each = list[Any](), list[Result]()
        self._arguments, self._slots = arguments, _Slots()
        self._template: tuple[list[Any], Any] | None = None
        self._state_tree: Any = None
        self._is_graph = bool(arguments.graph) and graphs.is_graph(out)
        if arguments.graph:
            self._add_state(nodes, out if self._is_graph else ())
        if not self._is_graph:
            count = len(self.arrays)
            template = _Matching(arguments, self._add).of(out, said)
            leaves, tree = jax.tree.flatten(template, is_leaf=lambda x: isinstance(x, _Fixed))
            # In the order of the tree, which does not depend on what was matched, and so on rows.
            places = [self._slots[x] for x in leaves if not isinstance(x, _Fixed)]
            self.arrays[count:] = [self.arrays[i] for i in places]
            self.each[count:] = [self.each[i] for i in places]
            numbers = itertools.count(count)
            held = [x if isinstance(x, _Fixed) else next(numbers) for x in leaves]
            self._template = held, tree

    def _add(self, x: Any, result: Result) -> object:
        self.arrays.append(jnp.asarray(x))
        self.each.append(result)
        return self._slots.new(len(self.each) - 1)

    def _add_state(self, nodes: list[Any], out: Any) -> None:
        """Adds the variables of the modules that the step was given, and of those that it returns."""
        both, slots = (nodes, out), _Slots()
        self._definition, values = graphs.split(both)
        _, given = slots.of_all(self._arguments)
        before = dict(zip(self._arguments.paths, given, strict=True))
        leaves, self._state_tree = jax.tree.flatten(values)
        places = []
        for ((which, *path), holder), value in zip(graphs.places(both), values, strict=True):
            known = jax.tree.leaves(before.get(tuple(path)) if which == 0 else None)
            for i, (rest, _) in enumerate(jax.tree_util.tree_leaves_with_path(value)):
                at = slots[known[i]] if i < len(known) and slots.has(known[i]) else None
                name = f"result{jax.tree_util.keystr((*graphs.keys(path), *rest))}"
                name = name if at is None else self._arguments.leaves[at].name
                places.append(Result(name, at, graphs.kind_of(holder)))
        for x, result in zip(leaves, places, strict=True):
            self._add(x, result)

    def returned(self) -> set[int]:
        """The places of the arguments' arrays that the step returns changed."""
        return {x.before for x in self.each if x.before is not None}

    def rebuilt(self, arrays: Sequence[Any]) -> Any:
        """What the step returns, of arrays of all workers; modules of the arguments are changed."""
        out = None
        if self._state_tree is not None:
            values = self._state_tree.unflatten(arrays[: self._state_tree.num_leaves])
            _, out = graphs.merged(self._definition, values, inner=False)
        if self._template is None:
            return out
        tree: Any
        leaves, tree = self._template
        return tree.unflatten([x.value if isinstance(x, _Fixed) else arrays[x] for x in leaves])


class _Matching:
    """Finds the parts of a result that go on from an argument, by structure, shapes and dtypes."""

    def __init__(self, arguments: Arguments, add: Callable[[Any, Result], object]):
        self._arguments, self._add, self._taken = arguments, add, set[int]()
        self._slots = _Slots()
        self._offered: dict[Any, list[tuple[Any, list[Any]]]] = {}
        plain, _ = self._slots.of_all(arguments)
        self._has_boxes = bool(find_nodes(plain, Own))
        self._is_key = [is_key(x.shape) for x in arguments.leaves]
        for argument in plain:
            self._offer(argument, is_argument=True)

    def _offer(self, node: Any, is_argument: bool = False) -> None:
        """Offers a part of the arguments, and all parts of it.

        A number, or an array in something, is too like others; a key is not, nor an argument.
        """
        is_slot = self._slots.has
        leaves, tree = jax.tree.flatten(opened(node) if self._has_boxes else node)
        is_known = not is_slot(node) or self._is_known(node, is_argument)
        if is_known and any(map(is_slot, leaves)):
            kinds = tuple([self._kind_before(x) if is_slot(x) else as_static(x) for x in leaves])
            self._offered.setdefault((tree, kinds), []).append((node, leaves))
        for part in () if is_slot(node) else jax.tree.leaves(node, is_leaf=lambda x: x is not node):
            if part is not node:
                self._offer(part)

    def _is_known(self, slot: object, is_argument: bool) -> bool:
        i = self._slots[slot]
        shape = self._arguments.leaves[i].shape
        alone = shape.ndim > 0 and (is_argument or shape.dtype == np.uint32)
        return alone or self._is_key[i]

    def _kind_before(self, slot: object) -> Any:
        leaf = self._arguments.leaves[self._slots[slot]]
        shape = list(leaf.shape.shape)
        if leaf.role is Role.ROWS:
            shape[leaf.dim] //= self._arguments.workers.num_gradients
        return tuple(shape[leaf.role is Role.OWN :]), leaf.shape.dtype

    def of(self, out: Any, said: Collection[str]) -> Any:
        """The result with a slot for each array.

        The largest parts are matched first: updates may look like momentum, which is a part of a state.
        What a user has named in ``out`` goes on from nothing, even if it looks so, as gradients do.
        """
        found: dict[Any, Any] = {}
        self._said = said
        for path, node in sorted(_parts(out), key=lambda part: -len(jax.tree.leaves(part[1]))):
            inside = any(path[:i] in found for i in range(len(path)))
            is_said = _words(jax.tree_util.keystr(path) or "result").intersection(said)
            matched = None if inside or is_said else self._matched(node)
            if matched is not None:
                found[path] = matched
        return self._filled(out, (), found)

    def _matched(self, node: Any) -> Any:
        """A part of a result with its slots, as the part of the arguments that it goes on from; or None."""
        leaves, tree = jax.tree.flatten(node)
        kinds = tuple([(jnp.shape(x), x.dtype) if is_array(x) else as_static(x) for x in leaves])
        for outside, before in self._offered.get((tree, kinds), ()):
            places = [self._slots[x] for x in before if self._slots.has(x)]
            if self._taken.isdisjoint(places):
                self._taken.update(places)
                slots = [self._slot(x, at) for x, at in zip(leaves, before, strict=True)]
                held: Any = jax.tree.structure(outside)
                return held.unflatten(slots)
        return None

    def _filled(self, node: Any, path: Any, found: dict[Any, Any]) -> Any:
        """A part of a result, in which the parts that are found have their slots."""
        if path in found:
            return found[path]
        name = f"result{jax.tree_util.keystr(path)}"
        if isinstance(node, Own):
            return jax.tree.map(lambda x: self._add(x, Result(name, kind="own")), node.value)
        if jax.tree_util.all_leaves([node]):
            is_number = is_array(node) or (type(node) is int and self._may_be_count(node, name))
            return self._add(node, Result(name)) if is_number else _Fixed(node)
        tree: Any
        parts, tree = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)
        return tree.unflatten([self._filled(x, (*path, *rest), found) for rest, x in parts])

    def _may_be_count(self, number: int, name: str) -> bool:
        """True for a number of Python that is that of a worker's rows, or of which the user says more."""
        return number in self._arguments.rows_of_one() or bool(_words(name) & {*self._said})

    def _slot(self, x: Any, at: Any) -> Any:
        if not self._slots.has(at):
            return _Fixed(x)
        place = self._slots[at]
        leaf = self._arguments.leaves[place]
        return self._add(x, Result(leaf.name, place, leaf.kind))


def _parts(tree: Any, path: Any = ()) -> Iterator[tuple[Any, Any]]:
    """A tree and all parts of it, each with its path."""
    yield path, tree
    for rest, part in jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: x is not tree):
        if rest:
            yield from _parts(part, (*path, *rest))


class Outside:
    """What becomes of each result outside of the workers.

    Attributes:
      roles: a `Role` for each.
    """

    def __init__(self, program: Any, differences: Differences, differ: Sequence[Classes]):
        self._program, self._differences = program, differences
        # The workers' axes over which each result differs.
        self._over = [differences.axes_of(classes) for classes in differ]
        self._results, self._workers = program.results, program.workers
        self._leaves = program.arguments.leaves
        self._averaged, self._out = {*program.mapped.averaged}, program.mapped.out
        self.roles = [self._role(i, x) for i, x in enumerate(self._results.each)]
        self._check_ratios()
        self._check_counts()

    def _leaf(self, i: int) -> Any:
        before = self._results.each[i].before
        return None if before is None else self._leaves[before]

    def _role(self, i: int, result: Result) -> Role:
        x, leaf, over = self._results.arrays[i], self._leaf(i), self._over[i]
        if result.kind == "own":
            return Role.OWN
        if leaf is not None and leaf.role in (Role.OWN, Role.ROWS):
            if more := sorted(set(over).difference(leaf.over())):
                raise ValueError(
                    f"{result.name} is the same over {more} before the step, and differs over it after"
                )
            return leaf.role
        if result.kind == "MetricState" and leaf is not None:
            return self._metric_state(i, result, over)
        if not over:
            return self._of_constant(i, result)
        if i in self._program.chains:
            return Role.KEY
        is_float = not is_key(x) and jnp.issubdtype(x.dtype, jnp.inexact)
        if leaf is not None or result.kind:
            # Of flax's fp8 layers: a collection of linen, a kind of variable in nnx.
            if "_overwrite_with_gradient" in {*_words(result.name), result.kind}:
                return Role.LARGEST
            statistic = result.kind == "BatchStat" or _words(result.name) & self._averaged
            if statistic and is_float:
                return Role.MEAN
            raise ValueError(self._drift(i, result, x))
        if is_key(x):
            raise ValueError(
                f"{result.name} is a random key that differs between workers: return it as state"
            )
        if said := _words(result.name) & {*self._out}:
            return SAID[self._out[said.pop()]]
        if not x.ndim:
            self._check_number(i, result, x)
            return Role.MEAN if is_float else Role.SUM
        if self._program.grown[i]:
            return Role.ROWS
        raise ValueError(
            f"{result.name} is an array of shape {x.shape} that differs between workers, and no rows of a "
            "batch, as its first dimension does not grow with the rows: return a number of it, such as its "
            f"norm or mean; or say what it is, map_step(..., out={{{_first_key(result.name)!r}: ...}}), "
            '"rows" to join them, "each" for [workers, ...], "mean" or "sum"'
        )

    def _of_constant(self, i: int, result: Result) -> Role:
        """What is the same for all stays, but a constant that ``out`` adds, such as a number of rows."""
        if result.before is not None or result.kind:
            return Role.SAME
        value = differ.constant(self._program.closed, i)
        is_whole = value is not None and jnp.issubdtype(jnp.result_type(value), jnp.integer)
        if not is_whole or jnp.ndim(value):
            return Role.SAME
        said = [self._out[word] for word in _words(result.name) & {*self._out}]
        if not said and int(value) in self._program.arguments.rows_of_one():
            raise ValueError(
                f"{result.name} is {int(value)}, the number of one worker's rows, as of len(batch): return "
                f"workers.num_gradients * len(batch), or say that it is added, map_step(..., "
                f"out={{{_last_word(result.name)!r}: 'sum'}}); 'mean' keeps a number that only looks so"
            )
        return Role.SUM if said == ["sum"] else Role.SAME

    def _check_counts(self) -> None:
        """Raises where the number of one worker's rows is added, which doubles with them."""
        program, rows = self._program, self._program.arguments.rows_of_one()
        for i, role in enumerate(self.roles):
            name = self._results.each[i].name
            # Beside totals that are averaged, as those of Keras, a count is one worker's.
            if role is not Role.SAME or _words(name) & self._averaged:
                continue
            number = differ.added(program.closed.jaxpr, i)
            if number is None or number not in rows:
                continue
            if differ.added(program.doubled[0].jaxpr, i) == 2 * number:
                raise ValueError(
                    f"to {name} {number:g} is added, the number of one worker's rows, as of len(batch): "
                    "add that of all, workers.num_gradients * len(batch)"
                )

    def _check_number(self, i: int, result: Result, x: Any) -> None:
        """Raises for a number that picks one of a worker's, of which there is no mean and no sum."""
        jaxpr = self._program.closed.jaxpr
        name = differ.last_operation(jaxpr, jaxpr.outvars[i])
        if name in differ.PICKS or x.dtype == bool:
            raise ValueError(
                f"{result.name}, {x.dtype}[], is made by {name} of one worker's rows, and is neither "
                "averaged nor added: say what it is of all workers, map_step(..., "
                f"out={{{_last_word(result.name)!r}: {differ.PICKS.get(name, 'min')!r}}}); 'max' is the "
                "largest, or true on any, 'min' the smallest, or true on all, 'each' gives [workers], and "
                "'mean' and 'sum' are allowed too"
            )

    def _metric_state(self, i: int, result: Result, over: Sequence[str]) -> Role:
        """What a metric of nnx has gained on each worker is added, also where that is the same."""
        jaxpr, before = self._program.closed.jaxpr, result.before
        assert before is not None
        changed = jaxpr.outvars[i] is not jaxpr.invars[before]
        if changed and is_increment(jaxpr, before, i):
            return Role.GAINED
        if not over:
            return Role.SAME
        raise ValueError(
            f"{result.name} is a metric that differs between workers, and no sum: what each worker adds to "
            "it depends on what it holds, such as the mean of nnx.metrics.Welford. Return the rows, or "
            "their sum and number, and update the metric behind the step"
        )

    def _check_ratios(self) -> None:
        """Raises for a whole number that is added beside a floating one that is averaged."""
        beside: dict[str, dict[Role, str]] = {}
        for result, role in zip(self._results.each, self.roles, strict=True):
            said = result.before is not None or result.kind or _words(result.name) & {*self._out}
            if not said and role in (Role.MEAN, Role.SUM):
                inside = result.name.rpartition("[")[0]
                beside.setdefault(inside, {})[role] = result.name
        for each in beside.values():
            if len(each) == 2:
                mean, total = each[Role.MEAN], each[Role.SUM]
                raise ValueError(
                    f"{mean} is a floating number, which is averaged over the workers, and beside it "
                    f"{total} a whole one, which is added: a ratio of them would be too small by the "
                    f"number of workers. Say what they are: map_step(..., out={{{_last_word(mean)!r}: "
                    f"'mean', {_last_word(total)!r}: 'sum'}}) for a mean and a count; 'sum' for both for "
                    "a ratio"
                )

    def _drift(self, i: int, result: Result, x: Any) -> str:
        """An error's text for state that all workers hold, and that differs after the step."""
        leaf, over = self._leaf(i), self._over[i]
        axes = f" over {', '.join(over)}" if len(self._workers.axes) > 1 else ""
        of = (
            f"{result.name}, {x.dtype}{list(x.shape)}, differs between workers{axes} after the step"
        )
        exchanges = self._differences.gradients()
        if not exchanges:
            return (
                f"{of}, and nothing in the step lets workers talk: use an optimizer of the library, such "
                "as lioncub_jax.owner_adamw(..., workers=workers), or lioncub_jax.global_gradients around "
                f"yours. {_LOOKS}"
            )
        if len(over) < len(self._workers.axes):
            return (
                f"{of}, and not over all axes of the workers: give the optimizer the same "
                "lioncub_jax.Workers as the step"
            )
        if leaf is not None and leaf.held.in_optimizer:
            return (
                f"{of}: it stands in front of the transform in which workers talk, or is changed by what "
                "each has for itself, such as its own loss. In front, each worker has its own: state = "
                "step.prepare(state) makes it so. Behind it, give all the same: value="
                "lioncub_jax.mean_over_workers(loss, workers)"
            )
        if not is_key(x) and jnp.issubdtype(x.dtype, jnp.inexact):
            return f"{of}. {self._cure(result, exchanges)}"
        return (
            f"{of}: it is state that all workers hold, and no float that could be averaged. Add it over "
            "the workers in the step, count + lioncub_jax.training.sum_over_workers(new, workers); or give "
            "each worker its own of it, lioncub_jax.training.own(x, workers)"
        )

    def _cure(self, result: Result, exchanges: Sequence[Collection[str]]) -> str:
        """What to do about a floating array that drifts apart, the likeliest first."""
        trees, name = self._trees(), _last_key(result.name)
        cause = (
            "what each worker has for itself, such as its own loss or norm: take "
            "lioncub_jax.mean_over_workers(loss, workers)"
        )
        if _is_parameter(result, trees):
            shown = ", ".join([*exchanges[0]][:3])
            return (
                "A parameter would drift apart: its update does not come from a transform in which "
                f"workers talk, which has the gradients of {shown}; a mask or label keeps it from that one "
                f"(give it optax.set_to_zero() or global_gradients); or it is changed behind it by {cause}"
            )
        alike = [x for x in self._leaves if name in _words(x.name)]
        if name == result.name or any(
            x.held.in_optimizer or _is_parameter(x, trees) for x in alike
        ):
            return (
                f"It is made of {cause}; what is to be each worker's own goes in a box, "
                "lioncub_jax.training.own(x, workers)"
            )
        return f"A statistic is averaged, in each step, by averaged=({name!r},); or it is made of {cause}"

    def _trees(self) -> set[str]:
        """The names of trees of arguments that have the gradients' paths and shapes: parameters.

        Trees that lie deeper are copies, which a loop around an optimizer keeps in its state.
        """
        shapes = {x.name: x.shape.shape for x in self._leaves}
        wanted = self._differences.shapes
        starts = {n.removesuffix(p) for p in wanted for n in shapes if n.endswith(p)}
        found = {s for s in starts if all(shapes.get(s + p) == x for p, x in wanted.items())}
        least = min(map(_depth, found), default=0)
        return {s for s in found if _depth(s) == least}

    def specs(self) -> list[P]:
        """How each result lies on the mesh."""
        specs, axes = [], self._workers.axes
        for i, (result, role) in enumerate(zip(self._results.each, self.roles, strict=True)):
            if result.before is not None:
                specs.append(self._leaves[result.before].spec)
            elif role is Role.ROWS:
                specs.append(P(tuple(n for n in axes if n in self._over[i])))
            else:
                specs.append(P(axes) if role is Role.OWN else P())
        return specs

    def lines(self) -> list[str]:
        """What becomes of each result, a line each."""
        pairs = zip(self._results.each, self.roles, strict=True)
        return [f"{result.name}: {role.value}" for result, role in pairs]

    def joined(self, results: list[Any], before: Sequence[Any]) -> list[Any]:
        """Results as they leave a worker; ``before``: what it was given, by place."""
        axes, by = self._workers.axes, {role: list[int]() for role in Role}
        for i, role in enumerate(self.roles):
            by[role].append(i)
        old: list[Any] = []
        for result in self._results.each:
            old.append(None if result.before is None else before[result.before])
        # A worker with values that are not finite keeps its own floats, and leaves the mean of statistics.
        own = [i for i in by[Role.OWN] if old[i] is not None and self._leaf(i).held.kept]
        own = [i for i in own if jnp.issubdtype(old[i].dtype, jnp.inexact)]
        finite = all_finite([results[i] for i in own])
        for i in own:
            results[i] = jnp.where(finite, results[i], old[i])
        wide = {i: results[i].astype(common_dtype(results[i], jnp.float32)) for i in by[Role.MEAN]}
        state = {i for i in wide if old[i] is not None}
        finite = all_finite([wide[i] for i in state])
        sent = {i: jnp.where(finite, x, 0) if i in state else x for i, x in wide.items()}
        told = finite.astype(jnp.float32) if state else ()
        totals, present = wires.sum_of_floats((sent, told), axes)
        for i, x in totals.items():
            if i in state:
                mean = x / jnp.maximum(present, 1).astype(x.dtype)
                results[i] = jnp.where(present > 0, mean.astype(old[i].dtype), old[i])
            else:
                is_whole = not jnp.issubdtype(results[i].dtype, jnp.inexact)
                results[i] = (x / self._workers.num_gradients).astype(
                    x.dtype if is_whole else results[i].dtype
                )
        for i in by[Role.GAINED]:
            results[i] = old[i] + wires.sum_over_workers(results[i] - old[i], axes)
        for i in by[Role.SUM]:
            over = tuple([n for n in axes if n in self._over[i]])
            count = as_count(results[i])  # a constant is the same for all
            results[i] = (
                wires.sum_over_workers(count, over) if over else self._workers.num_gradients * count
            )
        for i in by[Role.LARGEST]:
            results[i] = _picked(wires.max_over_workers, results[i], axes)
        for i in by[Role.SMALLEST]:
            results[i] = _picked(wires.min_over_workers, results[i], axes)
        for i in by[Role.OWN]:
            results[i] = xla.by_words(lambda x: x[None], results[i])
        return results


def _picked(pick: Callable[..., jax.Array], x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """The largest or smallest over the workers: bools are numbers on the way, NaN of one is NaN for all."""
    if x.dtype == bool:
        return pick(x.astype(jnp.int32), axes).astype(bool)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return pick(x, axes)
    # XLA's maximum of several devices passes over NaN.
    undefined = wires.max_over_workers(jnp.isnan(x).astype(jnp.int32), axes) > 0
    return jnp.where(undefined, jnp.nan, pick(x, axes))


def _is_parameter(x: Any, trees: Collection[str]) -> bool:
    """True for a result or argument in one of these trees, or a parameter of nnx."""
    if x.kind:
        return bool(x.kind == "Param")
    return any(x.name == tree or x.name.startswith((f"{tree}[", f"{tree}.")) for tree in trees)


def _depth(name: str) -> int:
    """The number of keys, attributes and indices in a name."""
    return len(re.findall(r"\w+", name))


def _words(name: str) -> set[str]:
    return set(re.findall(r"\w+", name))


def _last_word(name: str) -> str:
    """The last key, attribute or index in a name."""
    return str(re.findall(r"\w+", name)[-1])


def _first_key(name: str) -> str:
    """The first key or attribute in the name of a result, of which all arrays are probably alike."""
    keys = re.findall(r"[A-Za-z_]\w*", name)[1:]
    return str(keys[0]) if keys else _last_word(name)


def _last_key(name: str) -> str:
    """The last key or attribute in a name, else that of the argument: no index, as of a list."""
    return str(re.findall(r"[A-Za-z_]\w*", re.sub("<.*?>", "", name))[-1])
