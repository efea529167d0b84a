"""Mistakes that the tests must see: each is put alone into a copy of the repository, and tests run there.

``python tests/mutants.py`` says for each by which test it was caught, or that it survived. It is no test
itself: all of it takes an hour. Each mistake is one that a good engineer could make, changes what the
library does, and breaks no import. Where the library has moved on, the list says so before anything runs;
code that is wrapped or indented in another way is found, and so is a function that went to another file.
"""

import argparse
import ast
import contextlib
import functools
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).absolute().parents[1]
LIMIT = 1200  # seconds; what takes longer hangs, and was noticed so
MARK = "MUTANT_RUN"  # in the environment of all that a run starts, wherever it goes
FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.M)

# "#" a file of lioncub_jax or benchmarks, and words in the names of tests that should see its mistakes;
# "=" a function, method, class or constant of it, and what is wrong; "-" the code, which stands there once;
# "+" the mistake, nothing where code is left out.
MUTANTS = r"""
# exchange/transform.py: reference optimizer chains contract
= held_counters: an owner's counter moves although no worker takes part
- n if n.ndim else jnp.where(present > 0, n, o)
+ n

= next_counts: of buckets the one with the most voters gives the number that abstained
- jnp.min(num_present)
+ jnp.max(num_present)

# exchange/step.py: reference optimizer chains contract
= single_worker_step: a single worker ignores that it shall abstain
- axes.any_over_shards(abstains | ~axes.all_finite(values), axis)
+ axes.any_over_shards(~axes.all_finite(values), axis)

= single_worker_step: a single worker forgets the errors of earlier codes
- plus_error(rule.interpolate(g, m), e)
+ rule.interpolate(g, m)

= single_worker_step: a single worker adds the errors of earlier codes at every step
- None if e is None else jnp.where(abstains, e, 0)
+ e

= single_worker_step: a single worker has statistics of its first bucket only
- [reply] * len(plan.buckets)
+ [reply]

# exchange/step.py: reference optimizer chains contract quantize
= remember_errors: the error of a worker that abstains is forgotten
- return errors
+ return [0 * error for error in errors]

= decision_context: ties of a second bucket take the coins of the first
- row = places.first_row + first
+ row = first

= encode: a leaf takes the scales of the bucket's first rows for its own
- cut(by_row, start * BLOCK, len(x))
+ cut(by_row, 0 * start, len(x))

# exchange/step.py: sharding accounting optimizer contract
= leaf_means: a leaf in shards has the scale of one shard
- float(s.size) * bucket.num_shards
+ float(s.size)

= participation: a device with a NaN abstains, and others of its worker vote
- ~axes.any_over_shards(~xla.all_delayed_by(flags, words), plan.exchange.axis)
+ xla.all_delayed_by(flags, words)

= remember_errors: padding in a chunk of a group keeps an error
- saturated(layout.zero_padding(made, sizes), error.dtype)
+ saturated(made, error.dtype)

# exchange/checks.py: bad_input contract
= check_betas: a beta of 1 is let through
- 0 <= beta < 1
+ 0 <= beta <= 1

= check_rates: a number that is none is a rate
- np.isfinite, allowed)
+ lambda x: True, allowed)

= check_number: an array is taken for what is compiled
- if static and isinstance(x, jax.Array):
+ if static is bool:

# exchange/votes.py: reference optimizer quantize contract
= pairs_of_votes: pairs of votes are of all workers, whoever abstains
- bits.products(upper, bits.difference(votes, upper))
+ bits.products(upper, [~plane for plane in upper])

= pairs_of_votes: padding has votes
- upper = [plane & real for plane in upper]
+ pass

= with_tie_bits: a tie leans to the upper side
- (tied & context.tie_bits(positive.shape[-1]))
+ tied

= tally: a row moves only where the number of voters is odd
- reduce(operator.or_, voters)
+ voters[0]

= average: an average of codes of several bits divides by the voters alone
- .astype(jnp.int32)[..., None] * fmt.max_code
+ .astype(jnp.int32)[..., None]

= number_of_ties: padding counts as ties
- tied &= bits.pack(context.real())[0]
+ pass

= average: an average of codes with a zero divides by workers that abstain, too
- ((counted.present >> k) & 1)
+ ((jnp.uint32(fmt.num_workers) >> k) & 1)

# exchange/decide.py: reference optimizer quantize contract
= known_elements: momentum at the owner fades although nobody came
- jnp.isfinite(mean) & (present > 0)
+ jnp.isfinite(mean)

= known_elements: padding is a vote of its row, and has momentum
- known &= layout.real_elements(row_sizes)
+ pass

= codes: an owner forgets what it owes where nobody came
- new_error = jnp.where(jnp.isnan(u), error, new_error)
+ pass

= mean_of_values: values of a worker that abstains come into the mean
- jnp.where(participates[worker], decode(codes(worker), scales), 0)
+ decode(codes(worker), scales)

# exchange/matrices.py: muon contract
= _shares: a matrix goes to the owner with the most work
- heapq.heapreplace(heap, (load + hand.work, owner))
+ heapq.heapreplace(heap, (load - hand.work, owner))

= Deal.join: matrices are taken by the order of their elements, whatever their dimension numbers
- flat[k] = leaves[one.leaf].transpose(one.order).reshape(-1)
+ flat[k] = leaves[one.leaf].reshape(-1)

= Deal.part_sizes: a row of which a device has a part has no padding
- own = jnp.tile(jnp.clip(run.size - own * ROW, 0, ROW), run.number)
+ own = jnp.tile(jnp.full_like(own, ROW), run.number)

= deals: devices are owners of whole matrices even where that sends twice the bytes
- devices * whole.rows <= WORTH * shared.rows
+ devices * whole.rows <= 9 * shared.rows

# exchange/matrices.py: muon contract
= _turn: the momentum of a matrix moves where its mean is not known
- jnp.where(known, saturated(new, rows.dtype), old)
+ saturated(new, rows.dtype)

= Hand.of: a matrix is as much work as it has elements
- 4 * short**2 * long + 2 * short**3
+ short * long

= _deal: the first of a kind of matrices begins where the owner's rows do
- [*filled]
+ [0] * len(filled)

= _deal: an owner of later matrices of a leaf has the first of them
- len(numbers), k, start, size
+ len(numbers), k, 0, size

= _deal: every slice of embeddings is the first one
- rows, 1, k, start, here
+ rows, 1, k, 0, here

= Deal.split: a leaf comes back by the order of its matrices' dimensions, and not by the inverse of it
- in_order.transpose(np.argsort(one.order))
+ in_order.transpose(one.order)

= Deal.part_sizes: rows behind the last that an owner has are no padding
- jnp.where(row < filled
+ jnp.where(row < self.rows + 0 * filled

= matrix_of: shards of a matrix in a group are taken for others
- reshape(deal.num_chunks, shards, -1).swapaxes(0, 1)
+ reshape(shards, deal.num_chunks, -1)

= update_matrices: updates stay with the device that made them
- u = swap(u)
+ pass

= _turn: one element that is not known makes its matrix so
- update(jnp.where(known, x, 0), jax
+ update(x, jax

= _turn: all matrices of a kind are the first
- first + t * hand.rows
+ first + 0 * t

= _matrices: rows and columns are in the order of the leaf
- not in taken], *taken)
+ not in taken], *sorted(taken))

= in_place: what is restored lies at the end of an owner's rows
- (span.start, deal.rows - span.stop)
+ (span.start + deal.rows - span.stop, 0)

# optimizers.py: muon
= muon_of_matrix: a high matrix is scaled as a wide one
- rms * max(m, n) ** 0.5
+ rms * n**0.5

# exchange/decide.py: muon contract
= run_matrices: an owner takes the matrices of another
- owners = context.worker * each + jnp.arange(each, dtype=jnp.int32)
+ owners = jnp.arange(each, dtype=jnp.int32)

# checkpoint/rows.py: muon
= Rows.split: momentum that lies whole on a device is read as if its devices shared it
- x = matrices.in_place(self._to_owners(x), self.deal
+ x = matrices.in_place(x, self.deal

= Rows.of: the slices of embeddings are saved among the matrices
- (x[0] in mixed) == (part == "matrices")
+ (x[0] in mixed) != (part == "matrices")

# exchange/quantize.py: quantize reference sharding
= midrise: a row of zeros votes if codes have several bits
- inverse, mean > 0, finite
+ inverse, mean >= 0, finite

= mean_of_sums: the step of a row whose sum overflows is the largest there is
- jnp.where(jnp.isfinite(total), total / size, maximum)
+ total / size

# exchange/bits.py: quantize reference
= saturated: a number that a dtype cannot hold becomes infinite
- x = jnp.clip(x, -largest, largest)
+ pass

# exchange/bits.py: bits reference
= sum_bits: the carry of 8 votes of 8 is lost
- (num_workers * (2**p - 1)).bit_length()
+ (num_workers * (2**p - 1) - 1).bit_length()

= any_in_rows: in a short block the upper lanes of a row are not seen
- either, bit = either | (either >> bit), bit // 2
+ bit //= 2

= whole_rows: few numbers fill half a block for each worker
- max(2, 1 << (rest - 1).bit_length()) if rest else 0
+ max(16, 1 << (rest - 1).bit_length()) if rest else 0

= draw_signs: a zero takes the side that is the coin of its tie
- _seed(num_steps, _ZEROS)
+ _seed(num_steps, _TIES)

# exchange/votes.py: liars
= vote: a worker that says that it abstains has a vote in an average
- sent = zero_unless(participates, received.planes, fmt)
+ sent = received.planes

# exchange/wires.py: liars
= unpack_message: who takes part is added up as it comes
- numbers[:, 0, 0] & 1
+ numbers[:, 0, 0]

= voted_planes: a vote on a row that is not voted on counts
- return [plane & mask for plane in planes]
+ return list(planes)

= unpack_reply: the first owner alone says how many came
- jnp.sort(present)[len(present) // 2]
+ present[0]

# mesh/axes.py: sharding contract
= check_bound: without types the devices of a worker take their steps apart
- if axis and inner and not tracked(inner):
+ if False:

= total_over_shards: ties of cut leaves are those of one shard
- [once(x, over - varying_axes(x)) for x in numbers]
+ [once(x, over) for x in numbers]

= total_over_shards: voters are counted once on each device of a worker
- *[once(x, over) for x in copies]
+ *copies

= total_over_shards: what all devices of a worker have is divided by their number and added up again
- jnp.where(lax.axis_index(tuple(sorted(of))) == 0, x, 0) if of else x
+ x / jnp.float32(lax.axis_size(tuple(sorted(of)))) if of else x

# exchange/layout.py: tiles
= rows_to_leaf: rows in the order of tiles come back as if they were in that of the leaf
- x.reshape(-1, shape[-1] // ROW, SUBLANES, ROW).swapaxes(1, 2)
+ x.reshape(-1, SUBLANES, shape[-1] // ROW, ROW)

# exchange/momentum.py: schedules reference optimizer
= blend: the message is blended with the momentum of after the step
- Partial(_mixed, b1)
+ lambda g, mu: _mixed(b1, g, _mixed(b2, g, mu))

# exchange/sync.py: sync schedules
= sync_momentum: a sync comes one step late
- schedule.due(count)
+ schedule.due(count - 1)

= thinning: a gap that thins ends one sync early
- max(math.ceil(k * math.log2(gaps[-1] + 1)), syncs + 1)
+ max(math.floor(k * math.log2(gaps[-1] + 1)), syncs + 1)

= _mean_if: momenta are averaged in bfloat16
- (mu, jax.tree.map(square, mu)), axis)
+ (mu, jax.tree.map(square, mu)), axis, jnp.bfloat16)

# exchange/decide.py: accounting
= at_owner: what comes back of any transform is a sign, where no reply is named
- codes(2) if reply is None else reply
+ sign() if reply is None else reply

# optimizers.py: sync optimizer chains baselines face contract
= descending: leaves that the mask leaves out decay too
- optax.add_decayed_weights(weight_decay, mask)
+ optax.add_decayed_weights(weight_decay)

= _synced: which leaves are synced is not handed on
- sync_momentum(vote, sync, checks.as_mask("sync_where", where), workers=workers)
+ sync_momentum(vote, sync, workers=workers)

# exchange/checks.py: bad_input face chains gradients contract
= check_local: the first leaf is named, whichever was reduced already
- paths[shared]
+ paths[0]

= check_abstain: a number is a flag
- flag.shape != () or flag.dtype != bool
+ flag.shape != ()

= check_abstain: a misspelt keyword is anybody's
- if name.startswith("abst"):
+ if name == "abstain":

= warn_if_on_several_devices: a local optimizer among several workers is warned of
- mesh.size > 1 and not mesh.manual_axes
+ mesh.size > 1

= _report_workers: of replicas that drift apart another worker is named
- sums[:, 1] != sums[0, 1]
+ sums[:, 0] != sums[0, 0]

# programs/compilations.py: watch
= compiled_programs: programs of the default backend alone are read
- in backend.backends().values()
+ in [jax.devices()[0].client]

= _on_end: what was compiled before is read again, though it was allowed
- compiled_programs() - _before.pop(threading.get_ident())
+ compiled_programs()

# programs/watch.py: watch
= read: what travels inside a worker is told to travel between workers
- one.axes is None or bool(set(one.axes) & set(axes))
+ True

= _wrong: floats that a sync may send excuse those of every step
- if x.collective.gated or not gated]
+ if True]

# mesh/checksum.py: checkpoint faults
= checksum: the place of a shard in the whole array is not in its checksum
- jnp.uint32(start) * k
+ jnp.uint32(0) * k

= checksum: rows that were added to cut an array over a mesh are in its checksum
- jnp.where(row < rows, one, 0)
+ one

# mesh/placement.py: sharding face gradients
= Workers.axes: devices of a group are counted before the workers
- return (*mesh_axes.names(self.axis), *mesh_axes.names(self.group))
+ return (*mesh_axes.names(self.group), *mesh_axes.names(self.axis))

# mesh/specs.py: sharding training boxes
= _knows: in a trace types are not asked how parameters of nnx are cut
- return bool(jax.typeof(x).sharding.mesh.explicit_axes)
+ return False

= check_batch_spec: the workers' axes may come in any order in a batch
- first[: len(workers)] != tuple(workers)
+ set(first[: len(workers)]) != set(workers)

# training/map_step.py: map_step
= Program._traced: a step is traced again where JAX has dropped its trace, and may be another
- return known(arrays)
+ pass

# training/map_step.py: processes
= MappedStep.__call__: numbers that hosts set by hand are never compared after the first call
- if self._shared and self._count:
+ if self._shared and False:

= MappedStep._prepared: a host that sets a rate by hand alone asks the others about its program
- if known is not None and known.is_compared:
+ if False:

= MappedStep._prepared: a host that gives other rows in a later step waits for the others
- self._check_rows(arguments.local_rows(call))
+ pass

# training/differ.py: map_step
= Origins.join: what is added to a raw key hides it
- self.constant.union(*values)
+ next(filter(None, values), self.constant)

# training/results.py: map_step
= Outside._role: in nnx the scales of fp8 layers are no such state
- in {*_words(result.name), result.kind}
+ in _words(result.name)

# exchange/mapped.py: face boxes sharding
= jitted_init: what is empty is said to lie in parts
- spec if x.size else P()
+ spec

# exchange/mapped.py: chains
= find_holders: what stands behind an exchange is each worker's own too
- i < last and not inside[i]
+ i != last and not inside[i]

= find_holders: what a class declares is not asked in front of an exchange
- find_holders(child, in_front=front) if holder is None
+ find_holders(child, in_front=front) if holder is None or front

# mesh/boxes.py: boxes
= _variable: the workers' axis is written behind the names of a box
- (spec[0], *getattr(names, "spec", names))
+ (*getattr(names, "spec", names), spec[0])

# mesh/specs.py: gradients
= without: an axis that is taken stays in what a model says
- frozenset(axes_in(spec)).difference(taken)
+ frozenset(axes_in(spec))

# training/modules.py: gradients training chains
= from_nnx: what a model keeps is written where nnx does not let it be written
- nnx.merge(graph, params, model_state, copy=True)
+ nnx.merge(graph, params, model_state)

# training/worker.py: local_steps training
= make_gradient: gradients of the parts of a batch are added and not averaged
- (t / accumulate).astype(p.dtype)
+ t.astype(p.dtype)

= _merge_parts: of whole numbers that the parts of a batch count the largest is told
- jnp.sum(high_and_low(x), 0, x.dtype)
+ jnp.max(high_and_low(x), 0)

= _in_parts: all parts of a batch, and all local steps, draw the same random numbers
- tree.unflatten(each), jax.random.fold_in(rng, index))
+ tree.unflatten(each), rng)

# training/train_step.py: local_steps simulate training
= make_train_step: all workers draw the same random numbers
- rng = jax.random.fold_in(rng, axes.worker_index(workers.axes))
+ pass

= make_train_step: local state is kept only where the loss is no number
- abstains |= ~axes.all_finite(grads)
+ pass

= make_train_step: statistics of a worker that abstains are kept with what was no number
- model_state, local_state = jax.tree.map(partial(jnp.where, abstains), before, after)
+ model_state, local_state = after

# training/own.py: training face
= copied_to_each: random streams of a model are the same on all workers
- fold(workers, x) if is_key(x) else strong(x)
+ x if is_key(x) else strong(x)

# training/loss.py: gradients
= local_value_and_grad: parameters are not cast, and gradients come summed
- value_and_grad(axes.varying(params, (*axis, *group)), *args, **kwargs)
+ value_and_grad(params, *args, **kwargs)

# training/results.py: map_step contract
= Outside.joined: one NaN stays in what is in front of the vote
- results[i] = jnp.where(finite, results[i], old[i])
+ pass

= _continued: what is said of gradients is not asked where they look like parameters
- if is_inside or _said(jax.tree_util.keystr(path) or "result", said):
+ if is_inside:

= _continued: updates take the place of a momentum that looks alike
- sorted(_parts(tree), key=lambda part: -part[0].num_leaves)
+ sorted(_parts(tree), key=lambda part: part[0].num_leaves)

# mesh/hosts.py: processes
= check_rows: processes that take the same rows may give different ones
- each[other][1] != sums
+ False

# mesh/hosts.py: processes
= _scalars: hosts whose scalars differ train on
- f"{name} = {np.asarray(key_words(x)).tolist()}"
+ f"{name}"

= check_same_scalars: a rate that a host sets by hand is compared with none
- if calls & (calls - 1) == 0 or calls % 128 == 0:
+ if False:

# mesh/hosts.py: processes
= put: what each process has is sent to all, to be compared
- return jax.make_array_from_process_local_data(sharding, host, shape)
+ return jax.device_put(host, sharding)

# training/stats.py: face sync training logging
= Meter.__call__: tokens a second are those since the first row
- self._last = step, now
+ self._last = self._last or (step, now)

= _numbers: leaves that were not measured pull the drift down
- measured = each >= 0
+ measured = each > -1.5

= _numbers: a leaf that does not drift is left out of the mean
- measured = each >= 0
+ measured = each > 0

# checkpoint/files.py: checkpoint
= described: a description that was changed is read
- text != sealed(body)
+ not body

= described: a checkpoint has the name of another step
- str(step) != folder.name
+ not about

= write: a save is not read back
- host_checksum(x)) != (leaf.shape, leaf.dtype, about.sums[name]):
+ 0) != (leaf.shape, leaf.dtype, 0):

= damage: a disk that fails passes for damage
- if is_disk or _FAILS
+ if _FAILS

# checkpoint/manager.py: checkpoint
= Checkpoints._made_manager: a restart takes the branch that was left
- if step > self._restored]
+ if step > self._restored + 1e9]

= Checkpoints._verify: unfinished steps of others that are later are taken away
- number.isdigit() and int(number) < step:
+ number.isdigit():

= Checkpoints.__init__: the best goes with the old ones
- reverse=best == "min"
+ reverse=best == "max"

= Checkpoints._read: a checksum that differs is restored
- return restored(like, self.workers, saved, leaves, about.sums), about.data
+ return restored(like, self.workers, saved, leaves), about.data

# checkpoint/manager.py: processes
= Checkpoints._meet_in_background: a process whose write failed leaves the others waiting
- places += _BACKGROUND[len(saving.met) : here[0] if here else None]
+ places += _BACKGROUND[len(saving.met) : here[0] if here else 0]

# checkpoint/sigterm.py: checkpoint
= stop_on_sigterm: the handler of signals of before is not put back
- signal.SIG_DFL if handler is None else handler
+ signal.SIG_DFL

# checkpoint/sigterm.py: processes
= stop_on_sigterm: a process that others told to stop dies of its own signal while it saves
- if asked or not agreed:
+ if True:

# exchange/bits.py: checkpoint face
= merge_over_workers: of whole numbers of the workers the smallest is taken
- return jnp.max(x, axis=0)
+ return jnp.min(x, axis=0)

# checkpoint/carry.py: carry_over
= carry_over: a field is found by the end of its name, such as mu by u
- f".{name}".endswith(f".{path}")
+ name.endswith(path)

= carry_over: moments go on without their counter
- missing and len(missing) < len(wanted)
+ len(missing) > len(wanted)

= carry_over: the state of a run that goes on counts from 0 again
- "count" in fields and _STEP
+ "count" not in fields and _STEP

# checkpoint/convert.py: checkpoint contract
= _resized: those who go on get what the first worker had
- merge_over_workers(x)
+ x[0]

= _resized: newcomers draw the random numbers of those who were there
- new.reshape(-1, *x.shape[1:])[rows:]
+ x[index % rows][rows:]

= entries: two leaves of one name write over each other
- if name in inside or times > 1
+ if times > 1

# checkpoint/rows.py: checkpoint contract
= _to_rows: of what owners hold in two levels each device takes the first slice
- worker_index(over) * num_rows
+ 0 * worker_index(over)

# mesh/start.py: start
= _place_in_step: steps of one job of Slurm share a port
- FIRST_PORT + (16 * job + step) % NUM_PORTS
+ FIRST_PORT + 16 * job % NUM_PORTS

= _devices: who shares a node takes all of its GPUs
- len(shown) < count) else [rank]
+ len(shown) < count) else []

= _launcher: another number of processes than Slurm has tasks is nobody's mistake
- tasks not in (-1, x[1])
+ tasks is None

= _launcher: of two launchers that contradict each other the first is believed
- x != there[first] or
+

# baselines/one_bit_adam.py: one_bit baselines contract
= one_bit_adam: the warm-up is one step longer
- state.count < last
+ state.count <= last

= one_bit_adam: a frozen variance is corrected by all steps
- jnp.clip(state.count, 1, last)
+ jnp.maximum(state.count, 1)

= one_bit_adam: what never had a gradient moves
- some & (v > 0)
+ some

# baselines/powersgd.py: powersgd baselines contract
= _summed: leaves that are cut travel in one message with those that are not
- groups.setdefault(axes.varying_axes(x), []).append(i)
+ groups.setdefault(frozenset(), []).append(i)

= powersgd: of a worker's devices each takes part by itself
- ~axes.any_over_shards(abstain | ~axes.all_finite(sent), axis)
+ ~abstain & axes.all_finite(sent)

= _scaled: factors that came out as zeros are kept for ever
- x / jnp.where(moves, largest, 1)[None], otherwise)
+ x / jnp.where(moves, largest, 1)[None], 0 * otherwise)

= _first_q: a leaf whose factors are as large as itself is compressed
- max(m * n - 1, 0) //
+ max(m * n, 0) //

= powersgd: the rounding of a short dtype is not fed back
- [_fitting(mean, g.dtype) for mean, g in zip(means, grads, strict=True)]
+ [_fitting(mean, jnp.float32) for mean in means]

# baselines/diloco.py: baselines contract local_steps
= diloco: the outer step does not look ahead
- nesterov=True
+ nesterov=False

# programs/compiled.py: compiled
= SENT: an all-gather counts a worker's message to itself
- float((g - 1) * n)
+ float(g * n)

= _calls: of loops in loops the inner one counts alone
- times=run.times * turns
+ times=turns

# programs/replica_groups.py: compiled
= joined: a permute without pairs joins all devices
- if pairs and ", source_target_pairs={}" in text:
+ if False:

= _iota: groups that are written transposed are read straight
- .transpose(_numbers(order) if order else None)
+ .copy()

# mesh/axes.py: sharding chains
= all_finite: the largest number says whether all are finite
- jnp.all(jnp.isfinite(x)) for x
+ jnp.isfinite(jnp.max(jnp.abs(x))) for x

# exchange/checks.py: ranges
= check_decay: a beta that loses half of the numbers of a dtype is kept
- .eps) / 2
+ .eps) / 4

# exchange/bits.py: training
= of_high_and_low: a sum beyond its dtype wraps
- jnp.where(upper > most >> half, most, total)
+ total

# programs/compiled.py: compiled
= _out_of_words: short floats in words are whole numbers
- if len(short) != 1 or any
+ if short or any

# exchange/checks.py: bad_input
= _MIXING: a transform that sorts runs on a slice
- "cum|sort|rev$
+ "cum|rev$

= _mixing_primitive: a loop over the rows runs on a slice
- mixing = name if by_row else _mixing_primitive(one, shape)
+ mixing = _mixing_primitive(one, shape)

= check_elementwise: a transform that wants parameters gets none
- if params in used:
+ if False:

= check_elementwise: state of another shape is what an owner has of it
- if x.shape not in ((), rows.shape):
+ if x.ndim > 2:

# audit/predicted.py: contract accounting house
= _collective: what a worker cuts is counted whole
- workers.shardings(x.sharding.spec).shard_shape(x.shape)
+ x.shape

= of: of the ways that a step can go the last is the usual one
- ways[sent.index(min(sent))]
+ ways[-1]

= _ways: the turns of a loop are counted as one
- times * step.params["length"] if name == "scan" else times
+ times

= _ways: a collective that nobody knows is passed over
- if name not in _QUIET and named_axes(step):
+ if False:

= _collective: a mean in bfloat16 is widened on every platform
- axes.platform(mesh) == "cpu"
+ axes.platform(mesh)

# audit/replicas.py: replicas
= Replicas._compare: a tie of replicas passes for a majority
- 2 * sizes.max() <= len(words)
+ 2 * sizes.max() < len(words)

= Replicas._compare: who differs gets the copy of worker 0, right or wrong
- source[devices[right][0]] = True
+ source[devices[0]] = True

# tools/plan/model.py: planner
= step_time: an all-reduce waits for half of its latencies
- {reduce: 2 * deep,
+ {reduce: deep,

= step_time: devices of a worker do not share its link
- bits * (workers - 1) / workers * parameters / 8
+ bits * (workers - 1) / workers * parameters / 8 / cluster.group_size

= Cluster.unknown: a link reaches its nominal rate
- low, high, least, most = min(known), max(known), 0.0,
+ low, high, least, most = 1.0, 1.0, 0.0,

= Cluster.unknown: a mean is taken never to overlap
- 0.0 if self.on_cpu else 1.0
+ 0.0

# tools/plan/verdict.py: planner
= plan: a method may need more memory than a device has
- row.held_bytes > memory
+ row.held_bytes > math.inf

= Plan.faster: a range leaves out the errors of steps
- spread = 1 + errors * row.learned.error / row.ratio
+ spread = 1

= Plan.hides: an all-reduce hides by the largest share of its link
- self.seconds(x)[0, 2]
+ self.seconds(x)[2, 2]

= Plan.longest: exchanges in each step are advised where workers are no faster than one
- return min(self.cluster.num_workers - 1, LONG)
+ return LONG

= Plan.if_alike: beyond what was measured micro-steps cost nothing
- for x in SCHEMES.values() if x.every == 1}
+ for x in SCHEMES.values()}

# tools/plan/evidence.py: planner
= _nearest: the nearest cell is so by its number of workers alone
- math.prod(away(cell)), -cell.steps
+ away(cell)[1], -cell.steps

= _nearest: short runs are preferred to long ones
- math.prod(away(cell)), -cell.steps
+ math.prod(away(cell)), cell.steps

= cell_for: at a border of all that was measured nothing is said
- FAR in both or other.cell is not found.cell
+ other.cell is not found.cell

# tools/probe.py: probe
= _with_step: a step that takes longer than its parts is forgotten
- overlap=min(hidden, 1.0),
+ overlap=min(max(hidden, 0.0), 1.0),

= _points: the bytes of a worker are taken for what it sends
- SENT[op.split()[0]](count, length * dtype.dtype.itemsize)
+ length * dtype.dtype.itemsize

# benchmarks/lab/namespaces.py: lab
= watch: a run ends with the code of the last worker that failed
- if code and not exit_code:
+ if code:

# benchmarks/lab/group.py: lab
= Group.kill: what the members of a group have started outlives it
- os.killpg(member.process.pid, number)
+ os.kill(member.process.pid, number)

# tools/cli.py: cli
= _plan: a rate beside a name is forgotten
- args.rates or [link.bandwidth]
+ [link.bandwidth]

# programs/units.py: cli planner
= RATES: bytes per second are read as bits
- ("byte", 8)
+ ("byte", 1)
"""


class Place(NamedTuple):
    """Lines of a definition in a file, counted from 0."""

    file: str
    first: int
    end: int


class Mutant(NamedTuple):
    """A mistake, in one place."""

    name: str
    file: str
    definition: str
    hints: list[str]
    old: str
    new: str

    def put_into(self, root: Path) -> tuple[str, str]:
        """The file of the definition, and its text with the mistake.

        Raises:
          ValueError: where the list does not fit the library.
        """
        found = definitions(root, self.file).get(self.definition, [])
        others = (f.relative_to(root).as_posix() for f in root.glob("lioncub_jax/**/*.py"))
        found = found or [
            x for file in others for x in definitions(root, file).get(self.definition, [])
        ]
        if len(found) != 1:
            raise ValueError(
                f"{self.name!r}: {self.file} has no {self.definition}, and other files {len(found)}"
            )
        [(file, first, end)] = found
        lines = (root / file).read_text().splitlines(keepends=True)
        wrong, times = as_written(self.old).subn(lambda _: self.new, "".join(lines[first:end]))
        if times != 1:
            raise ValueError(
                f"{self.name!r}: {self.definition} of {file} has this {times} times, and not once:\n"
                f"{self.old}"
            )
        text = "".join([*lines[:first], wrong, *lines[end:]])
        compile(text, file, "exec")  # every test would see a mistake of syntax
        return file, text


def as_written(code: str) -> re.Pattern[str]:
    """A pattern of code, however a formatter has cut it into lines."""
    words = []
    for word in re.findall(r"\w+|\S", code):
        words.append(rf",?\s*{re.escape(word)}" if word in ")]}" else re.escape(word))
    return re.compile(r"\s*".join(words))


@functools.cache
def definitions(root: Path, file: str) -> dict[str, list[Place]]:
    """The definitions of a file by name, methods behind their class; nothing where there is no file."""
    path, found = root / file, defaultdict[str, list[Place]](list)
    todo = [("", ast.parse(path.read_text() if path.exists() else ""))]
    while todo:
        prefix, inside = todo.pop()
        for x in inside.body:
            names = [getattr(x, "name", None)]
            if isinstance(x, ast.Assign | ast.AnnAssign):
                to = x.targets if isinstance(x, ast.Assign) else [x.target]
                names = [one.id for one in to if isinstance(one, ast.Name)]
            for name in filter(None, names):
                found[prefix + name].append(Place(file, x.lineno - 1, x.end_lineno))
            if isinstance(x, ast.ClassDef):
                todo.append((f"{prefix}{x.name}.", x))
    return found


def mutants() -> list[Mutant]:
    found: list[Mutant] = []
    file, words = "", ""
    for line in filter(None, MUTANTS.splitlines()):
        mark, rest = line[0], line[2:]
        if mark == "#":
            file, _, words = rest.partition(": ")
        elif mark == "=":
            inside = "" if file.startswith("benchmarks/") else "lioncub_jax/"
            definition, _, name = rest.partition(": ")
            found.append(Mutant(name, f"{inside}{file}", definition, words.split(), "", ""))
        else:
            found[-1] = found[-1]._replace(**{{"-": "old", "+": "new"}[mark]: rest})
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


def tests_of(mutant: Mutant, file: str, copy: Path, args: argparse.Namespace) -> list[str]:
    """What pytest is told to run: the likely first."""
    files = sorted(copy.glob("tests/*.py"))
    likely = [f"tests/{f.name}" for word in mutant.hints for f in files if word in f.stem]
    doctests = ["lioncub_jax"] if args.all else [file]
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
    began, (file, wrong) = time.time(), mutant.put_into(copy)
    path = copy / file
    before, written = path.read_text(), path.stat().st_mtime_ns
    path.write_text(wrong)
    try:
        by = run(copy, tests_of(mutant, file, copy, args), args)
    finally:
        path.write_text(before)
        os.utime(path, ns=(written, written))
    print(
        f"{by or 'SURVIVED':70} {time.time() - began:>5.0f} s  {file}: {mutant.name}",
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
