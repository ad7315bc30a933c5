"""Parameters that start to need gradients during training: unfrozen or added layers.

Callers: `compress`, whose DDP knows only the parameters it was made with, and synchronous `distribute`, until its next
step. Invariant: before any rank steps by newcomers' gradients, all ranks compare the newcomers and take rank 0's
values. Their gradients are exact means in float32.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from laconic.errors import BadInput
from laconic.exchange.collectives import all_reduce, broadcast
from laconic.exchange.layout import flat, in_groups, write
from laconic.exchange.likeness import check_alike, have_equal
from laconic.transports.world import World


def announce(newcomers: Mapping[str, nn.Parameter], world: World) -> None:
    """Agree on newly trained parameters, by name; all ranks call it, and get rank 0's values.

    Raises:
        Mismatch: other ranks have other newcomers.
    """
    terms = [("a new parameter", f"'{name}' of {p.dtype} {tuple(p.shape)}") for name, p in newcomers.items()]
    check_alike("new parameters", terms, world.transport)
    if not have_equal(newcomers.values(), world.transport):
        for parameter in newcomers.values():
            broadcast(parameter.data, root=0, group=world)


def average(newcomers: Sequence[nn.Parameter], world: World) -> None:
    """Average these parameters' gradients over all ranks; a missing one counts as zeros."""
    for group in in_groups(newcomers, NBYTES, lambda _: False):
        buffer = flat(group)
        for parameter, view in zip(buffer.parameters, buffer.views, strict=True):
            write(parameter.grad, view)
        all_reduce(buffer.values, "mean", group=world)
        for parameter, view in zip(buffer.parameters, buffer.views, strict=True):
            if parameter.grad is None or parameter.grad.is_sparse:
                parameter.grad = view.clone()
            else:
                parameter.grad.copy_(view)


NBYTES = 4 << 20  # of a message


class NewcomersToDDP:
    """Watches a DDP model for parameters that it was made without, and averages their gradients beside it.

    Raises:
        BadInput: there are such parameters already, and it is unknown which.
    """

    def __init__(self, ddp: DistributedDataParallel, world: World) -> None:
        self._ddp, self._world = ddp, world
        ignored = ddp.parameters_to_ignore
        self._known = {id(p) for n, p in ddp.module.named_parameters() if p.requires_grad and n not in ignored}
        facts = ddp._get_ddp_logging_data()
        made_with = facts.get("num_parameter_tensors", len(self._known))
        if (unknown := len(self._known) - made_with) > 0:
            text = "DDP averages those it was made with; unfreeze or add layers before DistributedDataParallel(model)"
            raise BadInput(f"{unknown} parameters need gradients that did not when DDP was made: {text}")
        self._known |= {id(p) for n, p in ddp.module.named_parameters() if n in ignored}
        self._new: list[nn.Parameter] = []
        self._queued = False
        self._handles: list[Any] = [ddp.register_forward_pre_hook(self._look)]

    def _look(self, *_: object) -> None:
        """A hook before each forward."""
        if not (torch.is_grad_enabled() and self._ddp.require_backward_grad_sync):
            self._queued = True  # this backward is one that DDP does not synchronise
            return
        self._queued = False
        found = {n: p for n, p in self._ddp.module.named_parameters() if p.requires_grad and id(p) not in self._known}
        if found:
            announce(found, self._world)
            text = f"{len(found)} parameters, '{next(iter(found))}' first, were frozen or not there when DDP was made"
            cure = "to compress them, wrap the model in DDP anew, and compress that"
            warnings.warn(f"{text}: their gradients are averaged in float32; {cure}", stacklevel=2)
            self._watch(found.values())

    def _watch(self, parameters: Iterable[nn.Parameter]) -> None:
        first = not self._new
        self._new += parameters
        self._known |= set(map(id, self._new))
        for parameter in self._ddp.module.parameters() if first else parameters:
            if parameter.requires_grad:
                handle = parameter.register_post_accumulate_grad_hook(self._made)
                self._handles.append(handle)

    def _made(self, _: Tensor) -> None:
        """A hook on any gradient: queue our exchange for the end of backward, after DDP's own."""
        if not self._queued:
            self._queued = True
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(lambda: engine.queue_callback(lambda: average(self._new, self._world)))

    def close(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._new = [], []
