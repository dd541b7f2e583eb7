"""Local steps: workers step on their own parameters, and average the changes, not gradients.

This is algorithm 1 of Qsparse-local-SGD (Basu et al., 2019, arXiv 1906.02367), in which all ranks
synchronise after the same steps. x are the common parameters, x_i are worker i's, and m_i is its
residue.

    H times:   x_i    <- optimizer_i(x_i, gradient_i)
    then:      acc_i   = m_i + (x - x_i)
               sent_i  = what the method makes of acc_i
               m_i    <- acc_i - sent_i
               x      <- outer(x, (1/n) * sum_i sent_i)
               x_i    <- x

outer is a torch optimizer of the common parameters, or subtracts the average: see outer_step.

With an overlap of tau, each worker takes tau more steps while the average travels. d_i is the
change of x_i in these steps. When the average has come, x_i <- x + d_i, so d_i is part of the
worker's next change (the idea of Streaming DiLoCo, Douillard et al., 2025, arXiv 2501.18512).

With fragments, the model is cut into P parts, which synchronise in turn. A round ends with the last
part, and is one step of the Exchange. The Exchange is used as it is, with changes instead of
gradients. Every worker's optimizer keeps its own state, which is never averaged.

When ranks wait: `step` waits for all ranks at the first step, where they compare, and after each
step at which ranks synchronise. With an overlap, it waits tau steps later; if changes are clipped,
it also waits at once. All this depends only on how many steps were taken. So every rank has to take
every step, even one with a bad gradient.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch

from scalecom_hvd.agreement import FIRST_MEETING, Settings, compare_ranks
from scalecom_hvd.bucket_layout import Stats
from scalecom_hvd.exchange.bucket import Groups, Part
from scalecom_hvd.exchange.collectives import Collectives, gather_objects
from scalecom_hvd.exchange.exchange import Exchange
from scalecom_hvd.exchange.face import Options
from scalecom_hvd.exchange.gradients import NotFinite, limit_of
from scalecom_hvd.exchange.local import rounds_agreement
from scalecom_hvd.exchange.local.changes import Clipping, Journey, check_config, cut_into_fragments
from scalecom_hvd.exchange.local.outer_step import Outer, OuterStep
from scalecom_hvd.exchange.local.rounds_alive import collect_all, register
from scalecom_hvd.exchange.local.worker import OwnParameters, Worker
from scalecom_hvd.exchange.methods.base import Method
from scalecom_hvd.exchange.new_gradients import digest
from scalecom_hvd.exchange.node import Node
from scalecom_hvd.exchange.run import Averager
from scalecom_hvd.saved_state import Saved, check_local_steps, check_rounds
from scalecom_hvd.schedule import Schedule
from scalecom_hvd.training_warnings import Health

log = logging.getLogger("scalecom_hvd")


class LocalSteps(Averager):
    """The local steps of one optimizer on this rank, and the Exchange that averages them.

    Args:
        parameters: {name: parameter} of all that are trained, in the model's order.
        method, collectives, schedule: how and when changes are averaged.
        groups: see face.Options.
        start_anew: makes this rank's optimizer forget its momentum and the like, after this rank's
            parameters had to go back.
        outer, overlap, clip_changes: as in DistributedOptimizer.
        node: the ranks of this rank's node, which step together; `collectives` are then its peers.
            None: every rank is a worker by itself.

    Attributes:
        common: {name: x}, float32 or float64, the same on all ranks once they have agreed.
        taken, skipped: how many steps were taken, and how many of these were left out on this rank
            because of a bad gradient.
        newcomer: whether this rank has taken no step yet, neither here nor in a loaded state.
        outer: the outer optimizer, or None.
        own: this rank's parameters, held while it resumes in the middle of a round.
        worker: what this rank averages, and the ranks that step with it.

    Raises:
        ValueError: the overlap does not fit into a round (with fragments, into a fragment's share
            of it), or there are more fragments than tensors, or than groups of them.
        TypeError: `outer` gives no optimizer of the common parameters, or the overlap or
            clip_changes is no number.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        method: Method,
        collectives: Collectives,
        schedule: Schedule,
        groups: Groups | None = None,
        start_anew: Callable[[], None] = lambda: None,
        outer: Outer | None = None,
        overlap: int = 0,
        clip_changes: float | None = None,
        node: Node | None = None,
    ) -> None:
        schedule.check_overlap(overlap)
        check_config(method.config)
        self.schedule = schedule
        self._overlap = overlap
        self._clipping = Clipping(clip_changes)
        self._journey: Journey | None = None
        self.taken = 0
        self.skipped = 0
        self.newcomer = True
        self.node = node
        self.worker = Worker(parameters, node)
        addresses = {parameter.data_ptr() for parameter in self.worker.own.values()}
        collect_all(addresses)  # if the script made its optimizer anew
        self._outer = OuterStep(self.worker, outer)
        self.common = self._outer.common
        self.outer = self._outer.optimizer
        self._changes = {n: x.new_zeros(x.shape) for n, x in self.common.items()}  # contiguous
        # Made once, for the reason that bucket.py gives.
        self._sent_from = {n: torch.empty_like(p) for n, p in self.worker.items() if overlap}
        self.collectives = collectives
        self._restarted = collectives.restarts()
        self._start_anew = start_anew
        self._health = Health()
        # _under_way: whether this rank has taken steps since its last synchronisation. _open:
        # whether any rank has taken steps since the last synchronisation of all ranks.
        self._under_way = self._open = False
        # After which steps `synchronise` added one, as long as stages given in steps were to come.
        self._early: list[int] = []
        self._agreed = False
        # Whether ranks have yet to compare what their first local steps changed.
        self._is_first = True
        # Whether x comes from training with others, or from a loaded state. Such an x replaces a
        # newcomer's.
        self._knows = False
        self.own = OwnParameters(self.worker.own)
        self._residues = method.residues
        self._fragments, groups = cut_into_fragments(
            parameters, groups, schedule.fragments, method.config
        )
        self.exchange: Exchange = Exchange(
            self.common,
            method,
            collectives,
            Options(groups, is_scaled=False),
            settings=self._settings(),
            node=node,
            part_of=self,
        )
        method.run.begin(self.common, self)
        register(self, travels=overlap > 0)

    @property
    def active(self) -> bool:
        """Whether there is anybody to synchronise with."""
        return self.collectives.size > (0 if self.collectives.elastic else 1)

    def synchronisations_in(self, steps: int) -> int:
        """How many synchronisations there are in the first `steps` steps."""
        return self.schedule.synchronisations(steps) + sum(taken <= steps for taken in self._early)

    def step(self, take: Callable[[], Any]) -> Any:
        """Take one step of this rank's own optimizer, and synchronise if that is due.

        take: makes the step, and returns this method's result. If it raises NotFinite, the step is
        counted, but changes nothing on this rank.
        """
        if self.active:
            self._begin()
            self._under_way = True  # if the step fails half-way, what it moved is a change, too
        self.own.let_go()
        self.newcomer = False
        try:
            result = take()
            self._health.take()
        except NotFinite as reason:
            result = reason.result
            self.skipped += 1
            skipped = "local step %d is skipped on this rank: %s (%d skipped so far)"
            log.info(skipped, self.taken, reason, self.skipped)
            self._health.skip(self.taken, "this rank")
        self.taken += 1
        if self.active:
            self._open = True
            due = self.schedule.fragments_due(self.taken)
            # If another schedule made the state, its averages may still travel when more are due.
            if self._journey is not None and (
                due or self.taken >= self._journey.since + self._overlap
            ):
                self._arrive()
            if due:
                self._depart(due)
                if not self._overlap:
                    self._arrive()
        return result

    @torch.inference_mode(False)  # scripts call it when they evaluate
    def synchronise(self) -> None:
        """Synchronise now. All ranks must call it after the same step. The schedule stays.

        Raises:
            RuntimeError: on all ranks, if parameters are not finite, if ranks took different
                numbers of steps, or if their outer optimizers step differently.
        """
        if not self.active:
            return
        self._begin()
        self.own.let_go()
        mine = {"taken": self.taken, "outer_groups": self._outer.groups()}
        everyone = gather_objects(self.collectives, mine, "local_steps.synchronise")
        rounds_agreement.check_same_steps(everyone)
        if self._journey is not None:
            self._arrive()
        if not self._open:
            return
        config = self._residues.config
        if self.taken <= max(config.warmup_steps, config.stages[-1][0]):
            self._early.append(self.taken)
        # If a rank's change is not finite, nothing is averaged, and that rank goes back to x. The
        # second attempt then works.
        for _ in range(2):
            self._depart(range(len(self._fragments)))
            if self._arrive():
                break
        else:
            raise RuntimeError(
                "ranks cannot synchronise: the sum of their changes, or residues, is not finite. "
                "Lower the learning rate"
            )

    @torch.no_grad()
    def _begin(self) -> None:
        """Before a step, make sure that ranks agree, and that this round begins at x."""
        self._notice_restart()
        if not self._agreed:
            with self.worker.agreeing(self.taken):
                self._agree()
            self._agreed = self._knows = self._is_first = True
        elif not self._under_way:
            # If a script loads a model, or clips its weights, between two rounds, it means the
            # common parameters.
            self._take_up_parameters()

    def _notice_restart(self) -> None:
        """If ranks were started anew (elastic runs), forget what travels: it never arrives.

        Changes are not lost: parameters still differ from x by them.
        """
        if self._restarted():
            self._agreed = False
            if self.travels:
                self.exchange.abort()
                self._journey = None

    def _take_up_parameters(self) -> None:
        for name, parameter in self.worker.items():
            x = self.common[name]
            if not torch.equal(x.to(parameter.dtype), parameter):
                x.copy_(parameter)

    @torch.no_grad()
    def _depart(self, fragments: range) -> None:
        """Send the changes of these fragments."""
        if self._is_first:
            self._compare_first()
        names = [name for fragment in fragments for name in self._fragments[fragment]]
        journey = Journey(names, self.taken)
        for name in names:
            parameter = self.worker[name]
            x, change = self.common[name], self._changes[name]
            if parameter.dtype == change.dtype:
                torch.sub(x, parameter, out=change)
            else:
                # In its own dtype, the parameter began at the rounded x.
                change.copy_(x.to(parameter.dtype)).sub_(parameter)
            if self._overlap:  # at once: the processor's cache may still hold the parameter
                journey.sent_from[name] = self._sent_from[name].copy_(parameter)
        changes = [self._changes[name] for name in names]
        self._clipping.clip(changes, self.collectives, self.worker.norm)
        self.exchange.part = Part(set(names), fragments[-1] == len(self._fragments) - 1)
        for name in reversed(names):
            # A frozen tensor sends nothing, and its residue stays as it is. But if it was frozen in
            # the middle of a round, it has a change to send.
            trained = self.worker[name].requires_grad
            self.exchange.ready(name, self._changes[name].view(-1), trained)
        if self._overlap:
            self.exchange.send()
        self._journey = journey

    def _compare_first(self) -> None:
        """Compare what ranks' first steps have changed. All ranks wait here."""
        self._is_first = False
        self.worker.check_alike(self.taken)
        pairs = [(self.common[n].to(p.dtype), p) for n, p in self.worker.items()]
        moved = any(not torch.equal(x, parameter) for x, parameter in pairs)
        mine = {"moved": moved, "own": digest(self.worker.values())}
        everyone = gather_objects(self.collectives, mine, "local_steps.first")
        rounds_agreement.warn_of_same_steps(everyone)

    @property
    def travels(self) -> bool:  # type: ignore[override]
        """Whether averages travel that nobody has waited for yet."""
        return self._journey is not None and self._journey.averages is None

    @torch.inference_mode(False)  # a script may save in inference mode
    @torch.no_grad()
    def collect(self) -> None:
        """Wait for averages that travel. They are applied when their overlap's steps are over.

        Every rank has sent its part of them already. If the exchange's step was aborted, there are
        none, and the changes are sent the next time.
        """
        if not self.travels:
            return
        if not self.exchange.in_step():
            self._journey = None
            return
        journey, skipped = self._journey, self._residues.skipped_steps
        flats = self.exchange.finish(looks=False)
        averages = {name: flat.view(self.common[name].shape) for name, flat in flats.items()}
        journey.averages = {} if self._residues.skipped_steps > skipped else averages

    @torch.no_grad()
    def _arrive(self, everywhere: bool = True) -> bool:
        """Apply the averages. Return whether there were any.

        everywhere: whether all ranks make this call now.
        """
        self.collect()
        self.exchange.look(everywhere)
        journey, self._journey = self._journey, None
        if journey is None:
            return False
        if not journey.averages:
            self._go_back()
            return False
        self._outer.take(journey.averages)
        # These parameters have changed if steps were taken meanwhile. If there are fragments, those
        # of the others have.
        went_on = self.taken > journey.since
        under_way = went_on or len(journey.names) < len(self.common)
        for name in journey.names:
            x, parameter = self.common[name], self.worker[name]
            if not went_on:
                parameter.copy_(x)
            elif parameter.dtype == x.dtype:
                parameter.sub_(journey.sent_from[name]).add_(x)
            else:
                parameter.copy_(x + (parameter - journey.sent_from[name]))
        self.worker.complete(journey.names)
        self._under_way = self._open = under_way
        return True

    def _go_back(self) -> None:
        """Go back to x if it was this worker's change that was not finite.

        Nothing was averaged. The others keep their changes, and send them the next time.
        """
        changes = (self.common[name] - parameter for name, parameter in self.worker.items())
        fine = all(bool((change.abs() <= limit_of(change.dtype)).all()) for change in changes)
        if not self.worker.any(not fine, self.taken):
            return
        log.warning(
            "step %d: this rank's parameters are not finite, or changed by more than 2**100, "
            "since its last synchronisation. They are reset to their values at that "
            "synchronisation, and this rank's optimizer's state is reset to zero. Look at the "
            "loss of every rank, or lower the learning rate",
            self.taken,
        )
        self._begin_at_common()
        self.worker.complete(self.common)
        # The optimizer's momentum would spoil every later synchronisation.
        self._start_anew()

    def _begin_at_common(self) -> None:
        for name, parameter in self.worker.items():
            parameter.copy_(self.common[name])

    # The agreement, before the first step.

    @torch.no_grad()
    def _agree(self, early: bool = False) -> None:
        """Compare all ranks' schedules, steps and x. Newcomers take over steps and x of the others.

        early: whether ranks may still differ if all are new: the first step does not follow yet.
        """
        self._notice_restart()
        self.collect()
        overwritten = not self.own.in_place()
        if not self._under_way and not overwritten:
            self._take_up_parameters()
        mine = {
            "settings": self._settings(),
            "taken": self.taken,
            "knows": self._knows,
            "open": self._under_way or self._open,
            "early": self._early,
            "overwritten": overwritten,
            "parameters": digest(self._outer.tensors()),
            "outer": self._outer.describe(),
            "outer_groups": self._outer.groups(),
            "since": None if self._journey is None else self._journey.since,
        }
        everyone = gather_objects(self.collectives, mine, FIRST_MEETING)
        compare_ranks(everyone, ("settings",))
        rounds_agreement.check_not_overwritten(everyone)
        if self.node is not None:
            rounds_agreement.check_same_steps(everyone)
        known, latest = rounds_agreement.latest_ranks(everyone)
        if early and not known:
            return
        if len({other["since"] for other in everyone}) > 1:
            # Newcomers do not hold the averages that travel. Ranks that do hold them apply them
            # now. If a rank's averages never arrived, because ranks were started anew, that rank
            # takes over the resulting parameters.
            knows = self.collectives.position in known
            if self._journey is not None and knows:
                self._arrive(everywhere=False)
                if self.own.held:
                    self.own.hold()
            elif any(everyone[rank]["since"] is not None for rank in known):
                self._knows = False
            self._journey = None
            self._agree(early)
            return
        compared = [everyone[rank] for rank in known] or everyone
        rounds_agreement.check_same_start(compared)
        if known:
            self._outer.take_groups(compared[0]["outer_groups"])
        if len({other["parameters"] for other in everyone}) > 1:
            root = known[0]
            keeps = self.collectives.position in known
            self._send_common(root, everyone[root]["outer"], keeps)
        if known:
            self.taken, self._early = latest, list(compared[0]["early"])
        self._open = any(other["open"] for other in compared)

    def _send_common(self, root: int, described: rounds_agreement.Told, keeps: bool) -> None:
        """Give all ranks the common parameters, and outer state, of the rank at position `root`.

        Unless it `keeps` its own parameters, this rank begins from the common ones.
        """
        self._outer.broadcast(self.collectives, root, described)
        if not keeps:
            self._begin_at_common()
            self._under_way = False
            self.own.let_go()
            if self._journey is not None:
                self._journey.sent_from = {
                    name: self.worker[name].clone() for name in self._journey.names
                }
            log.warning(
                "this rank begins from rank %d's common parameters, in the middle of a round of "
                "local steps",
                root,
            )

    def _settings(self) -> Settings:
        """What ranks must have in common."""
        return {
            "local_steps": self.schedule.describe(),
            "overlap": self._overlap,
            "fragments": len(self._fragments),
            "clip_changes": self._clipping.times,
            **self._outer.settings(),
        }

    # What elastic states, broadcast_parameters and the run call.

    def rejoin(self) -> None:
        """Let newcomers of an elastic run take over what others have, before the first gradient.

        All ranks compare again before the next step, because models may be loaded until then.
        """
        if self.active:
            self._agree(early=True)
        self._agreed = False

    def keep(self) -> None:
        """Hold this rank's own parameters until the next step, whatever is broadcast before."""
        if not self.own.held and self.active and not self.newcomer:
            self.own.hold()

    @torch.no_grad()
    def show_common(self) -> None:
        """For a broadcast, make the parameters the common ones, until they are put back."""
        if self._under_way and self.node is None:  # newcomers need them, and nodes have none
            self._begin_at_common()

    def state_dict(self) -> Saved:
        """What is saved of this rank's local steps. The tensors are the ones in use.

        Returns:
            {"local_steps": {"taken": steps, "early": after which of them, before the last stage,
            `synchronise` was called}}, and more in these cases. The model does not hold x (steps
            were taken since, or half precision): "common": {name: x}, "local": {name: x_i}, and
            "under_way" and "open": whether this rank, and any rank, has taken steps since. An outer
            optimizer: "outer", "outer_kind". Averages travel: see Journey.state_dict.
        """
        state: dict[str, Any] = {"taken": self.taken, "early": list(self._early)}
        state |= self._outer.state_dict()
        saved = {"local_steps": state, **self.exchange.state_dict()}
        if not self.taken or not (self.own.held or self.active):
            return saved
        narrow = any(p.dtype != self.common[name].dtype for name, p in self.worker.items())
        if self._under_way or narrow:
            state |= {"under_way": self._under_way, "open": self._open}
            state["common"] = {name: x.detach() for name, x in self.common.items()}
            own = {name: p.detach() for name, p in self.worker.own.items()}
            state["local"] = self.own.values or own
        if self._journey is not None:
            state |= self._journey.state_dict()
        return saved

    def check_state(self, state: Saved) -> None:
        """Raise ValueError unless a complete state has local steps of these parameters."""
        check_local_steps(state, local=True)
        own, both = state["local_steps"], (self.common, self.worker.own)
        check_rounds(own, *({n: tuple(t.shape) for n, t in of.items()} for of in both))
        self._outer.check_state(own)

    @torch.no_grad()
    def load_state_dict(self, state: Saved) -> None:
        """Load the local steps of a complete state, and put this rank's own parameters in place."""
        own = state["local_steps"]
        self._outer.load_state_dict(own)
        self.taken, self._early = int(own["taken"]), list(own["early"])
        self._under_way = self._open = self._agreed = False
        self._journey = None
        # A state from before the first step knows no more than a newcomer does.
        self._knows, self.newcomer = self.taken > 0, self.taken == 0
        self.own.let_go()
        if "common" in own:
            self._under_way, self._open = bool(own["under_way"]), bool(own["open"])
            for name, x in self.common.items():
                x.copy_(own["common"][name])
            self.own.hold(own["local"])
            self.own.put_back()
        if "since" in own:
            self._journey = Journey.of(own, self.common, self.worker)

    def stats(self) -> Stats:
        """Numbers of the last synchronisation, and of local steps; see Method.stats."""
        own: Stats = {
            "local_steps": self.schedule.describe(),
            "local_steps_taken": self.taken,
            "local_steps_skipped": self.skipped,
        }
        if self._clipping.times is not None:
            own["changes_clipped"] = self._clipping.clipped
        return self.exchange.stats() | own
