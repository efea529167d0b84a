"""Mistakes that the tests must see: each is put alone into a copy of the repository, and tests run there.

``python tests/mutants.py`` says for each by which test it was caught, or that it survived. It is no test
itself: all of it takes an hour. Each mistake is one that a good engineer could make, changes what the
library does, and breaks no import. Where the library has moved on, the list says so before anything runs.
"""

import argparse
import contextlib
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).absolute().parents[1]
LIMIT = 1200  # seconds; what takes longer hangs, and was noticed so
MARK = "MUTANT_RUN"  # in the environment of all that a run starts, wherever it goes
FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.M)

# "#" a file of lioncub_jax or benchmarks, and words in the names of tests that should see its mistakes;
# "=" what is wrong; "-" the code, which stands there once; "+" the mistake, nothing where code is left out.
MUTANTS = r"""
# exchange/transform.py: reference optimizer chains contract
= an owner's counter moves although no worker takes part
- n if n.ndim else jnp.where(present > 0, n, o)
+ n

= of buckets the one with the most voters gives the number that abstained
- jnp.min(num_present)
+ jnp.max(num_present)

# exchange/step.py: reference optimizer chains contract
= a single worker ignores that it shall abstain
- axes.any_over_shards(abstains | ~axes.all_finite(values), axis)
+ axes.any_over_shards(~axes.all_finite(values), axis)

= a single worker forgets the errors of earlier codes
- plus_error(rule.interpolate(g, m), e)
+ rule.interpolate(g, m)

= a single worker adds the errors of earlier codes at every step
- None if e is None else jnp.where(abstains, e, 0)
+ e

= a single worker has statistics of its first bucket only
- [reply] * len(plan.buckets)
+ [reply]

# baselines/terngrad.py: liars
= a worker that says that it abstains has a vote in a sum
- zero=True, divides_by_present=True
+ zero=True, divides_by_present=False

# baselines/terngrad.py: contract
= a single worker has the signs of its gradients
- decode, reply_format, itself)
+ decode, reply_format, jnp.sign)

# exchange/step.py: reference optimizer chains contract quantize
= the error of a worker that abstains is forgotten
- error = xla.chosen(participates, new, old, error,
+ error = xla.chosen(participates, new, old, 0 * error,

= a share of the error is to come back, and all of it does
- error if codec.keep == 1 else codec.keep * error
+ error

= ties of a second bucket take the coins of the first
- row = places.first_row + first
+ row = first

= a leaf takes the padding of the bucket's first rows for its own
- sizes[first:][:size]
+ sizes[:size]

# exchange/step.py: sharding accounting optimizer contract
= a leaf in shards has the scale of one shard
- float(s.size) * bucket.num_shards
+ float(s.size)

= a device with a NaN abstains, and others of its worker vote
- ~axes.any_over_shards(~xla.all_delayed_by(flags, words), plan.axis)
+ xla.all_delayed_by(flags, words)

= padding in a chunk of a group keeps an error
- saturated(layout.zero_padding(x, plan.row_sizes[i]), leaves
+ saturated(x, leaves

# exchange/checks.py: bad_input contract
= a beta of 1 is let through
- 0 <= beta < 1
+ 0 <= beta <= 1

= a number that is none is a rate
- np.isfinite, allowed)
+ lambda x: True, allowed)

= an array is taken for what is compiled
- if static and isinstance(x, jax.Array):
+ if static is bool:

# exchange/votes.py: reference optimizer quantize contract
= pairs of votes are of all workers, whoever abstains
- bits.products(upper, bits.difference(votes, upper))
+ bits.products(upper, [~plane for plane in upper])

= padding has votes
- upper = [plane & real for plane in upper]
+ pass

= a tie leans to the upper side
- (tied & context.tie_bits(positive.shape[-1]))
+ tied

= a row moves only where the number of voters is odd
- reduce(operator.or_, voters)
+ voters[0]

= an average of codes of several bits divides by the voters alone
- .astype(jnp.int32)[..., None] * fmt.max_code
+ .astype(jnp.int32)[..., None]

= padding counts as ties
- tied &= bits.pack(context.real())[0]
+ pass

= an average of codes with a zero divides by workers that abstain, too
- ((counted.present >> k) & 1)
+ ((jnp.uint32(fmt.num_workers) >> k) & 1)

# exchange/at_owner.py: reference optimizer quantize contract
= momentum at the owner fades although nobody came
- jnp.isfinite(mean) & (present > 0)
+ jnp.isfinite(mean)

= padding is a vote of its row, and has momentum
- known &= layout.real_elements(row_sizes)
+ pass

= an owner forgets what it owes where nobody came
- new_error = jnp.where(jnp.isnan(u), error, new_error)
+ pass

= values of a worker that abstains come into the mean
- jnp.where(participates[worker], decode(codes(worker), scales), 0)
+ decode(codes(worker), scales)

# exchange/matrices.py: muon contract
= a matrix goes to the owner with the most work
- heapq.heapreplace(heap, (load + kind.work, owner))
+ heapq.heapreplace(heap, (load - kind.work, owner))

= matrices are taken by the order of their elements, whatever their dimension numbers
- flat[k] = leaves[i].transpose(one.order).reshape(-1)
+ flat[k] = leaves[i].reshape(-1)

= a row of which a device has a part has no padding
- own = jnp.tile(jnp.clip(run.size - own * ROW, 0, ROW), run.number)
+ own = jnp.tile(jnp.full_like(own, ROW), run.number)

= devices are owners of whole matrices even where that sends twice the bytes
- devices * whole.rows <= WORTH * shared.rows
+ devices * whole.rows <= 9 * shared.rows

# exchange/matrices.py: muon contract
= the momentum of a matrix moves where its mean is not known
- jnp.where(known, saturated(n, rows.dtype), o)
+ saturated(n, rows.dtype)

# exchange/at_owner.py: muon contract
= embeddings in the holes are taken for parts of matrices
- jnp.where(known & of_matrix, mean, jnp.nan)
+ jnp.where(known, mean, jnp.nan)

= an owner takes the matrices of another
- owners = context.worker * each + jnp.arange(each, dtype=jnp.int32)
+ owners = jnp.arange(each, dtype=jnp.int32)

# checkpoint/rows.py: muon
= momentum that lies whole on a device is read as if its devices shared it
- x = matrices.in_place(self._to_owners(x), self.deal
+ x = matrices.in_place(x, self.deal

= the slices of embeddings are saved among the matrices
- (x[0] in mixed) == (part == "matrices")
+ (x[0] in mixed) != (part == "matrices")

# exchange/quantize.py: quantize reference sharding
= a row of zeros votes if codes have several bits
- jnp.bfloat16), mean > 0, finite)
+ jnp.bfloat16), mean >= 0, finite)

= the step of a row whose sum overflows is the largest there is
- jnp.where(jnp.isfinite(total), total / size, maximum)
+ total / size

= the norm of a row is rounded to the nearest, and the largest value clipped
- + 0xFFFF)
+ + 0x8000)

= rotated rows are measured as if padding had stayed where it was
- context._replace(row_sizes=None)
+ context

# exchange/bits.py: quantize reference
= a number that a dtype cannot hold becomes infinite
- x = jnp.clip(x, -largest, largest)
+ pass

# exchange/bits.py: bits reference
= the carry of 8 votes of 8 is lost
- (num_workers * (2**p - 1)).bit_length()
+ (num_workers * (2**p - 1) - 1).bit_length()

= in a part block the upper lanes of a row are not seen
- either, bit = either | (either >> bit), bit // 2
+ bit //= 2

= few numbers fill half a block for each worker
- max(2, 1 << (rest - 1).bit_length()) if rest else 0
+ max(16, 1 << (rest - 1).bit_length()) if rest else 0

= a zero takes the side that is the coin of its tie
- _seed(num_steps, _ZEROS)
+ _seed(num_steps, _TIES)

# exchange/votes.py: liars
= a worker that says that it abstains has a vote in an average
- sent = zero_unless(participates, received.planes, fmt)
+ sent = received.planes

# exchange/wires.py: liars
= who takes part is added up as it comes
- numbers[:, 0, 0] & 1
+ numbers[:, 0, 0]

= a vote on a row that is not voted on counts
- return [plane & mask for plane in planes]
+ return list(planes)

= the first owner alone says how many came
- jnp.sort(present)[len(present) // 2]
+ present[0]

# mesh/axes.py: sharding contract
= without types the devices of a worker take their steps apart
- if axis and inner and not tracked(inner):
+ if False:

= ties of cut leaves are those of one shard
- [once(x, over - varying_axes(x)) for x in numbers]
+ [once(x, over) for x in numbers]

= voters are counted once on each device of a worker
- *[once(x, over) for x in copies]
+ *copies

= what all devices of a worker have is divided by their number and added up again
- jnp.where(lax.axis_index(tuple(sorted(of))) == 0, x, 0) if of else x
+ x / jnp.float32(lax.axis_size(tuple(sorted(of)))) if of else x

# exchange/xla.py: kernels
= a TPU reads the upper bits of a code as its lower ones
- & 0xF) << first)
+ & 0xF))

# exchange/momentum.py: schedules reference optimizer
= the message is blended with the momentum of after the step
- _mixed(self.b1, mu, g)
+ _mixed(self.b1, self.update(g, mu), g)

# exchange/sync.py: sync schedules
= a sync comes one step late
- schedule.due(count)
+ schedule.due(count - 1)

= a gap that thins ends one sync early
- max(math.ceil(k * math.log2(gaps[-1] + 1)), syncs + 1)
+ max(math.floor(k * math.log2(gaps[-1] + 1)), syncs + 1)

= momenta are averaged in bfloat16
- (mu, jax.tree.map(square, mu)), axis)
+ (mu, jax.tree.map(square, mu)), axis, jnp.bfloat16)

# exchange/at_owner.py: accounting
= what comes back of any transform is a sign, where no reply is named
- codes(2) if reply is None else reply
+ sign() if reply is None else reply

# optimizers.py: sync optimizer chains baselines face contract
= leaves that the mask leaves out decay too
- optax.add_decayed_weights(weight_decay, mask)
+ optax.add_decayed_weights(weight_decay)

= which leaves are synced is not handed on
- sync_momentum(vote, sync, checks.as_mask("sync_where", where), workers=workers)
+ sync_momentum(vote, sync, workers=workers)

# exchange/checks.py: bad_input face chains gradients contract
= the first leaf is named, whichever was reduced already
- paths[shared]
+ paths[0]

= a number is a flag
- flag.shape != () or flag.dtype != bool
+ flag.shape != ()

= a misspelt keyword is anybody's
- if name.startswith("abst"):
+ if name == "abstain":

= a local optimizer among several workers is warned of
- mesh.size > 1 and not mesh.manual_axes
+ mesh.size > 1

= of replicas that drift apart another worker is named
- sums[:, 1] != sums[0, 1]
+ sums[:, 0] != sums[0, 0]

# programs/compilations.py: watch
= programs of the default backend alone are read
- in backend.backends().values()
+ in [jax.devices()[0].client]

= what was compiled before is read again, though it was allowed
- compiled_programs() - _before.pop(threading.get_ident())
+ compiled_programs()

# programs/watch.py: watch
= what travels inside a worker is told to travel between workers
- one.axes is None or bool(set(one.axes) & set(axes))
+ True

= floats that a sync may send excuse those of every step
- if x.collective.gated or not gated]
+ if True]

# mesh/checksum.py: checkpoint faults
= the place of a shard in the whole array is not in its checksum
- jnp.uint32(start) * k
+ jnp.uint32(0) * k

# mesh/placement.py: sharding face gradients
= devices of a group are counted before the workers
- return (*mesh_axes.names(self.axis), *mesh_axes.names(self.group))
+ return (*mesh_axes.names(self.group), *mesh_axes.names(self.axis))

# mesh/specs.py: sharding training boxes
= in a trace types are not asked how parameters of nnx are cut
- return bool(jax.typeof(x).sharding.mesh.explicit_axes)
+ return False

= the workers' axes may come in any order in a batch
- first[: len(workers)] != tuple(workers)
+ set(first[: len(workers)]) != set(workers)

# training/map_step.py: map_step
= a step is traced again where JAX has dropped its trace, and may be another
- return known(arrays)
+ pass

# training/map_step.py: processes
= numbers that hosts set by hand are never compared after the first call
- if self._shared and self._count:
+ if self._shared and False:

= a host that sets a rate by hand alone asks the others about its program
- if known is not None and known.is_compared:
+ if False:

= a host that gives other rows in a later step waits for the others
- self._check_rows(arguments.local_rows(call))
+ pass

# training/results.py: map_step
= in nnx the scales of fp8 layers are no such state
- in {*_words(result.name), result.kind}
+ in _words(result.name)

= results stand in the order in which they were matched, which rows change
- self._slots[x] for x in leaves if not isinstance(x, _Fixed)]
+ i for i in sorted(self._slots[x] for x in leaves if not isinstance(x, _Fixed))]

# exchange/mapped.py: face boxes sharding
= what is empty is said to lie in parts
- spec if x.size else P()
+ spec

# exchange/mapped.py: chains
= what stands behind an exchange is each worker's own too
- i < last and not inside[i]
+ i != last and not inside[i]

= what a class declares is not asked in front of an exchange
- find_holders(part, in_front=front) if holder is None
+ find_holders(part, in_front=front) if holder is None or front

# mesh/boxes.py: boxes
= the workers' axis is written behind the names of a box
- (spec[0], *getattr(names, "spec", names))
+ (*getattr(names, "spec", names), spec[0])

# mesh/specs.py: gradients
= an axis that is taken stays in what a model says
- frozenset(axes_in(spec)).difference(taken)
+ frozenset(axes_in(spec))

# training/modules.py: gradients training chains
= what a model keeps is written where nnx does not let it be written
- nnx.merge(graph, params, model_state, copy=True)
+ nnx.merge(graph, params, model_state)

# training/worker.py: local_steps training
= gradients of the parts of a batch are added and not averaged
- (t / accumulate).astype(p.dtype)
+ t.astype(p.dtype)

= of whole numbers that the parts of a batch count the largest is told
- jnp.sum(halves(x), 0, x.dtype)
+ jnp.max(halves(x), 0)

= all parts of a batch, and all local steps, draw the same random numbers
- tree.unflatten(each), jax.random.fold_in(rng, index))
+ tree.unflatten(each), rng)

# training/train_step.py: local_steps simulate training
= all workers draw the same random numbers
- rng = jax.random.fold_in(rng, axes.worker_index(workers.axes))
+ pass

= local state is kept only where the loss is no number
-             abstains |= ~axes.all_finite(grads)
+             pass

= statistics of a worker that abstains are kept with what was no number
- model_state, local_state = jax.tree.map(partial(jnp.where, abstains), before, after)
+ model_state, local_state = after

# training/own.py: training face
= random streams of a model are the same on all workers
- fold(workers, x) if is_key(x) else strong(x)
+ x if is_key(x) else strong(x)

# training/loss.py: gradients
= parameters are not cast, and gradients come summed
- value_and_grad(axes.varying(params, (*axis, *group)), *args, **kwargs)
+ value_and_grad(params, *args, **kwargs)

# training/results.py: map_step contract
= one NaN stays in what is in front of the vote
- results[i] = jnp.where(finite, results[i], old[i])
+ pass

= what is said of gradients is not asked where they look like parameters
- None if inside or is_said else self._matched(node)
+ None if inside else self._matched(node)

= updates take the place of a momentum that looks alike
- sorted(_parts(out), key=lambda part: -len(jax.tree.leaves(part[1])))
+ sorted(_parts(out), key=lambda part: len(jax.tree.leaves(part[1])))

# mesh/hosts.py: processes
= processes that take the same rows may give different ones
- each[other][1] != sums
+ False

# mesh/hosts.py: processes
= hosts whose scalars differ train on
- f"{name} = {np.asarray(key_words(x)).tolist()}"
+ f"{name}"

= a rate that a host sets by hand is compared with none
- if calls & (calls - 1) == 0 or calls % 128 == 0:
+ if False:

# mesh/hosts.py: processes
= what each process has is sent to all, to be compared
- return jax.make_array_from_process_local_data(sharding, host, shape)
+ return jax.device_put(host, sharding)

# training/stats.py: face sync training logging
= tokens a second are those since the first row
-         self._last = step, now
+         self._last = self._last or (step, now)

= leaves that were not measured pull the drift down
- measured = each >= 0
+ measured = each > -1.5

= a leaf that does not drift is left out of the mean
- measured = each >= 0
+ measured = each > 0

# checkpoint/files.py: checkpoint
= a description that was changed is read
- text != sealed(body)
+ not body

= a checkpoint has the name of another step
- str(step) != folder.name
+ not about

= a save is not read back
- host_checksum(x)) != (leaf.shape, leaf.dtype, about.sums[name]):
+ 0) != (leaf.shape, leaf.dtype, 0):

= a disk that fails passes for damage
- if is_disk or _FAILS
+ if _FAILS

# checkpoint/manager.py: checkpoint
= a restart takes the branch that was left
- if step > self._restored]
+ if step > self._restored + 1e9]

= unfinished steps of others that are later are taken away
- number.isdigit() and int(number) < step:
+ number.isdigit():

= the best goes with the old ones
- "reverse": best == "min"
+ "reverse": best == "max"

= a checksum that differs is restored
-         return restored(like, self.workers, saved, leaves, keep, about.sums), about.data
+         return restored(like, self.workers, saved, leaves, keep), about.data

# checkpoint/manager.py: processes
= a process whose write failed leaves the others waiting
- places += _BACKGROUND[len(saving.met) : here[0] if here else None]
+ places += _BACKGROUND[len(saving.met) : here[0] if here else 0]

# checkpoint/sigterm.py: checkpoint
= the handler of signals of before is not put back
- signal.SIG_DFL if handler is None else handler
+ signal.SIG_DFL

# checkpoint/sigterm.py: processes
= a process that others told to stop dies of its own signal while it saves
- if asked or not agreed:
+ if True:

# exchange/bits.py: checkpoint face
= of whole numbers of the workers the smallest is taken
- return jnp.max(x, axis=0)
+ return jnp.min(x, axis=0)

# checkpoint/carry.py: carry_over
= a field is found by the end of its name, such as mu by u
- f".{name}".endswith(f".{path}")
+ name.endswith(path)
= moments go on without their counter
- missing and len(missing) < len(wanted)
+ len(missing) > len(wanted)
= the state of a run that goes on counts from 0 again
- "count" in fields and _STEP
+ "count" not in fields and _STEP

# checkpoint/convert.py: checkpoint contract
= the last workers survive, with the momentum of others
- x[: survive * keep]
+ x[len(x) - survive * keep :]

= what workers owed who left is lost
- if owed and keep and count < rows:
+ if owed and keep and count > rows:

= newcomers draw the random numbers of those who were there
- new.reshape(-1, *x.shape[1:])[survive:]
+ x[index % rows][survive:]

= two leaves of one name write over each other
- if name in inside or times > 1
+ if times > 1

# checkpoint/rows.py: checkpoint contract
= of what owners hold in two levels each device takes the first slice
- worker_index(over) * num_rows
+ 0 * worker_index(over)

# mesh/start.py: start
= steps of one job of Slurm share a port
- FIRST_PORT + (16 * job + step) % NUM_PORTS
+ FIRST_PORT + 16 * job % NUM_PORTS

= who shares a node takes all of its GPUs
- len(shown) < count) else [rank]
+ len(shown) < count) else []

= another number of processes than Slurm has tasks is nobody's mistake
- tasks not in (-1, x[1])
+ tasks is None

= of two launchers that contradict each other the first is believed
- x != there[first] or
+

# baselines/compression.py: baselines contract dgc powersgd
= leaves that are cut travel in one message with those that are not
- groups.setdefault(axes.varying_axes(x), []).append(i)
+ groups.setdefault(frozenset(), []).append(i)

= of a worker's devices each takes part by itself
- ~axes.any_over_shards(abstain | ~axes.all_finite(values), axis)
+ ~abstain & axes.all_finite(values)

# baselines/dgc.py: dgc baselines contract
= stages of a warm-up that does not divide begin too early
- -(-warmup * n // len(falling))
+ warmup * n // len(falling)

= a stage of the warm-up begins one step late
- state.count >= np.array
+ state.count > np.array

= the residual of a worker that leaves goes with it
- "residual": Holder.FEEDBACK
+ "residual": Holder.WORKER

= the velocity of what is sent goes on
- [_without(x, sent) for x, sent in zip(velocity, indices, strict=True)]
+ velocity

# baselines/one_bit_adam.py: one_bit baselines contract
= the warm-up is one step longer
- count < end
+ count <= end

= a frozen variance is corrected by all steps
- jnp.maximum(state.updates, 1)
+ jnp.maximum(state.count, 1)

= what never had a gradient moves
- some & (v > 0)
+ some

# baselines/powersgd.py: powersgd baselines contract
= factors that came out as zeros are kept for ever
- x / jnp.where(moves, largest, 1)[None], otherwise)
+ x / jnp.where(moves, largest, 1)[None], 0 * otherwise)

= a leaf whose factors are as large as itself is compressed
- max(m * n - 1, 0) //
+ max(m * n, 0) //

= the rounding of a short dtype is not fed back
- [_fitting(mean, g.dtype) for mean, g in zip(means, grads, strict=True)]
+ [_fitting(mean, jnp.float32) for mean in means]

# baselines/terngrad.py: baselines contract
= terngrad divides by all workers, whoever abstains
- num_workers - state.votes.abstained
+ num_workers + 0 * state.votes.abstained

= terngrad clips at the deviation of a part of a leaf
- max(g.size * axes.shard(g, axis)[1], 1)
+ max(g.size, 1)

# baselines/ef_signsgd.py: baselines contract
= with feedback weights grow and do not decay
- return -rate *
+ return rate *

# baselines/diloco.py: baselines contract local_steps
= the outer step does not look ahead
- nesterov=True
+ nesterov=False

# programs/compiled.py: compiled
= an all-gather counts a worker's message to itself
- float((g - 1) * n)
+ float(g * n)

= of loops in loops the inner one counts alone
- times=run.times * turns
+ times=turns

# programs/replica_groups.py: compiled
= a permute without pairs joins all devices
-     if pairs and ", source_target_pairs={}" in text:
+     if False:

= groups that are written transposed are read straight
- .transpose(_numbers(order) if order else None)
+ .copy()

# mesh/axes.py: sharding chains
= the largest number says whether all are finite
- jnp.all(jnp.isfinite(x)) for x
+ jnp.isfinite(jnp.max(jnp.abs(x))) for x

# exchange/checks.py: ranges
= a beta that loses half of the numbers of a dtype is kept
- .eps) / 2
+ .eps) / 4

# exchange/momentum.py: optimizer
= momentum that is fed is forgotten too
- (g == 0) & (size <
+ (size <

# exchange/bits.py: training
= a sum beyond its dtype wraps
- jnp.where(upper > most >> half, most, total)
+ total

# programs/compiled.py: compiled
= short floats in words are whole numbers
- if len(short) != 1 or any
+ if short or any

# exchange/checks.py: bad_input
= a transform that sorts runs on a slice
- "cum|sort|rev$
+ "cum|rev$

= a loop over the rows runs on a slice
- mixing = name if by_row else _mixing_primitive(one, shape)
+ mixing = _mixing_primitive(one, shape)

= a transform that wants parameters gets none
- if params in used:
+ if False:

= state of another shape is what an owner has of it
- if x.shape not in ((), rows.shape):
+ if x.ndim > 2:

# audit/predicted.py: contract accounting house
= what a worker cuts is counted whole
- shard_shape(x.shape, x.sharding.spec, mesh.shape)
+ x.shape

= of the ways that a step can go the last is the usual one
- ways[sent.index(min(sent))]
+ ways[-1]

= the turns of a loop are counted as one
- times * step.params["length"] if name == "scan" else times
+ times

= a collective that nobody knows is passed over
- if name not in _QUIET and named_axes(step):
+ if False:

= a mean in bfloat16 is widened on every platform
- axes.platform(mesh) == "cpu"
+ axes.platform(mesh)

# audit/replicas.py: replicas
= a tie of replicas passes for a majority
- 2 * sizes.max() <= len(words)
+ 2 * sizes.max() < len(words)

= who differs gets the copy of worker 0, right or wrong
- source[devices[right][0]] = True
+ source[devices[0]] = True

# tools/plan/model.py: planner
= an all-reduce waits for half of its latencies
- {reduce: 2 * deep,
+ {reduce: deep,

= devices of a worker do not share its link
- bits * (workers - 1) / workers * parameters / 8
+ bits * (workers - 1) / workers * parameters / 8 / cluster.group_size

= a link reaches its nominal rate
- low, high, least, most = min(known), max(known), 0.0,
+ low, high, least, most = 1.0, 1.0, 0.0,

= a mean is taken never to overlap
- 0.0 if self.on_cpu else 1.0
+ 0.0

# tools/plan/verdict.py: planner
= a method may need more memory than a device has
- held_bytes(scheme, parameters, cluster) > memory
+ held_bytes(scheme, parameters, cluster) > math.inf

= a range leaves out the errors of steps
- spread = 1 + errors * row.learned.error / row.ratio
+ spread = 1

= an all-reduce hides by the largest share of its link
- self.seconds(x)[0, 2]
+ self.seconds(x)[2, 2]

= exchanges in each step are advised where workers are no faster than one
- return min(self.cluster.num_workers - 1, LONG)
+ return LONG

= beyond what was measured micro-steps cost nothing
- for x in SCHEMES.values() if x.every == 1}
+ for x in SCHEMES.values()}

# tools/plan/evidence.py: planner
= the nearest cell is so by its number of workers alone
- math.prod(away(cell)), -cell.steps
+ away(cell)[1], -cell.steps

= short runs are preferred to long ones
- math.prod(away(cell)), -cell.steps
+ math.prod(away(cell)), cell.steps

= at a border of all that was measured nothing is said
- FAR in both or other.cell is not found.cell
+ other.cell is not found.cell

# tools/probe.py: probe
= a step that takes longer than its parts is forgotten
- overlap=min(hidden, 1.0),
+ overlap=min(max(hidden, 0.0), 1.0),

= the bytes of a worker are taken for what it sends
- yield sent(count) * length
+ yield length

# benchmarks/lab/namespaces.py: lab
= a run ends with the code of the last worker that failed
- if code and not exit_code:
+ if code:

# benchmarks/lab/group.py: lab
= what the members of a group have started outlives it
- os.killpg(member.process.pid, number)
+ os.kill(member.process.pid, number)

# tools/cli.py: cli
= a rate beside a name is forgotten
- args.rates or [link.bandwidth]
+ [link.bandwidth]

# programs/units.py: cli planner
= bytes per second are read as bits
- ("byte", 8)
+ ("byte", 1)

"""


class Mutant(NamedTuple):
    """A mistake, in one place."""

    name: str
    file: str
    hints: list[str]
    old: list[str]
    new: list[str]

    def put_into(self, root: Path) -> str:
        """The text of the file with the mistake; an error where the list does not fit the library."""
        text, old = (root / self.file).read_text(), "\n".join(self.old)
        if text.count(old) != 1:
            raise ValueError(
                f"{self.name!r}: {self.file} has this {text.count(old)} times, and not once:\n{old}"
            )
        wrong = text.replace(old, "\n".join(self.new))
        compile(wrong, self.file, "exec")  # every test would see a mistake of syntax
        return wrong


def mutants() -> list[Mutant]:
    found: list[Mutant] = []
    file, words = "", ""
    for line in filter(None, MUTANTS.splitlines()):
        mark, rest = line[0], line[2:]
        if mark == "#":
            file, _, words = rest.partition(": ")
        elif mark == "=":
            inside = "" if file.startswith("benchmarks/") else "lioncub_jax/"
            found.append(Mutant(rest, f"{inside}{file}", words.split(), [], []))
        else:
            {"-": found[-1].old, "+": found[-1].new}[mark].append(rest)
    return found


def copied(root: Path, folder: Path) -> Path:
    """What git has of the repository, and what it would have: nothing that was built or measured."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=root, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        if (root / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, folder / name)
    # Once for all runs, which write no bytecode: of two mistakes in one second it would be the first's.
    subprocess.run(
        [sys.executable, "-m", "compileall", "-q", "lioncub_jax"], cwd=folder, check=True
    )
    return folder


def tests_of(mutant: Mutant, copy: Path, args: argparse.Namespace) -> list[str]:
    """What pytest is told to run: the likely first."""
    files = sorted(copy.glob("tests/*.py"))
    likely = [f"tests/{f.name}" for word in mutant.hints for f in files if word in f.stem]
    doctests = ["lioncub_jax"] if args.all else [mutant.file]
    return [*dict.fromkeys(likely), *(["tests"] if args.all else []), *doctests]


def ended(mark: str) -> None:
    """Kills whatever a run has left, in sessions of their own too."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{MARK}={mark}".encode() in (process / "environ").read_bytes().split(b"\0"):
                os.kill(int(process.name), signal.SIGKILL)


def run(copy: Path, tests: list[str], args: argparse.Namespace) -> str:
    """The test that failed, or what else went wrong; "" where all is well."""
    quiet = ["-x", "-q", "-rfE", "--tb=no", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *quiet]
    mark = f"{copy}{time.time_ns()}"
    own = {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", MARK: mark}
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    command += [*args.tests, *tests]
    with subprocess.Popen(command, cwd=copy, env=os.environ | own, text=True, **streams) as process:
        try:
            said, _ = process.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            return f"a hang: killed after {LIMIT} s"
        finally:
            ended(mark)
    code = process.returncode
    if code in (0, 5):  # 5: of doctests there may be none
        return ""
    failed = FAILED.search(said)
    if code > 2 or (code > 0 and not failed):
        raise SystemExit(f"pytest cannot run {tests}:\n{said}")
    return failed[1] if failed else f"a crash: {signal.Signals(-code).name}"


def tried(mutant: Mutant, copy: Path, args: argparse.Namespace) -> bool:
    path, began = copy / mutant.file, time.time()
    before, written = path.read_text(), path.stat().st_mtime_ns
    path.write_text(mutant.put_into(copy))
    try:
        by = run(copy, tests_of(mutant, copy, args), args)
    finally:
        path.write_text(before)
        os.utime(path, ns=(written, written))
    print(
        f"{by or 'SURVIVED':70} {time.time() - began:>5.0f} s  {mutant.file}: {mutant.name}",
        flush=True,
    )
    return bool(by)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="a pattern in the file or the name")
    parser.add_argument("--jobs", type=int, default=2, help="copies in which tests run at once (2)")
    parser.add_argument(
        "--all", action="store_true", help="run all test files behind the likely ones"
    )
    parser.add_argument("--list", action="store_true", help="check the list and print it")
    parser.add_argument(
        "--tests", nargs=argparse.REMAINDER, default=[], help="for pytest; the last"
    )
    args = parser.parse_args()
    stale = []
    for mutant in mutants():
        try:
            mutant.put_into(ROOT)
        except ValueError as error:
            stale.append(str(error))
    if stale:
        raise SystemExit("\n\n".join(stale))
    chosen = [m for m in mutants() if re.search(args.only, f"{m.file}: {m.name}")]
    if args.list:
        print(*(f"{m.file}: {m.name}" for m in chosen), sep="\n")
        return
    copies: queue.SimpleQueue[Path] = queue.SimpleQueue()

    def one(mutant: Mutant) -> bool:
        copy = copies.get()
        try:
            return tried(mutant, copy, args)
        finally:
            copies.put(copy)

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.jobs) as pool:
        for job in range(args.jobs):
            copies.put(copied(ROOT, Path(folder) / str(job)))
        found = list(pool.map(one, chosen))
    print(f"{sum(found)} of {len(found)} were caught")


if __name__ == "__main__":
    main()
