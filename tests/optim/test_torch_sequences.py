"""What scripts do to an optimizer, in sequences drawn at random: the bits are those of torch's fused AdamW throughout.

Torch steps fp32 or fp64 *masters*; where the model is narrower, what a working copy means is spelled out here: a copy
is the rounded master, an element that others wrote to it becomes the master's, and a state that is forgotten takes its
master along. Lengths are multiples of 64, where torch's fused kernel rounds all elements alike.
"""

import copy
import pickle
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.visible import bits, parameter, parameters_of
from torch import Tensor
from torch.optim import lr_scheduler

from superadam import SpeculativeCPUAdamW
from superadam.state.parameter import differing

pytestmark = [
    pytest.mark.x86_64,
    pytest.mark.filterwarnings("ignore:Detected call of"),
    pytest.mark.usefixtures("one_torch_thread"),
]

LRS = [0.125, 0.25, 0.0625]
DECAYS = [0.0, 0.5, 0.25]  # no product with a learning rate is rounded, which torch does otherwise


def noise(shape: Any, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Pair:
    """Ours, and torch's over masters.

    Attributes:
        dtype: of the model.
        ours, theirs: the optimizers; parameters have the same places in the groups of both.
        copies: the working copy of each master of theirs; where the model is as wide, the master itself.
        held: what `state` of both returned once.
        kept: what actions remember.
        writes: how often others wrote to parameters.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.copies: dict[Tensor, Tensor] = {}
        made = [parameter(*shape, dtype=dtype, seed=seed) for seed, shape in enumerate([(64,), (2, 64), (8, 16)])]
        masters = [self.master_for(p) for p in made]
        groups = [{"params": made[:1], "weight_decay": 0.5}, {"params": made[1:]}]
        theirs = [{"params": masters[:1], "weight_decay": 0.5}, {"params": masters[1:]}]
        self.ours: Any = SpeculativeCPUAdamW(groups, lr=0.125)
        self.theirs: Any = torch.optim.AdamW(theirs, lr=0.125, fused=True)
        self.held: tuple[Any, Any] | None = None
        self.kept: dict[str, Any] = {}
        self.writes = 0

    def master_for(self, p: Tensor) -> Tensor:
        """Return a master with the values of a parameter, for theirs."""
        own = torch.nn.Parameter(p.detach().clone())
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        master = own if self.dtype == wide else torch.nn.Parameter(p.detach().to(wide))
        self.copies[master] = own
        return master

    @property
    def rows(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Our parameter, their working copy and their master, for each place."""
        both = zip(parameters_of(self.ours), parameters_of(self.theirs), strict=True)
        return [(p, self.copies[master], master) for p, master in both]

    @property
    def states(self) -> tuple[Any, Any]:
        """`state` of both; perhaps an earlier one."""
        return self.held or (self.ours.state, self.theirs.state)

    @property
    def can_be_saved(self) -> bool:
        """Whether all state is that of parameters in the groups; torch raises KeyError for any other."""
        own = {*map(id, parameters_of(self.ours))}
        return not self.kept.get("parked") and all(id(one) in own for one in self.ours.state)

    @torch.no_grad()
    def adopt(self) -> None:
        """Let what was written to working copies be the masters'."""
        for _, own, master in self.rows:
            if own is not master:
                where = differing(own.detach(), master.detach().to(own.dtype))
                master[where] = own[where].to(master.dtype)

    @torch.no_grad()
    def forget(self, master: Tensor) -> None:
        """Let a master be its working copy, because its state is gone."""
        master.copy_(self.copies[master])

    def step_theirs(self, *, adopts: bool = True) -> None:
        """Make a step of finite gradients."""
        if adopts:
            self.adopt()
        rows = self.rows
        if not all(own.grad is None or bool(own.grad.isfinite().all()) for _, own, _ in rows):
            return
        for group in self.theirs.param_groups:
            for master in group["params"]:
                entry = self.theirs.state.get(master)
                if group["amsgrad"] and entry:
                    entry.setdefault("max_exp_avg_sq", torch.zeros_like(master))
        for _, own, master in rows:
            if own is not master:
                master.grad = None if own.grad is None else own.grad.to(master.dtype)
        self.theirs.step()
        with torch.no_grad():
            for _, own, master in rows:
                own.copy_(master)

    def check_parameters(self) -> None:
        for p, own, _ in self.rows:
            assert bits(p) == bits(own)

    def check_everything(self) -> None:
        """Which reads the state, and so commits."""
        self.check_parameters()
        self.adopt()
        ours, theirs = self.ours.state, self.theirs.state
        for p, own, master in self.rows:
            assert (p.grad is None) == (own.grad is None)
            assert p.grad is None or bits(p.grad) == bits(own.grad)
            entry, expected = ours.get(p, {}), theirs.get(master, {})
            assert bool(entry) == bool(expected)
            if entry:
                assert float(entry["step"]) == float(expected["step"])
                keys = [key for key in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if entry.get(key) is not None]
                assert [bits(entry[key]) for key in keys] == [bits(expected[key]) for key in keys]
                assert bits(entry.get("master", p if own is master else master)) == bits(master)


Action = Callable[[Pair, int], None]
ACTIONS: dict[str, Action] = {}


def action(function: Action) -> Action:
    ACTIONS[function.__name__] = function
    return function


# -- gradients and steps -----------------------------------------------------------------------------------------------


@action
def gradients(pair: Pair, seed: int) -> None:
    """Of all parameters, or of all but one; sometimes not finite."""
    for place, (p, own, _) in enumerate(pair.rows):
        gradient = noise(p.shape, pair.dtype, 100 * seed + place)
        if seed % 8 == 7 and place == 0:
            gradient.view(-1)[seed % 64] = float("inf")
        is_given = seed % 5 < 3 or place != seed % 3
        p.grad, own.grad = (gradient.clone(), gradient.clone()) if is_given else (None, None)


@action
def edit_gradients(pair: Pair, seed: int) -> None:
    edits: list[Callable[[Tensor], Tensor]] = [lambda g: g.add_(noise(g.shape, g.dtype, seed))]
    edits += [lambda g: g.mul_(0.5), lambda g: g.mul_(0.3), lambda g: g.clamp_(-0.5, 0.5)]
    for one in [one for p, own, _ in pair.rows[seed % 2 :] for one in (p, own) if one.grad is not None]:
        edits[seed // 2 % 4](one.grad)


@action
def clip(pair: Pair, seed: int) -> None:
    limit = [0.5, 5.0, 1e3][seed % 3]
    norms = [torch.nn.utils.clip_grad_norm_([row[side] for row in pair.rows], limit) for side in (0, 1)]
    assert bits(norms[0]) == bits(norms[1])


@action
def drop_gradients(pair: Pair, seed: int) -> None:
    pair.ours.zero_grad(set_to_none=bool(seed % 3))
    for _, own, _ in pair.rows:
        if seed % 3:
            own.grad = None
        elif own.grad is not None:
            own.grad.zero_()


ACTIONS |= {
    "speculate": lambda pair, seed: pair.ours.speculate(None if seed % 3 else parameters_of(pair.ours)[: seed % 4]),
    "roll_back": lambda pair, seed: pair.ours.rollback(),
    "commit": lambda pair, seed: pair.ours.commit(),
    "look": lambda pair, seed: pair.check_everything(),
}


@action
def step(pair: Pair, seed: int) -> None:
    (pair.ours.step if seed % 2 else pair.ours.resolve)()
    pair.step_theirs()


@action
def train(pair: Pair, seed: int) -> None:
    """A whole iteration, mostly with speculation."""
    gradients(pair, 4 * seed)
    if seed % 4:
        pair.ours.speculate()
    step(pair, seed)
    if seed % 3:
        drop_gradients(pair, 1)


@action
def train_scaled(pair: Pair, seed: int) -> None:
    """With a GradScaler, whose scale is a power of two; sometimes a gradient overflows."""
    if pair.dtype == torch.float16:  # which torch refuses to unscale
        return
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0 ** (seed % 8), growth_interval=1) for _ in range(2)]
    gradients(pair, seed)
    for scaler in scalers:
        scaler.scale(torch.ones(()))  # which makes the scale
    if seed % 4:
        pair.ours.speculate()
    if seed % 3:
        scalers[0].unscale_(pair.ours)
    if seed % 3 == 2:
        torch.nn.utils.clip_grad_norm_(parameters_of(pair.ours), 0.5)
    scalers[0].step(pair.ours)
    own = [copied for _, copied, _ in pair.rows]
    plain = torch.optim.SGD(own)
    if any(one.grad is not None for one in own):
        scalers[1].unscale_(plain)
        if seed % 3 == 2:
            torch.nn.utils.clip_grad_norm_(own, 0.5)
        pair.step_theirs()
        plain.step = lambda *arguments: None  # type: ignore[method-assign]
        scalers[1].step(plain)
        for scaler in scalers:
            scaler.update()
        assert scalers[0].get_scale() == scalers[1].get_scale()


# -- parameters and groups ---------------------------------------------------------------------------------------------


@action
def add_group(pair: Pair, seed: int) -> None:
    if len(pair.rows) < 6:
        p = parameter(64 * (1 + seed % 2), dtype=pair.dtype, seed=seed)
        options = {"lr": LRS[seed % 3], "weight_decay": DECAYS[seed // 3 % 3]}
        pair.theirs.add_param_group({"params": pair.master_for(p), **options})
        pair.ours.add_param_group({"params": p, **options})


def _place(pair: Pair, seed: int) -> tuple[int, int] | None:
    places = [(g, i) for g, group in enumerate(pair.ours.param_groups) for i in range(len(group["params"]))]
    return places[seed % len(places)] if places else None


@action
def replace_parameter(pair: Pair, seed: int) -> None:
    """By one without state, or with that of the old one: of the same shape, or with more rows or fewer."""
    place = _place(pair, seed)
    if place is None:
        return
    group, index = place
    pair.adopt()
    old = pair.ours.param_groups[group]["params"][index]
    old_master = pair.theirs.param_groups[group]["params"][index]
    values = old.detach().clone()
    if old.dim() == 2:
        values = [values, values[1:], torch.cat([values, values[:1] * 0.5])][seed // 8 % 3]
        values = values if values.numel() % 64 == 0 and values.numel() else old.detach().clone()
    values.view(-1)[: seed % 64] = 0.75
    new = torch.nn.Parameter(values)
    master = pair.master_for(new)
    for state, before, after in zip(pair.states, (old, old_master), (new, master), strict=True):
        entry = state.get(before)
        if seed % 2:  # else its entry is edited before it is taken out, as Gaussian splatting does
            state.pop(before, None)
        if entry and seed // 4 % 4:
            for key in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
                if entry.get(key) is not None:
                    moment = entry[key]
                    if len(after) != len(moment):
                        moment = moment[1:] if len(after) < len(moment) else torch.cat([moment, moment[:1]])
                    entry[key] = moment.clone()
            state[after] = entry
            if after is master and master.shape == old_master.shape:
                with torch.no_grad():
                    master.copy_(old_master)
        state.pop(before, None)
    pair.ours.param_groups[group]["params"][index] = new
    pair.theirs.param_groups[group]["params"][index] = master
    if pair.copies[master] is not master:
        pair.adopt()
    else:
        with torch.no_grad():
            master.copy_(new)


@action
def take_parameter_away(pair: Pair, seed: int) -> None:
    """Or put back what was taken away, with its state."""
    parked = pair.kept.setdefault("parked", [])
    if parked:
        group, *both = parked.pop()
        for optimizer, p in zip((pair.ours, pair.theirs), both, strict=True):
            optimizer.param_groups[group]["params"].append(p)
    elif (place := _place(pair, seed)) is not None:
        group, index = place
        both = [one.param_groups[group]["params"].pop(index) for one in (pair.ours, pair.theirs)]
        parked.append((group, *both))


@action
def reverse_parameters(pair: Pair, seed: int) -> None:
    for optimizer in (pair.ours, pair.theirs):
        optimizer.param_groups[-1]["params"].reverse()


@action
def swap_storage(pair: Pair, seed: int) -> None:
    """By one with the same values, also where the first is gone."""
    for p in parameters_of(pair.ours)[seed % 3 :]:
        old = p.data
        p.data = old.clone()
        if seed // 3 % 2:
            old.untyped_storage().resize_(0)


@action
def write_parameters(pair: Pair, seed: int) -> None:
    """What no parameter was before: a value that comes back is no write, unless it was read in between."""
    pair.writes += 1
    for p, own, _ in pair.rows[: 1 + seed % 3]:
        values = noise(p.shape, pair.dtype, seed) + 16 * pair.writes
        for one in (p, own):
            target = one.data if seed // 3 % 2 else one.detach()
            target.copy_(torch.where(values > 16 * pair.writes + seed % 4 - 2, values, target))
    if seed // 3 % 2:
        pair.ours.reload_masters()


# -- hyper-parameters --------------------------------------------------------------------------------------------------


@action
def change_hyperparameters(pair: Pair, seed: int) -> None:
    key, values = [
        ("lr", LRS),
        ("weight_decay", DECAYS),
        ("betas", [(0.9, 0.999), (0.5, 0.9), (0.0, 0.99)]),
        ("eps", [1e-8, 1e-4, 0.0]),
        ("maximize", [False, True, False]),
        ("amsgrad", [True, False, True]),
    ][seed % 6]
    for optimizer in (pair.ours, pair.theirs):
        group = optimizer.param_groups[seed // 6 % len(optimizer.param_groups)]
        group[key] = values[seed // 12 % 3]
        if key == "lr" and seed // 36 % 2:
            group[key] = torch.tensor(values[seed // 12 % 3])


@action
def schedule(pair: Pair, seed: int) -> None:
    if "schedulers" not in pair.kept:
        pair.kept["schedulers"] = [lr_scheduler.StepLR(one, 1 + seed % 2, 0.5) for one in (pair.ours, pair.theirs)]
    for scheduler in pair.kept["schedulers"]:
        scheduler.step()


# -- state -------------------------------------------------------------------------------------------------------------


@action
def hold_state(pair: Pair, seed: int) -> None:
    pair.held = (pair.ours.state, pair.theirs.state) if seed % 2 else None


@action
def edit_state(pair: Pair, seed: int) -> None:
    rows = pair.rows
    if not rows:
        return
    p, _, master = rows[seed % len(rows)]
    kind = seed // 4 % 8
    for state, key in zip(pair.states, (p, master), strict=True):
        entry = state.get(key)
        if not entry:
            if kind == 0:
                state[key] = {
                    "step": torch.tensor(3.0),
                    "exp_avg": noise(key.shape, master.dtype, seed),
                    "exp_avg_sq": noise(key.shape, master.dtype, seed).square(),
                }
        elif kind == 0:
            entry["step"] = torch.tensor(7.0) if key is master or seed // 32 % 2 else 7
        elif kind == 1:
            entry["step"].fill_(5)
        elif kind == 2:
            entry["exp_avg"] = entry["exp_avg"] * 0.5
        elif kind == 3:
            entry["exp_avg_sq"].mul_(0.25)
        elif kind == 4:
            state[key] = {name: value.clone() for name, value in entry.items()}
        elif kind == 5:
            entry.update({name: torch.zeros_like(master) for name in ("exp_avg", "exp_avg_sq")})
        elif kind == 6:
            state.pop(key)
        else:
            entry.clear()
    if kind in (6, 7) and pair.theirs.state.get(master, None) in (None, {}):
        pair.adopt()
        pair.forget(master)


@action
def edit_masters(pair: Pair, seed: int) -> None:
    """In place, and perhaps what else is in their entries; then a step of all parameters."""
    ours, theirs = pair.ours.state, pair.theirs.state
    pair.adopt()
    for p, own, master in pair.rows:
        if own is not master and ours.get(p) and "master" in ours[p]:
            with torch.no_grad():
                for one in (ours[p]["master"], master):
                    one.mul_(0.5)
            for entry in (ours[p], theirs[master]):
                if seed % 2:
                    entry["exp_avg"] = entry["exp_avg"] * 0.5
                if seed // 2 % 2:
                    entry["step"].fill_(9)
    for place, (p, own, _) in enumerate(pair.rows):
        p.grad, own.grad = (noise(p.shape, pair.dtype, 100 * seed + place) for _ in range(2))
    if seed // 4 % 2:
        pair.ours.speculate()
    pair.ours.step()
    pair.step_theirs(adopts=False)


@action
def assign_state(pair: Pair, seed: int) -> None:
    """The same, a copy, none, or what was taken away before; each in a new dict."""
    pair.adopt()
    now = [(master, master.detach().clone()) for master in pair.copies]
    before = (pair.ours.state, pair.theirs.state, now)
    kind, kept = seed % 4, pair.kept.get("states")
    if kind == 3 and kept is None:
        kind = 2
    pair.held = None
    for side, optimizer in enumerate((pair.ours, pair.theirs)):
        entries = [
            before[side],
            {p: copy.deepcopy(entry) for p, entry in before[side].items()},
            {},
            kept and kept[side],
        ][kind]
        is_plain = kind == 3 or (seed % 8 == 2 and optimizer is pair.ours)
        optimizer.state = entries if is_plain else defaultdict(dict, entries)
    if kind >= 2:
        masters = dict(kept[2]) if kind == 3 else {}
        for master, own in pair.copies.items():
            known = masters.get(master) if pair.theirs.state.get(master) else None
            if own is not master:
                with torch.no_grad():
                    master.copy_(own if known is None else known)
        pair.adopt()
        pair.kept["states"] = before


@action
def save(pair: Pair, seed: int) -> None:
    if pair.can_be_saved:
        pair.adopt()
        ours = (pair.ours.state_dict if seed % 3 else pair.ours.torch_state_dict)()
        masters = [master.detach().clone() for _, _, master in pair.rows] if seed % 3 else None
        pair.kept["saved"] = copy.deepcopy((ours, pair.theirs.state_dict(), masters))


@action
def load(pair: Pair, seed: int) -> None:
    """If it fits. No parameter is written: a loaded master counts where it rounds to its parameter."""
    if "saved" not in pair.kept:
        return
    ours, theirs, masters = copy.deepcopy(pair.kept["saved"])
    both = (theirs["param_groups"], pair.theirs.param_groups)
    sizes = [[len(group["params"]) for group in groups] for groups in both]
    state = [(theirs["state"].get(place), master) for place, (_, _, master) in enumerate(pair.rows)]
    if sizes[0] != sizes[1] or any(entry and entry["exp_avg"].shape != master.shape for entry, master in state):
        return
    for group in theirs["param_groups"]:
        group["fused"] = True
    pair.held = None
    pair.ours.load_state_dict(ours)
    pair.theirs.load_state_dict(theirs)
    with torch.no_grad():
        places = {master: place for place, (_, _, master) in enumerate(pair.rows)}
        for master, own in pair.copies.items():
            if own is not master and masters is not None and theirs["state"].get(places.get(master)):
                master.copy_(masters[places[master]])
            elif own is not master:
                master.copy_(own)


@action
def go_on_with_copies(pair: Pair, seed: int) -> None:
    """Gradients stay behind, as torch leaves them."""
    if pair.kept.get("parked"):
        return
    both = (pair.ours, pair.theirs, pair.copies)
    pair.held, pair.kept = None, {}
    if seed % 2:
        pair.ours, pair.theirs, pair.copies = copy.deepcopy(both)
    else:
        pair.ours = pickle.loads(pickle.dumps(pair.ours))
        pair.theirs, pair.copies = pickle.loads(pickle.dumps((pair.theirs, pair.copies)))


@action
def step_others(pair: Pair, seed: int) -> None:
    """In torch's own context, which puts everything back."""
    stateless = pytest.importorskip("torch.optim._stateless")
    if not pair.can_be_saved or not pair.theirs.state or not pair.rows:
        return
    pair.adopt()
    pair.held = None
    other = copy.copy(pair)
    other.theirs, other.copies = copy.deepcopy((pair.theirs, pair.copies))
    replaced = {str(place): torch.nn.Parameter(p.detach().clone()) for place, p in enumerate(parameters_of(pair.ours))}
    saved = copy.deepcopy(pair.ours.state_dict())
    with stateless.swap_in_optimizer_params_and_state(pair.ours, replaced, saved):
        gradients(other, 8 * seed)
        if seed % 2:
            pair.ours.speculate()
        pair.ours.step()
        other.step_theirs()
        other.check_everything()
    for place, master in enumerate(parameters_of(other.theirs)):
        if saved["state"].get(place):  # an empty one stays so
            assert bits(saved["state"][place]["exp_avg"]) == bits(other.theirs.state[master]["exp_avg"])


ITERATIONS = 4 * ["train"] + 2 * ["gradients", "speculate", "step"]


@settings(max_examples=3 * settings().max_examples)
@given(
    dtype=st.sampled_from([torch.bfloat16, torch.bfloat16, torch.float32, torch.float16, torch.float64]),
    program=st.lists(
        st.tuples(st.sampled_from([*ITERATIONS, *sorted(ACTIONS)]), st.integers(0, 1000)), min_size=3, max_size=16
    ),
)
@example(torch.bfloat16, [("train", 1), ("train", 5), ("change_hyperparameters", 5), ("train", 1)])  # to amsgrad
@example(torch.bfloat16, [("train", 12), ("train", 36)])  # twice without a gradient of the first parameter
def test_any_sequence_has_the_bits_of_torch(dtype: torch.dtype, program: list[tuple[str, int]]) -> None:
    pair = Pair(dtype)
    for name, seed in program:
        ACTIONS[name](pair, seed)
        pair.check_parameters()
    pair.check_everything()
    train(pair, 1)
    pair.check_everything()
