"""State in fewer bits: how it is rounded, and how it is shown, decoded when it is asked for, and may be written to."""

import copy
import itertools
import math
import pickle
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from support.optimizers import copy_weights, through_disk, train_alike, trained
from support.visible import bits, give_gradients, parameter, parameters_of, refused, state_bits, train, visible
from torch import Tensor, nn
from torch.utils import _pytree

from superadam import OffloadScheduler, SpeculativeCPUAdam, SpeculativeCPUAdamW
from superadam.integrations import distributed_checkpoint
from superadam.optim.entry import Encoded, Entry, raw
from superadam.state import compact
from superadam.testing import round_by_thresholds

KEYS = ("exp_avg", "exp_avg_sq", "master")


def make(moments: str = "8bit", master: str = "24bit", cls: type = SpeculativeCPUAdamW, **options: Any) -> Any:
    """Return an optimizer of two parameters, of which the first alone has whole blocks."""
    made = [parameter(8, 64, dtype=torch.bfloat16), parameter(3, 5, dtype=torch.bfloat16, seed=1)]
    return cls(made, lr=1e-2, moments=moments, master=master, **options)


def first(optimizer: Any) -> Any:
    """Return the state of the first parameter."""
    return optimizer.state[parameters_of(optimizer)[0]]


def decoded(optimizer: SpeculativeCPUAdam) -> list[str]:
    """Return which values lie decoded in the published state at present: memory that users save with this state."""
    return [
        key
        for parameter, entry in optimizer._binding.published.entries.items()
        for key in (KEYS if parameter.shape == (8, 64) else KEYS[2:])
        if isinstance(raw(entry).get(key), Tensor)
    ]


def test_shows_the_dtypes_and_shapes_that_torch_would() -> None:
    optimizer = trained(make())
    weight, other = parameters_of(optimizer)
    entry = optimizer.state[weight]
    assert [entry[key].dtype for key in KEYS] == [torch.bfloat16, torch.bfloat16, torch.float32]
    assert all(entry[key].shape == weight.shape for key in KEYS)
    assert torch.equal(entry["master"].bfloat16(), weight)
    assert optimizer.state[other]["exp_avg"].dtype == torch.bfloat16
    assert (optimizer.moments, optimizer.master) == ("8bit", "24bit")


LOOKS: dict[str, Callable[[Any], object]] = {
    "state": lambda optimizer: optimizer.state,
    "step": lambda optimizer: [entry["step"] for entry in optimizer.state.values()],
    "keys": lambda optimizer: [len(entry) + ("exp_avg" in entry) for entry in optimizer.state.values()],
    "training": trained,
    "commit": SpeculativeCPUAdam.commit,
}


@pytest.mark.parametrize("look", LOOKS)
def test_nothing_is_decoded_that_nobody_asks_for(look: str) -> None:
    optimizer = trained(make())
    LOOKS[look](optimizer)
    assert decoded(optimizer) == []


@pytest.mark.parametrize("use", ["dropped", "held", "written"])
def test_what_was_read_goes_with_the_next_bucket_unless_a_program_has_it_or_wrote_to_it(use: str) -> None:
    model = nn.Linear(64, 64, bias=False).bfloat16()
    optimizer = SpeculativeCPUAdamW(model.parameters(), moments="8bit", master="24bit")
    with OffloadScheduler(optimizer, model, num_threads=1, bucket_numel=64) as scheduler:
        for step in range(3):
            model(torch.ones(2, 64, dtype=torch.bfloat16)).sum().backward()
            if step == 2:
                entry = optimizer._binding.published.entries[model.weight]
                assert isinstance(raw(entry)["exp_avg"], Encoded) is (use == "dropped")
            optimizer.step()
            assert scheduler.statistics.waiting_buckets == (1 if use == "dropped" else step + 1)
            optimizer.zero_grad()
            read = optimizer.state[model.weight]["exp_avg"]
            if use == "written":
                read.fill_(1 / 3)
            read = read if use == "held" else None


def test_only_what_is_asked_for_is_decoded_and_goes_when_nobody_has_it() -> None:
    optimizer = trained(make())
    moment = first(optimizer)["exp_avg"]
    assert decoded(optimizer) == ["exp_avg"]
    assert first(optimizer)["exp_avg"] is moment
    train(optimizer, 2)
    assert decoded(optimizer) == ["exp_avg"]
    del moment
    train(optimizer, 3)
    assert decoded(optimizer) == []
    optimizer.state_dict()
    train(optimizer, 4)
    assert decoded(optimizer) == []
    entries = list(optimizer.state.values())
    values = entries[0].values()
    assert all(isinstance(value, Tensor) for value in values)
    train(optimizer, 5)
    assert decoded(optimizer) == []  # though an entry is held
    assert not any(value.isnan().any() for value in values)
    optimizer.state[parameters_of(optimizer)[0]] = dict(entries.pop(0))  # of tensors, as others make one
    del entries, values
    train(optimizer, 6)
    assert decoded(optimizer) == []


KEPT: dict[str, Callable[[Any], Any]] = {
    "entry": first,
    "tensor": lambda optimizer: first(optimizer)["exp_avg"],
    "view": lambda optimizer: first(optimizer)["exp_avg"].view(-1),
    "detached": lambda optimizer: first(optimizer)["exp_avg"].detach(),
    "array": lambda optimizer: first(optimizer)["exp_avg"].view(torch.int16).numpy(),
    "state_dict": lambda optimizer: optimizer.state_dict()["state"][0],
    "entries": lambda optimizer: list(optimizer.state.values()),
    "copy": lambda optimizer: dict(first(optimizer)),
}


@pytest.mark.parametrize("what", KEPT)
def test_what_somebody_has_stays_true(what: str) -> None:
    """A tensor that is referred to shows each step, and what is written to it counts, as in torch."""
    optimizer, untouched = trained(make()), trained(make())
    kept = KEPT[what](optimizer)
    train_alike(optimizer, untouched, 2, 3, speculative=False)
    expected = first(untouched)["exp_avg"].clone()
    value: Any = kept[0] if isinstance(kept, list) else kept
    value = value["exp_avg"] if isinstance(value, dict) else value
    shown = value if isinstance(value, Tensor) else torch.from_numpy(value).view(torch.bfloat16)
    assert torch.equal(shown.reshape(-1), expected.reshape(-1))
    for _ in range(2):
        shown.mul_(0.7)
        first(untouched)["exp_avg"].mul_(0.7)
        optimizer.commit()
        stored = optimizer._binding._transaction.table.states[0].values_of("exp_avg")
        assert torch.equal(shown.reshape(-1), stored.reshape(-1))  # rounded, as they are stored
    train_alike(optimizer, untouched, 4, 5, speculative=False)


@pytest.mark.parametrize("key", KEYS)
def test_what_is_written_counts_where_a_process_group_is_set(key: str) -> None:
    optimizer, plain = trained(make()), trained(make())
    for one in (optimizer, plain):
        first(one)[key].mul_(1.01)
    optimizer.process_group = None
    train_alike(optimizer, plain, 5, 6, speculative=False)


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("factor", [None, 1.0, 4.0])
@pytest.mark.parametrize("is_counted", [False, True])
@pytest.mark.parametrize("speculative", [False, True])
def test_what_is_written_counts_though_nobody_keeps_it(key, factor, is_counted, speculative):
    """Also past the version counter, and after gradients were speculated on; looking changes nothing."""
    optimizer, plain, untouched = trained(make()), trained(make()), trained(make())
    for one in (optimizer, plain, untouched):
        give_gradients(one, 3, speculative=speculative and one is optimizer)
        if one is not untouched:
            tensor = first(one)[key]
            tensor = tensor if is_counted else tensor.data
            tensor.sum() if factor is None else tensor.mul_(factor)
            del tensor
        one.step()
        trained(one, [4, 5])
    assert visible(optimizer) == visible(plain)
    assert (visible(optimizer) == visible(untouched)) is (factor != 4.0)


def test_what_is_written_is_rounded_to_nearest_and_shown_so() -> None:
    optimizer = trained(make())
    shown = first(optimizer)["exp_avg"]
    shown.zero_()
    shown[0, :3] = torch.tensor([1.0, 1.05, 1.07]).bfloat16()
    optimizer.commit()
    assert first(optimizer)["exp_avg"][0, :3].tolist() == shown[0, :3].tolist() == [1.0, 1.0, 1.125]


def test_other_tensors_can_be_put_into_an_entry() -> None:
    optimizer, untouched = trained(make()), trained(make())
    first(optimizer)["exp_avg"] = torch.full((8, 64), 0.5)
    first(untouched)["exp_avg"].fill_(0.5)
    train_alike(optimizer, untouched, 2, 3, speculative=False)
    optimizer.state[parameters_of(optimizer)[0]] = dict(first(untouched))
    assert visible(optimizer) == visible(untouched)
    first(optimizer)["max_exp_avg_sq"] = torch.zeros(8, 64)
    with pytest.raises(ValueError, match=r"max_exp_avg_sq of .* expected none, as moments are '8bit'"):
        train(optimizer, 4)


def test_tensors_in_another_layout_can_be_put_into_an_entry() -> None:
    values = torch.linspace(0, 1, 512).view(64, 8).t()
    results = []
    for put in (values, values.contiguous()):
        optimizer = trained(make())
        first(optimizer)["exp_avg"] = put
        trained(optimizer, [2])
        results.append([value.tolist() for value in first(optimizer).values()])
    assert results[0] == results[1]


def test_an_entry_is_a_dict() -> None:
    entry = first(trained(make()))
    unread = Entry(raw(entry))
    tensors = {key: entry[key] for key in entry}
    with pytest.raises(RuntimeError, match="ambiguous"):  # other tensors are compared, as in a dict
        _ = unread != tensors
    for copied in (
        {**entry}, dict(entry), entry.copy(), copy.copy(entry), dict(entry.items()), {} | entry, entry | {},
        dict(zip(entry.keys(), entry.values(), strict=True)), _pytree.tree_map(lambda value: value, entry),
    ):  # fmt: skip
        assert type(copied) is dict
        assert all(value is tensors[key] for key, value in copied.items())
        assert list(copied) == ["step", *KEYS]
    assert entry.get("exp_avg") is tensors["exp_avg"]
    assert entry.setdefault("exp_avg", None) is tensors["exp_avg"]
    assert entry.get("nothing", 7) == entry.pop("nothing", 7) == 7
    assert entry == tensors
    assert "exp_avg" in repr(entry)
    assert entry.pop("exp_avg") is tensors["exp_avg"]
    assert isinstance(entry.popitem()[1], Tensor)
    with pytest.raises(KeyError):
        entry["exp_avg"]


FORMATS = [*itertools.product(["fp32", "bf16", "8bit"], ["fp32", "24bit"])]


@pytest.mark.parametrize(("moments", "master"), FORMATS)
def test_state_of_torch_can_be_loaded_and_goes_back(moments: str, master: str) -> None:
    plain = trained(torch.optim.AdamW([parameter(8, 64, dtype=torch.bfloat16)], lr=1e-2))
    optimizer = SpeculativeCPUAdamW([parameter(8, 64, dtype=torch.bfloat16)], lr=1e-2, moments=moments, master=master)
    copy_weights(optimizer, plain)
    optimizer.load_state_dict(plain.state_dict())
    ours, theirs = optimizer.state_dict()["state"][0], plain.state_dict()["state"][0]
    for key, share in (("exp_avg", 2**-4), ("exp_avg_sq", 2**-5)):
        found, wanted = ours[key].double(), theirs[key].double()
        # Of an 8-bit block, elements that are much smaller than the largest become zero, or the least code.
        atol = 2**-15 * wanted.abs().max().item() if moments == "8bit" else 0.0
        assert torch.allclose(found, wanted, rtol=share, atol=atol)
    trained(optimizer, range(3, 5))
    plain.load_state_dict(optimizer.torch_state_dict())
    train(plain, 5)


@pytest.mark.parametrize(("before", "after"), [*itertools.permutations(FORMATS, 2)])
def test_converts_between_formats_at_load(before: tuple[str, str], after: tuple[str, str]) -> None:
    """To more bits exactly; there and back again changes nothing then."""
    optimizer, converted = trained(make(*before)), make(*after)
    converted.load_state_dict(optimizer.state_dict())
    copy_weights(converted, optimizer)
    if FORMATS.index(after) < FORMATS.index(before) and (before[1], after[1]) != ("fp32", "24bit"):
        for entry, wide in zip(*[one.state_dict()["state"].values() for one in (optimizer, converted)], strict=True):
            assert all(torch.equal(entry[key].float(), wide[key].float()) for key in entry)
        again = make(*before)
        copy_weights(again, optimizer)
        again.load_state_dict(converted.state_dict())
        assert state_bits(again) == state_bits(optimizer)
    trained(converted, range(3, 5))
    assert all(parameter.isfinite().all() for parameter in parameters_of(converted))


def _load(optimizer: SpeculativeCPUAdam, *, steps: int) -> None:
    theirs = torch.optim.AdamW(copy.deepcopy(optimizer.param_groups[0]["params"]), amsgrad=True)
    for _ in range(steps):
        give_gradients(theirs, 0)
        theirs.step()
    optimizer.load_state_dict(theirs.state_dict())


def _switch_on(optimizer: SpeculativeCPUAdam) -> None:
    optimizer.param_groups[0]["amsgrad"] = True
    try:
        optimizer.step()
    finally:
        optimizer.param_groups[0]["amsgrad"] = False


AMSGRAD: dict[str, tuple[Callable[[SpeculativeCPUAdam], Any], str]] = {
    "made": (lambda optimizer: make(amsgrad=True), "amsgrad is True, but moments is '8bit', expected amsgrad=False"),
    "added": (
        lambda optimizer: optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2, 64))], "amsgrad": True}),
        "amsgrad is True, but moments is '8bit'",
    ),
    "loaded with state": (
        lambda optimizer: _load(optimizer, steps=1),
        r"max_exp_avg_sq of parameter . of group 0 .* moments='bf16'",
    ),
    "loaded": (lambda optimizer: _load(optimizer, steps=0), "amsgrad is True, but moments is '8bit'"),
    "switched on": (_switch_on, "amsgrad is True for parameter . of group 0, whose moments have 8 bits"),
    "format of a group": (
        lambda optimizer: optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2, 64))], "moments": "fp32"}),
        "a parameter group has moments, expected it as an argument of the optimizer",
    ),
    "master of a group": (
        lambda optimizer: SpeculativeCPUAdamW([{"params": [nn.Parameter(torch.ones(2, 64))], "master": "fp32"}]),
        "a parameter group has master, expected it as an argument of the optimizer",
    ),
    "limit of a group": (
        lambda optimizer: optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))], "max_grad_norm": 1.0}),
        "a parameter group has max_grad_norm, expected it as an argument of the optimizer",
    ),
}


@pytest.mark.parametrize("what", AMSGRAD)
@pytest.mark.parametrize("order", [1, -1])
def test_amsgrad_and_formats_of_a_group_are_refused(what: str, order: int) -> None:
    """Before anything is made, also where a parameter without whole blocks comes first."""
    attempt, sentence = AMSGRAD[what]
    optimizer = trained(make())
    optimizer.param_groups[0]["params"] = optimizer.param_groups[0]["params"][::order]
    give_gradients(optimizer, 2)
    with refused(optimizer, ValueError, sentence):
        attempt(optimizer)
    assert optimizer.param_groups[0]["amsgrad"] is False


@pytest.mark.parametrize("order", [1, -1])
def test_amsgrad_is_refused_before_state_is_made_for_a_checkpoint(order, monkeypatch):
    """As torch.distributed.checkpoint asks for it."""
    optimizer = make()
    optimizer.param_groups[0]["params"] = optimizer.param_groups[0]["params"][::order]
    give_gradients(optimizer, 1)
    monkeypatch.setattr("superadam.optim.checkpoint.is_asked_for_template", lambda: True)
    with refused(optimizer, ValueError, AMSGRAD["switched on"][1]):
        _switch_on(optimizer)


def test_a_parameter_of_another_dtype_keeps_its_state() -> None:
    optimizer = trained(make())
    before = [bits(first(optimizer)[key]) for key in ("step", *KEYS[:2])]
    model = nn.ParameterList(parameters_of(optimizer)).float()
    assert [bits(first(optimizer)[key]) for key in ("step", *KEYS[:2])] == before
    model.bfloat16()
    trained(optimizer, range(3, 5))


def test_nothing_becomes_zero_that_is_not() -> None:
    """Second moments are never stored as zero, though the block's largest is far larger; NaN takes its block."""
    weight, optimizer = one(moments="8bit", master="24bit")
    step(optimizer, weight, 1.0)
    weight.grad = torch.full_like(weight, 1e-6)
    weight.grad[0, 0] = 1e6
    weight.grad[1, 32:] = 0.0
    optimizer.step()
    second = optimizer.state[weight]["exp_avg_sq"]
    assert (second > 0).all()
    second[3, 5] = float("nan")
    optimizer.commit()
    assert second.isnan().sum() == 64
    assert second[3].isnan().all()


@pytest.mark.slow
@pytest.mark.parametrize("wait", [True, False])
def test_a_checkpoint_is_made_of_one_decoded_tensor_after_the_other(wait, tmp_path, monkeypatch):
    """So that a save takes the memory of the largest, not of all."""

    def build():
        optimizer = make()
        return nn.ParameterList(parameters_of(optimizer)), optimizer

    model, optimizer = build()
    trained(optimizer)
    made: list[torch.UntypedStorage] = []
    most, decode = 0, Encoded.decode

    def watched(self: Encoded, values: Tensor) -> None:
        nonlocal most
        made.append(values.untyped_storage())
        most = max(most, len([one for one in made if one.nbytes()]))
        decode(self, values)

    monkeypatch.setattr(Encoded, "decode", watched)
    distributed_checkpoint.save(tmp_path, model, optimizer, wait=wait)
    distributed_checkpoint.wait()
    assert len(made) >= 4
    assert most == 1
    assert decoded(optimizer) == []
    other, loaded = build()
    distributed_checkpoint.load(tmp_path, other, loaded)
    assert visible(loaded) == visible(optimizer)
    train_alike(loaded, optimizer, 2, 3, speculative=False)


def one(value: float = 1.0, **options: Any) -> tuple[nn.Parameter, SpeculativeCPUAdamW]:
    parameter = nn.Parameter(torch.full((64, 64), value, dtype=torch.bfloat16))
    return parameter, SpeculativeCPUAdamW([parameter], lr=0.0, betas=(0.5, 0.5), weight_decay=0.0, **options)


def step(optimizer: SpeculativeCPUAdamW, parameter: Tensor, gradient: float) -> None:
    parameter.grad = torch.full_like(parameter, gradient)
    optimizer.step()
    parameter.grad = None


def test_what_stood_for_a_moment_counts_again_after_a_load() -> None:
    weight, zero = nn.Parameter(torch.ones(2, 64)), torch.zeros(2, 64, dtype=torch.float16)
    optimizer = SpeculativeCPUAdamW([weight], weight_decay=0.0, moments="8bit")
    step(optimizer, weight, 1e-9)  # which is 0 in fp16
    saved, before = copy.deepcopy(optimizer.state_dict()), bits(weight)
    optimizer.state[weight]["exp_avg"] = zero
    optimizer.load_state_dict(saved)
    optimizer.state[weight]["exp_avg"] = zero
    step(optimizer, weight, 0.0)
    assert bits(weight) == before


@pytest.mark.parametrize("is_read", [False, True])
@pytest.mark.parametrize("gradient", [None, 0.0])
def test_state_that_is_taken_out_and_put_back_counts_again(gradient: float | None, is_read: bool) -> None:
    """Whether the parameter was frozen meanwhile or trained with state of its own."""
    parameter, optimizer = one(moments="8bit", master="24bit")
    step(optimizer, parameter, 4.0)
    kept = optimizer.state.pop(parameter)
    for _ in range(2):
        optimizer.step() if gradient is None else step(optimizer, parameter, gradient)
    if is_read:
        assert kept["exp_avg"].eq(2.0).all()
    optimizer.state[parameter] = kept
    step(optimizer, parameter, 2.0)
    assert optimizer.state[parameter]["exp_avg"].eq(2.0).all()
    assert optimizer.state[parameter]["step"] == 2


@pytest.mark.parametrize("decoded", [(), (0,), (1,), (0, 1)], ids=str)
@pytest.mark.parametrize("of_another_optimizer", [False, True])
def test_parameters_exchange_their_states(of_another_optimizer: bool, decoded: tuple[int, ...]) -> None:
    parameters = [nn.Parameter(torch.ones(2, 64)) for _ in range(2)]
    old, other = (SpeculativeCPUAdamW(parameters, lr=0.0, betas=(0.5, 0.5), moments="8bit") for _ in range(2))
    new = other if of_another_optimizer else old
    for value, one in enumerate(parameters, 1):
        one.grad = torch.full_like(one, value)
    old.step()
    held = [old.state[parameters[position]]["exp_avg"] for position in decoded]
    taken_from, given_to = old.state, new.state  # reading either would notice what is missing
    for one, state in zip(parameters, [taken_from.pop(one) for one in parameters][::-1], strict=True):
        given_to[one] = state
        one.grad = torch.zeros_like(one)
    new.step()
    assert [new.state[parameter]["exp_avg"].max().item() for parameter in parameters] == [0.5, 0.25], held


def test_a_master_and_a_parameter_that_are_written_to_show_it_to_each_other() -> None:
    parameter, optimizer = one(master="24bit")
    step(optimizer, parameter, 1.0)
    optimizer.state[parameter]["master"].fill_(2.0)
    step(optimizer, parameter, 1.0)
    assert parameter.eq(2.0).all()
    held = optimizer.state_dict()
    with torch.no_grad():
        parameter.fill_(8.0)
    assert optimizer.state_dict()["state"][0]["master"].eq(8.0).all()
    step(optimizer, parameter, 1.0)
    assert parameter.eq(8.0).all()
    assert held["state"][0]["master"].eq(8.0).all()


WRITES: dict[str, tuple[Callable[[dict[str, Any], Tensor], object], float]] = {
    "write": (lambda entry, new: entry["master"].copy_(new), 2.0),
    "assign": (lambda entry, new: entry.update(master=new), 1.0),
    "assign, then write": (lambda entry, new: [entry.update(master=new), new.add_(0)], 1.0),
    "assign another dtype": (lambda entry, new: entry.update(master=new.bfloat16()), 1.0),
    "new .data": (lambda entry, new: setattr(entry["master"], "data", new), 1.0),
}
"""How a program gives a parameter of 1.0 a master of 2.0, and which of them counts."""
CALLS: dict[str, Callable[[SpeculativeCPUAdamW], object]] = {
    "speculate": SpeculativeCPUAdamW.speculate,
    "state": lambda optimizer: optimizer.state,
    "state dict": SpeculativeCPUAdamW.state_dict,
    "resolve": SpeculativeCPUAdamW.resolve,
    "commit": SpeculativeCPUAdamW.commit,
}


@pytest.mark.parametrize("storage", [("fp32", "fp32"), ("fp32", "24bit"), ("8bit", "fp32"), ("8bit", "24bit")], ids=str)
@pytest.mark.parametrize("write", WRITES)
def test_a_master_that_is_written_to_counts_and_one_that_is_assigned_only_as_the_parameter_rounds(write, storage):
    """However the state is stored, whatever is held of it, and whoever looks before the step."""
    change, expected = WRITES[write]
    for calls in [(), *itertools.product(CALLS, repeat=2)]:
        for is_held in (False, True):
            parameter, optimizer = one(moments=storage[0], master=storage[1])
            step(optimizer, parameter, 1.0)
            held = optimizer.state[parameter]["exp_avg_sq"].untyped_storage() if is_held else None
            step(optimizer, parameter, 1.0)
            change(optimizer.state[parameter], torch.full((64, 64), 2.0))
            parameter.grad = torch.ones_like(parameter)
            for call in calls:
                CALLS[call](optimizer)
            optimizer.step()
            assert parameter.eq(expected).all(), (calls, held)


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.functionalize, torch.vmap])
def test_state_that_is_read_in_a_transform_is_ordinary(transform: Callable[..., Any]) -> None:
    parameter, optimizer = one(moments="8bit")
    step(optimizer, parameter, 4.0)

    def work(x: Tensor) -> Tensor:
        optimizer.state[parameter]["exp_avg"]
        return x.sum()

    transform(work)(torch.ones(2, 2))
    step(optimizer, parameter, 2.0)
    assert optimizer.state[parameter]["exp_avg"].eq(2.0).all()


def test_threads_that_read_the_state_get_one_tensor_and_a_step_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else what one of them writes would be lost. Decoding is slowed down so that they meet."""
    parameter, optimizer = one(moments="8bit")
    step(optimizer, parameter, 4.0)
    entry, decode, inside = optimizer.state[parameter], compact.decode, threading.Event()

    def slow(*arguments: Any) -> None:
        decode(*arguments)
        inside.set()
        time.sleep(0.2)

    monkeypatch.setattr(compact, "decode", slow)
    with ThreadPoolExecutor(2) as threads:
        readers = [threads.submit(lambda: entry["exp_avg"]) for _ in range(2)]
        inside.wait()
        monkeypatch.undo()
        step(optimizer, parameter, 2.0)  # which waits until the decoded tensor is in the entry
        mine, theirs = (reader.result() for reader in readers)
    assert mine is theirs
    step(optimizer, parameter, 2.0)
    assert mine.eq(2.0).all()
    assert optimizer.state[parameter]["exp_avg"] is mine


def test_an_entry_goes_through_files_and_trees_as_a_dict_of_tensors() -> None:
    optimizer = trained(make())
    entry = first(optimizer)
    loaded = through_disk(entry)
    assert loaded.keys() == {"step", *KEYS}
    assert [path[0].key for path, _ in _pytree.tree_flatten_with_path(entry)[0]] == list(loaded)
    seen = _pytree.tree_leaves([dict(optimizer.state), optimizer.state_dict(), optimizer.torch_state_dict()])
    assert not any(isinstance(value, Encoded) for value in seen)


def test_an_entry_of_another_class_of_dicts_loses_a_stale_master() -> None:
    """As entries are after a pickle."""
    optimizer = trained(make())
    entry = pickle.loads(pickle.dumps(first(optimizer)))
    assert type(entry) is not dict
    entry["master"] = torch.ones(3)
    optimizer.state[parameters_of(optimizer)[0]] = entry
    train(optimizer, 2)
    assert [*entry] == [*first(optimizer)]
    assert sorted(dict(entry)) == ["exp_avg", "exp_avg_sq", "master", "step"]
    assert entry["master"].shape == (8, 64)


# -- rounding ----------------------------------------------------------------------------------------------------------


def entries(optimizer: Any) -> list[dict[str, Tensor]]:
    """Return the state of each parameter."""
    return list(optimizer.state_dict()["state"].values())


@pytest.mark.parametrize("value", ["bfloat16", "BF16", "", None, 16, torch.bfloat16, ["bf16"]])
def test_other_values_are_refused_in_one_sentence(value: Any) -> None:
    for cls in (SpeculativeCPUAdam, SpeculativeCPUAdamW):
        with pytest.raises(ValueError, match=r"^moments is .*, expected 'fp32' or 'bf16'") as caught:
            cls([nn.Parameter(torch.ones(3))], moments=value)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("gradient", [1.0, -3e-9, 1e-12, 1e-39], ids=str)
def test_moments_follow_gradients_of_any_size(gradient: float) -> None:
    """To nearest, a moment stops where what a step adds is less than half of its last bit."""
    parameter = nn.Parameter(torch.zeros(640))
    optimizer = SpeculativeCPUAdam([parameter], lr=0.0, moments="bf16")
    for _ in range(300):
        step(optimizer, parameter, gradient)
    means = [optimizer.state[parameter][key].double().mean().item() for key in KEYS[:2]]
    betas = optimizer.param_groups[0]["betas"]
    first, second = (mean / (1 - beta**300) for mean, beta in zip(means, betas, strict=True))  # what they lack at first
    assert first == pytest.approx(gradient, rel=0.01)
    if abs(gradient) > 1e-16:  # its square is a normal number
        assert second == pytest.approx(gradient**2, rel=0.02)


@pytest.mark.parametrize("key", KEYS[:2])
@pytest.mark.parametrize("bits_of_nan", [0x7FFFFFFF, 0x7F810000, -1])
@pytest.mark.parametrize("storage", [("bf16", "fp32"), ("fp32", "24bit"), ("bf16", "24bit")], ids=str)
def test_nan_of_any_bits_and_infinity_stay(storage: tuple[str, str], bits_of_nan: int, key: str) -> None:
    """A threshold that is added to the largest of them would make a number of it."""
    parameter = nn.Parameter(torch.zeros(2, 64).bfloat16())
    optimizer = SpeculativeCPUAdam([parameter], moments=storage[0], master=storage[1])
    for _ in range(3):
        parameter.grad = torch.ones(2, 64).bfloat16()
        optimizer.step()
        if optimizer.state[parameter]["step"] == 1:
            moment = optimizer.state[parameter][key]
            width = torch.int32 if moment.dtype == torch.float32 else torch.int16
            moment[1].view(width).fill_(bits_of_nan if width == torch.int32 else bits_of_nan >> 16)
            optimizer.state[parameter]["exp_avg_sq"][0, 5] = math.inf
            del moment
    state = optimizer.state[parameter]
    for values in (parameter, state[key], state["master"]):
        assert values.isnan().tolist() == [[False] * 64, [True] * 64]
    assert state["exp_avg_sq"].isinf().nonzero().tolist() == [[0, 5]]


@pytest.mark.parametrize("begin", [1, 2**24 - 1, 2**24 + 1, 2**32 - 1, 2**40])
def test_every_step_has_its_own_thresholds(begin: int) -> None:
    optimizers = [SpeculativeCPUAdam([nn.Parameter(torch.ones(130))], moments=how) for how in ("fp32", "bf16")]
    for optimizer in optimizers:
        train(optimizer, 0)
        saved = optimizer.state_dict()
        saved["state"][0]["step"] = torch.tensor(begin, dtype=torch.float32 if begin <= 2**24 else torch.float64)
        optimizer.load_state_dict(saved)
    plain, ours = optimizers
    for step in range(begin + 1, begin + 4):
        saved = plain.state_dict()
        saved["state"][0] |= {key: entries(ours)[0][key] for key in KEYS[:2]}  # bf16 is widened
        plain.load_state_dict(saved)
        for optimizer in optimizers:
            train(optimizer, step)
        for wide, narrow in [(entries(plain)[0][key], entries(ours)[0][key]) for key in KEYS[:2]]:
            assert bits(narrow.float()) == bits(round_by_thresholds(wide, step, 16))
            assert bits(narrow.float()) != bits(round_by_thresholds(wide, step + 1, 16))
        assert entries(ours)[0]["step"] == step
        assert entries(ours)[0]["step"].dtype == (torch.float32 if step <= 2**24 else torch.float64)


def test_what_is_encoded_is_decoded_where_a_parameter_gets_another_layout() -> None:
    converted, twin = (trained(make("fp32")) for _ in range(2))
    one = parameters_of(converted)[0]
    one.data = one.data.t().contiguous().t()
    assert torch.equal(entries(converted)[0]["master"], entries(twin)[0]["master"])
