"""The trained parameters as one vector, and how workers begin and end with the same ones.

Callers: modes whose workers own their weights, servers, elastic jobs.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from laconic.errors import BadInput
from laconic.exchange.collectives import all_reduce, broadcast
from laconic.transports.world import World


def trained_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """The model's parameters that the optimiser trains, in the model's order.

    Raises:
        BadInput: the optimiser trains parameters that are not the model's.
    """
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    found = [p for p in model.parameters() if id(p) in trained]
    if len(found) != len(trained):
        raise BadInput(f"the optimiser trains {len(trained) - len(found)} parameters that are not the model's")
    return found


def start_alike(model: nn.Module, world: World) -> None:
    """Everyone begins with rank 0's parameters and buffers."""
    tensors = [t.detach() for t in (*model.parameters(), *model.buffers())]
    if world.world_size == 1 or not tensors:
        return
    parts = [t.contiguous().reshape(-1).view(torch.uint8).cpu() for t in tensors]
    whole = broadcast(torch.cat(parts), root=0, group=world)
    for tensor, part in zip(tensors, torch.split(whole, [p.numel() for p in parts]), strict=True):
        tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))  # a copy is aligned for any dtype


class FlatWeights:
    """The trained parameters as one flat float32 vector: each parameter is a view of `values`, nothing is copied.

    What is written to `values` is in the model at once.

    Raises:
        BadInput: parameters that are not float32 on the CPU.
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        for parameter in parameters:
            if parameter.dtype != torch.float32 or parameter.device.type != "cpu":
                text = f"{parameter.dtype} on {parameter.device}"
                raise BadInput(f"this mode averages float32 weights on the CPU; a parameter is {text}")
        self.parameters = parameters
        self.values = torch.empty(sum(p.numel() for p in parameters))
        for parameter, part in self.parts():
            part.copy_(parameter.detach())
            parameter.data = part

    def parts(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Each parameter and the view of `values` that is its own."""
        pieces = torch.split(self.values, [p.numel() for p in self.parameters])
        for parameter, piece in zip(self.parameters, pieces, strict=True):
            yield parameter, piece.view(parameter.shape)

    def set_gradients(self, flat: Tensor) -> None:
        """Let the parameters' gradients be views of `flat`."""
        pieces = torch.split(flat, [p.numel() for p in self.parameters])
        for parameter, piece in zip(self.parameters, pieces, strict=True):
            parameter.grad = piece.view(parameter.shape)

    def gradients(self, out: Tensor | None = None) -> Tensor:
        """All gradients as one flat vector, zeros where there is none; written to `out` when given."""
        flat = torch.empty_like(self.values) if out is None else out
        pieces = torch.split(flat, [p.numel() for p in self.parameters])
        for parameter, piece in zip(self.parameters, pieces, strict=True):
            if parameter.grad is None:
                piece.zero_()
            elif parameter.grad.is_sparse:
                raise BadInput("this mode sends dense gradients; use sparse=False, or consistency='hogwild'")
            else:
                piece.copy_(parameter.grad.reshape(-1))
        return flat


def check_in_place(weights: FlatWeights, optimizer: torch.optim.Optimizer) -> None:
    """Refuse parameters that no longer lie in `weights`: averaging would pass them by."""
    if any(parameter.data_ptr() != part.data_ptr() for parameter, part in weights.parts()):
        raise BadInput("the model's parameters were replaced after distribute() (model.to, .half, …); do that before")
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    if count != len(weights.parameters):
        text = f"{count - len(weights.parameters)} parameters were added to the optimiser after distribute()"
        raise BadInput(f"{text}; add them before, or the workers would drift apart")


def average_buffers(model: nn.Module, world: World) -> None:
    """Floating buffers (running means of BatchNorm) become their mean over the workers, the others rank 0's."""
    for buffer in model.buffers():
        if buffer.is_floating_point():
            all_reduce(buffer, "mean", algorithm="ring", group=world)
        else:
            broadcast(buffer, root=0, group=world)
