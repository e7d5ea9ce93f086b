"""Peak memory of forward and backward, from meta tensors: nothing is allocated or computed.

Two numbers of layers are run, and the peak of all layers lies on the line through both.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedConfig

from superadam.kernels.torch_private import dispatch_mode
from superadam.plan import UnplannableError, attention
from superadam.plan.models import on_meta, period_of, with_layers

LOSS_ROWS = 1024  # tokens whose logits are there together, where the loss is computed in chunks

FORWARD, HEAD, LAYERS, END = "forward", "head and loss", "layers' backward", "end of backward"
STAGES = (FORWARD, HEAD, LAYERS, END)  # HEAD: forward and backward of output layer and loss; END: behind all layers


class Live(dispatch_mode()):  # type: ignore[misc]
    """Counts the bytes of storages that are alive, those made inside included: `now`, and the `peaks` of stages."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.stage = 0, FORWARD
        self.peaks = dict.fromkeys(STAGES, 0)
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

    def enter(self, stage: str) -> None:
        """Begin a stage."""
        self.stage = stage
        self.peaks[stage] = max(self.peaks[stage], self.now)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in found if isinstance(found, tuple | list) else (found,):
            if isinstance(tensor, Tensor):
                self.add(tensor)
        self.peaks[self.stage] = max(self.peaks[self.stage], self.now)
        return found


def chunked_loss(hidden: Tensor, head: nn.Module, labels: Tensor) -> Tensor:
    """Return the mean cross entropy of all rows, with the logits of `LOSS_ROWS` of them at a time."""

    def part(some: Tensor, wanted: Tensor) -> Tensor:
        return nn.functional.cross_entropy(head(some).float(), wanted, reduction="sum")

    hidden, labels = hidden.flatten(0, 1), labels.flatten()
    parts = zip(torch.split(hidden, LOSS_ROWS), torch.split(labels, LOSS_ROWS), strict=True)
    total = torch.stack([checkpoint(part, *pair, use_reentrant=False) for pair in parts]).sum()
    return total / labels.numel()


def run(model: Any, tokens: Tensor, loss: str, enter: Callable[[str], object] = lambda stage: None) -> None:
    """Make one forward and backward; gradients leave `.grad` at once, as with a scheduler."""

    def leave(parameter: Tensor) -> None:
        parameter.grad = None

    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(leave)

    def enter_end(embedding: nn.Module, inputs: object, found: Any) -> None:
        found.register_hook(lambda gradient: enter(END))

    model.get_input_embeddings().register_forward_hook(enter_end)
    enter(FORWARD)
    mask = torch.ones_like(tokens)  # without one, models look into the tokens' positions for packed sequences
    hidden = model.base_model(input_ids=tokens, attention_mask=mask, use_cache=False).last_hidden_state
    enter(HEAD)
    hidden.register_hook(lambda gradient: enter(LAYERS))
    head = model.get_output_embeddings()
    if loss == "chunked":
        result = chunked_loss(hidden, head, tokens)
    else:
        result = model.loss_function(logits=head(hidden), labels=tokens, vocab_size=model.config.vocab_size)
    del hidden
    torch.autograd.backward(result)


def recomputing(model: Any, *, is_wanted: bool) -> Any:
    """Return a new model, which computes each layer again in backward if that is wanted."""
    if is_wanted:  # its name since transformers 5.23, and before
        enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
        enable({"use_reentrant": False})
    return model


def peaks_of(
    config: PreTrainedConfig, sequences: int, tokens: int, *, loss: str = "chunked", checkpointing: bool = True
) -> dict[str, int]:
    """Return the bytes at the peak of each stage beyond parameters and buffers, of a model with all its layers.

    It is trained in bf16, with `tokens` of each sequence; a loss that is not "chunked" has whole logits. Raises
    `UnplannableError` where the model cannot be run so.
    """
    attention.register()
    model, mode = on_meta(config, attention.NAME), Live()
    for tensor in (*model.parameters(), *model.buffers()):
        mode.add(tensor)
    begin, calls = mode.now, attention.calls
    try:
        recomputing(model, is_wanted=checkpointing)
        with mode:
            run(model, torch.zeros(sequences, tokens, dtype=torch.long, device="meta"), loss, mode.enter)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".strip().split("\n")[0]
        raise UnplannableError(
            f"a {config.model_type} cannot be run without values ({reason}), so that its memory is unknown; "
            "measure it on the machine"
        ) from error
    seen = attention.calls - calls
    if seen < config.num_hidden_layers * (1 + checkpointing):
        raise UnplannableError(
            f"{config.num_hidden_layers} layers of a {config.model_type} called the attention that can be chosen "
            f"{seen} times, expected once for each at least, so that the memory of the others is unknown; measure "
            "it on the machine"
        )
    return {stage: peak - begin for stage, peak in mode.peaks.items()}


def activations_of(
    config: PreTrainedConfig, parameters: int, sequences: int, tokens: int, **how: Any
) -> dict[str, int]:
    """Return the peaks of the whole model by two runs with few layers; arguments and errors as for `peaks_of`.

    LAYERS is when the layers' backward begins, END when one of them is left, or none. `parameters` is the number of
    those of the whole model, which has to lie on the line of the two as well.
    """
    period, layers = period_of(config), int(config.num_hidden_layers)
    few = (2 * period, 3 * period)
    if layers <= few[1]:
        few = (max(1, layers - period), layers)
    unlike = (
        f"the layers of a {config.model_type} differ in a way that its layer_types do not tell, expected kinds that "
        "repeat, so that few of them say nothing of all; measure it on the machine"
    )
    try:
        configs = [with_layers(config, count) for count in few]
    except Exception as error:  # its configuration lists something for each layer
        raise UnplannableError(unlike) from error
    sizes = [sum(parameter.numel() for parameter in on_meta(each).parameters()) for each in configs]
    rest = (layers - few[1]) // period

    def at(values: list[int], periods: int) -> int:
        return values[1] + (values[1] - values[0]) * periods * period // max(1, few[1] - few[0])

    if (layers - few[1]) % period or at(sizes, rest) != parameters:
        raise UnplannableError(unlike)
    runs = [peaks_of(config, sequences, tokens, **how) for config in configs]
    whole = {stage: at([run[stage] for run in runs], rest) for stage in STAGES}
    return whole | {END: max(whole[END], at([run[LAYERS] for run in runs], 1 - few[1] // period))}
