"""`examples/long_sequences.py`: ranks that hold slices of sequences have the gradients of whole ones."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import Mock

import long_sequences as example
import pytest
import torch
import torch.distributed as dist
from support.ranks import preload, run
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import (
    Gemma2ForCausalLM,
    GptOssForCausalLM,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MistralForCausalLM,
    MixtralForCausalLM,
    PreTrainedModel,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

ROWS, SEQUENCE, VOCABULARY = 2, 32, 64

TOLERANCE = 2 * ROWS * SEQUENCE * 2**-24
"""Relative error of a parameter's gradient, which is a sum over at most this number of tokens.

Slices add up the same fp32 terms in another order, and an addition rounds to 24 bits. 4e-7 was seen, twentieth of this;
without positions, 0.3.
"""

Tensors = Mapping[str, Tensor]

for model in (*example.MODELS, Gemma2ForCausalLM):
    preload(model.__module__)


# ---- what ranks compute ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A model and how it lies on the ranks.

    Attributes:
        options: of the model's configuration.
        shape: the number of batches, and of ranks that share the sequences of each.
        sharding: over "all" ranks, over the 2-D "mesh" (replicated along batches), or "none".
        checkpointing: whether blocks are computed once more in backward.
    """

    name: str
    model: type[PreTrainedModel] = LlamaForCausalLM
    options: Mapping[str, Any] = field(default_factory=dict)
    shape: tuple[int, int] = (1, 2)
    sharding: str = "all"
    checkpointing: bool = False

    def make_model(self) -> PreTrainedModel:
        """Return a small model, with random weights so large that attention looks at positions."""
        torch.manual_seed(7)
        options = {
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "intermediate_size": 48,
            "moe_intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "num_local_experts": 4,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "max_position_embeddings": 2 * SEQUENCE,
            "initializer_range": 0.2,
            "sliding_window": 5,
            "attention_dropout": 0.0,
            "residual_dropout": 0.0,
            "pad_token_id": None,
            "use_cache": False,
        }
        return self.model(self.model.config_class(**options | dict(self.options)))

    def batches(self) -> tuple[Tensor, Tensor]:
        """Return ids and labels of all rows; halves of a sequence have different numbers of labels."""
        ids = torch.randint(VOCABULARY, (self.shape[0] * ROWS, SEQUENCE), generator=torch.Generator().manual_seed(11))
        return ids, ids.masked_fill(torch.arange(SEQUENCE) % 5 < torch.arange(len(ids)).unsqueeze(1), -100)

    def whole_gradients(self, **arguments: Any) -> Tensors:
        """Return the gradients of whole sequences, computed in one process by transformers alone."""
        model = self.make_model()
        ids, labels = self.batches()
        model(ids, labels=labels, **arguments).loss.backward()
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    def distributed_model(self) -> tuple[PreTrainedModel, dist.ProcessGroup, int]:
        """Return this rank's part of the model, the ranks that share sequences with it, and which batch it has."""
        mesh = init_device_mesh("cpu", self.shape, mesh_dim_names=("data", "sequence"))
        model = self.make_model()
        example.use_ulysses(model, mesh.get_group("sequence"))
        if self.checkpointing:
            model.activation_checkpointing_enable()
        if self.sharding != "none":
            for part in (*model.model.layers, model):
                fully_shard(part, mesh=mesh if self.sharding == "mesh" else None)
        return model, mesh.get_group("sequence"), mesh.get_local_rank("data")

    def gradients(self, model: PreTrainedModel, group: dist.ProcessGroup, batch: int) -> Tensors:
        """Run forward and backward on this rank's slice, and return gradients averaged over all ranks."""
        rows = slice(batch * ROWS, (batch + 1) * ROWS)
        model(**example.shard_batch(*(part[rows] for part in self.batches()), group)).loss.backward()
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        if self.sharding != "none":
            return {name: gradient.full_tensor() for name, gradient in gradients.items()}
        for gradient in gradients.values():
            dist.all_reduce(gradient)
            gradient /= dist.get_world_size()
        return gradients


ROPE = {"rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": SEQUENCE // 2}
ROPE |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
CASES = [
    *(Case(model.__name__, model) for model in example.MODELS),
    *(Case(f"{rope} rope", options={"rope_parameters": {"rope_type": rope, **ROPE}}) for rope in example.ROPE_TYPES),
    Case("replicated", sharding="none"),
    Case("checkpointing", checkpointing=True),
    Case("one head of keys", options={"num_key_value_heads": 1}),
    Case("as many heads of keys", options={"num_key_value_heads": 4}),
    Case("two batches", shape=(2, 2)),
    Case("two batches, replicated along them", shape=(2, 2), sharding="mesh"),
    Case("four ranks share a sequence", shape=(1, 4)),
    Case("four ranks share sinks", GptOssForCausalLM, shape=(1, 4), checkpointing=True),
    Case(
        "six heads of keys for four ranks",
        options={"hidden_size": 48, "num_attention_heads": 12, "num_key_value_heads": 6},
        shape=(1, 4),
    ),
]


def refusal_of(words: str, change=len, model=LlamaForCausalLM, batch=torch.clone, **options: Any) -> str | None:
    """Return with what a model of these options is refused, given a changed batch or arguments; None if it is not."""
    case = Case("", model, options, sharding="none")
    try:
        model, group, _ = case.distributed_model()
        arguments = example.shard_batch(*map(batch, case.batches()), group)
        change(arguments)
        model.train()(**arguments)
    except ValueError as error:
        return str(error)
    return None


def given(**arguments: Any) -> dict[str, Any]:
    return {"change": lambda of_rank: of_rank.update(arguments)}


def restarts(every: int) -> dict[str, Any]:
    return {"change": lambda of_rank: of_rank.update(position_ids=of_rank["position_ids"] % every)}


REFUSALS: dict[str, tuple[str, dict[str, Any]]] = {
    "padding": ("no masks for padding", given(attention_mask=torch.ones(ROWS, SEQUENCE // 2))),
    "a mask of one's own": ("attention_mask", given(attention_mask=torch.zeros(ROWS, 1, 16, 16))),
    "packing in a slice": ("packed sequences", restarts(8)),
    "packing in one slice": ("packed sequences", restarts(20)),
    "packing between slices": ("position_ids are not those", restarts(SEQUENCE // 2)),
    "packing with a window": ("packed sequences", {**restarts(8), "model": MistralForCausalLM}),
    "no positions": ("position_ids are not those", {"change": lambda of_rank: of_rank.pop("position_ids")}),
    "lengths of packed sequences": ("cu_seq_lens_q", given(cu_seq_lens_q=torch.tensor([0, 4]))),
    "a window of the call": ("sliding_window", given(sliding_window=8)),
    "a cap": ("softcap", given(softcap=30.0)),
    "dropout": ("dropout", {"attention_dropout": 0.1}),
    "a cache": ("use_cache", given(use_cache=True)),
    "weights": ("output_attentions", given(output_attentions=True)),
    "attention to later tokens": ("no masks", given(is_causal=False)),
    "a model that looks at later tokens": ("no masks", {"is_causal": False}),
    "loss of a router": ("output_router_logits", {"output_router_logits": True, "model": MixtralForCausalLM}),
    "loss of a router in the call": (
        "output_router_logits",
        {**given(output_router_logits=True), "model": MixtralForCausalLM},
    ),
    "three heads": (
        "3 heads cannot be divided among 2",
        {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 24},
    ),
    "dynamic rope": ("type dynamic", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}}),
    "a sequence of 31": ("31 tokens cannot be divided", {"batch": lambda ids: ids[:, 1:]}),
    "batches that differ": ("different batches", {"batch": lambda ids: ids + dist.get_rank()}),
    "another model": ("Gemma2ForCausalLM was not checked", {"model": Gemma2ForCausalLM}),
    "another head": ("LlamaForSequenceClassification was not checked", {"model": LlamaForSequenceClassification}),
}
"""What is refused in a sentence that holds these words."""


def report(rank: int, folder: str) -> None:
    ranks = dist.get_world_size()
    made = [(case, *case.distributed_model()) for case in CASES if math.prod(case.shape) == ranks]
    found: dict[str, Any] = {case.name: case.gradients(model, group, batch) for case, model, group, batch in made}
    if ranks == 2:
        found["refusals"] = {name: refusal_of(words, **options) for name, (words, options) in REFUSALS.items()}
        found["example"] = list(example.train(steps=3, sequence=64, sequence_ranks=2))
    torch.save(found, f"{folder}/{ranks}-{rank}")


# ---- what they report ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """Return what each of two ranks reports, and each of four."""
    folder = tmp_path_factory.mktemp("ranks")
    for ranks in (2, 4):
        run(report, ranks, folder=str(folder))
    return {ranks: [torch.load(folder / f"{ranks}-{rank}") for rank in range(ranks)] for ranks in (2, 4)}


def errors(case: Case, gradients: Tensors) -> list[float]:
    """Return how far each parameter's gradient is from that of whole sequences, relative to it."""
    whole = case.whole_gradients()
    assert gradients.keys() == whole.keys()
    return [float((gradients[name] - whole[name]).norm() / whole[name].norm()) for name in whole]


def test_start_without_torchrun_ends_in_one_sentence(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr("sys.argv", ["long_sequences.py"])
    with pytest.raises(SystemExit, match=r"^long_sequences.py needs several ranks: start it with torchrun [^\n]*$"):
        example.main()


def test_ranks_that_cannot_meet_are_told_once(monkeypatch):
    monkeypatch.setattr(dist, "init_process_group", Mock(side_effect=dist.DistNetworkError("no answer\nand more")))
    monkeypatch.setattr("sys.argv", ["long_sequences.py"])
    monkeypatch.setenv("RANK", "2")
    told_by_first = r"^long_sequences.py: the ranks could not meet \(no answer\); [^\n]*$"
    for local_rank, told in (("0", told_by_first), ("1", "^1$")):
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        with pytest.raises(SystemExit, match=told):
            example.main()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_gradients_are_those_of_whole_sequences(case, reports):
    first, *others = (report[case.name] for report in reports[math.prod(case.shape)])
    for other in others:
        assert other.keys() == first.keys()
        assert all(torch.equal(other[name], first[name]) for name in first)
    assert max(errors(case, first)) < TOLERANCE


def test_the_tolerance_catches_positions_that_start_again_in_every_slice():
    positions = torch.arange(SEQUENCE).expand(ROWS, -1) % (SEQUENCE // 2)
    assert min(errors(CASES[0], CASES[0].whole_gradients(position_ids=positions))) > 1000 * TOLERANCE


def test_what_would_be_different_is_refused_on_all_ranks(reports):
    said = [(name, report["refusals"][name] or "") for name in REFUSALS for report in reports[2]]
    assert [(name, sentence) for name, sentence in said if REFUSALS[name][0] not in sentence] == []


def test_the_example_learns_the_same_on_all_ranks(reports):
    losses = [report["example"] for report in reports[2]]
    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0] == pytest.approx(math.log(256), rel=0.05)


def test_cross_attention_is_refused():
    module, query, key = nn.Module(), torch.zeros(1, 2, 4, 8), torch.zeros(1, 2, 8, 8)
    attend = partial(example.ulysses_attention, module, query, attention_mask=None, group=None)
    with pytest.raises(ValueError, match="asked for no causality, no position_ids, keys of other tokens;"):
        attend(key, key)
    module.is_causal = True
    with pytest.raises(ValueError, match="asked for no position_ids, keys of other tokens;"):
        attend(key, key)
    with pytest.raises(ValueError, match="asked for no causality;"):
        attend(query, query, is_causal=False, position_ids=torch.arange(4))
