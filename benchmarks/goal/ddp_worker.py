"""One PyTorch worker of `benchmarks/time_to_loss.py --torch`: AdamW under DistributedDataParallel.

The same model, with parameters of its own and the same text; it takes turns, as `worker.py` does.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpt import corpus
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power
from torch.nn.parallel import DistributedDataParallel

from goal import turns
from goal.model import CONTEXT, HEADS, LAYERS, VOCABULARY, WIDTH


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(WIDTH, 1e-6, bias=False) for _ in range(2))
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, time, _ = x.shape
        split = self.qkv(self.norm1(x)).view(batch, time, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*split, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, time, WIDTH))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    """Bytes [batch, time] to logits [batch, time, 256], as `examples/gpt/model.py`."""

    def __init__(self) -> None:
        super().__init__()
        self.read = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH, 1e-6, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.read(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.read.weight)


def power_sgd(rank: int) -> Callable[[nn.Module], nn.Module]:
    def wrap(model: nn.Module) -> nn.Module:
        # One bucket: with several the hook's all-reduces meet in another order on another worker, and
        # Gloo fails. Compression must have begun when time is taken.
        wrapped = DistributedDataParallel(model, bucket_cap_mb=1000)
        state = power.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
        wrapped.register_comm_hook(state, power.powerSGD_hook)
        return wrapped

    return wrap


def bfloat16(model: nn.Module) -> nn.Module:
    """PyTorch's own hook of that kind asks for NCCL; this one does the same by Gloo."""
    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(None, _in_bfloat16)
    return wrapped


def _in_bfloat16(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    half = bucket.buffer().to(torch.bfloat16).div_(dist.get_world_size())
    sent = dist.all_reduce(half, async_op=True).get_future()
    return sent.then(lambda done: bucket.buffer().copy_(done.value()[0]))


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "torch-adamw": DistributedDataParallel,
    "torch-adamw-bfloat16": bfloat16,
    "torch-powersgd-4": power_sgd(4),
    "torch-powersgd-16": power_sgd(16),
}


class Trainer:
    """A model under DDP, and its AdamW."""

    def __init__(self, name: str, tokens: int):
        model = GPT()
        self._model = WRAPPERS[name](model)
        self._adamw = torch.optim.AdamW(model.parameters(), 1e-4, (0.9, 0.99), weight_decay=0.1)
        self._text, self._count, self._taken = corpus.standard_library().train, tokens // CONTEXT, 0

    def step(self) -> None:
        """One step, parameters updated."""
        draw = corpus.draw(self._text, self._count, CONTEXT, (dist.get_rank(), self._taken))
        self._adamw.zero_grad(set_to_none=True)
        _loss(self._model, torch.from_numpy(draw.astype("int64"))).backward()
        self._adamw.step()
        self._taken += 1


def _loss(model: nn.Module, windows: torch.Tensor) -> torch.Tensor:
    logits = model(windows[:, :-1])
    return F.cross_entropy(logits.reshape(-1, VOCABULARY), windows[:, 1:].reshape(-1))


def main() -> None:
    dist.init_process_group("gloo")
    turns.work(Path(sys.argv[1]), dist.get_rank(), step_of, largest)
    dist.barrier()
    dist.destroy_process_group()


def step_of(name: str, stage: str, tokens: int) -> turns.Step:
    """The step of a method, as that of `worker.py`."""
    step = Trainer(name, tokens).step
    for _ in range(4):  # PowerSGD's first steps are plain, and DDP rebuilds its buckets
        step()
    return step


def largest(x: float) -> float:
    """A maximum over all workers."""
    value = torch.tensor([x], dtype=torch.float64)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return value.item()


if __name__ == "__main__":
    # Gloo takes the address of the host's name; the lab gives each worker its own.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", turns.INTERFACE)
    main()
