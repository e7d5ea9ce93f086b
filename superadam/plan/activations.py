"""Peak memory of forward and backward, from fake tensors: nothing is allocated or computed.

Two numbers of layers are run, and the peak of all layers lies on the line through both. Fake tensors are on the CPU:
one on a GPU that requires grad ends the process where torch was built without CUDA.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedConfig

from superadam.kernels.torch_private import modes_of_dispatch
from superadam.plan import UnplannableError, attention
from superadam.plan.models import build, period_of, with_layers

LOSS_ROWS = 1024
"""Tokens whose logits are there together, where the loss is computed in chunks."""

FORWARD, HEAD, LAYERS = "forward", "head and loss", "layers' backward"
PHASES = (FORWARD, HEAD, LAYERS)


@dataclass(frozen=True, slots=True)
class Activations:
    """Bytes at the peak of each phase beyond parameters, with gradients that leave at once.

    Attributes:
        forward, head, layers: of the whole model; `head` is the forward and backward of output layer and loss.
        last: at the end of backward, when one layer is left.
    """

    forward: int
    head: int
    layers: int
    last: int


class Live(modes_of_dispatch()[1]):  # type: ignore[misc]
    """Counts bytes of storages that are alive, those made inside included.

    Attributes:
        now: bytes.
        peaks: of each phase.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now, self.phase = 0, FORWARD
        self.peaks = dict.fromkeys(PHASES, 0)
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()

    def add(self, tensor: Tensor) -> None:
        """Count a tensor that was there before."""
        storage = tensor.untyped_storage()
        if storage not in self._seen:
            self._seen.add(storage)
            self.now += storage.nbytes()
            weakref.finalize(storage, self._drop, storage.nbytes()).atexit = False

    def _drop(self, size: int) -> None:
        self.now -= size

    def enter(self, phase: str) -> None:
        """Begin a phase."""
        self.phase = phase
        self.peaks[phase] = max(self.peaks[phase], self.now)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for one in found if isinstance(found, tuple | list) else (found,):
            if isinstance(one, Tensor):
                self.add(one)
        self.peaks[self.phase] = max(self.peaks[self.phase], self.now)
        return found


def chunked_loss(hidden: Tensor, head: nn.Module, labels: Tensor, rows: int = LOSS_ROWS) -> Tensor:
    """Return the mean cross entropy of all rows, with the logits of `rows` of them at a time."""

    def part(some: Tensor, wanted: Tensor) -> Tensor:
        return nn.functional.cross_entropy(head(some).float(), wanted, reduction="sum")

    hidden, labels = hidden.flatten(0, 1), labels.flatten()
    parts = zip(torch.split(hidden, rows), torch.split(labels, rows), strict=True)
    total = torch.stack([checkpoint(part, *pair, use_reentrant=False) for pair in parts]).sum()
    return total / labels.numel()


def run(model: Any, tokens: Tensor, loss: str, mode: Live | None = None) -> None:
    """Make one forward and backward; gradients leave `.grad` at once, as with a scheduler."""

    def leave(parameter: Tensor) -> None:
        parameter.grad = None

    def begin(phase: str) -> None:
        if mode is not None:
            mode.enter(phase)

    hooks = [one.register_post_accumulate_grad_hook(leave) for one in model.parameters() if one.requires_grad]
    try:
        begin(FORWARD)
        hidden = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state
        begin(HEAD)
        hidden.register_hook(lambda gradient: begin(LAYERS))
        head = model.get_output_embeddings()
        if loss == "chunked":
            result = chunked_loss(hidden, head, tokens)
        else:
            result = model.loss_function(logits=head(hidden), labels=tokens, vocab_size=model.config.vocab_size)
        del hidden
        torch.autograd.backward(result)
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _prepared(config: PreTrainedConfig, *, checkpointing: bool) -> Iterator[tuple[Any, Live]]:
    attention.register()
    with modes_of_dispatch()[0](allow_non_fake_inputs=True):
        model: Any = build(config, attention.NAME)
        model.train()
        if checkpointing:
            options = {"use_reentrant": False}
            if hasattr(model, "activation_checkpointing_enable"):  # its name since transformers 5.23
                model.activation_checkpointing_enable(options)
            else:
                model.gradient_checkpointing_enable(options)
        mode = Live()
        for one in (*model.parameters(), *model.buffers()):
            mode.add(one)
        yield model, mode


def peaks_of(
    config: PreTrainedConfig, sequences: int, tokens: int, *, loss: str = "chunked", checkpointing: bool = True
) -> dict[str, int]:
    """Return the bytes at the peak of each phase beyond parameters and buffers, of a model with all its layers.

    Args:
        config: of transformers; the model is trained in bf16.
        sequences, tokens: of a micro-batch, and of each sequence.
        loss: "chunked", or "full" for logits that are whole.
        checkpointing: whether each layer is computed again in backward.

    Raises:
        UnplannableError: the model cannot be run so; the message says why.
    """
    with _prepared(config, checkpointing=checkpointing) as (model, mode):
        begin, calls = mode.now, attention.calls
        try:
            with mode:
                run(model, torch.zeros(sequences, tokens, dtype=torch.long), loss, mode)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".strip().split("\n")[0]
            raise UnplannableError(
                f"a {config.model_type} cannot be run without values ({reason}), so that its memory is unknown; "
                "measure it on the machine"
            ) from error
    seen = attention.calls - calls
    if seen < config.num_hidden_layers:
        raise UnplannableError(
            f"{config.num_hidden_layers} layers of a {config.model_type} called the attention that can be chosen "
            f"{seen} times, expected once for each at least, so that the memory of the others is unknown; measure "
            "it on the machine"
        )
    return {phase: peak - begin for phase, peak in mode.peaks.items()}


def activations_of(
    config: PreTrainedConfig,
    parameters: int,
    sequences: int,
    tokens: int,
    *,
    loss: str = "chunked",
    checkpointing: bool = True,
) -> Activations:
    """Return the peaks of the whole model by two runs with few layers; arguments and errors as for `peaks_of`.

    `parameters` is the number of those of the whole model, which has to lie on the line of the two as well.
    """
    period, layers = period_of(config), int(config.num_hidden_layers)
    few = (2 * period, 3 * period)
    if layers <= few[1]:
        few = (max(1, layers - period), layers)
    configs = [with_layers(config, count) for count in few]
    sizes = []
    for one in configs:
        with torch.device("meta"):
            sizes.append(sum(parameter.numel() for parameter in build(one).parameters()))
    rest = (layers - few[1]) // period

    def at(values: list[int], periods: int) -> int:
        return values[1] + (values[1] - values[0]) * periods * period // (few[1] - few[0])

    if (layers - few[1]) % period or at(sizes, rest) != parameters:
        raise UnplannableError(
            f"the layers of a {config.model_type} differ in a way that its layer_types do not tell, expected kinds "
            "that repeat, so that few of them say nothing of all; measure it on the machine"
        )
    runs = [peaks_of(one, sequences, tokens, loss=loss, checkpointing=checkpointing) for one in configs]
    whole = {phase: at([one[phase] for one in runs], rest) for phase in PHASES}
    one_left = 1 - few[1] // period
    return Activations(whole[FORWARD], whole[HEAD], whole[LAYERS], at([one[LAYERS] for one in runs], one_left))
