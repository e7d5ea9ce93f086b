"""Train on sequences too long for one device: each rank holds a slice of every sequence, and of the parameters.

    torchrun --nproc-per-node 2 examples/long_sequences.py     # with 4, pairs of ranks train on different batches

It needs transformers, and was tried with 5.23. In a decoder, tokens meet only in attention. DeepSpeed-Ulysses
(https://arxiv.org/abs/2309.14509) puts an all-to-all before it, which trades slices of the sequence for a share of the
heads, and the reverse one after it. `use_ulysses` and `shard_batch` are what a program of your own needs: gradients are
those of whole sequences, up to rounding, and what would silently change them is refused on all ranks.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import sysconfig
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import pad

try:
    import transformers
    from transformers.masking_utils import causal_mask_function
except ImportError as error:
    sys.exit(f'long_sequences.py cannot be run ({error}); in the clone: pip install ".[finetune]"')

from superadam import SpeculativeCPUAdamW

MODELS = (
    transformers.GptOssForCausalLM,
    transformers.GraniteForCausalLM,
    transformers.LlamaForCausalLM,
    transformers.MistralForCausalLM,
    transformers.MixtralForCausalLM,
    transformers.Phi3ForCausalLM,
    transformers.Qwen2ForCausalLM,
    transformers.Qwen3ForCausalLM,
    transformers.Qwen3MoeForCausalLM,
    transformers.SeedOssForCausalLM,
)
"""Models whose gradients tests compare with those of whole sequences: in others, tokens may meet elsewhere too."""

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings that depend on a token's position alone, not on the last position of what a rank has."""

NOT_FOR_ATTENTION = ("num_items_in_batch", "shift_labels")
"""What transformers hands to every layer although it is meant for the loss."""

IGNORED_LABEL = -100


def use_ulysses(model: transformers.PreTrainedModel, group: dist.ProcessGroup) -> None:
    """Let a model attend over sequences whose slices lie on the ranks of `group`, in their order.

    Give the model what `shard_batch` returns.

    Raises:
        ValueError: the model's gradients would not be those of whole sequences.
    """
    if not isinstance(model, MODELS):
        raise ValueError(
            f"{type(model).__name__} was not checked with slices of sequences; expected one of "
            f"{', '.join(each.__name__ for each in MODELS)}: compare its gradients with those of whole sequences first"
        )
    if (rope := model.config.rope_parameters["rope_type"]) not in ROPE_TYPES:
        raise ValueError(
            f"rotary embeddings of type {rope} depend on the slice that a rank has: use one of {', '.join(ROPE_TYPES)}"
        )
    name = f"ulysses_{group.group_name}"
    transformers.AttentionInterface.register(name, partial(ulysses_attention, group=group))
    transformers.AttentionMaskInterface.register(name, partial(check_mask, group=group))  # else masks are just dropped
    model.set_attn_implementation(name)


def ulysses_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: int | Tensor | None,
    *,
    group: dist.ProcessGroup,
    scaling: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    position_ids: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Return causal attention of this rank's slice to whole sequences: `(batch, slice, heads, head_dim)`; and None.

    Args:
        query, key, value: `(batch, heads, slice, head_dim)`; there may be fewer heads of keys and values.
        attention_mask: what `check_mask` returned.
        s_aux: sinks of all heads, see `attend`.
        position_ids: of this rank's tokens in whole sequences.
        others: refused where they ask for something.

    Raises:
        ValueError: what is asked for is not plain causal self-attention over whole sequences.
    """
    asked = {name: given for name, given in others.items() if name not in NOT_FOR_ATTENTION}
    asked["attention_mask"] = isinstance(attention_mask, Tensor)
    asked["sliding_window"] = sliding_window != attention_mask
    asked["dropout"] = dropout > 0
    asked["no causality"] = not (getattr(module, "is_causal", False) if is_causal is None else is_causal)
    asked["no position_ids"] = position_ids is None
    asked["keys of other tokens"] = key.shape[2] != query.shape[2]
    refused = [name for name, given in asked.items() if given is not None and given is not False]
    if refused:
        raise ValueError(
            f"Ulysses attention was asked for {', '.join(refused)}; expected causal self-attention, without masks, "
            "windows of one's own, dropout, caches and losses of routers: turn these off in the configuration or the "
            "call"
        )
    ranks, heads = group.size(), query.shape[1]
    if heads % ranks:
        raise ValueError(
            f"{heads} heads cannot be divided among {ranks} ranks: use a number of ranks that divides them"
        )
    if module.layer_idx == 0:  # looking at values makes a GPU wait: once a forward is enough
        check_positions(position_ids, query.shape[2], group)
    repeats = ranks // math.gcd(ranks, key.shape[1])  # of key and value heads, so that they can be divided
    if repeats > 1:
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    query, key, value = (exchange(part, 1, 2, group) for part in (query, key, value))
    options = {
        "scale": query.shape[3] ** -0.5 if scaling is None else scaling,
        "sinks": None if s_aux is None else s_aux.unflatten(0, (ranks, -1))[group.rank()],
    }
    if sliding_window is None:
        whole = attend(query, key, value, **options)
    else:
        whole = attend_in_window(query, key, value, sliding_window, **options)
    return exchange(whole, 2, 1, group).transpose(1, 2), None


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, *, scale: float, sinks: Tensor | None
) -> Tensor:
    """Return attention over whole sequences: `(batch, heads, sequence, head_dim)`.

    Args:
        query, key, value: `(batch, heads, sequence, head_dim)`; there may be fewer heads of keys and values.
        mask: bool, `(batch, 1, queries, keys)`, of what is seen; None for causal attention.
        scale: of scores.
        sinks: `(heads,)`, scores of what takes a share of each query's attention, and has no value.
    """
    head_dim, front = query.shape[3], 0
    if sinks is not None:  # one key more in front, whose product with each query is the sink
        front = int(mask is None)  # and a query, for the diagonal
        query, key, value = (pad(part, (0, 8, n, 0)) for part, n in ((query, front), (key, 1), (value, 1)))
        query[..., head_dim] = (sinks / scale).unsqueeze(1)
        key[..., 0, head_dim] = 1
        mask = None if mask is None else pad(mask, (1, 0), value=True)
    found = nn.functional.scaled_dot_product_attention(
        query, key, value, mask, is_causal=mask is None, scale=scale, enable_gqa=key.shape[1] < query.shape[1]
    )
    return found[:, :, front:, :head_dim]


def attend_in_window(query: Tensor, key: Tensor, value: Tensor, window: int, **options: Any) -> Tensor:
    """Return causal attention, as `attend`, in which a query sees `window` keys up to its own.

    A block of that many queries sees the keys of its own block and of the one before, so that memory is linear.
    """
    batch, _, length, _ = query.shape
    blocks = -(-length // window)
    end = blocks * window - length
    query = pad(query, (0, 0, 0, end)).unflatten(2, (blocks, window)).transpose(1, 2).flatten(0, 1)
    key, value = (pad(part, (0, 0, window, end)).unfold(2, 2 * window, window) for part in (key, value))
    key, value = (part.transpose(1, 2).flatten(0, 1).transpose(2, 3) for part in (key, value))
    own = torch.arange(window, device=query.device).unsqueeze(1) + window
    seen = torch.arange(2 * window, device=query.device)
    mask = ((own - window < seen) & (seen <= own)).repeat(batch * blocks, 1, 1, 1)
    mask[::blocks, ..., :window] = False  # there is nothing before the first block
    found = attend(query, key, value, mask, **options)
    return found.unflatten(0, (batch, blocks)).transpose(1, 2).flatten(2, 3)[:, :, :length]


def exchange(part: Tensor, split: int, join: int, group: dist.ProcessGroup) -> Tensor:
    """Divide dimension `split` among the ranks, and put what comes from them together along dimension `join`."""
    for_ranks = part.unflatten(split, (group.size(), -1)).movedim(split, 0).contiguous()
    from_ranks = all_to_all_single_autograd(for_ranks, None, None, group)
    return from_ranks.movedim(0, join).flatten(join, join + 1)


def check_positions(position_ids: Tensor, length: int, group: dist.ProcessGroup) -> None:
    """Raise ValueError unless each rank has the positions of its slice of `length` tokens."""
    expected = torch.arange(length, device=position_ids.device) + group.rank() * length
    raise_together(
        (position_ids != expected).sum(),
        "position_ids are not those of tokens in whole sequences: they are missing, or restart, as those of packed "
        "sequences do; pass what shard_batch returns",
        group,
    )


def check_mask(
    *,
    mask_function: Any,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = False,
    local_size: int | None = None,
    config: Any = None,
    device: torch.device,
    group: dist.ProcessGroup,
    **_shapes: Any,
) -> int | None:
    """Stand in transformers' AttentionMaskInterface for masks: causal ones need no tensor. Return the window, if any.

    Raises:
        ValueError: another mask is needed, for padding, packed sequences or chunks.
    """
    is_window = (
        allow_is_causal_skip and local_size is not None and local_size == getattr(config, "sliding_window", None)
    )
    is_known = attention_mask is None and (is_window or mask_function is causal_mask_function)
    raise_together(
        torch.tensor(0 if is_known else 1, device=device),
        "Ulysses attention has no masks for padding, packed sequences or chunks: give no attention_mask, "
        f"sequences of one text each, and labels of {IGNORED_LABEL} for padding at their end",
        group,
    )
    return local_size


def raise_together(wrong: Tensor, sentence: str, group: dist.ProcessGroup) -> None:
    """Raise ValueError on all ranks if `wrong` is not 0 on one of them, so that none is left waiting for it."""
    dist.all_reduce(wrong, group=group)
    if wrong:
        raise ValueError(sentence)


def shard_batch(input_ids: Tensor, labels: Tensor, group: dist.ProcessGroup) -> dict[str, Any]:
    """Return the arguments that a causal language model of transformers needs for this rank's slice of a batch.

    The mean of all ranks' losses is then the mean over the labels of all ranks, and the mean of their gradients, which
    FSDP and DistributedDataParallel take, is its gradient. Where a step accumulates several batches, give each forward
    the sum of their `num_items_in_batch`. Call this on all ranks.

    Args:
        input_ids, labels: int64 `(batch, sequence)`, whole, the same on the ranks of `group`. Labels are not shifted.

    Raises:
        ValueError: the sequence cannot be divided, or ranks of a group have got different batches.
    """
    ranks, length = group.size(), input_ids.shape[1] // group.size()
    if input_ids.shape[1] % ranks:
        raise ValueError(
            f"a sequence of {input_ids.shape[1]} tokens cannot be divided among {ranks} ranks: cut it, or add tokens "
            f"with labels of {IGNORED_LABEL} at its end"
        )
    here = slice(group.rank() * length, (group.rank() + 1) * length)
    shifted = pad(labels[:, 1:], (0, 1), value=IGNORED_LABEL)[:, here].contiguous()
    batch = torch.stack([input_ids, labels])
    of_first_rank = batch.clone()
    dist.broadcast(of_first_rank, group=group, group_src=0)
    totals = torch.stack([(shifted != IGNORED_LABEL).sum(), (batch != of_first_rank).sum()])
    dist.all_reduce(totals)
    num_items, num_different = totals.tolist()
    if num_different:
        raise ValueError("ranks that share sequences have got different batches: draw the same one on all of them")
    return {
        "input_ids": input_ids[:, here],
        "position_ids": torch.arange(here.start, here.stop, device=input_ids.device).unsqueeze(0),
        "labels": shifted,  # asks for a loss, which is then of `shift_labels`
        "shift_labels": shifted,
        "num_items_in_batch": num_items / dist.get_world_size(),
        "use_cache": False,
    }


def train(steps: int, sequence: int, sequence_ranks: int) -> Iterator[float]:
    """Train a tiny Llama with random weights on the bytes of Python's standard library; yield the loss of each step."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = (dist.get_world_size() // sequence_ranks, sequence_ranks)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("data", "sequence"))
    group = mesh.get_group("sequence")

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=176, num_hidden_layers=2, num_attention_heads=4
    )
    model = transformers.LlamaForCausalLM(config).to(device)
    model.activation_checkpointing_enable()
    use_ulysses(model, group)
    for part in (*model.model.layers, model):
        fully_shard(part)  # over all ranks: those that share a sequence, too, need not hold the same parameters
    optimizer = SpeculativeCPUAdamW(model.parameters(), lr=3e-3, max_grad_norm=1.0)

    library = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in library)), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(mesh.get_local_rank("data"))  # ranks that share a sequence draw the same
    for _ in range(steps):
        start = int(torch.randint(len(text) - sequence, (), generator=generator))
        tokens = text[start : start + sequence].long().unsqueeze(0).to(device)
        loss = model(**shard_batch(tokens, tokens, group)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss.detach())
        yield loss.item() / dist.get_world_size()


def main() -> None:
    """Print the loss of each step."""
    parser = argparse.ArgumentParser(description=train.__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--sequence", type=int, default=1024, help="bytes in a sequence")
    parser.add_argument("--sequence-ranks", type=int, default=2, help="ranks that share a sequence")
    arguments = parser.parse_args()
    if "RANK" not in os.environ:  # which torchrun sets
        sys.exit("long_sequences.py needs several ranks: start it with torchrun --nproc-per-node 2 long_sequences.py")
    try:
        dist.init_process_group()
    except (RuntimeError, ValueError) as error:  # on every rank; one of each node tells
        reason = str(error).partition("\n")[0]
        told = f"long_sequences.py: the ranks could not meet ({reason}); start all of them with one torchrun command"
        sys.exit(told if os.environ.get("LOCAL_RANK", "0") == "0" else 1)
    for step, loss in enumerate(train(**vars(arguments)), 1):
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
