"""One PyTorch worker of the race: the same model, batches and optimizer under what PyTorch's users have.

`benchmarks/step_time.py --torch` starts it in the lab, once for each worker.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import timing
import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpt import corpus
from model import BATCH, CONTEXT, HEADS, LAYERS, VOCABULARY, WIDTH
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power
from torch.nn.parallel import DistributedDataParallel

ALONE = "no communication"


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
        self.write = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.read(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.write(self.norm(x))


class Lion(torch.optim.Optimizer):
    """Lion (arXiv 2302.06675) on lists of tensors, as PyTorch's own optimizers do it."""

    def __init__(self, params: Any, lr: float = 1e-4, decay: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            grads = [p.grad for p in params]
            mus = [self.state[p].setdefault("mu", torch.zeros_like(p)) for p in params]
            signs = torch._foreach_mul(mus, 0.9)
            torch._foreach_add_(signs, grads, alpha=0.1)
            torch._foreach_sign_(signs)
            torch._foreach_mul_(params, 1 - group["lr"] * group["decay"])
            torch._foreach_add_(params, signs, alpha=-group["lr"])
            torch._foreach_mul_(mus, 0.99)
            torch._foreach_add_(mus, grads, alpha=0.01)


def alone(model: nn.Module) -> nn.Module:
    return model


def ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def half(model: nn.Module) -> nn.Module:
    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return wrapped


def power_sgd(rank: int) -> Callable[[nn.Module], nn.Module]:
    def wrap(model: nn.Module) -> nn.Module:
        # One bucket: with several the hook's all-reduces meet in another order on another worker, and
        # Gloo fails. Compression must have begun when time is taken.
        wrapped = DistributedDataParallel(model, bucket_cap_mb=1000)
        state = power.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
        wrapped.register_comm_hook(state, power.powerSGD_hook)
        return wrapped

    return wrap


METHODS: dict[str, Callable[[nn.Module], nn.Module]] = {
    ALONE: alone,
    "DDP float32": ddp,
    "DDP fp16 hook": half,
    "DDP PowerSGD rank 4": power_sgd(4),
}


def main() -> None:
    args = timing.options(__doc__, METHODS)
    dist.init_process_group("gloo")
    worker = dist.get_rank()
    racing = {name: prepared(METHODS[name], worker) for name in args.methods}
    for step in racing.values():  # PowerSGD's first steps are plain, and DDP rebuilds its buckets
        for _ in range(4):
            step()
    blocks = timing.take_turns(racing, largest, turns=args.turns, seconds=args.seconds)
    timing.write(args.out / f"worker{worker}.json", blocks, methods={name: {} for name in racing})
    dist.barrier()
    dist.destroy_process_group()


def prepared(wrap: Callable[[nn.Module], nn.Module], worker: int) -> Callable[[], None]:
    """A function that does one step, parameters updated."""
    torch.manual_seed(0)
    model = GPT()
    wrapped, optimizer = wrap(model), Lion(model.parameters())
    text = corpus.standard_library().train
    windows = torch.from_numpy(corpus.draw(text, BATCH, CONTEXT, (0, worker)).astype("int64"))
    inputs, targets = windows[:, :-1], windows[:, 1:]

    def once() -> None:
        optimizer.zero_grad(set_to_none=True)
        logits = wrapped(inputs)
        F.cross_entropy(logits.reshape(-1, VOCABULARY), targets.reshape(-1)).backward()
        optimizer.step()

    return once


def largest(x: float) -> float:
    """A maximum over all workers."""
    value = torch.tensor([x], dtype=torch.float64)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return value.item()


if __name__ == "__main__":
    # Gloo takes the address of the host's name; the lab gives each worker its own.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", timing.INTERFACE)
    main()
