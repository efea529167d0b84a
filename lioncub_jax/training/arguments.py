"""What goes into a mapped step: rows, what is each worker's own, and what is the same for all."""

import contextlib
import enum
import functools
import inspect
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from lioncub_jax.exchange import xla
from lioncub_jax.exchange.mapped import OWN, Holder, find_holders
from lioncub_jax.mesh import hosts
from lioncub_jax.mesh.hosts import is_key
from lioncub_jax.mesh.placement import Workers
from lioncub_jax.mesh.specs import (
    StateSpecs,
    axes_of,
    cuts_of,
    has_flax,
    product,
    shortened,
    spec_of,
)
from lioncub_jax.training import graphs

# The names or places of arguments, or of each the dimension in which its rows are.
Which = str | int | Sequence[str | int] | Mapping[str | int, int] | None
# The places of arrays that lie elsewhere than a program wants them, where to, and the shape of whole rows.
Moves: TypeAlias = list[tuple[int, NamedSharding, tuple[int, ...] | None]]
_VALUE = jax.tree_util.GetAttrKey("value")  # of a variable of nnx, in the path of its array


class Rows(NamedTuple):
    """The rows of a batch.

    Attributes:
      which: the arguments that have them.
      spec: how they lie; by default over the workers, and in other dimensions as they lie already.
      local_steps: into how many parts a worker cuts its rows first.
      accumulate: into how many it cuts each of these.
    """

    which: Which = None
    spec: P | None = None
    local_steps: int = 1
    accumulate: int = 1


class Role(enum.Enum):
    """What an array is to the workers; all but the first three are of results alone."""

    SAME = "the same for all"
    OWN = "each worker's own"
    ROWS = "rows"
    MEAN = "averaged"
    SUM = "added"
    GAINED = "what it gained on each worker is added"
    LARGEST = "the largest"
    SMALLEST = "the smallest"
    KEY = "a key, as on one device"


@jax.tree_util.register_pytree_with_keys_class
class Own:
    """A box around arrays of which each worker has its own, ``[workers, ...]``; in a step there is no box.

    Attributes:
      value: a tree of them.
    """

    def __init__(self, value: Any):
        self.value = value

    def tree_flatten_with_keys(self) -> Any:
        """For JAX."""
        return ((jax.tree_util.GetAttrKey("value"), self.value),), None

    @classmethod
    def tree_unflatten(cls, _: Any, children: Any) -> "Own":
        """For JAX."""
        return cls(*children)


def opened(tree: Any) -> Any:
    """A tree without boxes `Own`."""

    def is_own(x: object) -> bool:
        return isinstance(x, Own)

    return jax.tree.map(lambda x: x.value if is_own(x) else x, tree, is_leaf=is_own)


class Held(NamedTuple):
    """Who holds an array of the arguments.

    Attributes:
      own: its spec, if it is each worker's own.
      in_optimizer: True in the state of an optimizer.
      kept: True of what a worker keeps, where its own is not finite after a step: in a box `Own`, in a
        variable of nnx that stands for one, and in front of an exchange.
      declared: True in a class that says by ``holders()`` who has its fields, as a ``StepState``.
      variable: the kind of the variable of nnx that it stands in, or "".
    """

    own: P | None
    in_optimizer: bool = False
    kept: bool = False
    declared: bool = False
    variable: str = ""


class Leaf(NamedTuple):
    """An array among the arguments.

    Attributes:
      place: its own among the arrays.
      name: as a user would write it.
      argument: the place of its argument.
      role: a `Role`.
      spec: how it lies on the mesh.
      shape: of the whole of it, with its dtype.
      dim: the dimension of its rows.
      over: the axes that cut it into rows or into what is each worker's own.
      held: who holds it.
    """

    place: int
    name: str
    argument: int
    role: Role
    spec: P
    shape: jax.ShapeDtypeStruct
    dim: int
    over: tuple[str, ...]
    held: Held


class Call:
    """The arguments of a call, flat. What is made of them does not depend on their values.

    Attributes:
      keywords: the names of the last arguments.
      graph: the places of arguments with modules, and ``nodes`` these; ``graphdef`` is their definition.
      whole: ``(plain arguments, values of modules)``, with boxes.
      tree: its structure.
      traced: True in a ``jax.jit`` of the caller, where numbers of Python are constants.
      statics: leaves of the tree that are no arrays, by their places.
      arrays: the others.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        values: list[Any],
        keywords: tuple[str, ...],
        graph: list[int],
    ):
        self.keywords, self._step, self._num_args = keywords, step, len(values) - len(keywords)
        self.graph, self.nodes = graph, [values[i] for i in graph]
        self.graphdef, state = graphs.split(self.nodes)
        plain = [None if i in graph else x for i, x in enumerate(values)]
        self.whole = plain, state
        flat, self.tree = jax.tree.flatten(self.whole)
        array = array_class()
        others = {i: x for i, x in enumerate(flat) if type(x) is not array}
        self.traced = any(isinstance(x, jax.core.Tracer) for x in others.values())
        self.statics = {i: x for i, x in others.items() if not is_array(x, numbers=not self.traced)}
        self.arrays = [x for i, x in enumerate(flat) if i not in self.statics]

    @classmethod
    @contextlib.contextmanager
    def of(cls, step: Callable[..., Any], args: Any, kwargs: Any) -> "Iterator[Call]":
        """A call of a step; within, nnx knows its objects again in what the step returns."""
        values = [*args, *kwargs.values()]
        graph = [i for i, x in enumerate(values) if graphs.is_graph(x)]
        with graphs.updating(graph):
            yield cls(step, values, tuple(kwargs), graph)

    def structure(self) -> Any:
        """What a program depends on of all but the arrays."""
        statics = tuple([(i, as_static(x)) for i, x in self.statics.items()])
        return self.tree, self.graphdef, self.keywords, statics

    def key(self) -> Any:
        """What a program depends on."""
        return self.structure(), tuple(map(_signature, self.arrays))

    def names(self) -> list[str]:
        """The names of the arguments."""
        try:
            names = list(inspect.signature(self._step).parameters)
        except (TypeError, ValueError):
            names = []
        given = [n for n in names if n not in self.keywords]
        by_place = [given[i] if i < len(given) else f"argument {i}" for i in range(self._num_args)]
        return [*by_place, *self.keywords]


@functools.cache
def array_class() -> type:
    """The class of concrete arrays; ``isinstance`` of ``jax.Array`` is ten times as slow."""
    # Also in a trace, and where a trainer forbids transfers, as Kauldron does.
    with jax.ensure_compile_time_eval(), jax.transfer_guard("allow"):
        return type(jnp.zeros(0))


def _signature(x: Any) -> Any:
    """What a program depends on of an array or number, cheap: there are hundreds, in each step."""
    if type(x) is array_class() or isinstance(x, jax.Array):
        return x.aval, x.sharding  # type: ignore[attr-defined]
    return (x.shape, x.dtype) if isinstance(x, (np.ndarray, np.generic)) else type(x)


def as_static(x: Any) -> Any:
    """What is compared of an argument that is no array."""
    try:
        hash(x)
    except TypeError:
        return id(x)
    return x


def is_array(x: Any, numbers: bool = False) -> bool:
    """True for an array or a shape; also for a number of Python, if these are wanted."""
    if isinstance(x, (int, float, complex)):
        return numbers and not isinstance(x, bool)
    return isinstance(x, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct))


def kinds(leaves: Sequence[Any]) -> list[Any]:
    """What leaves of an argument, and of the result that goes on from it, have alike."""
    return [(jnp.shape(x), x.dtype) if is_array(x) else as_static(x) for x in leaves]


class Arguments:
    """The arguments of a step, without their values.

    Attributes:
      each: for each leaf of the tree its array, or None where it is none.
      leaves: the arrays.
      tree: the structure of ``(plain arguments, values of modules)``, with boxes.
      inside: the same without boxes, as in a step.
      names: of the arguments.
      values: in modules, by their paths: what ``each`` has of their leaves.
      shardings: how arrays lie outside of a worker.
      typed_keys: places of typed random keys.
      keys: of these, into which a worker folds its number.
      raw_keys: those of what may be a raw one.
    """

    def __init__(self, call: Call, workers: Workers, rows: Rows):
        self.workers, self.names = workers, call.names()
        self.graph, self._graphdef = call.graph, call.graphdef
        self.tree: Any = call.tree
        self.inside: Any = jax.tree.structure(opened(call.whole))
        self._keywords, self._rows, self._statics = call.keywords, rows, call.statics
        self.each, self.leaves = list[Leaf | None](), list[Leaf]()
        self._dims, places = arguments_of(rows.which, self.names), graphs.places(call.nodes)
        self.values = {path: list[Leaf | None]() for path, _ in places}
        held = _holders((call.whole[0], [x for _, x in places]), workers)
        flat = jax.tree_util.tree_leaves_with_path(call.whole)
        specs = [spec_of(x) for _, x in flat]
        for place, (path, x) in enumerate(flat):
            holder, at, inside = held[place], path[1].idx, path[2:]
            variable = places[at][0] if path[0].idx else ()
            if variable:
                at, inside = self.graph[variable[0]], (*graphs.keys(variable[1:]), *inside)
            elif holder.variable:  # in an nnx.State, whose variables are parts of a path
                inside = tuple([key for key in inside if key != _VALUE])
            leaf = None
            if place not in call.statics:
                name = f"{self.names[at]}{jax.tree_util.keystr(inside)}"
                leaf = self._leaf(name, at, x, specs[place], holder)
                self.leaves.append(leaf)
            self.each.append(leaf)
            if variable:
                self.values[variable].append(leaf)
        # XLA replicates what is empty.
        lie = [leaf.spec if leaf.shape.size else P() for leaf in self.leaves]
        self.shardings: list[NamedSharding] = workers.shardings(lie)
        self._find_keys()
        self._check_rows()

    def _leaf(self, name: str, at: int, x: Any, spec: P, held: Held) -> Leaf:
        workers, rows, dim = self.workers, self._rows, self._dims.get(at)
        spec = spec if dim is None or rows.spec is None else rows.spec
        role, spec, dim = _role(name, x, spec, held.own, dim, workers)
        over = () if role is Role.SAME else axes_of(spec[dim])
        kind = jax.typeof(x) if not isinstance(x, jax.ShapeDtypeStruct) else x
        sizes = list(jnp.shape(x))
        if role is Role.ROWS:
            sizes[dim] = _rows_of_all(name, x, dim, over, workers, rows)
        shape = jax.ShapeDtypeStruct(tuple(sizes), kind.dtype, weak_type=kind.weak_type)
        return Leaf(len(self.leaves), name, at, role, spec, shape, dim, over, held)

    def _find_keys(self) -> None:
        self.typed_keys = {i for i, x in enumerate(self.leaves) if is_key(x.shape)}
        # An optimizer's own keys are the same for all; a class that says who has its fields folds them.
        may_be = {
            i: x.shape
            for i, x in enumerate(self.leaves)
            if x.role is Role.SAME and not x.held.in_optimizer and not x.held.declared
        }
        self.keys = self.typed_keys.intersection(may_be)
        self.raw_keys = {i for i, x in may_be.items() if x.dtype == np.uint32 and x.ndim == 1}

    def _check_rows(self) -> None:
        rows = [x for x in self.leaves if x.role is Role.ROWS]
        if not rows:
            raise ValueError(
                f"no argument has rows for the workers: {self.names}. Arrays have rows, and lists of "
                'numbers have none; say which argument is the batch: map_step(step, workers, rows="batch")'
            )
        first: dict[int, Leaf] = {}
        for x in rows:
            other = first.setdefault(x.argument, x)
            sizes = [leaf.shape.shape[leaf.dim] for leaf in (x, other)]
            if sizes[0] != sizes[1]:
                raise ValueError(
                    f"{x.name} has {sizes[0]} rows and {other.name} {sizes[1]}, and each worker takes its "
                    "part of the rows of an argument: give what is no row of the batch, such as class "
                    "weights, as another argument, map_step(step, workers, rows=...)"
                )

    def rows_of_one(self) -> set[int]:
        """How many rows one of several workers has of each array, where that is more than one."""
        count = self.workers.num_gradients
        rows = [x.shape.shape[x.dim] // count for x in self.leaves if x.role is Role.ROWS]
        return {n for n in rows if n > 1 < count}

    def check_batch(self, returned: set[int], keys: set[int]) -> None:
        """Raises where the last argument may not be the batch, because another may be.

        Args:
          returned: places of arrays that the step returns changed. An argument with one is no batch; no
            more is a module of nnx, which is changed in place.
          keys: places of random keys.
        """
        if self._rows.which is not None:
            return
        known = {self.leaves[i].argument for i in returned} | {*self.graph}
        for i, x in enumerate(self.leaves):
            is_array = x.role is Role.SAME and x.shape.ndim and i not in self.typed_keys
            if x.argument in known or not is_array or i in keys:
                continue
            last, other = self.names[-1], self.names[x.argument]
            raise ValueError(
                f"only the last argument, {last!r}, would be cut into the rows of the workers, and "
                f"{other!r}, which the step does not return, would be whole on each: {x.name} "
                f"{x.shape.dtype}{list(x.shape.shape)}. Say what the batch is: map_step(step, workers, "
                f"rows={other!r}), rows=({other!r}, {last!r}), or rows={last!r}"
            )

    def key(self, call: Call) -> Any:
        """What a traced program depends on: all but how the given arrays lie."""
        return call.structure(), tuple(self.leaves)

    def moves(self, call: Call) -> Moves:
        """What is to be moved of the arrays of a call; the same in each call with arrays that lie so."""
        moves: Moves = []
        for i, (x, leaf, to) in enumerate(
            zip(call.arrays, self.leaves, self.shardings, strict=True)
        ):
            local = is_of_this_process(x, self.workers)
            # A number, as the step of a TrainState at first, would be another program than what follows it.
            # Of several processes none may give jit an array of NumPy for a mesh.
            of_host = isinstance(x, (int, float, complex))
            of_host |= isinstance(x, np.ndarray) and jax.process_count() > 1
            lies = isinstance(x, jax.Array) and x.sharding
            if local or of_host or (lies and not lies.is_equivalent_to(to, x.ndim)):
                is_rows = local and leaf.role is Role.ROWS
                moves.append((i, to, leaf.shape.shape if is_rows else None))
        return moves

    def on_worker(self, arrays: Sequence[Any]) -> list[Any]:
        """A worker's arrays, of what it is given of the whole ones."""
        here = list(arrays)
        for i, leaf in enumerate(self.leaves):
            if leaf.role is Role.OWN:
                here[i] = xla.by_words(operator.itemgetter(0), here[i])
        return here

    def local_rows(self, call: Call) -> dict[str, float]:
        """By name, of each array of rows that this process has alone, the rows for each part."""
        found = {}
        for x, leaf in zip(call.arrays, self.leaves, strict=True):
            if leaf.role is Role.ROWS and is_of_this_process(x, self.workers):
                parts = product(self.workers.mesh.shape, leaf.over)
                found[leaf.name] = leaf.shape.shape[leaf.dim] / parts
        return found

    def filled(self, arrays: Sequence[Any]) -> list[Any]:
        """All leaves of the tree: the arrays, and between them what is none."""
        pairs = enumerate(self.each)
        return [arrays[x.place] if x else self._statics[place] for place, x in pairs]

    def called(self, step: Callable[..., Any], arrays: Sequence[Any]) -> tuple[list[Any], Any]:
        """What the step returns for arrays of one worker, and the modules that it was given, changed."""
        plain, state = self.inside.unflatten(self.filled(arrays))
        values = list(plain)
        nodes = graphs.merged(self._graphdef, state)
        for i, node in zip(self.graph, nodes, strict=True):
            values[i] = node
        by_place = len(values) - len(self._keywords)
        keywords = dict(zip(self._keywords, values[by_place:], strict=True))
        return nodes, step(*values[:by_place], **keywords)


def _role(
    name: str, x: Any, spec: P, own: P | None, dim: int | None, workers: Workers
) -> tuple[Role, P, int]:
    """The role of an array, how it lies, and in which dimension its rows are."""
    if own is not None:
        count = product(workers.mesh.shape, axes_of(own[0]))
        if jnp.shape(x)[:1] != (count,):
            raise ValueError(
                f"{name} has shape {jnp.shape(x)}, and is each worker's own, [{count}, ...]: make the "
                "state by init of the optimizer, with the same workers"
            )
        return Role.OWN, own, 0
    inner = shortened(spec, workers.inner)
    lies = [d for d, entry in enumerate(spec) if not set(workers.axes).isdisjoint(axes_of(entry))]
    if not jnp.ndim(x) or (not lies and dim is None):
        return Role.SAME, inner if jnp.ndim(x) else P(), 0
    dim = lies[0] if lies else dim
    if dim is None or dim >= jnp.ndim(x):
        raise ValueError(f"{name} has shape {jnp.shape(x)}, and no dimension {dim} with rows")
    cuts = cuts_of(tuple(inner), jnp.ndim(x))
    cuts[dim] = (*workers.axes, *cuts[dim])
    return Role.ROWS, shortened(P(*cuts)), dim


def _rows_of_all(
    name: str, x: Any, dim: int, axes: tuple[str, ...], workers: Workers, rows: Rows
) -> int:
    """The number of rows of an array on all processes, of which this one may have a part."""
    parts = here = product(workers.mesh.shape, axes)
    given, told = jnp.shape(x)[dim], ""
    if is_of_this_process(x, workers):
        me = jax.process_index()
        here = len(hosts.parts_taken(workers.mesh, axes)[me])
        told = (
            f". These are the rows of process {me} of {jax.process_count()}, whose devices take {here} of "
            f"{parts} parts. Give what all have alike as {hosts.ONE}"
        )
    multiple = here * rows.local_steps * rows.accumulate
    if not given or given % multiple:
        raise ValueError(
            f"{name} has shape {jnp.shape(x)}: {workers.num_gradients} workers do not divide its rows, of "
            f"which there must be a positive multiple of {multiple} ({workers.num_gradients} workers, "
            f"{parts // workers.num_gradients} parts of each worker's by {axes}, {rows.local_steps} local "
            f"steps, {rows.accumulate} gradient accumulation steps): drop or pad the last rows, or say "
            f"which argument is the batch, map_step(step, workers, rows=...){told}"
        )
    return given // here * parts


def is_of_this_process(x: Any, workers: Workers) -> bool:
    """True for an array that only this process has, of several."""
    if jax.process_count() == 1 or isinstance(x, jax.core.Tracer):
        return False
    return hosts.is_process_local(x, NamedSharding(workers.mesh, P()))


def arguments_of(which: Which, names: list[str]) -> dict[int, int]:
    """The dimension of rows by the place of an argument; of the last one by default."""
    if which is None:
        return {len(names) - 1: 0}
    which = (which,) if isinstance(which, (str, int)) else which
    dims = which if isinstance(which, Mapping) else dict.fromkeys(which, 0)
    found = {}
    for one, dim in dims.items():
        if one not in names and not (isinstance(one, int) and -len(names) <= one < len(names)):
            raise ValueError(f"{one!r} is no argument of the step, which has {names}")
        found[names.index(one) if isinstance(one, str) else one % len(names)] = dim
    return found


def _holders(tree: Any, workers: Workers) -> list[Held]:
    """Who holds each leaf, by what says it.

    States of our transforms do, boxes `Own`, variables of nnx that name the workers' axes in front, and
    classes with ``holders()``, in which also what stands in front of an exchange is each worker's own.
    """
    found: list[Held] = []
    of_flax = has_flax(tree)

    def own_spec(x: Any) -> P:
        return P(workers.axes, *spec_of(x)[1:])

    def is_box(x: Any) -> bool:
        return isinstance(x, Own) or (of_flax and graphs.is_boxed(x))

    def visit(node: Any, in_optimizer: bool, variable: str) -> None:
        kind = graphs.kind_of(node) if of_flax else ""
        variable = kind or variable
        in_optimizer = in_optimizer or variable == "OptState" or is_of_optax(node)
        first, leaves, specs = len(found), jax.tree.leaves(node), getattr(node, "specs", None)
        held = functools.partial(Held, in_optimizer=in_optimizer, variable=variable)
        if is_box(node) or (kind and graphs.is_own(node, workers)):
            found.extend([held(own_spec(x), kept=is_box(node)) for x in leaves])
            return
        if isinstance(specs, StateSpecs):
            # A state that `MappedStep.prepare` has put into boxes is in front of another exchange.
            said = [spec if workers.stacks(spec) else None for spec in specs.state]
            for own, x in zip(said, jax.tree.leaves(node, is_leaf=is_box), strict=True):
                is_boxed = is_box(x)
                own = own_spec(jax.tree.leaves(x)[0]) if is_boxed else own
                found.append(held(own, kept=is_boxed))
            return
        parts = jax.tree.leaves(node, is_leaf=lambda x: x is not node)
        if len(parts) == 1 and parts[0] is node:
            found.append(held(None))
            return
        for part in parts:
            visit(part, in_optimizer, variable)
        if hasattr(node, "holders"):
            holders = jax.tree.leaves(find_holders(node))
            for i, (x, holder) in enumerate(zip(leaves, holders, strict=True), first):
                own = own_spec(x) if holder in OWN and not found[i].own else found[i].own
                kept = found[i].kept or holder is Holder.FRONT
                found[i] = found[i]._replace(own=own, kept=kept, declared=True)

    visit(tree, False, "")
    return found


def is_of_optax(node: Any) -> bool:
    """True for the state of a transform of optax or ours, or of a chain of such."""
    if not isinstance(node, tuple):
        return False
    if type(node) is tuple:
        return len(node) > 0 and all(map(is_of_optax, node))
    return type(node).__module__.split(".")[0] == "optax" or hasattr(node, "specs")
