"""Named flat gradients in, averages out: which bucket does what when.

This is the only room that knows of time. It does nearly everything while backward runs. One step:

    ready(name, gradient)   -> if its bucket is complete, the bucket's step begins: a generator of
                               the method (methods/), which makes moves and submits collectives.
                               It yields what it must wait for: its own kernel, which runs on a
                               thread if it can, or other ranks
    every later ready()     -> all buckets go on as far as they can without waiting
    finish()                -> submit what is left, and wait for everything
    all values are here     -> every rank sees whether any gradient was not finite; commit the
                               step, or roll it back

waves.py explains why this cannot deadlock. `ready` waits for nothing, so ranks may see their
gradients in any order, and may not see some of them at all (these take part as zeros). A step may
be taken in parts, each of some buckets (fragments of local steps). All parts have the step's
number, and the last part ends the step.

An exchange knows no parameter and no p.grad. Where gradients come from, and where averages go, is a
face's affair.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator, Mapping, Sequence

import torch

from scalecom_hvd.agreement import Names, Settings, compare_ranks
from scalecom_hvd.bucket_layout import Stats, step_stats
from scalecom_hvd.exchange.background_thread import BackgroundThread
from scalecom_hvd.exchange.bucket import Bucket, Part, plan_buckets
from scalecom_hvd.exchange.bucket_step import BucketStep, outcome
from scalecom_hvd.exchange.collectives import Collectives, Step, Wait, gather_objects
from scalecom_hvd.exchange.devices import Streams, recorded
from scalecom_hvd.exchange.diagnostics_sampler import Sampler
from scalecom_hvd.exchange.face import Face, Options
from scalecom_hvd.exchange.gradients import Gradient, Reported
from scalecom_hvd.exchange.methods.base import Method
from scalecom_hvd.exchange.methods.bucket_collectives import BucketCollectives
from scalecom_hvd.exchange.methods.checked_step import checked_step
from scalecom_hvd.exchange.methods.state import State
from scalecom_hvd.exchange.node import Node
from scalecom_hvd.exchange.pace import Pace
from scalecom_hvd.exchange.residue import Residues
from scalecom_hvd.exchange.run import Averager
from scalecom_hvd.exchange.unused_averages import ResidueCopies
from scalecom_hvd.exchange.waves import MOST_CHANNELS, Progress, Waves
from scalecom_hvd.saved_state import Saved
from scalecom_hvd.schedule import leader

_KINDS = ("offsets", "values", "dense", "gathered", "collectives")


class Exchange(Averager):
    """The exchange of named tensors. All ranks submit the same collectives.

    Args:
        like: {name: tensor} with the shapes, dtypes and devices of all that is averaged, in the
            model's order. Their numbers are not read.
        method: how compressed tensors are averaged. From now on the method serves these tensors.
        collectives: how this rank reaches the others.
        options: how it works. `Options()` is meant for gradients of ordinary parameters.
        face: what uses the exchange. None: it has nothing to say.
        settings: what ranks must have in common, besides the method's settings.
        node: the ranks of this node, if each holds a part of every gradient. They are asked whether
            a step counts, after "are all buckets sound" and before the commit.
        part_of: the averager that this exchange is a part of, which begins the method's run when it
            is complete. None: this exchange begins the run.

    Attributes:
        agreed: whether ranks have agreed, so that buckets may begin before `finish`.
        part: which tensors the coming step is about, the same on all ranks. None: all of them.
        streams: the streams on which the exchange works.

    Example:
        >>> exchange = Exchange({"w": torch.zeros(100, 100)}, ScaleCom(), collectives)
        >>> exchange.ready("w", gradient.view(-1))
        >>> average = exchange.finish()["w"].view(100, 100)
    """

    def __init__(
        self,
        like: Mapping[str, torch.Tensor],
        method: Method,
        collectives: Collectives,
        options: Options | None = None,
        *,
        face: Face | None = None,
        settings: Settings | None = None,
        node: Node | None = None,
        part_of: Averager | None = None,
    ) -> None:
        self.collectives, self.node, self._method = collectives, node, method
        self.residues: Residues = method.residues
        self.part: Part | None = None
        self.names = Names(collectives.numbers)
        self._like = dict(like)
        self.agreed = self._finishing = False
        self._restarted = collectives.restarts()
        self._options, self._face = options or Options(), face or Face()
        own = {} if method.diagnostics is None else {"diagnostics": method.diagnostics}
        self._settings = method.settings | dict(settings or {}) | own
        self._copies = ResidueCopies(method)
        self._sampler = Sampler(method.diagnostics) if method.diagnostics else None
        self._pace: Pace | None = None  # of rate="auto"
        # Hooks run on autograd's threads, one per device.
        self._lock = threading.RLock()
        self.streams = Streams(tensor.device for tensor in like.values())
        self._thread = BackgroundThread(self, self._go_on)
        self._failure: BaseException | None = None
        self._channels: list[Collectives] = []
        self._waves = Waves([], self._channels, self._bucket_step)
        # {bucket's number: norms of residues and gradients}, for the step's parts so far.
        self._norms: dict[int, tuple[float, float]] = {}
        self._arrived = Reported(self._like)
        # Names of tensors that are in no bucket, because they travel in another way.
        self._elsewhere: set[str] = set()
        self._whole = False
        self._unscaling: Wait[float] | None = None  # None: gradients are not scaled
        # Bytes that the step in progress has submitted by kind, and the number of its collectives.
        self._submitted = dict.fromkeys(_KINDS, 0)
        # Of the last finished step, or part of one: what it submitted, whether it ended the step,
        # how many elements of each compressed tensor were chosen, and the names of its tensors.
        self._last = self._submitted, True, dict[str, int](), list(like)
        if part_of is None:
            self._method.run.begin(self._like, self)

    # What faces call.

    def ready(self, name: str, flat: torch.Tensor | None, trained: bool = True) -> None:
        """Report a complete gradient of this rank. Backward's hooks call this, so it never waits.

        Args:
            name: its name.
            flat: (N,) contiguous. It may be written to, and holds the average in the end. None:
                this rank has no gradient, so zeros take part.
            trained: whether its parameter is trained.

        Raises:
            ValueError: the exchange has no such tensor.
            RuntimeError: it was reported in this step already, it has another size than its tensor
                had, or something has failed on the background thread. The step is rolled back.
        """
        self.ready_all({name: flat}, trained)

    def ready_all(self, flats: Mapping[str, torch.Tensor | None], trained: bool = True) -> None:
        """Report several gradients, in this order; see `ready`."""
        with self.entered(joins=False):
            for name, flat in flats.items():
                self._report(name, Gradient(flat, trained))
                if self.agreed:
                    self._waves.of[name].waiting.discard(name)
            self._advance()

    def ready_elsewhere(self, name: str) -> None:
        """Report a gradient that travels in another way, now and in all later steps."""
        with self.entered(joins=False):
            self._report(name, Gradient(None, True))
            self._elsewhere.add(name)
            self._advance()

    def _report(self, name: str, gradient: Gradient) -> None:
        if name not in self._like:
            raise ValueError(f"the exchange has no tensor {name!r}, so it cannot average it")
        self.notice_restart()
        if self.agreed and name in self._arrived:
            raise RuntimeError(f"{name!r} was reported twice before finish()")
        if not self._arrived:
            self._begin_step()
        self._arrived[name] = gradient

    def finish(self, looks: bool = True) -> dict[str, torch.Tensor]:
        """Wait for everything. Then commit the step, or roll it back.

        Call it when all gradients of this rank were reported. If `send` has sent everything, this
        waits for no other rank's script.

        Args:
            looks: whether ranks also compare what they saw (`look`).

        Returns:
            {name: average (N,)} of the step's tensors, NaN if the step does not count. They may
            view the gradients' memory. With `drops_unused`, tensors that no rank has used are left
            out.

        Raises:
            RuntimeError: on all ranks, at the first step: they were started differently.
            Exception: a collective failed, and the transport raised this. The step is rolled back.
        """
        ending = self.node.ending_a_step() if self.node else contextlib.nullcontext()
        waiting = self._pace.waiting() if self._pace else contextlib.nullcontext()
        with waiting, self.entered(), ending:
            self._finishing = True
            try:
                averages = self._finish()
            finally:
                self._finishing = False
        if looks:
            self.look()
        return averages

    def _looks(self) -> bool:
        sampler = None if self._whole else self._sampler
        return sampler is not None and self.residues.step % sampler.every == 0

    def look(self, all_are_here: bool = True) -> None:
        """If it is due, compare what ranks saw of the step that ended, if `all_are_here`."""
        if self._sampler is None or self._sampler.seen is None:
            return
        if all_are_here:
            with self.entered():
                self._sampler.look(self.collectives, self.names("diagnostics"))
        self._sampler.seen = None

    def send(self) -> None:
        """Send all that was reported, for callers that take long between `ready` and `finish`.

        All ranks make this call. At the first step, they agree here. From then on, no rank waits
        for another rank's script, even one that drops its optimizer: the background thread submits
        what depends on other ranks. Raises what `finish` raises.
        """
        with self.entered(joins=False):  # `finish` joins
            if not self.agreed:
                self._agree()
            self._advance()
            self._waves.begin(self._part(), all_are_here=True)
        self._thread.keep_owner()

    def in_step(self) -> bool:
        """Whether gradients were reported that are not averaged yet."""
        return bool(self._arrived)

    def complete_state(self) -> None:
        """Wait for what the method's state lacks. Every rank submitted this in its last step."""
        with self._lock, self.streams.entered():
            self.notice_restart()
            for progress in self._waves.all:
                progress.complete_state()

    def agree_anew(self) -> None:
        """At the next step, ranks compare and make buckets again: other residues were loaded."""
        with self._lock:
            self._begin_anew()
            self._copies.forget()
            if self._options.unused is not None:
                self._options.unused.forget()

    def _begin_anew(self) -> None:
        self._waves = Waves([], [], self._bucket_step)
        self.agreed = False
        if self._sampler is not None:
            self._sampler.seen = None

    @property
    def buckets(self) -> list[Bucket]:
        """The buckets, once ranks have agreed on them."""
        return [progress.bucket for progress in self._waves.all]

    def state_dict(self) -> Saved:
        """See Averager."""
        return {} if self.node is None else {"shard": [self.node.position, self.node.size]}

    @property
    def holds_gradients(self) -> bool:
        """Whether gradients must stay until `finish`: buckets have begun, or a scale was read."""
        scaled = not self._whole and self._unscaling is not None and self._unscaling.now() != 1
        return self.agreed or scaled

    @property
    def channel(self) -> Collectives:
        """The channel for what faces tell other ranks, once ranks have agreed."""
        return self._channels[-1]

    def begin_again(self) -> None:
        """Report again the gradients that have arrived, as in a first step."""
        arrived = self._arrived
        self._abort()
        for name, (flat, trained) in arrived.items():
            if name in self._elsewhere:
                self.ready_elsewhere(name)
            else:
                self.ready(name, flat, trained)

    def complete_collectives(self, alike: bool) -> None:
        """Complete all collectives of a step that all ranks give up, if all have begun it alike."""
        if not alike:
            return
        for name in self._like.keys() - self._arrived.keys() - self._elsewhere:
            self.ready(name, None)
        self._waves.complete(self._waves.all)

    def keep_gradients(self) -> None:
        """Undo the moves of a step, with gradients as they were before a script changed them."""
        for progress in self._waves.all:
            if progress.step is not None:
                progress.step.roll_back(keep_gradients=True)

    def abort(self) -> None:
        """Forget the step in progress. It is rolled back, so residues lose nothing."""
        with self._lock, self.streams.entered():
            self._abort()

    @contextlib.contextmanager
    def entered(self, joins: bool = True) -> Iterator[None]:
        """Let one thread in. After an error, forget the step. `joins`: see Streams.entered."""
        with self._lock, self.streams.entered(joins):
            try:
                yield
            except BaseException:
                self._abort()
                raise

    def notice_restart(self) -> None:
        """If ranks were started anew (elastic runs), forget everything."""
        if self._restarted():
            with self._lock, self.streams.entered():
                self._abort(restarted=True)

    # One step.

    def _advance(self) -> None:
        """Let every bucket go on as far as it can without waiting."""
        if self._failure is not None:
            raise self._failure
        self._waves.advance(self._part())

    def _go_on(self) -> bool:
        """On the background thread, let buckets go on. Returns whether some have more to submit."""
        if not self._lock.acquire(blocking=False):
            # A hook holds the lock only for a moment. `_finish` holds it until the step's end.
            return not self._finishing
        try:
            with self.streams.continued():
                self._advance()
            everyone = self._waves.all
            return any(p.has_more or not (p.waiting or p.has_begun) for p in everyone)
        except BaseException as error:
            self._failure = error  # raised when the user's thread calls
            return False
        finally:
            self._lock.release()

    def _begin_step(self) -> None:
        self._unscaling = self._method.scaling.inverse() if self._options.is_scaled else None
        if self._unscaling is not None and self.node is not None and self.collectives.is_ordered:
            # Ranks must submit what NCCL sends between nodes and inside a node in one order, or
            # they wait for each other for ever. Loss scales reach hosts at different times, so the
            # host waits. Mostly the copy began when forward began, and is here.
            self._unscaling.now()
        self._whole = self._must_send_whole()
        self._submitted = dict.fromkeys(_KINDS, 0)  # what travels still may count in the old one
        self._copies.begin_step(sends=not self._whole)

    def _must_send_whole(self) -> bool:
        names = self.residues.tensors.keys() - self._elsewhere
        return self.residues.sends_whole or not self._method.is_ready(names)

    def _bucket_step(self, progress: Progress, channel: Collectives) -> Step[None]:
        """One bucket's step, from its gradients to their averages. All gradients are here."""
        bucket = progress.bucket
        if progress.state_arrives is not None:
            yield from progress.state_arrives
            progress.state_arrives = None
        if self._options.unused is not None:
            compressed = [name for name in bucket.names if name in self.residues.tensors]
            thrown_away = self._options.unused.thrown_away(compressed)
            self._copies.begin_bucket(compressed, thrown_away, self._options.unused.waiting)
        flats = self._arrived.flats(bucket.names)
        scale = 1.0 if self._unscaling is None else (yield from self._unscaling)
        used = None
        # Where zeros do not count, it only matters what residues do.
        if self._options.drops_unused and (self._options.zeros_count or not self._whole):
            used = self._arrived.used(flats, self._options.zeros_count)
        vote = self._pace.vote() if self._pace is not None and bucket.number == 0 else None
        step = BucketStep(bucket, scale, flats, self._whole, self._arrived.idle(flats), used, vote)
        progress.step = step
        what = step, self.residues.step, self.leader_at, self._submitted
        collectives = BucketCollectives(channel, self.names, *what)
        if self._looks():
            self._sampler.before(step)
        if bucket.compressed:
            run, now = self._method.run, self.residues.step
            # These are copies. If a method changes a dictionary in place, only its copy changes.
            own = {name: dict(run.tensor_states[name]) for name in bucket.compressed}
            state = State(now, own, dict(run.method_state), self.residues.is_whole_at(now + 1))
            progress.new_state = yield from checked_step(self._method, step, collectives, state)
        if not collectives.sent_values:
            yield from collectives.average_taken()
        step.check()

    def leader_at(self, step: int, bucket: int) -> int:
        """The position of the rank that chooses for a bucket in a step."""
        is_staggered = self.residues.config.leader == "staggered"
        return leader(step, bucket, self.collectives.size, is_staggered)

    def _finish(self) -> dict[str, torch.Tensor]:
        """Submit what is left, wait for everything, and commit the step, or roll it back."""
        if not self._arrived:
            raise RuntimeError("finish() before ready(): with no gradient, call ready(name, None)")
        if not self.agreed:
            self._agree()
        part = self._part()
        self._advance()
        self._waves.complete(part)
        steps = [progress.step for progress in part]
        others = self._face.average_others()
        counts, unused, votes = outcome(steps, others, has_votes=self._pace is not None)
        names = [name for step in steps for name in step.names]
        ends = self.part is None or self.part.is_last
        chosen = {} if self._whole else {n: t.geometry.k for n, t in self.residues.tensors.items()}
        self._last = dict(self._submitted), ends, chosen, names
        if self.node is not None:
            counts, votes = self.node.counts(counts, self.residues.step, votes)
        if counts:
            self._commit(part, unused, ends, votes)
        else:  # as if it never happened: some rank had a gradient that is not finite
            self.residues.note_skipped_step()
            for progress in part:
                progress.roll_back()
                progress.step.spoil()
        averages = {name: average for each in part for name, average in each.end().items()}
        self._arrived = Reported(self._like)
        used = averages.keys() - unused
        if self._options.unused is not None:
            self._options.unused.end(used if counts else ())
        return {n: recorded(average) for n, average in averages.items() if n in used}

    def _part(self) -> list[Progress]:
        """The progress of the buckets that this part is about. No bucket is in two parts."""
        if self.part is None:
            return self._waves.all
        return [each for each in self._waves.all if each.bucket.names[0] in self.part.names]

    def _commit(self, part: Sequence[Progress], unused: set[str], ends: bool, votes: int) -> None:
        steps, due = [progress.step for progress in part], self.residues.norms_due()
        for step in steps:
            norms = {} if self._whole else step.gradient_norms()
            step.commit(unused.intersection(step.names))
            if due and norms:
                self._norms[step.number] = step.residue_norm(), math.hypot(*norms.values())
            self.residues.scale_after_outliers(norms if self._options.is_scaled else {})
        self._method.run.take_state([each.keep_state() for each in part if each.new_state])
        looks = self._looks()
        if looks:
            self._sampler.after(steps, self.collectives)
        if ends:
            self._end_step(looks, votes)

    def _end_step(self, looks: bool, votes: int) -> None:
        """End the step. Each of its parts was committed, or was skipped."""
        # If a part was skipped, the norms are not those of all buckets.
        if self._norms and len(self._norms) == sum(bool(b.compressed) for b in self.buckets):
            self.residues.look(list(self._norms.values()))
        self._norms = {}
        self.residues.note_step()
        if self._pace is not None:
            self._pace.hear(votes)
        has_new_lanes = self.residues.enter_stage()
        if has_new_lanes or (self._whole and not self.residues.sends_whole):
            # Every rank can wait here, and hooks must not wait for the first choice.
            for progress in self._waves.all:
                progress.complete_state()
                vars(progress.bucket).pop("whole_values", None)  # there are no more such steps
        if has_new_lanes:  # what was chosen ahead belongs to the old lanes
            self._method.run.begin_equal_state_anew()
        layout = self._face.layout() if self.residues.sends_whole else []
        if has_new_lanes or layout != [b.names for b in self.buckets if b.in_place]:
            self._make_buckets(layout)
        if looks:
            self._sampler.seen = self.residues.step - 1

    def _abort(self, restarted: bool = False) -> None:
        """Roll back and forget what was done of a step, for example if a collective failed."""
        for progress in self._waves.all:
            progress.give_up()
        self._failure = None
        self._face.aborted(restarted)
        # The state that ranks must have in common may come from this step on one rank and from the
        # next step on another, and perhaps it never arrives.
        self._method.run.begin_equal_state_anew()
        self._arrived = Reported(self._like)
        # Ranks may have submitted different parts of the step. With new buffers, new names and new
        # channels, these do not meet what comes next.
        self._channels = []
        self._begin_anew()

    # The agreement, once, at the end of the first backward.

    def _agree(self) -> None:
        """Agree on buckets, names and the step, or raise RuntimeError on every rank."""
        residues, groups = self.residues, self._options.groups
        everyone = self._method.run.agree(
            self._like,
            self.collectives,
            self.names,
            self._settings,
            {"groups": None if groups is None else [list(group) for group in groups]},
            {
                "elsewhere": list(self._elsewhere),
                "arrived": list(self._arrived),
                "buckets": residues.buckets,
                "channels": len(self._channels),
                **self._face.tell(),
            },
        )
        self._method.run.compare_states([other["state"] for other in everyone])
        elsewhere = self._elsewhere = {n for other in everyone for n in other["elsewhere"]}
        self._whole = self._must_send_whole()  # the step began before this was known
        arrived, loaded = everyone[0]["arrived"], everyone[0]["buckets"]
        plan = plan_buckets(self._like, residues, arrived, groups, loaded, elsewhere=elsewhere)
        # Ranks may use different devices, but the same tensors must share a device on all ranks.
        plans = gather_objects(self.collectives, {"buckets": plan}, "agreement.buckets")
        compare_ranks(plans, ("buckets",))
        channels = (1 if self.collectives.is_ordered else min(len(plan), MOST_CHANNELS)) + 1
        if min(other["channels"] for other in everyone) < channels:
            self._channels = [self.collectives.channel() for _ in range(channels)]
        self._face.hear(everyone, elsewhere)
        who = self.collectives.size, self.collectives.position
        if residues.rung is not None and residues.tensors:
            self._pace = Pace(residues, *who, [tensor.device for tensor in self._like.values()])
        residues.buckets = plan
        self._make_buckets([])
        residues.note_ranks(*who)
        self.agreed = True

    def _make_buckets(self, layout: list[list[str]]) -> None:
        """Make the agreed buckets or, if `layout` has names, those of steps that are sent whole."""
        self.residues.enter_stage()
        self._norms, whole = {}, bool(layout)
        ranks, share = self.collectives.size, self.collectives.share
        tensors = {} if whole else self.residues.tensors
        drops = self._options.drops_unused and not whole
        rest = self._like, tensors, ranks, share, self._thread, drops
        votes, plan = self._pace is not None, enumerate(layout or self.residues.buckets)
        buckets = [Bucket(b, names, *rest, votes and not b, whole) for b, names in plan]
        self._waves = Waves(buckets, self._channels[:-1], self._bucket_step)
        if self._sampler is not None:
            self._sampler.draw(buckets)
        # Kernels, and threads that communicate, need the cores that busy waiting would take.
        self.collectives.spins = not any(bucket.is_large for bucket in buckets)

    def stats(self) -> Stats:
        """Numbers of the last step taken; see Method.stats."""
        submitted, has_ended, chosen, names = self._last
        elements = {n: self._like[n].numel() for n in names if n not in self._elsewhere}
        step, size = max(self.residues.step - has_ended, 0), self.collectives.size
        chose = self.leader_at(step + self.residues.config.lookahead, 0) if size else 0
        numbers = step_stats(size, chose, elements, chosen, **submitted)
        if self.node is not None:
            numbers |= {"ranks_per_node": self.node.size, "bytes_in_node": self.node.bytes_sent}
        numbers["averages_thrown_away"] = self._copies.thrown_away
        numbers |= self._pace.stats() if self._pace is not None else {}
        return numbers | ({"diagnostics": self._sampler.last} if self._sampler else {})
