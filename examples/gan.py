"""Two networks that train against each other: each has an optimizer and a scheduler of its own.

    python examples/gan.py

- Open one `OffloadScheduler` for each optimizer. They take only the gradients of their own parameters.
- The generator's loss flows through the critic. Turn the critic's gradients off meanwhile, or they are computed, taken
  and dropped for nothing.
- Clamp weights with `clamp_` under `no_grad`. After a write through `.data`, call `optimizer.reload_masters()`.
- A step that follows a write to the weights is made in `step()`. So the critic here, which is clamped in every step,
  does not overlap; the generator does.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from superadam import OffloadScheduler, SpeculativeCPUAdamW


def network(inputs: int, outputs: int) -> nn.Module:
    """Return a small network in bf16."""
    return nn.Sequential(nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, outputs)).to(torch.bfloat16)


def train(rounds: int = 40, critic_steps: int = 3) -> tuple[nn.Module, nn.Module, list[float]]:
    """Teach a generator a normal distribution around 1; return both networks and the mean that it gives, by round."""
    torch.manual_seed(0)
    generator, critic = network(8, 4), network(4, 1)
    of_generator = SpeculativeCPUAdamW(generator.parameters(), lr=8e-3, betas=(0.0, 0.9), weight_decay=0.0)
    of_critic = SpeculativeCPUAdamW(critic.parameters(), lr=8e-3, betas=(0.0, 0.9), weight_decay=0.0)

    def fakes() -> Tensor:
        made: Tensor = generator(torch.randn(64, 8, dtype=torch.bfloat16))
        return made

    means = []
    with OffloadScheduler(of_generator, generator), OffloadScheduler(of_critic, critic):
        for _ in range(rounds):
            for _ in range(critic_steps):
                real = (1 + 0.3 * torch.randn(64, 4)).to(torch.bfloat16)
                of_critic.zero_grad()
                (critic(fakes().detach()).mean() - critic(real).mean()).backward()
                of_critic.step()
                with torch.no_grad():
                    for parameter in critic.parameters():
                        parameter.clamp_(-0.2, 0.2)

            critic.requires_grad_(False)
            of_generator.zero_grad()
            (-critic(fakes()).mean()).backward()
            of_generator.step()
            critic.requires_grad_(True)
            means.append(fakes().float().mean().item())
    return generator, critic, means


def main() -> None:
    """Print how the mean of what is generated approaches that of the data."""
    means = train()[-1]
    print(
        f"mean of what is generated: {means[0]:.2f} at first, {means[-1]:.2f} after {len(means)} rounds; of data: 1.00"
    )


if __name__ == "__main__":
    main()
