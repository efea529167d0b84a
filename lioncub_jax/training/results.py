"""What comes out of a mapped step: what is the same stays; what differs is joined, or is an error."""

import operator
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jax.tree_util import treedef_is_leaf

from lioncub_jax.exchange import wires, xla
from lioncub_jax.exchange.bits import common_dtype
from lioncub_jax.mesh.axes import all_finite
from lioncub_jax.mesh.hosts import is_key
from lioncub_jax.training import differ, graphs
from lioncub_jax.training.arguments import Arguments, Leaf, Own, Role, is_array, kinds
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
      array: traced.
      before: the array of the arguments that it goes on from, or None.
      kind: of the variable of nnx that holds it, "own" in a box that the step made, or "".
      said: what the user says that it is, in ``out``; or None.
    """

    name: str
    array: jax.Array
    before: Leaf | None = None
    kind: str = ""
    said: Role | None = None


class _Fixed(NamedTuple):
    value: Any


class Results:
    """The results of a step on one worker.

    Attributes:
      each: a `Result` for each array, in the order of what is returned.
    """

    def __init__(
        self,
        arguments: Arguments,
        given: Sequence[Any],
        nodes: list[Any],
        out: Any,
        said: Mapping[str, str],
    ):
        self.each, self._arguments, self._out = list[Result](), arguments, said
        self._state_tree: Any = None
        self._tree: Any = None
        is_graph = bool(arguments.graph) and graphs.is_graph(out)
        if arguments.graph:
            self._add_state(nodes, out if is_graph else ())
        if not is_graph:
            self._found = _continued(arguments, given, out, said)
            self._held = list[Any]()  # a place in ``each``, or what is no array

            def is_part(path: Any, x: Any) -> bool:
                return path in self._found or isinstance(x, Own)

            whole = jax.tree.map_with_path(self._add, out, is_leaf=is_part, is_leaf_takes_path=True)
            self._tree = jax.tree.structure(whole)

    def _add_state(self, nodes: list[Any], out: Any) -> None:
        """Adds the variables of the modules that the step was given, and of those that it returns."""
        both, arguments = (nodes, out), self._arguments
        self._definition, values = graphs.split(both)
        for ((which, *path), holder), value in zip(graphs.places(both), values, strict=True):
            known = arguments.values.get(tuple(path), []) if which == 0 else []
            for i, (rest, x) in enumerate(jax.tree_util.tree_leaves_with_path(value)):
                before = known[i] if i < len(known) else None
                name = f"result{jax.tree_util.keystr((*graphs.keys(path), *rest))}"
                name = before.name if before else name
                self.each.append(Result(name, jnp.asarray(x), before, graphs.kind_of(holder)))
        self._state_tree = jax.tree.structure(values)

    def _add(self, path: Any, node: Any) -> Any:
        """Adds the arrays of a part of what is returned; returns it as it is around the step."""
        if path in self._found:
            outside, before = self._found[path]
            leaves = jax.tree.leaves(node)
            for x, leaf in zip(leaves, before, strict=True):
                if leaf:
                    self._add_array(x, leaf.name, before=leaf, kind=leaf.held.variable)
                else:
                    self._held.append(_Fixed(x))
            return outside.unflatten(leaves)
        name = f"result{jax.tree_util.keystr(path)}"
        if isinstance(node, Own):
            for x in jax.tree.leaves(node.value):
                self._add_array(x, name, kind="own")
            return node.value
        said = _said(name, self._out)
        # A number of Python may be that of a worker's rows.
        is_count = type(node) is int and (said or node in self._arguments.rows_of_one())
        if is_count or is_array(node):
            self._add_array(node, name, said=said)
        else:
            self._held.append(_Fixed(node))
        return node

    def _add_array(self, x: Any, name: str, **about: Any) -> None:
        self._held.append(len(self.each))
        self.each.append(Result(name, jnp.asarray(x), **about))

    def returned(self) -> set[int]:
        """The places of the arguments' arrays that the step returns changed."""
        return {x.before.place for x in self.each if x.before}

    def rebuilt(self, arrays: Sequence[Any]) -> Any:
        """What the step returns, of arrays of all workers; modules of the arguments are changed."""
        out = None
        if self._state_tree is not None:
            values = self._state_tree.unflatten(arrays[: self._state_tree.num_leaves])
            _, out = graphs.merged(self._definition, values, inner=False)
        if self._tree is None:
            return out
        return self._tree.unflatten(
            [x.value if isinstance(x, _Fixed) else arrays[x] for x in self._held]
        )


def _continued(
    arguments: Arguments, given: Sequence[Any], out: Any, said: Mapping[str, str]
) -> dict[Any, tuple[Any, list[Leaf | None]]]:
    """The parts of a result that go on from arguments, by path: structures around the step, and arrays.

    They have the same structure, shapes and dtypes. The largest parts are matched first: updates may look
    like momentum, which is a part of a state. What a user has named in ``out`` goes on from nothing, even
    if it looks so, as gradients do.
    """
    offered = _offered(arguments, given)
    leaves, tree = jax.tree_util.tree_flatten_with_path(out)
    each, found, taken = kinds([x for _, x in leaves]), dict[Any, Any](), set[int]()
    for part, start, depth in sorted(_parts(tree), key=lambda part: -part[0].num_leaves):
        own_kinds = tuple(each[start : start + part.num_leaves])
        path = leaves[start][0][:depth] if own_kinds else ()
        is_inside = any(path[:i] in found for i in range(depth))
        if is_inside or _said(jax.tree_util.keystr(path) or "result", said):
            continue
        for outside, before in offered.get((part, own_kinds), ()):
            arrays = {x.place for x in before if x}
            if taken.isdisjoint(arrays):
                taken |= arrays
                found[path] = outside, before
                break
    return found


def _offered(
    arguments: Arguments, given: Sequence[Any]
) -> dict[Any, list[tuple[Any, list[Leaf | None]]]]:
    """The parts of the arguments, by their structure in a step, shapes and dtypes.

    A number, or an array in something, is too like others; a key is not, nor an argument.
    """
    each, found = kinds(arguments.filled(given)), dict[Any, Any]()
    outside, inside = (tree.children()[0] for tree in (arguments.tree, arguments.inside))
    for (part, start, depth), (within, *_) in zip(_parts(outside), _parts(inside), strict=True):
        before = arguments.each[start : start + part.num_leaves]
        arrays = [x for x in before if x]
        is_known = depth > 0 and bool(arrays)
        if is_known and treedef_is_leaf(part):
            place, x = arrays[0].place, arrays[0].shape
            is_array = x.ndim > 0 and (depth == 1 or x.dtype == np.uint32)
            is_known = is_array or place in arguments.typed_keys
        if is_known:
            key = within, tuple(each[start : start + part.num_leaves])
            found.setdefault(key, []).append((part, before))
    return found


def _parts(tree: Any, start: int = 0, depth: int = 0) -> Iterator[tuple[Any, int, int]]:
    """A structure and all parts of it, each with the place of its first leaf, and the number of its keys.

    A box is one part with what is in it, since there are no boxes in a step.
    """
    yield tree, start, depth
    while not treedef_is_leaf(tree) and tree.node_data()[0] is Own:
        [tree], depth = tree.children(), depth + 1
    for part in tree.children():
        yield from _parts(part, start, depth + 1)
        start += part.num_leaves


def _said(name: str, out: Mapping[str, str]) -> Role | None:
    """What the user says of a result by a name in its path, or None."""
    words = _words(name)
    return next((SAID[role] for word, role in out.items() if word in words), None)


class Outside:
    """What becomes of each result outside of the workers.

    Attributes:
      roles: a `Role` for each.
      specs: how each lies on the mesh.
    """

    def __init__(self, program: Any, differences: Differences, classes: Sequence[Classes]):
        self._program, self._differences = program, differences
        # The workers' axes over which each result differs.
        self._over = [differences.axes_of(x) for x in classes]
        self._results, self._workers = program.results, program.workers
        self._leaves = program.arguments.leaves
        self.roles = [self._role(i, x) for i, x in enumerate(self._results.each)]
        self._check_ratios()
        self._check_counts()
        self.specs = self._specs()

    def _is_averaged(self, result: Result) -> bool:
        return not set(self._program.mapped.averaged).isdisjoint(_words(result.name))

    def _role(self, i: int, result: Result) -> Role:
        x, leaf, over = result.array, result.before, self._over[i]
        if result.kind == "own":
            return Role.OWN
        if leaf and leaf.role in (Role.OWN, Role.ROWS):
            if more := sorted(set(over).difference(leaf.over)):
                raise ValueError(
                    f"{result.name} is the same over {more} before the step, and differs over it after"
                )
            return leaf.role
        if result.kind == "MetricState" and leaf:
            return self._metric_state(i, result, leaf.place)
        if not over:
            return self._of_constant(i, result)
        if i in self._program.chains:
            return Role.KEY
        is_float = not is_key(x) and jnp.issubdtype(x.dtype, jnp.inexact)
        if leaf or result.kind:
            # Of flax's fp8 layers: a collection of linen, a kind of variable in nnx.
            if "_overwrite_with_gradient" in {*_words(result.name), result.kind}:
                return Role.LARGEST
            statistic = result.kind == "BatchStat" or self._is_averaged(result)
            if statistic and is_float:
                return Role.MEAN
            raise ValueError(self._drift(i, result))
        if is_key(x):
            raise ValueError(
                f"{result.name} is a random key that differs between workers: return it as state"
            )
        if result.said:
            return result.said
        if not x.ndim:
            self._check_number(i, result)
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
        if result.before or result.kind:
            return Role.SAME
        value = differ.constant(self._program.closed, i)
        is_whole = value is not None and jnp.issubdtype(jnp.result_type(value), jnp.integer)
        if not is_whole or jnp.ndim(value):
            return Role.SAME
        if not result.said and int(value) in self._program.arguments.rows_of_one():
            raise ValueError(
                f"{result.name} is {int(value)}, the number of one worker's rows, as of len(batch): return "
                f"workers.num_gradients * len(batch), or say that it is added, map_step(..., "
                f"out={{{_words(result.name)[-1]!r}: 'sum'}}); 'mean' keeps a number that only looks so"
            )
        return Role.SUM if result.said is Role.SUM else Role.SAME

    def _check_counts(self) -> None:
        """Raises where the number of one worker's rows is added, which doubles with them."""
        program, rows = self._program, self._program.arguments.rows_of_one()
        numbers = differ.added(program.closed.jaxpr)
        suspects = dict[int, float]()
        for i, (result, number) in enumerate(zip(self._results.each, numbers, strict=True)):
            # Beside totals that are averaged, as those of Keras, a count is one worker's.
            may_be_own = self.roles[i] is Role.SAME and not self._is_averaged(result)
            if may_be_own and number in rows:
                suspects[i] = number
        doubled = differ.added(program.doubled.closed.jaxpr) if suspects else []
        for i, number in suspects.items():
            if doubled[i] == 2 * number:
                raise ValueError(
                    f"to {self._results.each[i].name} {number:g} is added, the number of one worker's "
                    "rows, as of len(batch): add that of all, workers.num_gradients * len(batch)"
                )

    def _check_number(self, i: int, result: Result) -> None:
        """Raises for a number that picks one of a worker's, of which there is no mean and no sum."""
        jaxpr, x = self._program.closed.jaxpr, result.array
        name = differ.last_operation(jaxpr, jaxpr.outvars[i])
        if name in differ.PICKS or x.dtype == bool:
            raise ValueError(
                f"{result.name}, {x.dtype}[], is made by {name} of one worker's rows, and is neither "
                "averaged nor added: say what it is of all workers, map_step(..., "
                f"out={{{_words(result.name)[-1]!r}: {differ.PICKS.get(name, 'min')!r}}}); 'max' is the "
                "largest, or true on any, 'min' the smallest, or true on all, 'each' gives [workers], and "
                "'mean' and 'sum' are allowed too"
            )

    def _metric_state(self, i: int, result: Result, before: int) -> Role:
        """What a metric of nnx has gained on each worker is added, also where that is the same."""
        jaxpr = self._program.closed.jaxpr
        changed = jaxpr.outvars[i] is not jaxpr.invars[before]
        if changed and is_increment(jaxpr, before, i):
            return Role.GAINED
        if not self._over[i]:
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
            is_clear = result.before or result.kind or result.said
            if not is_clear and role in (Role.MEAN, Role.SUM):
                inside = result.name.rpartition("[")[0]
                beside.setdefault(inside, {})[role] = result.name
        for each in beside.values():
            if len(each) == 2:
                mean, total = each[Role.MEAN], each[Role.SUM]
                raise ValueError(
                    f"{mean} is a floating number, which is averaged over the workers, and beside it "
                    f"{total} a whole one, which is added: a ratio of them would be too small by the "
                    f"number of workers. Say what they are: map_step(..., out={{{_words(mean)[-1]!r}: "
                    f"'mean', {_words(total)[-1]!r}: 'sum'}}) for a mean and a count; 'sum' for both for "
                    "a ratio"
                )

    def _drift(self, i: int, result: Result) -> str:
        """An error's text for state that all workers hold, and that differs after the step."""
        x, leaf, over = result.array, result.before, self._over[i]
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
        if leaf and leaf.held.in_optimizer:
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
        if _is_parameter(result.name, result.kind, trees):
            shown = ", ".join([*exchanges[0]][:3])
            return (
                "A parameter would drift apart: its update does not come from a transform in which "
                f"workers talk, which has the gradients of {shown}; a mask or label keeps it from that one "
                f"(give it optax.set_to_zero() or global_gradients); or it is changed behind it by {cause}"
            )
        alike = [x for x in self._leaves if name in _words(x.name)]
        if name == result.name or any(
            x.held.in_optimizer or _is_parameter(x.name, x.held.variable, trees) for x in alike
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
        depths = {s: len(_words(s)) for s in found}
        return {s for s, depth in depths.items() if depth == min(depths.values())}

    def _specs(self) -> list[P]:
        """How each result lies on the mesh."""
        specs, axes = [], self._workers.axes
        for result, role, over in zip(self._results.each, self.roles, self._over, strict=True):
            if result.before:
                specs.append(result.before.spec)
            elif role is Role.ROWS:
                specs.append(P(over))
            else:
                specs.append(P(axes) if role is Role.OWN else P())
        return specs

    def joined(self, results: list[Any], before: Sequence[Any]) -> list[Any]:
        """Results as they leave a worker; ``before``: what it was given, by place."""
        axes, each = self._workers.axes, self._results.each
        by = {role: [i for i, x in enumerate(self.roles) if x is role] for role in Role}
        old: list[Any] = [before[x.before.place] if x.before else None for x in each]
        # A worker with values that are not finite keeps its own floats, and leaves the mean of statistics.
        kept = [x.before is not None and x.before.held.kept for x in each]
        own = [i for i in by[Role.OWN] if kept[i] and jnp.issubdtype(old[i].dtype, jnp.inexact)]
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
                continue
            is_float = jnp.issubdtype(results[i].dtype, jnp.inexact)
            mean = x / self._workers.num_gradients
            results[i] = mean.astype(results[i].dtype if is_float else x.dtype)
        for i in by[Role.GAINED]:
            results[i] = old[i] + wires.sum_over_workers(results[i] - old[i], axes)
        for i in by[Role.SUM]:
            count, over = as_count(results[i]), self._over[i]
            if over:
                results[i] = wires.sum_over_workers(count, over)
            else:  # a constant is the same for all
                results[i] = self._workers.num_gradients * count
        for i in by[Role.LARGEST]:
            results[i] = _picked(wires.max_over_workers, results[i], axes)
        for i in by[Role.SMALLEST]:
            results[i] = _picked(wires.min_over_workers, results[i], axes)
        for i in by[Role.OWN]:
            results[i] = xla.by_words(operator.itemgetter(None), results[i])
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


def _is_parameter(name: str, kind: str, trees: Collection[str]) -> bool:
    """True for a result or argument in one of these trees, or a parameter of nnx."""
    if kind:
        return kind == "Param"
    return any(name == tree or name.startswith((f"{tree}[", f"{tree}.")) for tree in trees)


def _words(name: str) -> list[str]:
    """The keys, attributes and indices in a name."""
    return re.findall(r"\w+", name)


def _first_key(name: str) -> str:
    """The first key or attribute in the name of a result, of which all arrays are probably alike."""
    keys = re.findall(r"[A-Za-z_]\w*", name)[1:]
    return str(keys[0]) if keys else _words(name)[-1]


def _last_key(name: str) -> str:
    """The last key or attribute in a name, else that of the argument: no index, as of a list."""
    return str(re.findall(r"[A-Za-z_]\w*", re.sub("<.*?>", "", name))[-1])
