"""What a fresh installation must be able to do; run by `test_wheel.py` and `make smoke`, never collected by pytest."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.cli import main


def smoke() -> None:
    assert "site-packages" in laconic.__file__ or "wheel" in laconic.__file__, f"not the wheel's: {laconic.__file__}"
    x = torch.randn(5000)
    codec = laconic.codec("dynamic8")
    assert (codec.decode(codec.encode(x), 5000) - x).abs().max() < 0.1
    total = laconic.transports.run_threads(
        2, lambda t: laconic.all_reduce(torch.ones(3), group=laconic.World(t)).tolist()
    )
    assert total == [[2.0] * 3] * 2

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    ddp = DistributedDataParallel(torch.nn.Linear(64, 32))
    with laconic.compress(ddp, "dynamic8") as job:
        ddp(torch.randn(4, 64)).sum().backward()
        assert job.explain()
    laconic.init().close()
    dist.destroy_process_group()

    small = laconic.shrink(torch.nn.Linear(64, 10))
    small.save("small.lac")
    assert set(laconic.load_shrunk("small.lac")) == {"weight", "bias"}
    program = Path("sum.ll")
    program.write_text("define i32 @sum(i32 %x, i32 %y) {\n  %s = add nsw i32 %x, %y\n  ret i32 %s\n}\n")
    _ended(["code", "graph", str(program)])
    assert Path("sum.svg").is_file()
    if "train" in sys.argv:
        _ended(["train", "digits-mlp", "-n", "2", "--epochs", "1"])
        assert Path("runs/latest/report.html").is_file()
    print("smoke: ok")


def _ended(words: list[str]) -> None:
    """Run a command, which must end well."""
    try:
        main(words)
    except SystemExit as end:
        if end.code:
            raise


if __name__ == "__main__":
    smoke()
