"""A torch backend whose collectives go through a codec: what frameworks would send by it, and what of that is lossy.

    python -m benchmarks torch-backend

The trial behind "No torch backend" in docs/reference/supported.md: a process group in Python, registered as a
backend, around gloo's. It encodes and decodes every float32 tensor of 1,024 values and more, as a backend
must that sees tensors without names. It lists what DDP, FSDP1, FSDP2 and Megatron-like code ask of it, and how far
their losses are off.
"""

from __future__ import annotations

from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch import Tensor, nn

import laconic
from laconic.cli.shared import Json, echo_json
from laconic.transports.launcher import run_local

SMALLEST = 1024


class CodedGroup(dist.ProcessGroup):
    """gloo's process group, with large float32 tensors through a codec before each collective."""

    def __init__(self, store: dist.Store, rank: int, size: int, spec: str) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._gloo: Any = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size)
        self._codec, self._name = laconic.codec(spec), "0"
        self.seen: dict[str, int] = {}

    def _through(self, what: str, tensor: Tensor) -> Tensor:
        lossy = tensor.dtype == torch.float32 and tensor.numel() >= SMALLEST
        key = f"{what}, {'lossy' if lossy else 'as it is'}"
        self.seen[key] = self.seen.get(key, 0) + 1
        flat = tensor.detach().reshape(-1).contiguous()
        return self._codec.decode(self._codec.encode(flat), flat.numel()).view_as(tensor) if lossy else tensor

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:  # type: ignore[override]
        for tensor in tensors:
            tensor.copy_(self._through("all_reduce", tensor))
        return self._gloo.allreduce(tensors, opts)

    def _reduce_scatter_base(self, output: Any, given: Any, opts: Any = None) -> Any:  # type: ignore[override]
        return self._gloo._reduce_scatter_base(output, self._through("reduce_scatter", given), opts)

    def _allgather_base(self, output: Any, given: Any, opts: Any = None) -> Any:  # type: ignore[override]
        return self._gloo._allgather_base(output, self._through("all_gather", given), opts)

    reduce_scatter_single, all_gather_single = _reduce_scatter_base, _allgather_base  # their names since torch 2.13

    def allgather(self, outputs: Any, given: Any, opts: Any = None) -> Any:  # type: ignore[override]
        return self._gloo.allgather(outputs, [self._through("all_gather", each) for each in given], opts)

    def broadcast(self, tensors: Any, opts: Any = None) -> Any:  # type: ignore[override]
        return self._gloo.broadcast(tensors, opts)

    def barrier(self, opts: Any = None) -> Any:  # type: ignore[override]
        return self._gloo.barrier(opts)

    @property
    def group_name(self) -> str:
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name


def run_rank(kind: str, spec: str, steps: int) -> dict[str, Any]:
    """Train a few steps under one framework, by gloo or by the coded group."""
    torch.set_num_threads(1)
    if spec:
        groups: list[CodedGroup] = []

        def make(store: Any, rank: int, size: int, _: Any) -> CodedGroup:
            groups.append(CodedGroup(store, rank, size, spec))
            return groups[-1]

        dist.Backend.register_backend("laconic", make, devices=["cpu"])
    dist.init_process_group("laconic" if spec else "gloo")
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    if kind == "DDP":
        model = nn.parallel.DistributedDataParallel(model)
    elif kind == "FSDP1":
        from torch.distributed.fsdp import FullyShardedDataParallel

        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    elif kind == "FSDP2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.1), []
    for _ in range(steps):
        x = torch.randn(32, 64)
        y = model(x)
        if kind == "Megatron-like":  # a layer's halves are summed in forward, as tensor-parallel layers do
            whole = y.detach() / 2
            dist.all_reduce(whole)
            y = y + (whole - y).detach()
        loss = (y - x.sin()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        if kind == "Megatron-like":
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "seen": groups[0].seen if spec else {}}


def main(
    codec: Annotated[str, typer.Option(help="Of everything large.")] = "dynamic8",
    steps: Annotated[int, typer.Option(help="Of each training.")] = 20,
    json: Json = False,
) -> None:
    """Try a torch backend under four sorts of programs."""
    found = {}
    for kind in ("DDP", "FSDP1", "FSDP2", "Megatron-like"):
        plain, coded = (run_local(2, run_rank, (kind, spec, steps), timeout_s=120)[0] for spec in ("", codec))
        found[kind] = {"calls": coded["seen"], "first_loss_off": abs(coded["losses"][0] / plain["losses"][0] - 1)}
    if json:
        return echo_json(found)
    for kind, each in found.items():
        calls = "; ".join(f"{name}: {times}" for name, times in sorted(each["calls"].items()))
        off = 100 * each["first_loss_off"]
        typer.echo(f"{kind}: {calls}; the first loss, before any update, is off by {off:.4f} %")


if __name__ == "__main__":
    typer.run(main)
