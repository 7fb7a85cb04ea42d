"""What the suite can catch: small faults, built into a copy of the library one by one.

A tired colleague could write each of them, and each changes what the library does.
``python -m tests.mutations`` builds every fault of ``TABLE`` into a copy of the tracked
files, runs the tests there up to the first that fails, and says which one that was. The
tests of the mutated file's own subpackage come first, then those of every subpackage,
then the others. Those marked ``slow`` run only if no quick one has failed. It ends with
the score of the quick part (``-m "not slow"``) and of the whole suite. Its exit code is
1 if the whole suite misses a fault.

    python -m tests.mutations --list
    python -m tests.mutations --only 3 17 _late/gate.py -n 2 --part quick

A fault that survives asks for a test, not for another fault. Eleven of the first 59
survived. For example, no test near them saw row-wise sums of squares from before the
clip, an eps that XLA flushes to 0, or a restore that overtakes a push.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
from typing import Any, NamedTuple

REPOSITORY = pathlib.Path(__file__).parents[1]
OF_EVERY_SUBPACKAGE = [
    f"tests/test_{x}.py" for x in ("guards", "sharded", "compiled", "contract")
]
SELF = "test_mutations.py"  # It would catch every fault.
LIMIT = 3600  # Seconds for one run of pytest; a run that hangs has caught the fault.

# The file and the fault; the lines that are there; the lines in their place.
TABLE = """
_trees/indexed_slices.py: the values of padding count
- self._indices < shape[0]
+ self._indices <= shape[0]

_trees/rows.py: int16 indices of a table of more rows than they can count
- indices.dtype.itemsize < 4
+ indices.dtype.itemsize < 2

_trees/rows.py: rows that a part does not hold are those next to them
- return jnp.where(found == indices, place, length)
+ return jnp.where(found >= indices, place, length)

_trees/rows.py: rows of a bfloat16 table are written by way of a wider copy
- narrow = versions.scatter_copies(table.dtype)
+ narrow = False

_trees/rows.py: written rows of a narrow table have no derivative
- _scatter(of_table, primals[1], of_rows)
+ of_table

_trees/indexed_slices.py: repeated rows add up in half precision
- wide = np.promote_types(self.dtype, np.float32)
+ wide = self.dtype

_trees/indexed_slices.py: the next link sorts and sums again what is summed
- sums, self.dense_shape, summed=True)
+ sums, self.dense_shape, summed=False)

_trees/indexed_slices.py: updates of half precision are rounded before they are added
- if wide_dtype(table) == table.dtype:
+ if True:

_trees/indexed_slices.py: optax adds a repeated row once
- rows = rows.sum_duplicates()
+ rows = rows

_trees/opaque.py: a function for dense gradients sees row indices as numbers
- return jax.random.wrap_key_data(bits[..., None], impl=_opaque())
+ return indices

_trees/dtypes.py: a step that an int32 does not hold turns negative
- if own.bits >= 32:
+ if own.bits < 32:

_trees/boxes.py: a sum of squares a row is laid out as its table is
- return _content(node) if isinstance(node, _boxes()) else node
+ return node

_trees/boxes.py: state that stacks several of a parameter lies whole on every device
- return p.replace_boxed(s).add_axis(0, {"partition_name": None})
+ return s

_trees/compilers.py: sums of one array share its widening
- cpu=lambda x, known: jax.lax.optimization_barrier((x, known))[0],
+ cpu=lambda x, known: jax.lax.optimization_barrier(x),

_trees/compilers.py: a sum of squares shares its widening with the update
- cpu=jax.lax.optimization_barrier
+ cpu=lambda x: x

_trees/constants.py: state that starts at -0.0 starts at 0.0 under jit
- jnp.asarray(value, dtype) - _false(p, axes).astype(dtype)
+ jnp.asarray(value, dtype) + _false(p, axes).astype(dtype)

_trees/constants.py: state of sharded parameters lies whole on each device
- sharding = p.sharding.update(spec=P(*p.sharding.spec[:axes]))
+ sharding = p.sharding.update(spec=P())

_trees/arithmetic.py: an eps that is flushed to 0 lets the divisor be 0
- np.asarray(eps, x.dtype) < tiny
+ np.asarray(eps, x.dtype) == 0

_trees/maps.py: an imaginary part that is not finite is not seen
- jnp.all(jnp.isfinite(x), where=held)
+ jnp.all(jnp.isfinite(x.real), where=held)

_trees/maps.py: the compiler for CPU drops NaN from a large leaf
- jnp.sum(x - x)
+ jnp.max(jnp.abs(x), initial=0)

_trees/maps.py: the gradient of integers is calculated with
- return getattr(g, "dtype", None) != jax.dtypes.float0
+ return True

_trees/compilers.py: the transpose keeps the precision of the result
- ad.Zero(x.aval) if number else cotangent.astype(x.aval.dtype)
+ ad.Zero(x.aval) if number else cotangent

_trees/compilers.py: a NaN becomes inf where bits are cut off
- jax.lax.select(x != x, nan, jax.lax.reduce_precision(x, 8, 7))
+ jax.lax.reduce_precision(x, 8, 7)

_trees/norms.py: small leaves that are sharded are gathered to be handled together
- return x.size <= _SMALL and (mesh.empty or mesh.size == 1)
+ return x.size <= _SMALL

_trees/norms.py: norms in half precision cost a copy of the gradients
- if x.dtype.itemsize < 4:
+ if x.dtype.itemsize < 2:

_trees/norms.py: rows are clipped from above alone
- g = jnp.minimum(jnp.abs(g), most)
+ g = jnp.minimum(g, most)

_trees/mesh.py: a leaf that is replicated counts once a device
- tuple(name for name in names if name in _varying(x))
+ names

_trees/mesh.py: the norm of a layer runs over the layers on other devices
- axes.append((_names(spec[:depth]), _names(spec[depth:])))
+ axes.append(((), _names(spec)))

_trees/checks.py: a half-open interval holds its upper end
- below = number < high if interval
+ below = number <= high if interval

_trees/checks.py: shapes of as many axes agree
- fits = expected(leaf) == _shape(reference_leaf)
+ fits = len(expected(leaf)) == len(_shape(reference_leaf))

_trees/versions.py: an array varies over the first of its mesh axes alone
- jax.lax.pcast(x, axes, to="varying")
+ jax.lax.pcast(x, axes[:1], to="varying")

_transforms/clipping.py: zero gradients under a limit of 0 are 0/0
- outside = norm > max_norm
+ outside = norm >= max_norm

_transforms/clipping.py: a norm computed elsewhere is not used
- if use_norm is not None:
+ if False:

_transforms/clipping.py: the sums of clipped rows are multiplied by the factor once
- rows = _scale_layers(_scale_layers(rows, factors), factors)
+ rows = _scale_layers(rows, factors)

_transforms/clipping.py: novograd reads the gradients again for norms that are known
- sums = ClipSums(squares, factor_of)
+ pass

_transforms/clipping.py: two clips are taken at once, and one is forgotten
- checks.at_most_one(**arguments)
+ pass

_transforms/adagrad.py: a row without entries is 0/0
- row / max(1, math.prod(np.shape(g)[1:]))
+ row / math.prod(np.shape(g)[1:])

_transforms/adagrad.py: the accumulators change their dtype with the first update
- sums = maps.cast_like(sums, touched)
+ pass

_transforms/novograd.py: the square of a small clip factor underflows
- square = square * factor * factor
+ square = square * (factor * factor)

_transforms/novograd.py: the schedule inside the momentum is one step ahead
- rate = learning_rate(state.count) if
+ rate = learning_rate(state.count + 1) if

_transforms/delayed_nesterov.py: the sum of one period goes on in the next
- total = jnp.where(count == 0, 0, total)
+ pass

_transforms/delayed_nesterov.py: a part of the momentum is added, and not moved ahead
- jnp.where(moves(t), 1 - c * n + c, c)
+ jnp.where(moves(t), 1, c)

_transforms/momentum.py: the momentum of integers is one of integers
- dtype = dtypes.inexact_dtype(p) if mu_dtype is None else mu_dtype
+ dtype = p.dtype if mu_dtype is None else mu_dtype

_transforms/momentum.py: a momentum in half precision is computed twice
- mu = compilers.apart(mu)
+ pass

_transforms/momentum_look_ahead.py: the update looks ahead along the momentum of before
- return _scale(g, a * (decay / kept)) + _scale(mu, back + decay)
+ return _scale(g, a * (decay / kept)) + _scale(mu, decay)

_transforms/momentum_look_ahead.py: the momentum moves with the gradient as it came
- return moved + _scale(g, rest * a)
+ return moved + _scale(g, rest)

_transforms/momentum_look_ahead.py: a worker begins where the momentum comes from
- ahead = -jnp.asarray(learning_rate) * b1
+ ahead = jnp.asarray(learning_rate) * b1

_transforms/alignment.py: a gradient that is aligned enough is corrected
- (c >= agrees)
+ (c > 2 * agrees)

_transforms/alignment.py: gradients that are a little opposed turn
- opposes, short = c < 0,
+ opposes, short = c < opposed,

_transforms/alignment.py: the turn jumps where a gradient begins to agree
- turn = jnp.minimum(rotation * ramp * sure, 1)
+ turn = jnp.minimum(rotation * (1 - c) * sure, 1)

_trees/norms.py: the layers that a leaf stacks have one product
- return _sum(g * h, stacked)
+ return _sum(g * h, 0)

_transforms/learning_rate.py: the count of steps overflows
- count = optax.safe_increment(state.count)
+ count = state.count + 1

_transforms/densify.py: dense gradients lie whole on each device
- out_sharding=explicit_sharding(jnp.asarray(p)) if known else None
+ out_sharding=None

_late/conditional.py: both sides are computed and one of them is taken
- jax.lax.cond(pred, acted, rests_like)
+ jax.tree.map(
+     lambda a, r: jnp.where(pred, a, r), acted(), rests_like()
+ )

_late/gate.py: a gate's update has no name
- functools.update_wrapper(self, self.update)
+ pass

_late/gate.py: extra arguments are lost where update names none of them
- p.kind is p.VAR_KEYWORD
+ p.kind is p.VAR_POSITIONAL

_late/drop_stale.py: a push at the threshold is too late
- return staleness <= dtypes.saturated(limit)
+ return staleness < dtypes.saturated(limit)

_late/drop_stale.py: the staleness of a dropped push is not kept
- staleness=staleness,
+ staleness=jnp.where(fresh, staleness, state.staleness),

_late/drop_stale.py: a schedule of the threshold sees how late the push is
- "max_staleness", max_staleness, state.global_step, "[0, inf]"
+ "max_staleness", max_staleness, staleness, "[0, inf]"

_late/scale_by_staleness.py: a gradient ahead of its time has a weight of its own
- s = jnp.maximum(0, dtypes.saturated(staleness))
+ s = dtypes.saturated(staleness)

_transforms/measure_cosine.py: a leaf without a gradient counts in the last norm
- old = norms.total(jax.tree.leaves(held))
+ old = norms.total(jax.tree.leaves(before))

_late/worker_mean.py: a worker that has stepped in this cycle steps again
- full = push.taken & complete & ~ahead
+ full = push.taken & complete

_late/worker_mean.py: the mean of a cycle begins with that of the last one
- state = _cleared(over, state, row)
+ pass

_late/worker_mean.py: the old numbers of a row come back when its worker pushes anew
- old = jnp.where(counts[i] == 0, 0, held)
+ old = held

_late/delayed.py: the gradient of one step later acts
- at = place if delay > 1 else 0
+ at = (place + 1) % delay if delay > 1 else 0

_late/delayed.py: the shortest delay ends the wait, not the longest
- full = jnp.all((count >= delays) | ~moves)
+ full = jnp.any((count >= delays) & moves)

_late/delayed.py: a leaf that has no gradient holds up the others
- full = jnp.all((count >= delays) | ~moves)
+ full = jnp.all(count >= delays)

_late/delayed.py: a ring that has been filled once starts again from nothing
- jnp.where(count + 1 < 2 * delays, count + 1, delays)
+ jnp.where(count + 1 < 2 * delays, count + 1, 0)

_late/delayed.py: an int for a part is not found
- for end in range(len(path) + 1):
+ for end in (0, len(path)):

_late/delayed.py: the old gradient is copied before the new one takes its place
- never = constants.never(acted.astype(jnp.float32))
+ never = jnp.array(False)

_late/counters.py: TensorFlow's fraction divides by the steps alone
- own.global_step.astype(jnp.float32) + 1
+ own.global_step.astype(jnp.float32)

_late/compensate_delay.py: a delay is compensated the wrong way round
- arithmetic.scale(now - then, variance_control)
+ arithmetic.scale(then - now, variance_control)

_late/compensate_delay.py: repeated rows are corrected one by one
- updates = maps.sum_duplicates(updates)
+ pass

_late/compensate_delay.py: a worker's parameters do not fit masked gradients
- worker_params = maps.masked_like(updates, worker_params)
+ pass

_late/sums.py: a parameter that is None shifts the marks of those after it
- flags[name] = pushed[i]
+ flags[name] = pushed[len(flags)]

_late/accumulator.py: a push of the step itself is late
- fresh = local_step >= state.global_step
+ fresh = local_step > state.global_step

_late/gate.py: a gate in a sum is not told which leaves have a gradient
- if has_gate(state):
+ if False:

_late/accumulate.py: one device alone leaves out a push that is not finite
- if not axes:
+ if axes:

_late/accumulate.py: the sum is copied before the step is made from it
- taken = state.num_accumulated >= 0
+ taken = jnp.array(True)

_late/sums.py: a schedule is asked for the step behind this one
- "num_required", self._num_required, global_step, checks.COUNTS
+ "num_required", self._num_required, global_step + 1, checks.COUNTS

_late/sums.py: a leaf that was pushed in the last round counts in the next one
- pushed=pushed & ~full
+ pushed=pushed

_late/sums.py: a dropped push counts as one
- pushed = state.pushed | (taken &
+ pushed = state.pushed | (True &

_late/missing.py: the state of a leaf that nobody pushed for moves
- return jax.tree.map(lambda n, o: jnp.where(has_acted, n, o), new, old)
+ return new

_late/missing.py: a gate that adds up does not hear of a leaf without a gradient
- if not has_gate(state, "row_counts"):
+ if True:

_late/missing.py: trees beside the gradients keep the leaf
- return self.of_tree(value) if is_like_params else value
+ return value

_late/missing.py: a line search sees the parameters that learn alone
- if callable(value):
+ if value is None:

_training/apply.py: the loss does not reach a transformation that asks for it
- **{**gate.accepted_kwargs(tx, {"value": value}), **extra}
+ **extra

_training/apply.py: a training step copies the parameters
- donate_argnums=(0, 1)), tx
+ donate_argnums=(1,)), tx

_training/apply.py: an error of any cause is laid on row-sparse gradients
- return any(map(is_sparse, leaves)) and bool(jax.eval_shape(update_dense))
+ return any(map(is_sparse, leaves))

_training/apply.py: a step changes the state's dtypes
- _as_before(after, state)
+ after

_training/donation.py: a step takes the memory of a hyperparameter of the caller's
- jax.tree.leaves(kept) + self._captured
+ jax.tree.leaves(kept)

_training/donation.py: an array that stands in two places is taken twice
- held.add(id(x))
+ held.discard(id(x))

_training/local_steps.py: one step too many is taken
- number < wanted,
+ number <= wanted,

_training/local_steps.py: the pulled parameters are donated
- donate_argnums=(1,)), tx
+ donate_argnums=(0, 1)), tx

_training/readings.py: a table that the loss casts is read as it is
- for dtype in table.casts:
+ for dtype in ():

_training/readings.py: an id that a reading clips counts for no row
- clips = mode == jax.lax.GatherScatterMode.CLIP
+ clips = False

_training/readings.py: a reading of single numbers is one of rows
- if sizes != row:
+ if len(sizes) != len(row):

_training/readings.py: a jit that reads a table is not looked into
- if name == "jit":
+ if name == "jitted":

_training/readings.py: a checkpoint that reads a table saves all that it computes
- results, read = jax.checkpoint(inside, **how)(*inputs)
+ results, read = inside(*inputs)

_training/readings.py: rows of a stopped table get a gradient
- if not table.stopped:
+ if True:

_training/readings.py: the number that fills a read has the table's dtype
- fills = fills and bool(table.casts)
+ fills = False

_training/readings.py: an id outside of a part is padding where the table clips
- return (taken if clips else ids), taken
+ return (taken if clips else ids), (taken if clips else ids)

_training/readings.py: a slice of columns is one of rows
- if cut[1:] != [(0, length, 1) for length in row]:
+ if len(cut) != len(shape):

_trees/rows.py: a mesh that is not in context is not known
- return jax.sharding.reshard(x, NamedSharding(mesh or there, P()))
+ return jax.sharding.reshard(x, P())

_trees/indexed_slices.py: one number a row is a stack of gradients
- if self._summed:
+ if self._summed and self.values.ndim == self.ndim:

_training/lookup.py: a part of a table that has no name is taken for an array
- if not is_sparse(leaf) and not is_named(paths[i]):
+ if not is_named(paths[i]):

_trees/table_rows.py: an id that a part does not hold counts for the row all the same
- return read_rows(self.values, at), jnp.where(missing, height, ids)
+ return read_rows(self.values, at), ids

_trees/rows.py: rows of a sharded table lie as JAX guesses
- return take_rows(table, ids, out_sharding=explicit)
+ return take_rows(table, ids)

_server/parameter_server.py: a restore between check and step goes unnoticed
-         check_step(local_step, self._version)
-         old = self._version
+         old = self._version

_server/parameter_server.py: a push from before a restore is answered from memory
- self._answered = {}  # A
+ # A

_server/parameter_server.py: a restore wakes nobody who waits
-         self._answered = {}  # A worker that repeats an older push must pull again.
-         self._wake()
+         self._answered = {}

_server/programs.py: a worker that still computes holds up the others
-         jax.block_until_ready(leaves)
-         if self._require_finite:
+         if self._require_finite:

_server/programs.py: a call that waited for the compiler compiles the same again
- if known is not None:
+ if isinstance(known, Refusal):

_server/rows.py: rows that a pull asks for twice come twice
- once = np.unique(ids)
+ once = np.sort(ids)

_server/rows.py: a part has as many rows as its size, not as its ids
- if length != len(rows):
+ if length > len(rows):

_server/placement.py: a server begins that no push can fit
- checks.no_lookahead(params, state, LOOKAHEAD)
+ pass

_server/placement.py: the server looks at the memory of NumPy's arrays
- np.array(x) if isinstance(x, np.ndarray) else x
+ x

_server/actor.py: every pull puts its version into Ray's store
- if ref is None:
+ if ref is None or not tables:

_server/actor.py: a version that is gone is pulled for good
- return refs.get(tables) if last == _step(version) else None
+ return refs.get(tables)

_server/wire.py: a weakly typed array arrives with a type
- if x.weak_type or not x.is_fully_addressable:
+ if not x.is_fully_addressable:

_server/records.py: all lives of a server are one
- secrets.token_hex(8)
+ ""

_server/waiters.py: one who stops waiting takes along all who wait for that step
- if not waiting:
+ if waiting:

_server/waiters.py: a step forgets which incarnation it is from while it waits
- return [(step, woken) for at in waiting.values() for woken, step in at.items()]
+ return [(step, woken) for step, at in waiting.items() for woken in at]

_server/serial_executor.py: two calls run at once
- with self._lock:
+ with threading.Lock():

_server/serial_executor.py: the thread of a server that is gone lives on
- weakref.finalize(self, self._calls.put, None).atexit = False
+ pass

_server/records.py: the rate counts pushes from before the server began
- counted = pushes - self._before
+ counted = pushes

_server/checkpoints.py: a checkpoint of another job is read
- if saved.get(path) != wanted.get(path):
+ if False:

_server/checkpoints.py: nobody is told that one was not written
- if done is None:  # The run goes on, and the next one may succeed.
+ if done:

_server/checkpoints.py: two runs of a process wait for each other
- enable_async_checkpointing=False,
+ enable_async_checkpointing=True,

_server/checkpoints.py: a checkpoint that could not be written is left half written
- self._manage()  # Removes the half-written checkpoint.
+ pass

_server/checkpoints.py: a run goes on with other settings, and does not say so
- if name in before and before[name] != now[name]
+ if name not in before

_server/folder.py: a broken checkpoint is read
- if found.get(name) != each:
+ if name not in found:

_server/folder.py: a folder is of two runs of one process
- if other is not None and other.is_there():
+ if False:

_server/folder.py: a folder is of two processes
- except (BlockingIOError, PermissionError):
-             return False
+ except (BlockingIOError, PermissionError):
+             return True

_server/folder.py: among checkpoints there may be anything
- if names and (not names & {*ITEMS} or names & {"", "default"}):
+ if not names:

_server/folder.py: an empty path is the working directory
- if not path:
+ if path is None:

_server/recoverable.py: a push that is answered from memory is saved as pushed again
- if self._version is before:  # A repeated push: it got its first answer.
+ if self._version is None:  # A repeated push: it got its first answer.

_server/recoverable.py: a run that should not go on does
- if not saver.checkpoint.resume:
+ if saver.checkpoint.resume is None:

_server/extras.py: a package that is missing has no hint
- raise ImportError(f"{error}: {hint}") from error
+ raise

engines/_threads.py: threads that sleep are waited for
- self._halt.set()
+ pass

engines/_pool.py: more gradients are handed out than the run pushes
- if self._ledger.stands + self._awaited() >= self._job.pushes:
+ if self._ledger.stands >= self._job.pushes:

engines/_pool.py: a worker that blocks keeps the last push from the others
- return sum(self._since[index] > limit for index in self._busy)
+ return len(self._busy)

engines/_pool.py: a push that was answered and not given is saved and does not count
- self._ledger.settle(self.server.rest())
+ self.server.rest()

engines/_pool.py: a worker whose stream has ended draws again
- self._members = {i: w for i, w in self._members.items() if i != index}
+ pass

engines/_pool.py: workers that all wait for a step wait for good
- if len(members) < self._at_least or self._refused:
+ if True:

engines/_threads.py: a worker that blocks is waited for
- thread.join(max(0.0, deadline - time.monotonic()))
+ thread.join()

engines/_work.py: a duration may be anything
- return float(checks.in_range(name, worker.duration(number), "[0, inf]"))
+ return worker.duration(number)

engines/_ending.py: an exception loses what was answered before it
- step = run.save() if checkpoint else None
-             except
+ step = None
+             except

_server/recoverable.py: a server saves itself after a step that has failed
- if self._failed is self._version or not
+ if not

_server/folder.py: a folder that was deleted is made anew without its lock
- if self._path is None or self.is_there():
+ if True:

engines/_work.py: a gradient without pieces is pushed however late it is
- if over():
+ if False:

engines/_work.py: a vector is taken for a loss
- return x.shape == () and
+ return

_server/recoverable.py: workers push after the last word
- self._takes = 0
+ pass

_server/recoverable.py: a run that goes on takes all its pushes once more
- self._takes -= number + 1
+ pass

engines/_servers.py: a server that dies too often is replaced
- if self.deaths == self._max_deaths:
+ if self.deaths is None:

_server/channel.py: a process that hangs in a collective outlives the leader
- self._end("the leader of the server has died, and this process ends with it")
+ pass

_server/channel.py: a leader that fails alone goes on
- if not self._others_failed.acquire(timeout=wait):
+ if self._others_failed is None:

_server/layout.py: the last part has rows that do not exist
- return min(process * each, shape[cut]), min((process + 1) * each, shape[cut])
+ return process * each, (process + 1) * each

_server/layout.py: no state is cut
- return seen, axis
+ return seen, None

_server/sharded.py: parameters in parts stay in the memory that was given
- x if self._lies_here(x) else np.array(x)
+ x

_server/sharded.py: a step sees the padding of dense arrays
- lambda path, x, padded: padded if path in rows else x,
+ lambda path, x, padded: padded,

_server/sharded.py: padding of pushed rows is a row of the padded table
- indices = jnp.where(g.indices < g.dense_shape[0], g.indices, shape[0])
+ indices = g.indices

_server/messages.py: an argument that has the shape of a part is taken for one
- else Part(parts[x.number])
+ else parts[x.number]

_server/messages.py: rows that were pulled have the padding of a table cut along them
- rows[(slice(None), *inside)]
+ rows

_server/messages.py: a small array is sent when it may have been overwritten
- return cls(None, copy(tree))
+ return cls(None, tree)

_server/group.py: a push that was refused stays prepared
- if key in self._prepared:
+ if self._prepared is None:

_server/group.py: a push that fails in a follower has a place in the order
- raise error.cause from None
+ pass

_server/group.py: nobody waits for the coordinator
- time.sleep(0.02)
+ return

_server/group.py: followers are not told of checkpoints
- self._commands.send("snapshot", taken.pushes, taken.counters)
+ pass

_server/follower.py: a push that was prepared for nothing is kept
- self._prepared.pop(key, None)
+ self._prepared.get(key, None)

_server/follower.py: a follower resumes at the beginning
- self._leaves = jax.tree.leaves(self._programs.place(snapshot.state))
+ pass

engines/_group.py: a process that dies as a group starts is waited for
- done, left = self._ray.wait(left, num_returns=1, timeout=LOOK)
+ done, left = self._ray.wait(left, num_returns=len(left), timeout=LOOK)

engines/_group.py: Ray starts one of a group again by itself
- each = {**self._options, "max_restarts": 0, "max_task_retries": 0}
+ each = {**self._options}

engines/_group.py: a place that names other needs has no CPU
- if bundle["CPU"] is None:  # Ray asks for one, whatever else there is.
+ if False:

engines/_connect.py: a cluster is waited for without an end
- said, _ = process.communicate(timeout=seconds)
+ said, _ = process.communicate()

engines/_ending.py: SIGTERM while a cluster is waited for has no line
- with _sigterm(lambda *_: terminated(None, checkpoint)):
+ with contextlib.nullcontext():

engines/_ledger.py: a push that the server forgot is not lost
- self._lost += lost
+ pass

engines/_ledger.py: an answer of a server that died counts for the one after it
- if is_past(push.local_step, self.incarnation):
+ if False:

engines/_pool.py: too few workers are left for a step
- if len(members) == self._at_least:
+ if len(members) == 0:

engines/_ending.py: a run that failed is saved
- except Terminated:
+ except BaseException:

engines/_pool.py: a run that is taken up again begins its numbers anew
- self._busy[index] = self._start(index, worker, number)
+ self._busy[index] = self._start(index, worker, 0)

engines/_tensorboard.py: pushes that died with the server lead the curves ahead
- if incarnation == self._incarnations[-1]:
+ if incarnation in self._incarnations:

engines/_tensorboard.py: a run that goes on hides the checkpoint's own point
- min(began + 1, push.result.global_step)
+ min(began, push.result.global_step)

engines/_work.py: a minibatch stays where it was
- params, batch = _moved((params, batch), worker.device)
+ params = _moved(params, worker.device)

_demo/digits.py: each seed begins with the same weights
- rngs = nnx.Rngs(seed)
+ rngs = nnx.Rngs(0)

_demo/report.py: accepted pushes of the last worker count as dropped
- push.worker == last and not push.result.applied
+ push.worker == last

_demo/listing.py: names are cut where the terminal is narrow
- table.add_column("name", no_wrap=True)
+ table.add_column("name", width=12)

_demo/command_line.py: an option that is empty is left out
- if not path:
+ if path is None:

_demo/command_line.py: the picture of an earlier run is lost if the new one is not drawn
- if not existed and os.path.lexists(path):
+ if os.path.lexists(path):

_config/config.py: beta_1 and beta2 are nobody's names
- close = difflib.get_close_matches(spelt, known, n=1)
+ close = difflib.get_close_matches(str(word), known, n=1)

_config/config.py: NaN is taken for a finite number
- not abs(value) <= _LARGEST
+ abs(value) > _LARGEST

_config/hints.py: true is taken for the number 1
- return isinstance(value, kinds) and not isinstance(value, bool)
+ return isinstance(value, kinds)

_config/keras.py: a rate counts steps where Keras counts pushes
- if not isinstance(learning_rate, Mapping):
+ if isinstance(learning_rate, Mapping):

_config/keras.py: a piecewise constant rate changes one step early
- int(boundary) + 1 for boundary
+ int(boundary) for boundary

_config/schedules.py: the first step of a cosine is the last of the one before
- start(nearest) * (1 - 1e-6)
+ start(nearest) * (1 + 1e-6)

__main__.py: workers share the state of one local optimizer
- return own
+ shared = own()
+     return lambda: shared
"""


class Mutation(NamedTuple):
    """One fault."""

    file: str  # In gradxform/.
    breaks: str
    before: str
    after: str

    @property
    def title(self) -> str:
        """The file and the fault, as the table has them."""
        return f"{self.file}: {self.breaks}"

    def built_in(self, source: str) -> str:
        """The source with the fault; ``ValueError`` unless it fits in one place."""
        if source.count(self.before) != 1:
            raise ValueError(
                f"{self.file} has {self.before!r} {source.count(self.before)} times, "
                "and should have it once."
            )
        return source.replace(self.before, self.after)


def parsed(table: str) -> list[Mutation]:
    """The mutations of a table."""
    mutations = []
    for entry in table.strip().split("\n\n"):
        title, *lines = entry.splitlines()
        before, after = (
            "\n".join(line[2:] for line in lines if line.startswith(sign))
            for sign in "-+"
        )
        mutations.append(Mutation(*title.split(": ", 1), before, after))
    return mutations


MUTATIONS = parsed(TABLE)


def file_of(made: Any) -> str:
    """The file that defines a function or a class of the package."""
    return made.__module__.partition(".")[2].replace(".", "/") + ".py"


def copied(folder: pathlib.Path) -> pathlib.Path:
    """Copies the tracked files of the repository; the tests import no others."""
    listed = ["git", "ls-files", "-z"]
    names = subprocess.check_output(listed, cwd=REPOSITORY, text=True).split("\0")
    for name in filter(None, names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(REPOSITORY / name, folder / name)
    command = [sys.executable, "-c", "import gradxform; print(gradxform.__file__)"]
    path = subprocess.check_output(command, cwd=folder, env=env(folder), text=True)
    if pathlib.Path(path.strip()) != folder / "gradxform/__init__.py":
        raise RuntimeError(f"the tests would import {path.strip()}, and not the copy.")
    pytest(folder, "--collect-only")
    return folder


def env(folder: pathlib.Path) -> dict[str, str]:
    """The environment for the tests of a copy."""
    return {**os.environ, "PYTHONPATH": str(folder)}


def nearest_first(folder: pathlib.Path, file: str) -> list[list[str]]:
    """Tests of the file's subpackage, then those of every one, then all others."""

    def found(pattern: str) -> list[str]:
        paths = sorted(folder.glob(pattern))
        return [str(p.relative_to(folder)) for p in paths if p.name != SELF]

    subpackage, _, module = file.removesuffix(".py").rpartition("/")
    name = f"test_{module.strip('_')}.py"
    own = found(
        f"tests/{subpackage.strip('_')}/test_*.py" if subpackage else f"tests/{name}"
    )
    own.sort(key=lambda path: not path.endswith(name))
    own.append(f"gradxform/{file}")  # Its doctests.
    rest = [*found("tests/*/test_*.py"), *found("tests/test_*.py"), "gradxform"]
    rest += ["README.md", *found("docs/*.md"), *found("docs/*/*.md")]
    rest = [path for path in rest if path not in [*own, *OF_EVERY_SUBPACKAGE]]
    return [own, OF_EVERY_SUBPACKAGE, rest]


def pytest(folder: pathlib.Path, *options: str) -> str | None:
    """Runs tests of a copy. Returns the name of the first that fails, or None."""
    command = [sys.executable, "-m", "pytest", "-n0", "-q", "-x", "--tb=line", "-rfE"]
    command += options
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    try:
        process = subprocess.run(
            command, cwd=folder, env=env(folder), timeout=LIMIT, check=False, **pipe
        )
    except subprocess.TimeoutExpired:
        return f"none within {LIMIT} seconds"
    failed = re.search(r"^(?:FAILED|ERROR) (\S+::.*?)(?: - |$)", process.stdout, re.M)
    if process.returncode == 1 and failed:
        return failed[1]
    if process.returncode in (0, 5):  # There may be no such tests.
        return None
    # No test has failed: they could not be collected, or pytest was called wrongly.
    raise RuntimeError(f"{' '.join(options)}:\n{process.stdout}")


def outcome(
    mutation: Mutation, original: pathlib.Path, markers: dict[str, str]
) -> tuple[str, str, float]:
    """The part that catches a mutation, or "none"; its first test to fail; seconds."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="gradxform-") as temporary:
        # The copy keeps what Python has compiled, which goes by the times of the files.
        folder = shutil.copytree(original, pathlib.Path(temporary, "copy"))
        mutated = folder / "gradxform" / mutation.file
        mutated.write_text(mutation.built_in(mutated.read_text()))
        for part, marker in markers.items():
            for tests in nearest_first(folder, mutation.file):
                test = pytest(folder, "-m", marker, *tests)
                if test is not None:
                    return part, test, time.perf_counter() - start
    return "none", "", time.perf_counter() - start


def chosen(only: list[str]) -> list[int]:
    """The numbers of these mutations, or of those of these files; of all by default."""
    return [
        number
        for number, mutation in enumerate(MUTATIONS, 1)
        if not only or str(number) in only or mutation.file in only
    ]


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[], metavar="NUMBER|FILE")
    parser.add_argument("--part", choices=("quick", "all"), default="all")
    parser.add_argument("-n", type=int, default=1, metavar="JOBS")
    parser.add_argument("--list", action="store_true", help="prints the table alone")
    args = parser.parse_args()
    numbers = chosen(args.only)
    if args.list:
        for number in numbers:
            print(f"{number:2}  {MUTATIONS[number - 1].title}")
        return
    markers = {"quick": "not slow"} | ({"slow": "slow"} if args.part == "all" else {})
    with contextlib.ExitStack() as stack:
        enter, folder = stack.enter_context, tempfile.TemporaryDirectory
        if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
            # Only what a mutation has changed is compiled again.
            os.environ["JAX_COMPILATION_CACHE_DIR"] = enter(folder())
        original = copied(pathlib.Path(enter(folder())).resolve())
        pool = enter(concurrent.futures.ThreadPoolExecutor(args.n))
        outcomes = pool.map(
            lambda number: outcome(MUTATIONS[number - 1], original, markers), numbers
        )
        by_part: dict[str, list[str]] = {"quick": [], "slow": [], "none": []}
        for number, (part, test, seconds) in zip(numbers, outcomes, strict=True):
            title = MUTATIONS[number - 1].title
            print(
                f"{number:2}  {title}\n    {part}, {seconds:.0f} s  {test}", flush=True
            )
            by_part[part].append(test)
        # A test that fails without a fault has caught nothing.
        caught = {test for test in by_part["quick"] + by_part["slow"] if "::" in test}
        fails = pytest(original, *sorted(caught)) if caught else None
        if fails:
            raise RuntimeError(f"without any mutation fails {fails}")
    quick, slow, missed = map(len, by_part.values())
    print(f"The quick part has caught {quick} of {len(numbers)}", end="")
    print(f", the whole suite {quick + slow}." if len(markers) == 2 else ".")
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
