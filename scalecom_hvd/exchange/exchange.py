"""The exchange of one optimizer's gradients: which bucket does what when.

This is the only room that knows of time. It does nearly everything while backward runs. One step:

    a gradient is here      -> if its bucket is complete, the bucket's step begins: a generator of
                               the method (methods/), which makes moves and submits collectives.
                               It yields what it must wait for: its own kernel, which runs on a
                               thread if it can, or other ranks
    in every later hook     -> all buckets go on as far as they can without waiting
    synchronize()           -> `result`: submit what is left, and wait for everything
    all values are here     -> every rank sees whether any gradient was not finite; commit the
                               step, or roll it back

bucket_step.py explains why this cannot deadlock. Hooks wait for nothing, so ranks may see their
gradients in any order, and may not see some of them at all (these take part as zeros).
`complete_state` waits only for what every rank submitted in its last step.

A step may be taken in parts, each of some buckets (fragments of local steps). Each part then runs
as above. All parts have the step's number, and the last part ends the step.

Optimizers call `ready` from hooks and `result` from synchronize(). Imports methods/base,
bucket_step, bucket_plan, diagnostics_sampler, new_gradients, node, run, tensor_use and the rooms
below.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from scalecom_hvd.agreement import Names, Settings, compare_ranks
from scalecom_hvd.bucket_layout import Stats, step_stats
from scalecom_hvd.config import ScaleComConfig
from scalecom_hvd.diagnostics import Diagnostics
from scalecom_hvd.exchange.background_thread import BackgroundThread
from scalecom_hvd.exchange.bucket import Bucket
from scalecom_hvd.exchange.bucket_plan import Groups, Part, plan_buckets
from scalecom_hvd.exchange.bucket_step import MOST_CHANNELS, BucketStep, BucketSteps
from scalecom_hvd.exchange.collectives import Collectives, Step, Wait, gather_objects
from scalecom_hvd.exchange.devices import Streams, on_host
from scalecom_hvd.exchange.diagnostics_sampler import Sampler
from scalecom_hvd.exchange.methods.base import Method, State
from scalecom_hvd.exchange.methods.bucket_collectives import BucketCollectives
from scalecom_hvd.exchange.methods.checked_step import checked_step
from scalecom_hvd.exchange.new_gradients import (
    CHANGED,
    NewGradients,
    SparseAverage,
    check_same_parameters,
    digest,
    fill_in,
)
from scalecom_hvd.exchange.node import Node
from scalecom_hvd.exchange.residue import Residues
from scalecom_hvd.exchange.run import Averager
from scalecom_hvd.exchange.tensor_use import TensorUse
from scalecom_hvd.saved_state import Saved
from scalecom_hvd.schedule import leader


class Exchange(Averager):
    """The exchange of one optimizer's gradients. All ranks submit the same collectives.

    Args:
        parameters: {name: parameter} of all trained parameters, in the model's order.
        method: how compressed tensors are averaged. From now on the method serves these parameters.
        collectives: how this rank reaches the others.
        groups: lists of names that share a bucket. None: buckets of about config.bucket_bytes, in
            the order in which gradients arrive on rank 0.
        sparse_as_dense: whether sparse gradients are made dense.
        send_sparse: a function that averages a gradient that stays sparse.
        settings: what ranks must have in common, besides the method's settings.
        asks_for_news: whether a step begins only if some rank has new gradients (`must_exchange`).
        asks_for_use: whether ranks tell each other which tensors have gradients. A tensor sends
            nothing if no rank has a gradient for it, and its residue waits. Use this if averages of
            such tensors are thrown away (tensor_use.py).
        zeros_are_unused: with `asks_for_use`, whether a gradient of zeros counts as none.
        is_scaled: whether gradients carry the method's loss scale. Changes of parameters do not.
        node: the ranks of this node, if each of them holds a part of every gradient. They are asked
            whether a step counts, after "are all buckets sound" and before the commit. None: this
            rank has whole gradients.
        part_of: the averager that this exchange is a part of. That averager begins the method's run
            when it is complete. None: this exchange begins the run.
        compares_parameters: whether ranks that begin with different parameters are refused.

    Attributes:
        trained: the parameters.
        has_sent: whether values left residues in the last step.
        use: with `asks_for_use`, which tensors the last step used. The same on all ranks.
        part: which tensors the coming step is about, the same on all ranks. None: always all of
            them.
        streams: the streams on which the exchange works.

    Raises:
        ValueError, TypeError: see Run.begin.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        method: Method,
        collectives: Collectives,
        *,
        groups: Groups | None = None,
        sparse_as_dense: bool = False,
        send_sparse: SparseAverage | None = None,
        settings: Settings | None = None,
        asks_for_news: bool = False,
        asks_for_use: bool = False,
        zeros_are_unused: bool = False,
        is_scaled: bool = True,
        node: Node | None = None,
        part_of: Averager | None = None,
        compares_parameters: bool = True,
    ) -> None:
        self.residues: Residues = method.residues
        self.config: ScaleComConfig = method.config
        self.buckets: list[Bucket] = []
        self.part: Part | None = None
        self.names = Names(collectives.numbers)
        self._parameters = dict(parameters)
        self._name_of = {parameter: name for name, parameter in parameters.items()}
        self.trained = self._name_of.keys()
        self.has_sent = False
        # Tensors without a gradient on this rank, in this step.
        self._missing: set[str] = set()
        self._method, self._run = method, method.run
        self.collectives = collectives
        self._restarted = collectives.restarts()
        self._groups = groups
        self._sparse_as_dense = sparse_as_dense
        self._send_sparse = send_sparse
        self._is_scaled = is_scaled
        self.use = TensorUse(zeros_are_unused) if asks_for_use else None
        self.node = node
        self._settings = method.settings | dict(settings or {})
        # Ranks ask about gradients, and compare them, as scripts have them: on all ranks of all
        # nodes.
        everyone = collectives if node is None else node.everyone or collectives
        whole = self._parameters if node is None or node.shards is None else node.shards.parameters
        self._as_script_has = whole
        self._news = NewGradients(everyone, self.names, whole) if asks_for_news else None
        self._everyone = None if everyone is collectives else everyone
        # Only ranks that ask each other for news may find that a step must begin again. What such
        # a rank submitted of it may meet what another rank submitted before it gave the step up.
        self._copies = asks_for_news
        self._sampler: Sampler | None = None
        # Hooks run on autograd's threads, one per device.
        self._lock = threading.RLock()
        self.streams = Streams(parameter.device for parameter in parameters.values())
        self._thread = BackgroundThread(self, self._go_on)
        self._failure: BaseException | None = None
        self._finishing = False
        # The step about which ranks must still compare what they saw. None: there is no such step.
        self._look_at: int | None = None
        self._agreed = False
        self._channels: list[Collectives] = []
        self._steps = BucketSteps([], self._channels, self._bucket_step)
        # {bucket's number: norms of residues and gradients}, for the step's parts so far.
        self._norms: dict[int, tuple[float, float]] = {}
        self._arrived: dict[str, None] = {}
        self._sparse: dict[str, Callable[[], torch.Tensor] | None] = {}
        self._outputs: dict[str, torch.Tensor] = {}
        self._whole = False
        self._unscaling: Wait[float] | None = None  # None: gradients are not scaled
        kinds = ("offsets", "values", "dense", "gathered", "collectives")
        self._submitted = dict.fromkeys(kinds, 0)
        # About the last finished step, or part of a step: whether it ended the step, what was
        # submitted, how many elements of each tensor were chosen, and which tensors it was about.
        self._places: dict[str, int] = {}
        self._last = True, self._submitted, self._places, list(self._parameters)
        # Whether ranks must still compare parameters. Local steps compare theirs themselves.
        self._is_new = compares_parameters and part_of is None
        if part_of is None:
            self._run.begin(self._parameters, self)

    # What the optimizer calls.

    def must_exchange(self, fresh: bool) -> bool:
        """Whether a synchronize() that begins now has gradients to exchange.

        If so, the optimizer reports all of them, and asks for results. If backward gave no rank any
        gradient, gradients become what Horovod's average (or sum) of them is. Residues, leader and
        step then stay as they are.

        Args:
            fresh: whether backward gave this rank any gradient since the last exchange.

        Raises:
            RuntimeError: on all ranks, if gradients were changed on some rank after they arrived.
        """
        with self._or_forgotten():
            has_gradients = self._ask_all(fresh)
        for parameter in () if has_gradients else self._as_script_has.values():
            if parameter.grad is not None:
                self.streams.give(parameter.grad)
        return has_gradients

    def _ask_all(self, fresh: bool) -> bool:
        self._notice_restart()
        news, changed = self._news, self._has_changed()
        sparse = self._sparse, self._send_sparse
        if news.channel is not None:
            if not (news.ask(fresh) or news.came_by_hand(*sparse)):
                return False
            changed, alike = news.signal(changed, self._agreed)
            if changed:
                self._let_all_arrive(alike)
                raise RuntimeError(CHANGED)
            if alike:
                return True
            # Some rank gave a step up, or loaded a state. If this rank has begun a step, the step
            # is rolled back, and begins again once ranks have agreed.
            if self._agreed:
                self._begin_again()
            news.meet(None)
        under_way = {name: wait for name, wait in self._sparse.items() if wait is not None}
        return news.ask_at_first(fresh, changed, under_way) or news.came_by_hand(*sparse)

    def _begin_again(self) -> None:
        """Report again the gradients that have arrived, as in a first step.

        Sparse gradients are on their way already, because they travel without an agreement.
        """
        arrived, sparse = list(self._arrived), self._sparse
        self._abort()
        self._begin_step()
        self._arrived, self._sparse = dict.fromkeys(arrived), sparse
        for name in arrived:
            if sparse.get(name) is None:
                self.ready(self._parameters[name])

    def _let_all_arrive(self, alike: bool) -> None:
        """Complete all collectives of a step that all ranks give up, so that none is left over."""
        if not alike:
            return  # some rank has forgotten what the others have begun
        for name in self._parameters.keys() - self._arrived.keys():
            self.ready(self._parameters[name])
        self._steps.complete(self._steps.all)
        for wait in self._sparse.values():
            wait()

    def _has_changed(self) -> bool:
        """Whether a gradient was changed after it arrived, if that matters."""
        # The other ranks wait for this rank's signal, perhaps before they submit what this rank's
        # own stream waits for.
        with self.streams.left():
            changed = self._news.changed()
        is_scaled = self._unscaling is not None and self._unscaling.now() != 1
        if not (self._agreed or is_scaled) and self._everyone is None:
            # No bucket has begun, so gradients are exchanged as they are now. Only sparse
            # gradients travel already.
            changed = [name for name in changed if name in self._sparse]
        if changed:  # other gradients may have changed, unnoticed
            for bucket in self.buckets:
                bucket.roll_back(keep_gradients=True)
        return bool(changed)

    def ready(self, parameter: torch.Tensor) -> None:
        """Report a complete gradient of this rank. Backward's hooks call this, so it never waits.

        Args:
            parameter: one of the trained parameters. Its .grad is read. If it is None, it becomes
                zeros.

        Raises:
            RuntimeError: a gradient has another size than its parameter had, or something has
                failed on the background thread meanwhile. The step is rolled back.
        """
        name = self._name_of[parameter]
        with self._or_forgotten(joins=False):
            self._notice_restart()
            if not self._arrived:
                self._begin_step()
            self._arrived[name] = None
            if parameter.grad is None:
                self._missing.add(name)
            fill_in(parameter, name in self._sparse)
            if name in self._sparse and not parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_sparse(1)
            may_be_sparse = not (self._sparse_as_dense or self._agreed)
            if name in self._sparse or (parameter.grad.is_sparse and may_be_sparse):
                self._sparse[name] = self._send_sparse(parameter)
                if self._news is not None:
                    self._news.mark(name)
            else:
                if self._everyone is None and (self._agreed or not self._whole):
                    self.mark(name)
                if self._agreed:
                    self._steps.of[name].waiting.discard(name)
            self._advance()

    def mark(self, name: str) -> None:
        """Note that a gradient is on its way. If a script changed it now, that would be lost."""
        if self._news is not None:
            with self.streams.left():
                self._news.mark(name)

    def result(self, parameter: torch.Tensor) -> torch.Tensor:
        """The averaged gradient. Call it when every gradient of this rank has been reported.

        The first call of a step waits for all ranks.

        Args:
            parameter: each reported parameter, once.

        Returns:
            What .grad must become, with its shape and dtype. It is NaN in a skipped step.

        Raises:
            RuntimeError: ranks were started differently. It is raised at the first step, on all
                ranks.
            Exception: a collective failed, and the transport raised this. The step is rolled back.
        """
        name = self._name_of[parameter]
        with self._lock:
            if name not in self._outputs:
                self.finish()
                self.look()
            return self.streams.give(self._outputs.pop(name))

    def finish(self) -> None:
        """Wait for everything. Then commit the step, or roll it back, as `result` does.

        If `send` has sent everything, this waits for no other rank's script.
        """
        ending = self.node.ending_a_step() if self.node else contextlib.nullcontext()
        with self._or_forgotten(), ending:
            self._finishing = True
            try:
                self._finish()
            finally:
                self._finishing = False

    def look(self, all_are_here: bool = True) -> None:
        """Let ranks compare what they saw of the step that `finish` ended, if that is due.

        Args:
            all_are_here: whether all ranks call this. If not, nothing is compared.
        """
        step, self._look_at = self._look_at, None
        if step is not None and all_are_here:
            with self._or_forgotten():
                self._sampler.look(step, self.collectives, self.names("diagnostics"))

    def send(self) -> None:
        """Send all that was reported, for callers that take long between `ready` and `result`.

        All ranks make this call. At the first step, ranks agree here. From then on, no rank waits
        for another rank's script. Collectives that depend on what other ranks send are submitted on
        the background thread. This also holds if a script drops its optimizer meanwhile, which
        ranks may do at different times. The call raises what `result` raises.
        """
        with self._or_forgotten(joins=False):  # `finish` joins
            if not self._agreed:
                self._agree()
            self._advance()
            self._steps.begin(self._steps_of_part(), all_are_here=True)
        self._thread.keep_owner()

    def in_step(self) -> bool:
        """Whether gradients were reported that are not averaged yet."""
        return bool(self._arrived)

    def complete_state(self) -> None:
        """Wait for what the method's state lacks. Every rank submitted this in its last step."""
        with self._lock, self.streams.entered():
            self._notice_restart()
            for step in self._steps.all:
                step.complete_state()

    def agree_anew(self) -> None:
        """At the next step, ranks compare and make buckets again: other residues were loaded."""
        with self._lock:
            self.buckets = []
            self._steps = BucketSteps([], [], self._bucket_step)
            self._agreed, self._look_at = False, None

    def state_dict(self) -> Saved:
        """See Averager."""
        of_node = {} if self.node is None else self.node.state_dict()
        return of_node if self.use is None else {**of_node, **self.use.state_dict()}

    def load_state_dict(self, state: Saved) -> None:
        """See Averager."""
        if self.use is not None:
            self.use.load_state_dict(state)

    def start_over(self) -> None:
        """Forget the step in progress, if any, because the optimizer's state was loaded."""
        if self.in_step():
            self.abort()

    def abort(self) -> None:
        """Forget the step in progress. It is rolled back, so residues lose nothing."""
        with self._lock, self.streams.entered():
            self._abort()

    def watch(self, diagnostics: Diagnostics) -> None:
        """Look at steps from now on. `stats` then reports what was seen."""
        self._sampler = Sampler(diagnostics)
        self._settings |= diagnostics.settings

    @contextlib.contextmanager
    def _or_forgotten(self, joins: bool = True) -> Iterator[None]:
        """Let in one thread at a time. If something fails inside, forget the step in progress.

        Args:
            joins: see Streams.entered.
        """
        with self._lock, self.streams.entered(joins):
            try:
                yield
            except BaseException:
                self._abort()
                raise

    def _notice_restart(self) -> None:
        """If ranks were started anew (elastic runs), forget everything that was under way."""
        if self._restarted():
            self._abort()
            if self._news is not None:
                self._is_new = True
                self._news.meet(None)

    # One step.

    def _advance(self) -> None:
        """Let every bucket go on as far as it can without waiting."""
        if self._failure is not None:
            raise self._failure
        self._steps.advance([step for step in self._steps_of_part() if not step.is_late])

    def _go_on(self) -> bool:
        """Let every bucket go on, on the background thread.

        Returns whether some bucket has more to submit, so that it is worth looking again soon.
        """
        if not self._lock.acquire(blocking=False):
            # A hook holds the lock only for a moment. `_finish` holds it until the step's end.
            return not self._finishing
        try:
            with self.streams.continued():
                self._advance()
            return any(step.has_more or step.may_begin for step in self._steps.all)
        except BaseException as error:
            self._failure = error  # raised when the user's thread calls
            return False
        finally:
            self._lock.release()

    def _begin_step(self) -> None:
        self._outputs.clear()
        self._missing.clear()
        self._unscaling = self._method.scaling.inverse() if self._is_scaled else None
        if self._unscaling is not None and self.node is not None and self.collectives.is_ordered:
            # Ranks must submit what NCCL sends between nodes and inside a node in one order, or
            # they wait for each other for ever. Loss scales reach hosts at different times, so the
            # host waits. Mostly the copy began when forward began, and is here.
            self._unscaling.now()
        self._choose_late()
        self._whole = self._must_send_whole()
        self._submitted = dict.fromkeys(self._submitted, 0)
        if self._news is not None:
            self._news.begin(self._agreed)

    def _choose_late(self) -> None:
        """Choose the buckets that must not begin while backward runs; the same on all ranks."""
        for step in self._steps.all:
            step.is_late = self.use is not None and self.use.concerns(step)

    def _must_send_whole(self) -> bool:
        names = self.residues.tensors.keys() - self._sparse.keys()
        return self.residues.step < self.residues.whole_steps or not self._method.is_ready(names)

    def _sample_due(self) -> bool:
        looks = self._sampler is not None and self._sampler.due(self.residues.step)
        return looks and not self._whole

    def _bucket_step(self, step: BucketStep) -> Step[None]:
        """One bucket's step, from its gradients to their averages. All gradients are here."""
        bucket = step.bucket
        if step.state_arrives is not None:
            yield from step.state_arrives
            step.state_arrives = None
        collectives = BucketCollectives(
            self._steps.channel_of(bucket),
            self.names,
            bucket,
            self.residues.step,
            self.leader_at,
            self._submitted,
        )
        if self.use is not None:
            self.use.look(step)
        scale = 1.0 if self._unscaling is None else (yield from self._unscaling)
        bucket.begin(scale, self._whole, unused=() if self.use is None else self.use.unused)
        if self._sample_due():
            self._sampler.before(bucket)
        if bucket.compressed:
            state = self._state(bucket)
            step.new_state = yield from checked_step(self._method, bucket, collectives, state)
        if not collectives.sent_values:
            yield from collectives.average_taken()

    def _state(self, bucket: Bucket) -> State:
        run, now = self._run, self.residues.step
        # These are copies. If a method changes a dictionary in place, only its copy changes.
        own = {name: dict(run.tensor_states[name]) for name in bucket.compressed}
        return State(now, own, dict(run.method_state), now + 1 < self.residues.whole_steps)

    def leader_at(self, step: int, bucket: int) -> int:
        """The position of the rank that chooses for a bucket in a step."""
        return leader(step, bucket, self.collectives.size, self.config.leader == "staggered")

    def _finish(self) -> None:
        """Submit what is left, wait for everything, and commit the step, or roll it back."""
        if not self._arrived:
            raise RuntimeError("averages were asked for before gradients came: this is a bug")
        if not self._agreed:
            self._agree()
        steps = self._steps_of_part()
        self._advance()
        self._steps.complete([step for step in steps if not step.is_late])
        if self.use is not None:
            self._learn_use(steps)
        self._steps.complete([step for step in steps if not step.has_begun])
        sparse = {name: wait() for name, wait in self._sparse.items()}
        counts = self._is_sound(steps, sparse)
        names = [name for step in steps for name in step.bucket.names]
        ends = self.part is None or self.part.is_last
        self._last = ends, dict(self._submitted), {} if self._whole else self._places, names
        if self.node is not None:
            counts = self.node.counts(counts, self.residues.step)
        self.has_sent = counts and not self._whole
        self._commit(steps, ends) if counts else self._roll_back(steps)
        for step in steps:
            self._outputs.update(step.end())
        self._outputs.update(sparse)
        self._sparse = dict.fromkeys(self._sparse)
        self._arrived.clear()
        if self._news is not None:
            self._news.end(self.has_sent)

    def _learn_use(self, steps: Sequence[BucketStep]) -> None:
        """Learn which tensors the step uses, and undo what assumed something else."""
        for step in steps:
            self.use.look(step)
        # The ranks' agreement is on other channels.
        wrong = self.use.ask(steps, self._missing, self._channels[-1], self.names("used"))
        # Steps that are sent whole leave residues alone.
        for step in wrong if not self._whole else ():
            if step.has_begun:
                step.begin_again()

    def _is_sound(self, steps: Sequence[BucketStep], sparse: Mapping[str, torch.Tensor]) -> bool:
        """Whether the step is sound.

        All averages were reduced or gathered, so they are the same on all ranks, and all decide the
        same.
        """
        sound = [step.bucket.is_sound() for step in steps]
        sound += [average._values().isfinite().all() for average in sparse.values()]
        return all(map(bool, on_host(sound)))  # here the host waits for its devices

    def _steps_of_part(self) -> list[BucketStep]:
        """The steps of the buckets that this part is about. No bucket is in two parts."""
        if self.part is None:
            return self._steps.all
        return [step for step in self._steps.all if step.bucket.names[0] in self.part.names]

    def _commit(self, steps: Sequence[BucketStep], ends: bool) -> None:
        if self.residues.norms_due() and not self._whole:
            own = [step.bucket for step in steps if step.bucket.compressed]
            self._norms |= {bucket.number: bucket.norms() for bucket in own}
        for step in steps:
            step.bucket.commit()
        self._run.take_state([step.keep_state() for step in steps if step.new_state])
        looks = self._sample_due()
        if looks:
            self._sampler.after([step.bucket for step in steps], self.collectives)
        if ends:
            self._end_step(looks)

    def _end_step(self, looks: bool) -> None:
        """End the step. Each of its parts was committed, or was skipped."""
        # If a part was skipped, or ranks agreed anew since, the norms are not those of all buckets.
        if self._norms and len(self._norms) == sum(bool(b.compressed) for b in self.buckets):
            self.residues.look(list(self._norms.values()))
        self._norms = {}
        self._run.note_step()
        if self.residues.step == self.residues.warmup and self.residues.enter_stage():
            self._change_lanes()
        elif self._whole and self.residues.step >= self.residues.whole_steps:
            # Every rank can wait here, and hooks must not wait for the first choice.
            for step in self._steps.all:
                step.complete_state()
                step.bucket.drop_whole_buffer()
        if looks:
            self._look_at = self.residues.step - 1

    def _change_lanes(self) -> None:
        """End the warm-up: from the next step on, tensors are sent at other rates.

        What was chosen ahead for that step belongs to the old lanes, and is dropped.
        """
        for step in self._steps.all:
            step.complete_state()
        self._run.begin_equal_state_anew()
        self._make_buckets(self.residues.buckets)

    def _roll_back(self, steps: Sequence[BucketStep]) -> None:
        """Roll the step back as if it never happened: some rank had a gradient that is not finite.

        Gradients become NaN on every rank.
        """
        self.residues.note_skipped_step()
        for step in steps:
            step.roll_back()
            step.bucket.spoil()

    def _abort(self) -> None:
        """Roll back and forget what was done of a step, for example if a collective failed."""
        for bucket in self.buckets:
            bucket.roll_back()
            bucket.forget()
        self._failure = None
        if self._news is not None:
            self._news.give_up()
        # The state that ranks must have in common may come from this step on one rank and from the
        # next step on another, and perhaps it never arrives.
        self._run.begin_equal_state_anew()
        self._arrived.clear()
        self._sparse = dict.fromkeys(self._sparse)
        self._outputs.clear()
        # Ranks may have submitted different parts of the step. With new buffers, new names and new
        # channels, these do not meet what comes next.
        self._channels = []
        self.agree_anew()

    # The agreement, once, at the end of the first backward.

    def _agree(self) -> None:
        """Compare what all ranks were started with, and agree on buckets, names and the step.

        Raises:
            RuntimeError: something differs. It is raised on every rank.
        """
        residues, groups = self.residues, self._groups
        everyone = self._run.agree(
            self._parameters,
            self.collectives,
            self.names,
            self._settings | {"sparse_as_dense": self._sparse_as_dense},
            {"groups": None if groups is None else [list(group) for group in groups]},
            {
                "sparse": list(self._sparse),
                "arrived": list(self._arrived),
                "buckets": residues.buckets,
                "channels": len(self._channels),
                "parameters": digest(self._parameters.values()) if self._is_new else None,
                "use": None if self.use is None else self.use.state_dict(),
            },
        )
        check_same_parameters(everyone)
        self._is_new = False
        self._run.compare_states([other["state"] for other in everyone])
        for name in sorted({name for other in everyone for name in other["sparse"]}):
            if self._sparse.get(name) is None:  # none arrived here, so an empty one takes part
                parameter = self._parameters[name]
                parameter.grad = parameter.grad.to_sparse(1)
                self._sparse[name] = self._send_sparse(parameter)
        self._whole = self._must_send_whole()  # the step began before this was known
        arrived, loaded = everyone[0]["arrived"], everyone[0]["buckets"]
        plan = plan_buckets(
            self._parameters, residues, arrived, groups, loaded, sparse=self._sparse
        )
        # Ranks may use different devices, but the same tensors must share a device on all ranks.
        plans = gather_objects(self.collectives, {"buckets": plan}, "agreement.buckets")
        compare_ranks(plans, ("buckets",))
        channels = (1 if self.collectives.is_ordered else min(len(plan), MOST_CHANNELS)) + 1
        if min(other["channels"] for other in everyone) < channels:
            self._channels = [self.collectives.channel() for _ in range(channels)]
        if self._news is not None:
            self._news.meet(self._everyone or self._channels[-1])
        self._make_buckets(plan)
        if self.use is not None:
            self.use.agree([other["use"] for other in everyone])
        self._choose_late()
        residues.note_ranks(self.collectives.size, self.collectives.position)
        self._agreed = True

    def _make_buckets(self, plan: list[list[str]]) -> None:
        self.residues.enter_stage()
        self._places = {name: own.geometry.k for name, own in self.residues.tensors.items()}
        self.residues.buckets, self._norms = plan, {}
        size, share = self.collectives.size, self.collectives.share
        rest = self._parameters, self.residues, size, share, self._thread, self._copies
        self.buckets = [Bucket(b, names, *rest) for b, names in enumerate(plan)]
        self._steps = BucketSteps(self.buckets, self._channels[:-1], self._bucket_step)
        if self._sampler is not None:
            self._sampler.draw(self.buckets)
        # Kernels, and threads that communicate, need the cores that busy waiting would take.
        self.collectives.spins = not any(bucket.is_large for bucket in self.buckets)

    def stats(self) -> Stats:
        """Numbers of the last step taken; see Method.stats."""
        dense = {n: p.numel() for n, p in self._parameters.items() if n not in self._sparse}
        ends, submitted, chosen, names = self._last
        last, size = max(self.residues.step - ends, 0), self.collectives.size
        numbers = step_stats(
            size,
            self.leader_at(last, 0) if size else 0,
            {name: dense[name] for name in names if name in dense},
            chosen,
            **submitted,
        )
        if self.node is not None:
            numbers |= {"ranks_per_node": self.node.size, "bytes_in_node": self.node.bytes_sent}
        return numbers | ({"diagnostics": self._sampler.last} if self._sampler else {})
