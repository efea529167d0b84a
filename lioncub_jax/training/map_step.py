"""A train step, written as for one device, mapped over the workers.

The step is traced once, inside of a ``shard_map`` over the workers' axes, where each worker has its rows,
whole parameters, and its own gradients; only the optimizer talks. `differ` reads that trace: which results
differ between workers is proven, never guessed from names. The same trace is then run, so foreign code
needs no casts. A first call goes this way:

1. `Call` makes its arguments flat, and `Arguments` gives each array a `Role`: rows, each worker's own, or
   the same for all.
2. `Program` traces the step on one worker. `Results` has what it returns, and of each array the argument
   that it goes on from.
3. `differ.Origins` finds raw random keys, and `differ.Differences` the workers that have the same of each
   result.
4. `Outside` gives each result a `Role`, or raises an error that names it.
5. `Program.on_mesh` runs the trace on all workers, and `Outside.joined` joins what they return.
"""

import contextlib
import inspect
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.interpreters.partial_eval import dce_jaxpr
from jax.sharding import PartitionSpec as P

from lioncub_jax.exchange import checks
from lioncub_jax.mesh import hosts
from lioncub_jax.mesh.hosts import is_key
from lioncub_jax.mesh.placement import FREE, Workers, check_alive, check_real
from lioncub_jax.mesh.specs import axes_in, axes_of, spec_of
from lioncub_jax.programs import scopes
from lioncub_jax.training import differ
from lioncub_jax.training.arguments import (
    Arguments,
    Call,
    Moves,
    Role,
    Rows,
    Which,
    arguments_of,
    array_class,
)
from lioncub_jax.training.loss import in_worker
from lioncub_jax.training.own import fold, prepared
from lioncub_jax.training.results import SAID, Outside, Results


def map_step(
    step: Callable[..., Any],
    workers: Workers,
    *,
    rows: Which = None,
    averaged: Sequence[str] = ("batch_stats",),
    out: Mapping[str, str] | None = None,
    donate: Which = (),
) -> "MappedStep":
    """Maps a whole train step over the workers.

    ``step`` runs once on each worker, with its part of the rows::

        state_i, metrics_i = step(state, rows_i)

    and what is proven to be the same on all workers is the result. What may differ: each worker's own
    state of an optimizer is ``[workers, ...]``; batch statistics and floating numbers are averaged, and
    whole numbers added; rows are joined.

    Args:
      step: any function of pytrees, also one that changes modules of nnx in place.
      workers: a `Workers`.
      rows: the batch: the name or place of an argument, or several; a dict gives the dimension of the
        rows, ``{"batches": 1}``. By default the last argument, if the step returns or updates all others
        that have arrays; and what lies over the workers.
      averaged: names in the paths of floating state that is averaged, besides ``nnx.BatchStat``.
      out: other results by a name in their path: ``"rows"``, ``"mean"``, ``"sum"``, ``"max"``, ``"min"``,
        or ``"each"``.
      donate: arguments whose memory the step takes over.

    Returns:
      The step on global arrays, a `MappedStep`. Random keys among the arguments are
      folded with the number of the worker.

    Raises:
      TypeError: for no `Workers`.
      ValueError: for ``out`` that is none of these; when called, for a batch that is not named and may be
        another than the last argument, rows that the workers do not divide,
        an array that differs and must not, and gradients that are the same on all workers.

    Example:
      >>> import jax, jax.numpy as jnp, lioncub_jax as lc, optax
      >>> workers = lc.Workers.one_per_device()
      >>> tx = lc.lion_cub(1e-3, workers=workers)
      >>> def step(state, batch):
      ...     params, opt_state = state
      ...     loss, grads = jax.value_and_grad(lambda w: jnp.mean((batch @ w) ** 2))(params)
      ...     updates, opt_state = tx.update(grads, opt_state, params)
      ...     return (optax.apply_updates(params, updates), opt_state), loss
      >>> params = jnp.ones((3, 1))
      >>> batch = jnp.ones((8 * workers.num_gradients, 3))
      >>> state, loss = lc.map_step(step, workers)((params, tx.init(params)), batch)
      >>> float(loss)
      9.0

    Source: this library.
    """
    check_real(workers)
    if unknown := [x for x in (out or {}).values() if x not in SAID]:
        raise ValueError(
            f"out has {unknown[0]!r}: give 'rows', 'mean', 'sum', 'max', 'min' or 'each' of each name"
        )
    return MappedStep(step, workers, Rows(rows), tuple(averaged), out, donate)


class MappedStep:
    """A step of all workers, on global arrays, as `map_step` returns it.

    Example:
      >>> import jax.numpy as jnp, lioncub_jax as lc
      >>> workers = lc.Workers.one_per_device()
      >>> mean = lc.map_step(lambda w, rows: (w, jnp.mean(rows @ w)), workers)
      >>> print(mean.explain(jnp.ones(3), jnp.ones((workers.num_gradients, 3))))  # doctest: +ELLIPSIS
      given
      ...

    Source: this library.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        workers: Workers,
        rows: Rows,
        averaged: tuple[str, ...] = (),
        out: Mapping[str, str] | None = None,
        donate: Which = (),
        options: dict[str, Any] | None = None,
    ):
        self.step, self.workers, self.rows, self.averaged = step, workers, rows, averaged
        self.out, self.donate, self.options = dict(out or {}), donate, options
        devices = workers.mesh.devices.flat
        # Whether all processes take part, of several: then they compare what they do.
        taking_part = {x.process_index for x in devices}
        self._shared = 1 < len(taking_part) == jax.process_count()
        self._in_flight = deque[jax.Array](maxlen=8)
        self._is_bounded = devices[0].platform == "cpu"
        self._waits: hosts.Waits | None = None
        self._count = 0
        self._calls = dict[Any, tuple[Program, Moves]]()
        self._programs = dict[Any, Program]()
        # Of arrays that a process has alone the rows for each part, once the processes have compared them.
        self._rows: dict[str, float] | None = None
        self.__wrapped__, self.__name__ = step, getattr(step, "__name__", "step")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the step returns, of all workers; modules of nnx are changed in place."""
        with Call.of(self.step, args, kwargs) as call:
            if call.traced:
                program = Program(self, Arguments(call, self.workers, self.rows))
                return program.results.rebuilt(program.on_mesh(call.arrays))
            key = call.key()
            found = self._calls.get(key)  # once: a module's key has the metadata of each variable
            if found is None:
                program = self._prepared(call)
                found = self._calls[key] = program, program.arguments.moves(call)
            program, moves = found
            for x, leaf in zip(call.arrays, program.arguments.leaves, strict=True):
                if type(x) is array_class() and x.is_deleted():  # type: ignore[attr-defined]
                    check_alive(leaf.name, x)
            if self._shared and self._count:
                hosts.check_same_scalars(self._count, program.named(call.arrays))
            self._count += 1
            results = program.jitted(*moved(call.arrays, moves))
            self._bound(results)
            return program.results.rebuilt(results)

    def _bound(self, results: list[jax.Array]) -> None:
        """Waits for earlier steps on a CPU, whose collectives deadlock with dozens of steps in flight."""
        self._in_flight.extend(results[-1:])
        if self._shared and self._in_flight:
            self._waits = self._waits or hosts.Waits()
            self._waits.latest = self._in_flight[-1]
        is_full = len(self._in_flight) == self._in_flight.maxlen
        if self._is_bounded and is_full and not self._in_flight[0].is_deleted():
            self._in_flight[0].block_until_ready()

    def _prepared(self, call: Call) -> "Program":
        """The program for a call, which all processes have."""
        if not self._shared:
            return self._program(call)
        if self._rows is not None:
            # One process alone may have set a number by hand, which lies elsewhere: no new program, and
            # others do not come.
            arguments = Arguments(call, self.workers, self.rows)
            self._check_rows(arguments.local_rows(call))
            known = self._programs.get(arguments.key(call))
            if known is not None and known.is_compared:
                return known
        program = hosts.together("the step was not traced", partial(self._program, call))
        self._compare(program, call)
        return program

    def _check_rows(self, rows: dict[str, float]) -> None:
        before = self._rows or {}
        if any(before.get(name, count) != count for name, count in rows.items()):
            raise ValueError(
                f"process {jax.process_index()} gives {rows} rows for each part of the batch, and gave "
                f"{self._rows} when processes compared theirs: give as many in each step, or make another "
                "step for others"
            )

    def _compare(self, program: "Program", call: Call) -> None:
        """Compares between processes what they give, and the program: all raise, or none."""
        mesh, rows = self.workers.mesh, program.arguments.local_rows(call)
        named = program.named(call.arrays)
        spec = self.rows.spec
        over = self.workers.axes if spec is None else axes_of(spec[0])
        hosts.check_rows(rows, {name: named[name] for name in rows}, mesh, over)
        whole = {name: x for name, x in named.items() if name not in rows}
        hosts.check_same("map_step", whole, mesh)
        arrays = moved(call.arrays, program.arguments.moves(call))
        hosts.check_same_program(program.jitted.lower(*arrays), program.named(arrays))
        program.is_compared, self._rows = True, self._rows or rows

    def _program(self, call: Call) -> "Program":
        arguments = Arguments(call, self.workers, self.rows)
        key = arguments.key(call)
        if key not in self._programs:
            self._programs[key] = Program(self, arguments)
        return self._programs[key]

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """Lowers the step as ``jax.jit(...).lower``, to read its program. Shapes will do."""
        with Call.of(self.step, args, kwargs) as call:
            program = self._program(call)
            arrays = moved(call.arrays, program.arguments.moves(call))
            return program.jitted.lower(*arrays)

    def explain(self, *args: Any, **kwargs: Any) -> str:
        """What each array of such arguments is to the workers, and what becomes of each result."""
        with Call.of(self.step, args, kwargs) as call:
            program = self._program(call)
            given = [f"{x.name}: {x.role.value}" for x in program.arguments.leaves]
            pairs = zip(program.results.each, program.outside.roles, strict=True)
            returned = [f"{x.name}: {role.value}" for x, role in pairs]
            return "\n".join(["given", *given, "returned", *returned])

    def prepare(self, state: Any) -> Any:
        """Places a state on the mesh, and gives each worker its own of what stands in front of an exchange.

        That is the momentum of ``optax.trace`` in front of the library's transform in a chain, or what
        ``optax.MultiSteps`` adds up: a plain ``init`` makes one of it.

        Args:
          state: a tree with the states of optimizers in it, or an ``nnx.Optimizer``, which is changed.

        Returns:
          The state; in front of an exchange arrays are in boxes, ``[workers, ...]``.
        """
        return prepared(state, self.workers)


class Trace(NamedTuple):
    """A step as it was traced on one worker.

    Attributes:
      closed: its jaxpr.
      results: what it returns.
      run: a function that is this jaxpr.
    """

    closed: Any
    results: Results
    run: Callable[..., Any]


class Program:
    """A step for arguments of one structure: traced, read, and run.

    Attributes:
      arguments: what goes in.
      results: what the step returns on a worker.
      outside: what becomes of it.
      is_compared: True once the processes have found that they have the same.
    """

    is_compared = False

    def __init__(self, mapped: MappedStep, arguments: Arguments):
        self.mapped, self.workers, self.arguments = mapped, mapped.workers, arguments
        # Types are needed inside of a group only, whose devices share what they send.
        self.mapper = with_free_axis(self.workers) if self.workers.group else self.workers
        self.specs = [x.spec for x in self.arguments.leaves]
        try:
            self.closed, self.results, self.run = self._traced()
        except Exception as error:
            self._check_whole_batch(error)
            raise
        if len(self.closed.jaxpr.invars) != len(self.specs):
            raise ValueError(
                "the step closes over an array of the jax.jit around it, such as a batch, and all workers "
                "would have the whole of it: give it as an argument"
            )
        check_closure(self.closed, self.workers)
        origins = differ.Origins()
        origins.results(self.closed.jaxpr, [frozenset([i]) for i in range(len(self.specs))])
        self.keys = self.arguments.keys | (self.arguments.raw_keys & origins.keys)
        self.arguments.check_batch(self.results.returned(), self.keys)
        self._check_scans(origins.scanned)
        self._read()

    def _check_scans(self, scanned: set[int]) -> None:
        """Raises for rows along the dimension over which a scan with an exchange in it runs, its steps."""
        for leaf in self.arguments.leaves:
            if leaf.place in scanned and leaf.role is Role.ROWS and leaf.dim == 0:
                name = self.arguments.names[leaf.argument]
                raise ValueError(
                    f"{leaf.name} has shape {leaf.shape.shape}, of which the first dimension is cut into "
                    "the rows of the workers, and a scan with the exchange in it runs over it, so each "
                    "worker would take other steps. Name the dimension of the rows behind that of the "
                    f"steps: map_step(step, workers, rows={{{name!r}: 1}})"
                )

    def _check_whole_batch(self, error: Exception) -> None:
        """Raises, where the step cannot be traced, if it can with the whole batch: then rows= cures it.

        Where the caller has named rows, a note of the error says what a worker has.
        """
        found = None
        workers = self.workers.num_gradients
        with contextlib.suppress(Exception):
            found = self._traced(times=workers)
        if found is not None:
            self.arguments.check_batch(found.results.returned(), self.arguments.raw_keys)
            cut = ", ".join(x.name for x in self.arguments.leaves if x.role is Role.ROWS)
            error.add_note(
                f"With all rows the step runs. On a worker {cut} has 1/{workers} of its rows, and other "
                "arguments and arrays from around the step are whole: give what has rows as an argument, "
                "and name it, map_step(step, workers, rows=...)"
            )

    def _traced(self, times: int = 1) -> Trace:
        """Traces the step on one worker.

        JAX knows the trace of a jitted function again, so that the step is not traced a second time. What
        a worker has of an array is taken inside of it: taken in front, AdamW's owners need a quarter more
        memory on a CPU, as XLA then fuses other operations.

        Args:
          times: that it has as many rows as are given.
        """
        found: dict[str, Any] = {}

        def known(arrays: list[jax.Array]) -> list[jax.Array]:
            return jax.core.eval_jaxpr(found["jaxpr"].jaxpr, found["jaxpr"].consts, *arrays)

        def step(arrays: list[jax.Array]) -> list[jax.Array]:
            if found:  # JAX has dropped its trace, and another one would not be that which was read
                return known(arrays)
            arrays = self.arguments.on_worker(arrays)
            nodes, out = self.arguments.called(in_worker(self.mapped.step), arrays)
            results = Results(self.arguments, arrays, nodes, out, self.mapped.out)
            found["results"] = results
            return [x.array for x in results.each]

        step.__name__ = self.mapped.__name__
        jitted = jax.jit(step)

        def probe(arrays: list[jax.Array]) -> jax.Array:
            found["traced"] = jitted.trace(arrays).jaxpr
            return jnp.zeros(())  # by a result with a spec JAX knows an Explicit mesh

        shapes = []
        for leaf in self.arguments.leaves:
            shape = list(leaf.shape.shape)
            if leaf.role is Role.ROWS:
                shape[leaf.dim] *= times
            shapes.append(leaf.shape.update(shape=tuple(shape)))
        token = checks.proven.set(True)
        try:
            jax.eval_shape(self.mapper.map(probe, (self.specs,), P(), typed=False), shapes)
        finally:
            checks.proven.reset(token)
        found["jaxpr"] = differ.without_axes(found["traced"], self.workers.axes)
        run = jitted if found["jaxpr"] is found["traced"] else known
        return Trace(found["jaxpr"], found["results"], run)

    def _read(self) -> None:
        """Proves which results differ between workers, and decides what becomes of them."""
        jaxpr, leaves, workers = self.closed.jaxpr, self.arguments.leaves, self.workers
        differences = differ.Differences(workers)
        given = [differences.over(x.over) for x in leaves]
        folded = [differences.each if i in self.keys else x for i, x in enumerate(given)]
        results = differences.results(jaxpr, folded)
        self._check_gradients(differences)
        # A key that is kept, split or counted on goes on as on one device, whatever each draws with it.
        unfolded = differ.Differences(workers).results(jaxpr, given) if self.keys else results
        self.chains = list[int]()
        for i, x in enumerate(self.results.each):
            is_a_key = is_key(x.array) or (x.before and x.before.place in self.keys)
            if is_a_key and results[i] != differences.constant == unfolded[i]:
                self.chains.append(i)
        self.outside = Outside(self, differences, results)

    def named(self, arrays: Sequence[Any]) -> dict[str, Any]:
        """Arrays of a call by their names."""
        return {x.name: array for x, array in zip(self.arguments.leaves, arrays, strict=True)}

    @cached_property
    def doubled(self) -> Trace:
        """The step with twice the rows."""
        return self._traced(times=2)

    @cached_property
    def grown(self) -> list[bool]:
        """For each result whether its first dimension doubles with the rows: such are rows themselves."""
        pairs = zip(self.results.each, self.doubled.results.each, strict=True)
        arrays = [(one.array, other.array) for one, other in pairs]
        return [x.ndim > 0 and y.shape[0] == 2 * x.shape[0] for x, y in arrays]

    def _unfolded(self, arrays: Sequence[Any]) -> list[Any]:
        """The keys that go on as on one device, by the operations that they need."""
        wanted = [i in self.chains for i in range(len(self.results.each))]
        part, used = dce_jaxpr(self.closed.jaxpr, wanted)
        needed = [x for x, is_used in zip(arrays, used, strict=True) if is_used]
        return jax.core.eval_jaxpr(part, self.closed.consts, *needed)

    def _check_gradients(self, differences: differ.Differences) -> None:
        """Raises for gradients that are the same on all workers, or over some of their axes."""
        sizes = self.workers.mesh.shape
        for exchange in differences.gradients():
            over = differences.axes_of(differences.join(*exchange.values()))
            if same := [n for n in self.workers.axes if n not in over and sizes[n] > 1]:
                where = f"over {', '.join(same)}" if over else "on all workers"
                raise ValueError(
                    f"the gradients of {', '.join([*exchange][:3])} are the same {where}: they are made of "
                    "no rows of a batch, or were averaged in front of the exchange. Leave lax.pmean out, "
                    "or one of two transforms in which workers talk; or say which argument is the batch: "
                    'map_step(step, workers, rows="batch")'
                )
        if differences.draws_alike and self.workers.num_gradients > 1:
            warnings.warn(
                "the step draws random numbers with a key that is the same on all workers, so all draw "
                "alike, such as one dropout mask: it makes the key of a constant. Give the key as an "
                "argument, into which each worker folds its number, or fold it in: jax.random.fold_in(key, "
                f"jax.lax.axis_index({self.workers.axes}))",
                stacklevel=frames_of_ours(),
            )

    # --- Run

    @cached_property
    def jitted(self) -> Any:
        """The compiled program, of the arrays of a call."""

        def run(*arrays: jax.Array) -> list[jax.Array]:
            return self.on_mesh(arrays)

        run.__name__ = self.mapped.__name__
        donated = arguments_of(self.mapped.donate, self.arguments.names)
        leaves = self.arguments.leaves
        pairs = zip(self.outside.specs, self.results.each, strict=True)
        results = [spec if x.array.size else P() for spec, x in pairs]
        return jax.jit(
            run,
            in_shardings=tuple(self.arguments.shardings),
            out_shardings=self.workers.shardings(results),
            donate_argnums=[i for i, x in enumerate(leaves) if x.argument in donated],
            compiler_options=self.mapped.options,
        )

    def on_mesh(self, arrays: Sequence[Any]) -> list[Any]:
        """The results of all workers, of global arrays."""

        def on_worker(arrays: list[jax.Array]) -> list[jax.Array]:
            whole = self.arguments.on_worker(arrays)
            here = [fold(self.workers, x) if i in self.keys else x for i, x in enumerate(arrays)]
            with jax.named_scope(scopes.DECIDED):  # by none alone: `differ` has proven it
                results = self.run(here)
            if self.chains:
                for i, x in zip(self.chains, self._unfolded(arrays), strict=True):
                    results[i] = x
            return self.outside.joined(results, whole)

        run = self.mapper.map(on_worker, (self.specs,), self.outside.specs, typed=False)
        return run(list(arrays))  # type: ignore[no-any-return]


def frames_of_ours() -> int:
    """How many frames of this package stand on those of the line that called it, for a warning there."""
    package, frame, count = __name__.partition(".")[0], inspect.currentframe(), 0
    while frame and frame.f_globals["__name__"].partition(".")[0] == package:
        frame, count = frame.f_back, count + 1
    return count


def with_free_axis(workers: Workers) -> Workers:
    """The same workers on a mesh with one more axis, of one device, for a ``shard_map`` with types."""
    mesh = workers.mesh
    kinds = (*mesh.axis_types, jax.sharding.AxisType.Auto)
    wider = jax.sharding.Mesh(mesh.devices[..., None], (*mesh.axis_names, FREE), axis_types=kinds)
    return Workers(wider, workers.axis, workers.group)


def check_closure(closed: Any, workers: Workers) -> None:
    """Raises for arrays from around the step that lie over the workers, and for random keys."""
    for x in closed.consts:
        if not isinstance(x, jax.Array) or isinstance(x, jax.core.Tracer):
            continue
        if not set(workers.axes).isdisjoint(axes_in(spec_of(x))):
            raise ValueError(
                f"the step closes over an array of shape {x.shape} that is cut over the workers: give it "
                "as an argument"
            )
        if is_key(x):
            raise ValueError(
                "the step closes over a random key, and all workers would draw the same: give it as an "
                "argument, into which each folds its number"
            )


def moved(arrays: list[Any], moves: Moves) -> list[Any]:
    """The arrays where the program wants them."""
    arrays = list(arrays)
    for i, sharding, shape in moves:
        arrays[i] = hosts.put(arrays[i], sharding, shape)
    return arrays
