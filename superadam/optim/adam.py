"""`SpeculativeCPUAdam` and `SpeculativeCPUAdamW`: the transaction behind the interface of `torch.optim`."""

from __future__ import annotations

import copy
import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.optim.optimizer import Optimizer, ParamsT

from superadam.distributed.agreement import Question
from superadam.handles.gradient_handle import shared_memory, take_gradient, taken_of
from superadam.handles.taken_gradient import TakenGradient
from superadam.host.signals import THIS_THREAD
from superadam.kernels import native, torch_private
from superadam.optim import arguments, checkpoint
from superadam.optim.binding import Binding, Method, all_names_of, hyper_by_row, names_of, runs_of, untracked
from superadam.optim.entry import raw
from superadam.state.parameter import ParameterState, Pending, check_parameter, pieces_of
from superadam.state.storage import Storage
from superadam.step.gradients import gather
from superadam.step.outcome import Statistics, StepKind, StepOutcome


def _whole(method: Method) -> Method:
    """Run `untracked`, outside torch.func's transforms, and wholly before or after such calls of other threads."""

    @functools.wraps(method)
    def whole(self: Any, *args: Any, **kwargs: Any) -> Any:  # `self` may be named, as torch's checkpoints do
        # The lock is one call into C, which no signal divides from what follows.
        with self._binding._lock(), torch_private.without_transforms():
            return method(self, *args, **kwargs)

    return untracked(whole)  # type: ignore[return-value]  # of the same signature


def _lighten_step(optimizer_class: Any) -> None:
    """Let `step()` of a class go through torch's wrapper only where a hook or a profiler would notice.

    The wrapper, which each class gets with its first instance, takes a fifth of a step of few elements. A closure is a
    program that may register hooks, and so is the `step()` of a subclass.
    """
    wrapped = optimizer_class.step
    if getattr(wrapped, "__code__", None) is not torch_private.step_wrapper or wrapped.__wrapped__ is not _own_step:
        return
    plain, hooks_of_all = wrapped.__wrapped__, torch_private.hooks_of_all_steps

    @functools.wraps(wrapped)
    def step(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        watchers = (args, kwargs, *hooks_of_all, *torch_private.hooks_of_steps(self))
        return (wrapped if any(watchers) or torch_private.is_profiling() else plain)(self, *args, **kwargs)

    optimizer_class.step = torch_private.uncompiled(step)


@dataclass(slots=True)
class _Verdicts:
    """Limits and outcome, in an object that copies of the optimizer's `__dict__` share, as Lightning's do."""

    max_grad_norm: float | None = None
    on_nonfinite: str = "skip"
    limit_of_next_step: float | None = None
    last_outcome: StepOutcome | None = None


class SpeculativeCPUAdam(Optimizer):
    r"""Adam with fp32 masters and moments in CPU memory, validated updates, and speculation that never changes a bit.

    A drop-in for `torch.optim.Adam`. `step()` computes the global gradient norm, skips the step when a gradient is Inf
    or NaN, clips to `max_grad_norm`, and updates state and parameters. `speculate()` and `resolve()` are the same step
    in two parts: the first computes new values as if the gradients were good, the second validates, and publishes the
    new values or computes the step again. Until then neither parameters nor state change, and `.grad` holds a handle
    that behaves as the gradient.

    A parameter that is fp32 or fp64 and dense on the CPU is its own master. Any other parameter (bf16, fp16, or on a
    GPU) is a working copy: the rounded value of an fp32 master that the optimizer owns. Of a DTensor, as FSDP2's
    `fully_shard` makes them, that holds for the shard on this rank. Then all ranks of the job make each step together:
    each must call `step()`, `resolve()` and `clip_grad_norm_()` as often as the others, and parameters that have the
    same name, or position where no names were passed, are the same parameter on all of them.

    Args:
        params: tensors, (name, tensor) pairs or group dicts, as for `torch.optim.Adam`; float32, bfloat16, float16 or
            float64, or of any dtype where it is not trained.
        lr: learning rate, at least 0; a float or a one-element tensor.
        betas: decay rates of the moments, each in [0, 1).
        eps: added to the denominator, at least 0.
        weight_decay: at least 0; added to the gradient (L2), or taken from the parameter with `decoupled_weight_decay`.
        amsgrad: divide by the largest second moment so far.
        maximize: ascend instead of descend.
        decoupled_weight_decay: weight decay as in AdamW.
        max_grad_norm: limit of the global 2-norm of all gradients, as in `torch.nn.utils.clip_grad_norm_`, above 0;
            None or `math.inf` for none. An attribute, not a group key; may be changed at any time. A step on whose
            gradients `torch.nn.utils.clip_grad_norm_` is called as well is clipped by both.
        on_nonfinite: what an Inf or NaN gradient does: "skip" the step, or "raise" FloatingPointError; either way
            nothing is changed.
        moments: how `exp_avg` and `exp_avg_sq` are stored, in 4 bytes each ("fp32"), 2 ("bf16"), or 1 ("8bit", where
            the last of two or more dimensions is a multiple of 64, else 2; not with amsgrad). Steps compute in fp32
            all the same, but continue from what was stored, so that it changes results:
            https://github.com/superadam/superadam/blob/main/docs/smaller_state.md
        master: how masters of bf16 and fp16 working copies are stored, in 4 bytes ("fp32") or 3 ("24bit"), which
            changes results as well.
        process_group: the ranks that make each step together, with one norm and one verdict; needed where none of the
            parameters is distributed over all ranks of the job, as in the stages of a pipeline. An attribute, which
            copies of the optimizer do not have.
        foreach, fused: accepted for compatibility; there is one implementation.
        capturable, differentiable: must be False.

    Raises:
        ValueError: a hyper-parameter is out of range, or the parameter list is empty.
        TypeError: a parameter is complex, sparse or of an unsupported dtype.
        RuntimeError: `capturable` or `differentiable` is True.

    How to use it: https://github.com/superadam/superadam/blob/main/docs/quickstart.md

    Source: Kingma & Ba, arXiv 1412.6980; Reddi et al., arXiv 1904.09237 (amsgrad); Loshchilov & Hutter, arXiv
    1711.05101 (decoupled weight decay).
    """

    _binding: Binding
    _verdicts: _Verdicts
    _storage: Storage

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        decoupled_weight_decay: bool = False,
        max_grad_norm: float | None = None,
        on_nonfinite: str = "skip",
        moments: str = "fp32",
        master: str = "fp32",
        process_group: dist.ProcessGroup | None = None,
        foreach: bool | None = None,
        fused: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
    ) -> None:
        arguments.check_together(lr, betas, foreach=foreach, fused=fused)
        defaults: dict[str, Any] = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "foreach": foreach,
            "capturable": capturable,
            "differentiable": differentiable,
            "fused": fused,
            "decoupled_weight_decay": decoupled_weight_decay,
        }
        arguments.check_group(defaults)
        native.active_isa()  # here and not in the middle of training, a wrong SUPERADAM_ISA is an error
        native.requested_threads()  # and a wrong SUPERADAM_THREADS
        self._verdicts = _Verdicts()
        self.max_grad_norm = max_grad_norm
        self.on_nonfinite = on_nonfinite
        self.statistics = Statistics()
        self._storage = arguments.checked_storage(moments, master)
        super().__init__(params, defaults)
        _lighten_step(type(self))
        self._binding.process_group = process_group

    @torch_private.uncompiled
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as torch.optim does.

        Raises:
            ValueError, TypeError, RuntimeError: as the constructor; the group was not added.
        """
        with self._binding._lock(), THIS_THREAD.deferred_signals:  # Ctrl-C leaves no group that was not checked
            super().add_param_group(param_group)
            group = self.param_groups[-1]
            try:
                arguments.check_group(group)
                arguments.check_stored(group, self._storage, is_loaded=False)
                for parameter, name in zip(group["params"], names_of(group, len(self.param_groups) - 1), strict=True):
                    check_parameter(parameter, name)
            except Exception:
                self.param_groups.pop()
                raise

    @property
    def moments(self) -> str:
        """How moments are stored: "fp32", "bf16" or "8bit"."""
        return self._storage.moments.value

    @property
    def master(self) -> str:
        """How masters of working copies are stored: "fp32" or "24bit"."""
        return self._storage.master.value

    # ---- limits ------------------------------------------------------------------------------------------------------

    @property
    def max_grad_norm(self) -> float | None:
        """Limit of the global gradient norm; None or inf for none."""
        return self._verdicts.max_grad_norm

    @max_grad_norm.setter
    def max_grad_norm(self, value: float | None) -> None:
        limit = None if value is None else arguments.checked_limit("max_grad_norm", value, may_be_zero=False)
        self._verdicts.max_grad_norm = limit

    @property
    def on_nonfinite(self) -> str:
        """What an Inf or NaN gradient does: "skip" or "raise"."""
        return self._verdicts.on_nonfinite

    @on_nonfinite.setter
    def on_nonfinite(self, value: str) -> None:
        if value not in ("skip", "raise"):
            raise ValueError(f"on_nonfinite is {value!r}, expected 'skip' or 'raise'")
        self._verdicts.on_nonfinite = value

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The ranks that make each step together; None for those that parameters are distributed over."""
        return self._binding.process_group

    @process_group.setter
    @_whole
    def process_group(self, value: dist.ProcessGroup | None) -> None:
        self._binding.join(value, self.param_groups)

    @property
    def last_outcome(self) -> StepOutcome | None:
        """The outcome of the last step; None before the first."""
        return self._verdicts.last_outcome

    # ---- steps -------------------------------------------------------------------------------------------------------

    @untracked
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Make one step with the gradients in `.grad`, which stay there; its outcome is in `last_outcome`.

        Args:
            closure: reevaluates the model and returns the loss, which this returns, too.

        Raises:
            TypeError, ValueError: a gradient does not fit its parameter, or a hyper-parameter is out of range.
            FloatingPointError: a gradient is Inf or NaN, and `on_nonfinite` is "raise" or other FSDP1 ranks may not
                know.
            RuntimeError: there is a limit under FSDP1, on several ranks; or, with DTensor parameters, another rank
                failed, ended, or is not at the same point.
            MemoryError, torch.OutOfMemoryError, RuntimeError: memory ran out; call this again to make the step, unless
                there are other ranks, which have perhaps made it.

        Whatever is raised, nothing was changed. The step with zero gradients that `torch.distributed.checkpoint` makes
        to get state to load into creates that state, and is none.
        """
        if self._binding.lacks_any_state and checkpoint.is_asked_for_template():
            with self._binding._lock():
                self._binding.create_state(self.param_groups)
            return None
        loss = None
        if closure is not None:  # not under the lock: its backward may run hooks of the scheduler in other threads
            with torch.enable_grad():
                loss = closure()
        with self._binding._lock(), torch_private.without_transforms():  # which a closure may use
            self._make_step()
        return loss

    @_whole
    def resolve(self) -> StepOutcome:
        """Make one step, as `step()` does but without its hooks, and return the outcome; raises as `step()`.

        For each parameter `.grad` decides: None takes no part; the handle that `speculate()` or a scheduler has put
        there stands for the speculation; any other gradient counts as it is. Hyper-parameters count as they are now.
        """
        return self._make_step()

    def _make_step(self) -> StepOutcome:
        verdicts = self._verdicts
        with self._binding.on_all_ranks(Question.STEP, self.param_groups):
            is_lasting = verdicts.limit_of_next_step is None
            limit = verdicts.max_grad_norm if is_lasting else verdicts.limit_of_next_step
            self._binding.catch_up()
            with THIS_THREAD.deferred_signals:  # a step is made wholly or not at all
                transaction = self._binding.bound_now(self.param_groups)
                if self._binding.is_flattened:
                    arguments.refuse_limit_of_shard(limit)
                gradients = gather(transaction.table, runs_of(self.param_groups))
                outcome, applied = transaction.step(gradients, limit, is_lasting=is_lasting)
                verdicts.last_outcome, verdicts.limit_of_next_step = outcome, None
                setattr(self, torch_private.STEP_MARK, True)  # resolve() counts as step() for learning-rate schedulers
                self._binding.conclude(transaction, outcome, applied)
        if outcome.kind is StepKind.SKIPPED and (verdicts.on_nonfinite == "raise" or self._binding.is_flattened):
            advice = "" if verdicts.on_nonfinite == "skip" else ", or set on_nonfinite='skip'"
            raise FloatingPointError(
                f"{outcome.nonfinite} gradient elements are Inf or NaN, expected finite ones; nothing was changed: "
                f"lower the learning rate or the loss scale{advice}"
            )
        return outcome

    @_whole
    def speculate(self, params: Iterable[Tensor] | None = None) -> None:
        """Take gradients and compute new values as if the step were good; parameters and `state` do not change.

        `.grad` becomes a handle that behaves as the gradient. A gradient that is referenced elsewhere, too, is left
        alone.

        Args:
            params: only these parameters; default all. Those without a gradient are passed over.

        Raises:
            TypeError, ValueError: a gradient does not fit its parameter, a parameter is not one of this optimizer's, or
                a hyper-parameter is out of range; nothing was changed.
        """
        transaction = self._binding.bound(self.param_groups)
        table, hyper = transaction.table, hyper_by_row(self.param_groups)
        asked = table.states_of(params, "speculate()")
        for state in asked:
            if state.parameter.grad is not None:
                state.check_gradient(state.local_gradient(state.parameter.grad))
        shared = shared_memory(table.parameters) if table.is_distributed else ()
        received = table.new_values.received
        gradients: dict[ParameterState, TakenGradient] = {}
        for state in asked:
            taken = None if state.row in shared else take_gradient(state.parameter, state, self._binding)
            if taken is not None:
                gradient = taken.pending if received is None or taken.is_unrounded else received(taken.pending)
                taken.pending, taken.in_use = state.host_gradient(gradient), True
                gradients[state] = taken
        able = transaction.able_to_speculate(pieces_of(gradients), hyper)
        slots = table.new_values.shadows(able)
        transaction.speculate(
            {
                piece: Pending.of(taken, hyper[state.row], piece.elements_of(taken.pending), slot=slots.get(piece))
                for state, taken in gradients.items()
                for piece in state.pieces
            }
        )

    @_whole
    def rollback(self) -> None:
        """Drop unresolved speculation and give its gradients back to `.grad`; parameters and state did not change."""
        self._binding.drop()
        for parameter in arguments.parameters_of(self):
            taken = None if parameter.grad is None else taken_of(parameter.grad)
            if taken is not None:
                taken.leave_speculation()

    @_whole
    def commit(self) -> None:
        """Fold accepted steps, and what was written to parameters, into the state; reading `state` does so too."""
        self._binding.commit(self.param_groups)

    @_whole
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Set the limit of the global gradient norm for the coming step only, and return that norm.

        Unlike `torch.nn.utils.clip_grad_norm_`, leaves the gradients alone.

        Args:
            max_norm: limit, at least 0; `math.inf` for none.

        Returns:
            0-dim fp64 tensor: the 2-norm of all gradients in `.grad`, over all ranks where parameters are DTensors.

        Raises:
            TypeError, ValueError, RuntimeError: as `step()`.
        """
        with self._binding.on_all_ranks(Question.NORM, self.param_groups):
            limit = arguments.checked_limit("max_norm", max_norm, may_be_zero=True)
            self._binding.catch_up()
            with THIS_THREAD.deferred_signals:
                transaction = self._binding.bound_now(self.param_groups)
                norm = transaction.grad_norm(gather(transaction.table, runs_of(self.param_groups)))
        self._verdicts.limit_of_next_step = limit
        return torch.tensor(norm, dtype=torch.float64, device="cpu")

    @torch_private.uncompiled
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset gradients as torch.optim does, and drop the limit that `clip_grad_norm_()` has set."""
        with self._binding._lock():
            self._verdicts.limit_of_next_step = None
            super().zero_grad(set_to_none)

    # ---- what checkpoints use ----------------------------------------------------------------------------------------

    def _refuse_older_state(self) -> None:
        if self._binding.ranks is not None:
            self._binding.ranks.refuse_older_state()

    @_whole
    def _adopt_sampled_writes(self) -> list[Tensor]:
        """Adopt outside writes as a step does, before state is saved; return those whose masters were written to."""
        self._refuse_older_state()
        table = self._binding.bound(self.param_groups).table  # refuses parameters of which nothing can be saved
        self._binding.commit(self.param_groups, with_samples=True)
        return [state.parameter for state in table.states if state.master is not None and table.is_master_edited(state)]

    @contextmanager
    def _encoded(self) -> Iterator[None]:
        """Let `state_dict()` return `Encoded` stand-ins, inside, of what would have to be decoded."""
        with self._binding._lock():
            published = self._binding.published
            try:
                published.stays_encoded = True
                yield
            finally:
                published.stays_encoded = False

    # ---- state -------------------------------------------------------------------------------------------------------

    @property
    @_whole
    def state(self) -> defaultdict[Tensor, Any]:
        """Per parameter `step`, `exp_avg`, `exp_avg_sq` (`max_exp_avg_sq`, `master`): the last accepted state.

        After a state without masters was loaded, as torch's, `master` comes with the next step.

        Accepted steps are committed first. While a program refers to the dict or to anything in it, that shows each
        step when `step()` returns, and the step of those parameters is not made during backward.

        A master that is written to in place counts. One that is put in its place counts, as a loaded one, where it
        rounds to the parameter's value: elsewhere the parameter does, so write to that, or to both.
        """
        return self._binding.entries(self.param_groups)

    @state.setter
    @untracked
    def state(self, value: defaultdict[Tensor, Any]) -> None:
        if "_binding" in self.__dict__:
            with self._binding._lock():
                self._binding.replace(value)
        else:
            self._binding = Binding(value, self.statistics, self._storage)

    @_whole
    def reload_masters(self, params: Iterable[Tensor] | None = None) -> None:
        """Adopt values that were written to parameters past their version counters, as through `.data`.

        `step()` finds most of these writes by itself, and all others. An element that equals its rounded master keeps
        that master.

        Args:
            params: only these parameters; default all.

        Raises:
            ValueError: a parameter is not one of this optimizer's; nothing was changed.
        """
        self._binding.catch_up()
        with THIS_THREAD.deferred_signals:
            transaction = self._binding.bound_now(self.param_groups)
            transaction.adopt_outside_writes(transaction.table.states_of(params, "reload_masters()"))

    @_whole
    def state_dict(self) -> dict[str, Any]:
        """Return groups and state as `torch.optim.Optimizer.state_dict` does, with the `master` of each working copy.

        Entries are those of `state`, as in torch: while they are kept they have the values of the last step, counts
        included, and what is written to them counts.
        Accepted steps are committed first; gradients that wait for their verdict are not included.

        Raises:
            RuntimeError: an error has kept this rank from a step that others may have made.
        """
        if not self._binding.published.stays_encoded:  # as for a checkpoint, which may be about to be loaded
            self._refuse_older_state()
        result = super().state_dict()
        if self._binding.published.stays_encoded and isinstance(result.get("state"), dict):  # a hook may change that
            result["state"] = {key: raw(e) if isinstance(e, dict) else e for key, e in result["state"].items()}
        return result

    @_whole
    def torch_state_dict(self) -> dict[str, Any]:
        """Return `state_dict()` without masters, as `torch.optim.Adam` or `AdamW` over the same parameters loads it."""
        result, state = self.state_dict(), {}
        for key, e in result["state"].items():
            is_ours = isinstance(e, dict) and "step" in e  # others may keep something under a name of their own
            state[key] = {name: e[name] for name in e if name != "master"} if is_ours else e
        return {**result, "state": state}

    @_whole
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict()` of this class, or of torch.optim's Adam or AdamW, returned.

        Parameters stay as they are, as in torch; the model's weights may be loaded before or after. State stays on the
        CPU, in the dtypes of this optimizer: other moments are widened, or rounded to nearest. An element of `master`
        counts where it rounds to the parameter's; elsewhere, and without `master`, the parameter counts. What others
        keep in a parameter's state is cast and moved as in torch.

        Raises:
            ValueError: the state dict is not one of Adam over such parameters; nothing was changed.
        """
        if not isinstance(state_dict, dict):
            raise ValueError(
                f"the state dict is a {type(state_dict).__name__}, expected a dict; "
                "load what optimizer.state_dict() returned"
            )
        # As torch does it, but for the state, which torch would cast and move.
        pre_hooks, post_hooks = torch_private.hooks_of_loading(self)
        state_dict = state_dict.copy()
        for pre_hook in pre_hooks.values():
            changed = pre_hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        named = zip(arguments.parameters_of(self), all_names_of(self.param_groups), strict=True)
        states = [  # without what they have, which may be refused
            ParameterState(parameter, row, name, storage=self._storage) for row, (parameter, name) in enumerate(named)
        ]
        groups, entries, foreign = checkpoint.read(state_dict, states, self.param_groups)
        for group, own in zip(groups, self.param_groups, strict=True):
            arguments.check_stored(group, self._storage, is_loaded=True)
            group["params"] = own["params"]
            if "param_names" in own:
                group.setdefault("param_names", own["param_names"])
        loaded: dict[Any, Any] = {state.parameter: entry for state, entry in entries.items()}
        self.__setstate__({"state": defaultdict(dict, loaded | foreign), "param_groups": groups})
        for post_hook in post_hooks.values():
            post_hook(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Load `param_groups` and `state` from a pickle, a deep copy or `load_state_dict`."""
        values = dict(state)
        published = values.pop("state", None)  # a property here: it must not land in __dict__
        with THIS_THREAD.deferred_signals:  # else Ctrl-C would leave other groups with the state from before
            # First where there was one, as it may raise: of memory, say. Without a new one that stays, as in torch.
            if published is not None and "_binding" in self.__dict__:
                self.state, published = published, None
            super().__setstate__(values)
            _lighten_step(type(self))
            if published is not None:
                self.state = published

    @_whole
    def __getstate__(self) -> dict[str, Any]:
        """Return what pickles and deep copies hold, committed; hooks stay behind, as in torch."""
        values = {key: getattr(self, key) for key in ("defaults", "param_groups", "statistics", "_verdicts")}
        return {**values, "_storage": self._storage, "state": self._binding.entries(self.param_groups)}

    @_whole
    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """As by `__getstate__`, which alone would let other threads step before its tensors are copied."""
        copied = memo[id(self)] = type(self).__new__(type(self))
        copied.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return copied


_own_step = SpeculativeCPUAdam.step


class SpeculativeCPUAdamW(SpeculativeCPUAdam):
    """`SpeculativeCPUAdam` with decoupled weight decay, 1e-2 by default: a drop-in for `torch.optim.AdamW`."""

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        max_grad_norm: float | None = None,
        on_nonfinite: str = "skip",
        moments: str = "fp32",
        master: str = "fp32",
        process_group: dist.ProcessGroup | None = None,
        foreach: bool | None = None,
        fused: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            decoupled_weight_decay=True,
            max_grad_norm=max_grad_norm,
            on_nonfinite=on_nonfinite,
            moments=moments,
            master=master,
            process_group=process_group,
            foreach=foreach,
            fused=fused,
            capturable=capturable,
            differentiable=differentiable,
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        """As the base class; decay stays decoupled, whatever the loaded groups say, as in torch.optim.AdamW."""
        with THIS_THREAD.deferred_signals:  # or Ctrl-C would leave coupled decay
            super().__setstate__(state)
            for group in self.param_groups:
                group["decoupled_weight_decay"] = True
