"""What every transform of this library promises, in one list of transforms and one of properties.

A transform runs on three workers of two devices each, on parameters that are cut over those two and whose
sizes nothing divides. It is compiled once for all that is asked of that program.
"""

import functools
import inspect
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import assert_same, scanned, workers_on
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import lioncub_jax as lc
from lioncub_jax import baselines

Q, WIRES = lc.quantize, lc.wires
RATE = 1 / 8
HOW = {"learning_rate": RATE, "weight_decay": 0.0}


def like(plain, make, *arguments, **options):
    """``workers -> transform``; and what it is with one worker alone, None where codes are coarser."""
    return functools.partial(make, *arguments, **options), plain


def rated(plain, make, **options):
    """Of those that take a learning rate."""
    return like(plain, make, **HOW, **options)


LION, SGD = optax.lion(RATE, weight_decay=0.0), optax.sgd(RATE)
OUTER = optax.sgd(0.7, 0.9, nesterov=True)
TRANSFORMS = {
    "vote": rated(LION, lc.lion_cub),
    "vote, 3 bits": rated(LION, lc.lion_cub, quantizer=Q.midrise(3)),
    "vote, int8": rated(LION, lc.lion_cub, quantizer=Q.integer(8), wire=WIRES.counts()),
    "vote, buckets": rated(LION, lc.lion_cub, bucket_size=3000),
    "vote, synced": rated(LION, lc.lion_cub, sync=lc.sync.every(2)),
    "average": rated(LION, lc.distributed_lion, average=True),
    "owner": rated(LION, lc.owner_lion),
    "owner, adamw": rated(optax.adamw(RATE, weight_decay=0.0), lc.owner_adamw),
    "owner, muon": rated(optax.contrib.muon(RATE, consistent_rms=0.2), lc.owner_muon),
    "owner, trace": like(
        optax.trace(0.9), lc.owner, optax.trace(0.9), quantizer=Q.dense(), reply=lc.decide.values()
    ),
    "global lion": like(LION, lc.global_gradients, LION),
    "powersgd": like(SGD, baselines.powersgd, SGD, 2),
    "one_bit_adam": rated(None, baselines.one_bit_adam, warmup=2),
    "diloco": like(OUTER, baselines.diloco),
    "diloco, 4 bits": like(OUTER, baselines.diloco, bits=4),
}  # fmt: skip


def transform(name, workers):
    return TRANSFORMS[name][0](workers=workers)


def mapped(tx, workers):
    """A transform on gradients ``[workers, ...]``, a worker's each, and so is who abstains."""

    def update(rows, state, params):
        grads, told = jax.tree.map(lambda x: x[0], rows)
        return tx.update(grads, state, params, **told)

    run = lc.map_step(update, workers, rows="rows")
    return optax.GradientTransformationExtraArgs(
        tx.init, lambda grads, state, params, **told: run((grads, told), state, params)
    )


def test_every_optimizer_signs():
    makers = {make.func.__name__ for make, _ in TRANSFORMS.values()}
    ours = {
        "lion_cub",
        "distributed_lion",
        "owner",
        "owner_lion",
        "owner_adamw",
        "owner_muon",
        "global_gradients",
    }
    assert makers == ours | {*baselines.__all__}


def named(names):
    return pytest.mark.parametrize("name", list(names))


ALL = named(TRANSFORMS)
# Averages of floats, which have no abstention of their own.
FLOATS = {"global lion", "diloco"}
CODED = named(name for name in TRANSFORMS if name not in FLOATS)

SHAPES = {"w": (34, 130), "b": (65,), "s": ()}
SPECS = {"w": P("tensor"), "b": P(), "s": P()}
WORKERS = 3


def numbers(seed, *lead):
    rng = np.random.default_rng(seed)
    return {k: rng.normal(size=(*lead, *s)).astype(np.float32) for k, s in SHAPES.items()}


PARAMS = numbers(0)


class Run:
    """A transform with its program, its first state, and that after three steps."""

    def __init__(self, name):
        self.workers, self.can_abstain = workers_on("data=3 tensor=2"), name not in FLOATS
        self.tx = transform(name, self.workers)
        params = jax.device_put(PARAMS, self.workers.shardings(SPECS))
        self.first = params, self.tx.init(params)
        self.mapped = lc.map_step(self._step, self.workers)
        nobody = np.zeros(WORKERS, bool)
        self.program = self.mapped.lower(*self.first, (numbers(1, WORKERS), nobody)).compile()
        self.at = self.after(*self.first, seeds=(1, 2, 3))

    def _step(self, params, state, rows):
        grads, abstain = jax.tree.map(lambda x: x[0], rows)
        told = {"abstain": abstain} if self.can_abstain else {}
        updates, state = self.tx.update(grads, state, params, **told)
        return optax.apply_updates(params, updates), state

    def step(self, params, state, grads, abstain=()):
        return self.mapped(params, state, (grads, np.isin(np.arange(WORKERS), abstain)))

    def after(self, params, state, seeds):
        """Steps in which one worker after the other sits out once."""
        for seed in seeds:
            params, state = self.step(params, state, numbers(seed, WORKERS), [seed % 4])
        return params, state


run_of = functools.cache(Run)


def plain(tree):
    """Leaves by path, as numpy."""
    found = {jax.tree_util.keystr(p): x for p, x in jax.tree_util.tree_leaves_with_path(tree)}
    return {path: np.asarray(x) for path, x in found.items()}


# --- What travels


@ALL
def test_the_bytes_of_the_program_are_those_that_are_predicted(name):
    run = run_of(name)
    found = lc.audit.collectives(run.program, run.workers.mesh)
    asked = lc.audit.of(run.tx, PARAMS, run.workers, specs=SPECS)
    always, gated = Counter(), Counter()
    for x in found:
        if "data" in x.axes:
            (gated if x.gated else always)[x.op] += x.sent_bytes
    if name == "one_bit_adam":  # floats at first, codes behind it
        in_codes, in_floats = asked.stages
        # XLA may see that two buckets count the same workers.
        assert 0 <= in_floats - gated.pop("all-reduce") <= 8
        assert gated.total() == in_codes == asked.sent_bytes and not always
    else:
        assert asked.sent_bytes > 0  # thirds of bytes, added up in another order
        assert always.total() == pytest.approx(asked.sent_bytes, rel=1e-12)
        assert gated.total() == pytest.approx(asked.stages[-1] - asked.sent_bytes)
    # Over the other axes go flags and counts of votes, and a shared scale.
    inside = sum(x.sent_bytes for x in found if x.axes == ("tensor",)) - asked.group_bytes
    assert 0 <= inside <= 40 and all(x.axes in {("data",), ("tensor",)} for x in found)
    assert asked.parameters == 34 * 130 / 2 + 65 + 1


@ALL
def test_programs_of_all_platforms_send_the_same(name):
    """Each has workarounds of its own, which must not trip over shards, whole tiles or a number alone."""
    sizes = {"a": (65,), "b": (256, 512), "c": (256, 512), "d": ()}
    params = {k: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for k, shape in sizes.items()}
    specs, sent = {"a": P(), "b": P("tensor"), "c": P(), "d": P()}, {}
    for platform in ("cpu", "gpu", "tpu"):
        device = AbstractDevice(device_kind=platform, num_cores=None, platform=platform)
        mesh = AbstractMesh((WORKERS, 2), ("data", "tensor"), abstract_device=device)
        workers = lc.Workers(mesh, "data")
        asked = lc.audit.of(transform(name, workers), params, workers, specs=specs)
        sent[platform] = asked.stages
    assert len({*sent.values()}) == 1, sent


# --- Whose the state is

# Fields that differ between workers, each worker's or each owner's own; all others are the same everywhere.
OWN = {
    "vote": "mu", "average": "mu", "owner": "error owner.mu",
    "owner, adamw": "error owner.mu owner.nu owner.error",
    "owner, muon": "error owner.mu owner.nu owner.error", "owner, trace": "owner.trace",
    "diloco, 4 bits": "error owner.error", "powersgd": "error", "one_bit_adam": "error owner.error",
}  # fmt: skip


def own_fields(name):
    return set(OWN.get(name, OWN.get(name.split(",")[0], "")).split())


def field_of(path):
    """``owner.mu`` of ``[0].owner[1].value.mu``, ``error`` of ``[0].error['w']``."""
    names = re.findall(r"\.(\w+)", path.removesuffix(".value"))
    return ".".join(["owner"] * ("owner" in names) + names[-1:])


def saying(tree):
    """Fields of which a state says whose they are, and the states inside of it."""
    yield from getattr(tree, "holders", dict)()
    for x in jax.tree.leaves(tree, is_leaf=lambda x: x is not tree and hasattr(x, "holders")):
        if x is not tree and hasattr(x, "holders"):
            yield from saying(x)


@ALL
def test_state_is_where_it_is_said_to_be(name):
    run, found = run_of(name), set()
    params, state = run.at
    made = lc.training.abstract_state(run.tx, params, run.workers).opt_state
    leaves = jax.tree_util.tree_leaves_with_path(state)
    for (path, x), like in zip(leaves, jax.tree.leaves(made), strict=True):
        assert x.sharding.is_equivalent_to(like.sharding, x.ndim), path
        if "data" in jax.tree.leaves(tuple(x.sharding.spec)):
            found.add(field_of(jax.tree_util.keystr(path)))
    assert found == own_fields(name)
    # Where it is not the same everywhere, its class says what becomes of it if workers go or come.
    assert {field.split(".")[0] for field in found} <= {*saying(state)}
    for path, x in jax.tree_util.tree_leaves_with_path((params, state)):
        copies = {}
        for shard in x.addressable_shards:  # copies are the same to the bit
            first = copies.setdefault(str(shard.index), np.asarray(shard.data))
            np.testing.assert_array_equal(np.asarray(shard.data), first, err_msg=str(path))


# --- Abstention


def with_worker_1(grads, value):
    changed = {k: g.copy() for k, g in grads.items()}
    for g in changed.values():
        g[1] = value
    return changed


def differing(found, wanted):
    found, wanted = plain(found), plain(wanted)
    return {path for path in wanted if not np.array_equal(found[path], wanted[path])}


@CODED
def test_who_abstains_has_no_influence_and_keeps_what_it_had(name):
    run, grads = run_of(name), numbers(9, WORKERS)
    told = run.step(*run.at, grads, [1])
    assert_same(run.step(*run.at, with_worker_1(grads, 1e30), [1]), told)
    assert_same(run.step(*run.at, with_worker_1(grads, np.nan), [1]), told)
    # A gradient that is not finite abstains by itself, and one that is counts.
    assert_same(run.step(*run.at, with_worker_1(grads, np.nan)), told)
    assert_same(run.step(*run.at, with_worker_1(grads, np.inf)), told)
    assert differing(run.step(*run.at, grads)[0], told[0])
    before, after = plain(run.at[1]), plain(told[1])
    for path in before:
        if field_of(path) in own_fields(name) and "owner" not in path and "synced" not in name:
            np.testing.assert_array_equal(after[path][1], before[path][1], err_msg=path)
            assert "'w'" not in path or (after[path][0] != before[path][0]).any(), path


# On these a mean of nobody is zero, and the optimizer behind it goes on; a sync goes on as well.
GOES_ON = {"diloco, 4 bits", "vote, synced"}


@CODED
def test_where_nobody_votes_nothing_moves_and_no_counter_of_updates(name):
    run = run_of(name)
    for grads, abstain in ((numbers(9, WORKERS), [0, 1, 2]), (numbers(9, WORKERS), ())):
        if not abstain:
            grads = {k: np.full_like(g, np.nan) for k, g in grads.items()}
        moved = differing(run.step(*run.at, grads, abstain), run.at)
        counts = {"abstained", "abstentions", "ties", "unlike", "pairs"}
        said = {path for path in moved if field_of(path) in counts}
        seed = {path for path in moved if field_of(path) == "count"}  # and of no updates
        assert name in GOES_ON or (said and len(seed) == 1 and moved == said | seed), moved


# --- Going on from a checkpoint


# One of each kind of state.
SAVED = [
    "vote, synced", "owner", "owner, adamw", "owner, muon", "global lion", "diloco, 4 bits",
    "powersgd", "one_bit_adam",
]  # fmt: skip


@pytest.fixture(scope="module")
def restored(tmp_path_factory):
    """Several transforms as one state, saved and read back."""
    runs = {name: run_of(name) for name in SAVED}

    def state(parts, step, key):
        params = {name: params for name, (params, _) in parts.items()}
        opt_states = {name: state for name, (_, state) in parts.items()}
        return lc.training.StepState(jnp.int32(step), params, (), opt_states, jax.random.key(key))

    workers = runs[SAVED[0]].workers
    with lc.Checkpoints(tmp_path_factory.mktemp("saved"), workers=workers) as checkpoints:
        checkpoints.save(state({name: run.at for name, run in runs.items()}, 3, 1), wait=True)
        like = state({name: run.first for name, run in runs.items()}, 0, 0)
        found = checkpoints.restore(like).state
    assert int(found.step) == 3
    return {name: (found.params[name], found.opt_state[name]) for name in SAVED}


@pytest.mark.parametrize("name", SAVED)
def test_a_run_goes_on_from_its_checkpoint_to_the_bit(name, restored):
    run = run_of(name)
    assert_same(restored[name], run.at)
    assert_same(run.after(*restored[name], seeds=(4, 5)), run.after(*run.at, seeds=(4, 5)))


# --- Going on alone


# Transforms whose updates are sums of mean gradients but for what is still owed.
OWED = {
    "owner": like(
        None, lc.owner, optax.identity(), quantizer=Q.error_feedback(Q.midrise(2), jnp.float32)
    ),
    "diloco": like(None, baselines.diloco, -1.0, momentum=0.0, bits=1),
    "powersgd": like(None, baselines.powersgd, optax.identity(), 1),
}  # fmt: skip


def test_one_who_goes_on_alone_pays_what_several_workers_still_owe(tmp_path):
    """From a checkpoint: of nothing that was sent or kept is a part lost."""
    zeros = optax.tree.zeros_like(PARAMS)

    def first(workers):
        on = on_all({name: make(workers=workers) for name, (make, _) in OWED.items()}, workers)
        states = {name: tx.init(zeros) for name, tx in on.items()}
        params = jax.device_put(zeros, workers.shardings(P()))
        state = lc.training.StepState(jnp.int32(0), params, (), states, jax.random.key(0))
        return state, jax.jit(
            lambda g, states: {n: tx.update(g, states[n], zeros) for n, tx in on.items()}
        )

    def apart(done):
        return ({n: x[part] for n, x in done.items()} for part in range(2))

    three, one = workers_on("data=3"), workers_on("data=1")
    (state, update), (like, alone) = first(three), first(one)
    before, states = apart(update(numbers(1, WORKERS), state.opt_state))
    mean = {k: g.mean(0) for k, g in numbers(1, WORKERS).items()}
    total = jax.tree.map(lambda *x: sum(x), mean, numbers(2), numbers(3))
    with lc.Checkpoints(tmp_path, workers=three) as checkpoints:
        checkpoints.save(state._replace(opt_state=states))
    with lc.Checkpoints(tmp_path, workers=one) as checkpoints:
        paid, states = before, checkpoints.restore(like).state.opt_state
    for seed in (2, 3):
        updates, states = apart(alone(numbers(seed, 1), states))
        paid = jax.tree.map(np.add, paid, updates)
    for name in OWED:
        assert_same(paid[name], total, atol=1e-4)


# --- Types

WIDE = ["vote, 3 bits", "vote, synced", "owner, adamw", "powersgd"]


SHORT, LONG = (jnp.bfloat16, jnp.float32, jnp.float16), (jnp.float64,) * 3


@pytest.mark.parametrize("name", WIDE)
def test_sixty_four_bits_change_no_dtype_and_no_number(name):
    """State that changed its dtype would trace twice, and could not be restored."""
    run, grads = run_of(name), numbers(9, WORKERS)
    with jax.enable_x64(True):
        on = mapped(transform(name, run.workers), run.workers)
        told = np.zeros(WORKERS, bool)
        wide = on.update(grads, run.at[1], run.at[0], abstain=told)
        moved = optax.apply_updates(run.at[0], wide[0])
    # optax corrects Adam's bias in 64 bits then.
    assert_same((moved, wide[1]), run.step(*run.at, grads), atol=1e-4 if "adam" in name else 0)


@ALL
@pytest.mark.parametrize(("workers", "dtypes"), [(1, LONG), (3, SHORT)])
def test_an_update_has_the_dtype_of_its_gradient_where_jax_promotes_nothing(name, workers, dtypes):
    kinds, workers = dict(zip(SHAPES, dtypes, strict=True)), workers_on(f"data={workers}")
    # Adam of optax itself takes a number to the power of a count.
    own = jax.numpy_dtype_promotion("standard" if re.search("adamw|muon", name) else "strict")
    with own, jax.numpy_rank_promotion("raise"), jax.enable_x64(dtypes == LONG):
        on = mapped(transform(name, workers), workers)
        params = {k: jax.ShapeDtypeStruct(SHAPES[k], kind) for k, kind in kinds.items()}
        grads = jax.tree.map(lambda x: x.update(shape=(workers.num_gradients, *x.shape)), params)
        state = jax.eval_shape(on.init, params)
        updates, after = jax.eval_shape(on.update, grads, state, params)
    assert {k: u.dtype for k, u in updates.items()} == kinds
    assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(
        lambda x: (x.shape, x.dtype), state
    )


# --- One worker, and numbers that are arrays


def on_all(txs, workers):
    return {name: mapped(tx, workers) for name, tx in txs.items()}


def outcomes(txs, *lead):
    """Updates of two steps of some transforms, all in one program."""

    @jax.jit
    def steps(params, grads):
        first = {name: tx.init(params) for name, tx in txs.items()}
        done = scanned(txs, first, params, grads)
        return {name: updates for name, (updates, _) in done.items()}

    return steps(PARAMS, jax.tree.map(lambda *x: np.stack(x), *(numbers(n, *lead) for n in (1, 2))))


def test_one_worker_alone_is_the_plain_optimizer():
    """On a mesh, and without one; and a direction is all but the rate."""
    workers = workers_on("data=1")
    plain_ones = {name: tx for name, (_, tx) in TRANSFORMS.items() if tx is not None}
    want = outcomes(plain_ones)
    want["direction"] = want["vote"]
    direction = optax.chain(lc.scale_by_lion_cub(workers=None), optax.scale_by_learning_rate(RATE))
    ours = [
        name for name in plain_ones if TRANSFORMS[name][0].func.__name__ not in baselines.__all__
    ]
    without = {name: transform(name, None) for name in ours} | {"direction": direction}
    on = on_all({name: transform(name, workers) for name in plain_ones}, workers)
    for found in (outcomes(on, 1), outcomes(without)):
        for name in found:
            # Adam's roots and quotients are fused with what follows, or not.
            # And XLA multiplies matrices in other programs.
            near = 1e-6 if re.search("adam|muon", name) else 0
            assert_same(found[name], want[name], atol=near)


INJECTED = {  # what is static besides the axis
    lc.lion_cub: {"bucket_size": 3000},
    lc.owner_adamw: {},
    baselines.one_bit_adam: {"warmup": 1},
}


def test_injected_hyperparameters_change_nothing():
    """On explicit inner axes too, where JAX refuses closures over traced numbers."""
    workers = workers_on("data=2 tensor=2", kind=AxisType.Explicit)
    plainly, injected = {}, {}
    for make, static in INJECTED.items():
        how = {**HOW, **static, "workers": workers}
        plainly[make.__name__] = make(**how)
        inject = optax.inject_hyperparams(make, static_args=("workers", *static))
        injected[make.__name__] = inject(**how)
    found, wanted = (outcomes(on_all(txs, workers), 2) for txs in (injected, plainly))
    for name in found:  # betas are float32 then, and so is one less a beta
        near = {"atol": 1e-5, "rtol": 1e-5} if "adam" in name else {}
        assert_same(found[name], wanted[name], **near)


# --- Refusals that all share


def traced(tx, grads=None, params=PARAMS, of=None, **extra):
    """An update of one worker of two, by shape; with a state ``of`` other parameters."""
    grads = PARAMS if grads is None else grads

    def worker(grads, params):
        own = jax.lax.pcast(grads, "data", to="varying")
        state = tx.init(own if of is None else jax.lax.pcast(of, "data", to="varying"))
        return tx.update(own, state, params, **extra)[0]

    mesh = workers_on("data=2").mesh
    mapped = jax.shard_map(worker, mesh=mesh, in_specs=P(), out_specs=P())
    return jax.eval_shape(mapped, grads, params)


def refused(call, *words):
    with pytest.raises((TypeError, ValueError)) as caught:
        call()
    for word in words:
        assert word in str(caught.value)


@ALL
def test_what_no_transform_can_work_with_is_refused(name):
    make = functools.partial(transform, name)
    tx = make("data")
    unbound = "is not a mesh axis here", "jax.shard_map or jax.pmap"
    refused(lambda: tx.update(PARAMS, tx.init(PARAMS), PARAMS), "workers='data'", *unbound)
    refused(lambda: traced(make("batch")), "workers='batch'", "the mapped axes are ('data',")
    for axis in ((), ("data", "data"), ("data", 1), ["data"], 0):
        refused(lambda axis=axis: make(axis), f"workers={axis!r}", "a string, a tuple of names")
    maker, wanted = TRANSFORMS[name][0], "give a finite number, such as 1e-3, or an optax schedule"
    for rate in {"learning_rate", "weight_decay"} & {*inspect.signature(maker.func).parameters}:
        for x in ("1e-3", np.nan, True):
            refused(
                lambda x=x, rate=rate: maker(**{rate: x}, workers="data"), f"{rate}={x!r}", wanted
            )
    refused(lambda: traced(tx, abstian=True), "no argument 'abstian'", "give abstain")
    if name in FLOATS:  # which would be averaged, or averaged again
        refused(lambda: traced(tx, abstain=np.bool_(True)), "abstain", "give owner(tx)")
        return
    refused(lambda: traced(tx, abstain=np.float32(1)), "abstain", "float32", "one bool")
    others = {**PARAMS, "w": np.ones((35, 130), np.float32)}
    if any("owner" not in field for field in own_fields(name)):
        said = ["for other parameters"] if "muon" in name else ["is of other parameters", "shows"]
        for of in (others, {"w": others["w"]}):
            refused(lambda of=of: traced(tx, of=of), *said)
    refused(
        lambda: traced(optax.chain(tx, tx)), "from a vote before this one", "vote or average once"
    )
    whole = {**PARAMS, "w": np.ones((3, 5), np.int32)}
    refused(lambda: traced(tx, whole, whole), "['w'] is int32", "only floating leaves can vote")
    refused(lambda: traced(tx, abstain=np.zeros(3, bool)), "abstain", "(3,)")

    def summed(params):
        own = jax.lax.pcast(params, "data", to="varying")
        x = jax.lax.axis_index("data").astype(jnp.float32)
        reduced = jax.grad(lambda w: x * jnp.sum(w**2))(params["w"])
        return tx.update({**own, "w": reduced}, tx.init(own), params)[0]

    mapped = jax.shard_map(summed, mesh=workers_on("data=2").mesh, in_specs=P(), out_specs=P())
    refused(lambda: jax.eval_shape(mapped, PARAMS), "['w']", "already reduced in full")
