"""`SpeculativeCPUAdam` and `SpeculativeCPUAdamW`: the transaction behind the contract of `torch.optim`.

Owns the parameter groups, the published `state` and the limits of validation. Arithmetic and phases lie below it.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from superadam import checkpoint, native
from superadam.hyperparameters import Hyperparameters
from superadam.outcome import Statistics, StepKind, StepOutcome
from superadam.parameter import ParameterState, Phase, check_parameter
from superadam.table import ParameterTable
from superadam.transaction import Arrival, Transaction

_logger = logging.getLogger("superadam")


class SpeculativeCPUAdam(Optimizer):
    r"""Adam with fp32 masters and moments in CPU memory, validated updates, and speculation that never changes a bit.

    A drop-in for `torch.optim.Adam`. `step()` computes the global gradient norm, skips the step when a gradient is Inf or NaN, clips
    to `max_grad_norm`, and updates state and parameters. `speculate()` and `resolve()` are the same step in two parts: the first
    writes parameters as if the gradients were good, the second validates and, where needed, redoes or undoes it exactly.

    A parameter that is fp32 or fp64 and dense on the CPU is its own master. Any other parameter (bf16, fp16, or on a GPU) is a working
    copy: the rounded value of an fp32 master that the optimizer owns.

    Args:
        params: tensors, (name, tensor) pairs or group dicts, as for `torch.optim.Adam`; float32, bfloat16, float16 or float64.
        lr: learning rate, at least 0; a float or a 0-dim tensor.
        betas: decay rates of the moments, each in [0, 1).
        eps: added to the denominator, at least 0.
        weight_decay: at least 0; added to the gradient (L2), or taken from the parameter with `decoupled_weight_decay`.
        amsgrad: divide by the largest second moment so far.
        maximize: ascend instead of descend.
        decoupled_weight_decay: weight decay as in AdamW.
        max_grad_norm: limit of the global 2-norm of all gradients, as in `torch.nn.utils.clip_grad_norm_`; None or `math.inf` for none.
            An attribute, not a group key; may be changed at any time. Do not call `clip_grad_norm_` beside it.
        on_nonfinite: what an Inf or NaN gradient does: "skip" the step, or "raise" FloatingPointError after rolling back.
        foreach, fused: accepted for compatibility; there is one implementation.
        capturable, differentiable: must be False.

    Raises:
        ValueError: a hyper-parameter is out of range, or the parameter list is empty.
        TypeError: a parameter is complex, sparse or of an unsupported dtype.
        RuntimeError: `capturable` or `differentiable` was asked for.

    Source: Kingma & Ba, arXiv 1412.6980; Reddi et al., arXiv 1904.09237 (amsgrad); Loshchilov & Hutter, arXiv 1711.05101 (decoupled).
    """

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
        foreach: bool | None = None,
        fused: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
    ) -> None:
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
        _check_group(defaults)
        native.active_isa()  # a wrong SUPERADAM_ISA is an error here, not in the middle of training
        self.max_grad_norm = max_grad_norm
        self.on_nonfinite = on_nonfinite
        self.statistics = Statistics()
        self.last_outcome: StepOutcome | None = None
        self._transaction: Transaction | None = None
        self._state_is_exposed = False
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as torch.optim does.

        Raises:
            ValueError, TypeError, RuntimeError: as the constructor; the group was not added.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            _check_group(group)
            for parameter, name in zip(group["params"], _names(group, len(self.param_groups) - 1), strict=True):
                check_parameter(parameter, name)
        except Exception:
            self.param_groups.pop()
            raise

    # ---- limits ----------------------------------------------------------------------------------------------------

    @property
    def max_grad_norm(self) -> float | None:
        """Limit of the global gradient norm; None or inf for none."""
        return self._max_grad_norm

    @max_grad_norm.setter
    def max_grad_norm(self, value: float | None) -> None:
        if value is not None and not float(value) >= 0.0:
            raise ValueError(
                f"max_grad_norm is {value}, expected a number of at least 0, or None or math.inf for no limit"
            )
        self._max_grad_norm = None if value is None else float(value)

    @property
    def on_nonfinite(self) -> str:
        """What an Inf or NaN gradient does: "skip" or "raise"."""
        return self._on_nonfinite

    @on_nonfinite.setter
    def on_nonfinite(self, value: str) -> None:
        if value not in ("skip", "raise"):
            raise ValueError(f"on_nonfinite is {value!r}, expected 'skip' or 'raise'")
        self._on_nonfinite = value

    # ---- steps -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Make one step with the gradients in `.grad`, which stay there, unscaled.

        With speculation open, takes the remaining gradients too and resolves. What came of it is in `last_outcome`.

        Args:
            closure: reevaluates the model and returns the loss.

        Returns:
            the closure's loss, or None.

        Raises:
            TypeError, ValueError: a gradient does not fit its parameter, or a hyper-parameter is out of range; nothing was changed.
            FloatingPointError: a gradient is Inf or NaN and `on_nonfinite` is "raise"; nothing was changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        transaction = self._bound()
        if transaction.is_open:
            self.speculate()
            self.resolve()
        else:
            self._conclude(transaction.step(self._arrivals(transaction), 1.0, self.max_grad_norm))
        return loss

    @torch.no_grad()
    def speculate(self, params: Iterable[Tensor] | None = None) -> None:
        """Take gradients, set `.grad` to None, and write parameters as if the step were good; `state` does not change.

        Args:
            params: only these parameters; default all. Those without a gradient are passed over.

        Raises:
            RuntimeError: a parameter has a second gradient while its speculation is open.
            TypeError, ValueError: a gradient does not fit its parameter, a parameter is not one of this optimizer's, or a
                hyper-parameter is out of range. Whatever is raised, nothing was changed.
        """
        transaction = self._bound()
        chosen = None if params is None else {id(parameter) for parameter in params}
        if chosen is not None and not chosen <= {id(state.parameter) for state in transaction.table.states}:
            raise ValueError(
                "speculate() got a parameter that is not in any group of this optimizer; call add_param_group() first"
            )
        arrivals = [a for a in self._arrivals(transaction) if chosen is None or id(a.state.parameter) in chosen]
        transaction.speculate(arrivals)
        for arrival in arrivals:
            arrival.state.parameter.grad = None

    @torch.no_grad()
    def resolve(self) -> StepOutcome:
        """Validate everything that is speculated: accept it, redo it clipped, or drop it.

        Hyper-parameters that changed since `speculate()` count: the speculation is redone with the present ones.

        Returns:
            what came of the step; also in `last_outcome`.

        Raises:
            FloatingPointError: a gradient is Inf or NaN and `on_nonfinite` is "raise"; the speculation was dropped.
            ValueError: a hyper-parameter is out of range; the speculation is still open.
        """
        transaction = self._bound()
        hyper_now = {state: hyper for state, hyper in self._states_with_hyper(transaction) if state.pending is not None}
        return self._conclude(transaction.resolve(hyper_now, self.max_grad_norm))

    @torch.no_grad()
    def rollback(self) -> None:
        """Drop unresolved speculation: parameters and state are as before `speculate()`, bit for bit; the gradients are gone."""
        self._bound().roll_back()
        self._keep_published()

    @torch.no_grad()
    def commit(self) -> None:
        """Fold accepted steps into the state now. Readers of the state do it themselves."""
        if self._transaction is not None:
            self._transaction.commit()
            self._keep_published()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset gradients as torch.optim does; drops speculation that is still open."""
        if self._transaction is not None and self._transaction.is_open:
            _logger.info("zero_grad() dropped an open speculation; call step() or resolve() first to keep it")
            self.rollback()
        super().zero_grad(set_to_none)

    def _conclude(self, outcome: StepOutcome) -> StepOutcome:
        self.last_outcome = outcome
        self._keep_published()
        setattr(self.statistics, outcome.kind.value, getattr(self.statistics, outcome.kind.value) + 1)
        if outcome.kind is StepKind.SKIPPED and self.on_nonfinite == "raise":
            raise FloatingPointError(
                f"{outcome.nonfinite} gradient elements are Inf or NaN, expected finite gradients; nothing was changed: lower the learning "
                "rate or the loss scale, or set on_nonfinite='skip'"
            )
        return outcome

    # ---- binding parameters to their state -----------------------------------------------------------------------

    def _states_with_hyper(self, transaction: Transaction) -> Iterator[tuple[ParameterState, Hyperparameters]]:
        """Yield every parameter's state with the present hyper-parameters of its group; one record for each group."""
        states = iter(transaction.table.states)
        for group in self.param_groups:
            hyper = Hyperparameters.of_group(group)
            for state in itertools.islice(states, len(group["params"])):
                yield state, hyper

    def _arrivals(self, transaction: Transaction) -> list[Arrival]:
        """Return every parameter that has a gradient, with it."""
        return [
            Arrival(state, state.host_gradient(state.parameter.grad), hyper)
            for state, hyper in self._states_with_hyper(transaction)
            if state.parameter.grad is not None
        ]

    def _bound(self) -> Transaction:
        """Return the transaction over the present parameters; binds lazily, because frameworks replace them after construction."""
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        transaction = self._transaction
        if transaction is not None and (
            len(parameters) != len(transaction.table.states)
            or any(state.parameter is not p for state, p in zip(transaction.table.states, parameters, strict=True))
        ):
            if transaction.is_open:
                raise RuntimeError(
                    "the parameters of the optimizer changed while speculation was open; call resolve() or rollback() before changing them"
                )
            transaction.commit()
            self._publish(transaction.table)
            transaction = None
        if transaction is None:
            transaction = self._transaction = self._bind(parameters)
        elif self._state_is_exposed:
            for state in transaction.table.states:
                if state.pending is None:
                    self._read_published(state, transaction.table)
        return transaction

    def _bind(self, parameters: list[Tensor]) -> Transaction:
        names = [name for index, group in enumerate(self.param_groups) for name in _names(group, index)]
        known = (
            {} if self._transaction is None else {state.parameter: state for state in self._transaction.table.states}
        )
        states = []
        for row, (parameter, name) in enumerate(zip(parameters, names, strict=True)):
            state = known.get(parameter) or ParameterState(parameter, row, name)
            state.row = row
            states.append(state)
        _refuse_shared_memory(states)
        table = ParameterTable(states, itertools.repeat(0, len(states)))
        for state in states:
            self._read_published(state, table)
        return Transaction(table, self.statistics)

    # ---- published state ---------------------------------------------------------------------------------------------

    @property
    def state(self) -> defaultdict[Tensor, Any]:  # type: ignore[override]
        """Per parameter `step`, `exp_avg`, `exp_avg_sq` (`max_exp_avg_sq`, `master`): the last accepted state, committed first."""
        self._state_is_exposed = self._transaction is not None
        return self._committed_state()

    @state.setter
    def state(self, value: defaultdict[Tensor, Any]) -> None:
        self._state = value
        self._transaction = None

    def _committed_state(self) -> defaultdict[Tensor, Any]:
        if self._transaction is not None:
            self._transaction.commit()
            self._publish(self._transaction.table)
        return self._state

    def _keep_published(self) -> None:
        """Once somebody has seen `state`, and may hold or change parts of it, keep it up to date at every step."""
        if self._state_is_exposed and self._transaction is not None:
            self._publish(self._transaction.table)

    def _publish(self, table: ParameterTable) -> None:
        """Bring `_state` up to date with the table, except where an accepted step is not committed yet."""
        for state in table.states:
            if not state.has_state or state.is_provisional or state.phase is Phase.ACCEPTED:
                continue
            entry = self._state[state.parameter]
            step = entry.setdefault("step", torch.zeros((), dtype=torch.float32))
            if step != table.steps[state.row]:
                step.fill_(float(table.steps[state.row]))
            for key in (*checkpoint.MOMENTS, *checkpoint.OPTIONAL):
                tensor = None if key == "max_exp_avg_sq" and state.is_max_provisional else getattr(state, key)
                if tensor is not None:
                    entry[key] = tensor

    def _read_published(self, state: ParameterState, table: ParameterTable) -> None:
        """Bring a clean row of the table up to date with `_state`, which users and frameworks may have written to."""
        entry = self._state.get(state.parameter)
        if not entry:
            if state.has_state:
                state.is_provisional = state.is_max_provisional = True
                state.forget_provisional()
                table.steps[state.row] = 0
                table.note_moved(state)
            return
        tensors = [entry.get(key) for key in (*checkpoint.MOMENTS, *checkpoint.OPTIONAL)]
        held = [state.exp_avg, state.exp_avg_sq, state.max_exp_avg_sq, state.master]
        if any(ours is not theirs for ours, theirs in zip(held, tensors, strict=True)):
            checkpoint.check_entry(entry, state)
            for key, tensor in zip((*checkpoint.MOMENTS, *checkpoint.OPTIONAL), tensors, strict=True):
                fits = tensor is None or (
                    tensor.dtype == state.dtype and tensor.device.type == "cpu" and tensor.stride() == state.strides
                )
                entry[key] = tensor if fits else state.host_copy(tensor, state.dtype)
                setattr(state, key, entry[key])
            table.note_moved(state)
        if not isinstance(entry["step"], Tensor):
            entry["step"] = torch.tensor(float(entry["step"]), dtype=torch.float32)
        table.steps[state.row] = checkpoint.read_step(entry["step"], state.name)

    # ---- checkpoints, copies -----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return groups and state as `torch.optim.Optimizer.state_dict` does, with `master` for every working copy.

        Accepted steps are committed first; open speculation is not part of it.
        """
        was_exposed = self._state_is_exposed
        result = super().state_dict()
        result["state"] = {
            key: dict(entry) if isinstance(entry, dict) else entry for key, entry in result["state"].items()
        }
        self._state_is_exposed = was_exposed
        return result

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict()` of this class, or of torch.optim's Adam or AdamW, returned.

        fp32 state stays fp32 and on the CPU, whatever the parameters are. With `master` in the state, working copies become the
        rounded masters; without, masters are read from the parameters when they are first needed. Open speculation is rolled back.

        Raises:
            ValueError: the state dict is not one of Adam over such parameters; nothing was changed.
        """
        if not isinstance(state_dict, dict) or not {"state", "param_groups"} <= set(state_dict):
            raise ValueError("the state dict lacks state or param_groups; load what optimizer.state_dict() returned")
        loaded: dict[Tensor, dict[str, Tensor]] = {}

        def take_state(optimizer: Optimizer, final: dict[str, Any]) -> dict[str, Any]:
            """Check everything and take the tensors out, so that torch neither casts nor moves them."""
            states = self._bound().table.states
            ids = checkpoint.packed_ids(final["param_groups"], [len(group["params"]) for group in self.param_groups])
            by_id = dict(zip(ids, states, strict=True))
            for group in final["param_groups"]:
                _check_group({**self.defaults, **group})
            for identifier, entry in final["state"].items():
                if identifier not in by_id:
                    raise ValueError(
                        f"the state dict holds state for parameter {identifier!r}, which none of its groups lists; it is damaged"
                    )
                if entry:
                    checkpoint.check_entry(entry, by_id[identifier])
            for identifier, entry in final["state"].items():
                if entry:
                    loaded[by_id[identifier].parameter] = checkpoint.copy_entry(entry, by_id[identifier])
            self.rollback()
            return {**final, "state": {}}

        handle = self.register_load_state_dict_pre_hook(take_state)
        self._arriving_state = loaded
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
            del self._arriving_state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over `param_groups` and `state`, from a pickle, a deep copy or `load_state_dict`."""
        values = dict(state)
        published = values.pop("state")
        arriving = self.__dict__.get("_arriving_state")
        if arriving is not None:
            published = defaultdict(dict, arriving)
        self.__dict__.update(values)
        self.state = published
        self._state_is_exposed = False
        for group in self.param_groups:
            for key, value in (
                ("amsgrad", False),
                ("maximize", False),
                ("foreach", None),
                ("capturable", False),
                ("differentiable", False),
                ("fused", None),
                ("decoupled_weight_decay", False),
            ):
                group.setdefault(key, self.defaults.get(key, value))
        if not hasattr(self, "_zero_grad_profile_name"):
            self._patch_step_function()
        if arriving:
            self._write_masters()

    def __getstate__(self) -> dict[str, Any]:
        """Return everything but what is bound to this object's tensors; accepted steps are committed first."""
        values = {
            key: value
            for key, value in self.__dict__.items()
            if key not in ("_state", "_transaction", "_arriving_state")
        }
        return {**values, "state": self._committed_state()}

    def _write_masters(self) -> None:
        """Make every parameter that came with a master the rounded value of it."""
        for state in self._bound().table.states:
            if state.master is not None:
                state.parameter.copy_(state.master)
                state.note_written()
                if state.is_own_master:
                    state.master = None
                    del self._state[state.parameter]["master"]


def _check_group(group: dict[str, Any]) -> None:
    """Raise unless the hyper-parameters of a group can be used.

    Raises:
        ValueError: a value is out of range.
        RuntimeError: something that this optimizer does not do is asked for.
    """
    if group.get("capturable") or group.get("differentiable"):
        which = "capturable" if group.get("capturable") else "differentiable"
        raise RuntimeError(
            f"{which}=True is not possible: the update runs on the CPU outside CUDA graphs and autograd; leave it False or use torch.optim.AdamW"
        )
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"Tensor lr has shape {tuple(lr.shape)}, expected one element")
    Hyperparameters.of_group(group)


def _names(group: dict[str, Any], index: int) -> list[str]:
    """Return how errors call the parameters of a group."""
    return group.get("param_names") or [
        f"parameter {position} of group {index}" for position in range(len(group["params"]))
    ]


def _refuse_shared_memory(states: list[ParameterState]) -> None:
    """Raise when two parameters lie in the same memory: speculation on one would overwrite the other.

    Raises:
        ValueError: two distinct parameters overlap.
    """
    spans = []
    for state in states:
        p = state.parameter
        if p.numel():
            extent = 1 + sum((size - 1) * stride for size, stride in zip(p.shape, p.stride(), strict=True))
            spans.append((str(p.device), p.data_ptr(), p.data_ptr() + extent * p.element_size(), state.name))
    spans.sort()
    for (device, _, end, first), (other_device, begin, _, second) in itertools.pairwise(spans):
        if device == other_device and begin < end:
            raise ValueError(
                f"{first} and {second} share memory, expected distinct parameters in distinct memory; tie weights by using one Parameter twice"
            )


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
            foreach=foreach,
            fused=fused,
            capturable=capturable,
            differentiable=differentiable,
        )
