"""Peak memory of forward and backward, from meta tensors: nothing is allocated or computed."""

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
from superadam.plan.models import layers_of, on_meta

LOSS_ROWS = 1024  # tokens whose logits are there together, where the loss is computed in chunks

FORWARD, HEAD, LAYERS, END = "forward", "head and loss", "layers' backward", "end of backward"
STAGES = (FORWARD, HEAD, LAYERS, END)  # HEAD: forward and backward of output layer and loss; END: from the first layer


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

    def enter_end(layer: nn.Module, inputs: object, found: Any) -> None:
        output = found[0] if isinstance(found, tuple) else found
        output.register_hook(lambda gradient: enter(END))

    next(iter(layers_of(model)), model.get_input_embeddings()).register_forward_hook(enter_end)
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
    config: PreTrainedConfig, sequences: int, tokens: int, loss: str = "chunked", checkpointing: bool = True
) -> dict[str, int]:
    """Return the bytes at the peak of each stage beyond parameters and buffers.

    It is trained in bf16, with `tokens` of each sequence; a loss that is not "chunked" has whole logits. END is when
    one layer is left, or none. Raises `UnplannableError` where the model cannot be run so.
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
