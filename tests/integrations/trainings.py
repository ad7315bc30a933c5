"""Trainings of each framework on two ranks, by `laconic.integrations`: whole, stopped, and resumed."""

from __future__ import annotations

import contextlib
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


def _weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def trainer(folder: str, door: str) -> dict[str, Any]:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

    from laconic.integrations.transformers import LaconicCallback

    seen: list[dict[str, Any]] = []

    class Logger(TrainerCallback):
        fails = False

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            if self.fails:
                raise RuntimeError("broken on purpose")

        def on_log(self, *_: Any, logs: dict[str, Any] | None = None, **__: Any) -> None:
            seen.append(dict(logs or {}))

    def train(where: str, steps: int, resume: str | None = None) -> Tensor:
        torch.manual_seed(0)
        tokens = torch.randint(0, 32, (64, 16))
        data = [{"input_ids": row, "labels": row} for row in tokens]
        shape = {"vocab_size": 32, "n_positions": 16, "n_embd": 48, "n_layer": 1, "n_head": 2}
        model = GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=0, eos_token_id=0))
        arguments = TrainingArguments(
            output_dir=f"{folder}/{where}", max_steps=steps, save_steps=4, per_device_train_batch_size=4, use_cpu=True,
            seed=0, lr_scheduler_type="constant", report_to=[], disable_tqdm=True, logging_steps=2,
            ddp_find_unused_parameters=False,
        )  # fmt: skip
        callback = LaconicCallback("topk(0.05)", door=door)  # type: ignore[arg-type]
        logger = Logger()
        made = Trainer(model=model, args=arguments, train_dataset=data, callbacks=[logger, callback])
        if where == "whole":  # a training that fails, and another one by the same callback
            logger.fails = True
            start = {name: value.clone() for name, value in model.state_dict().items()}
            with contextlib.suppress(RuntimeError):
                made.train()
            failed = callback.job
            assert failed is not None
            closed: list[bool] = []
            genuine = failed.close
            failed.close = lambda: (closed.append(True), genuine())  # type: ignore[method-assign]
            model.load_state_dict(start)
            made = Trainer(model=model, args=arguments, train_dataset=data, callbacks=[Logger(), callback])
        made.train(resume_from_checkpoint=resume)
        assert callback.job is None
        ended = _weights(model)
        if where == "whole":
            assert closed
            made.train()  # the same Trainer again, as with successive data
            assert callback.job is None
        return ended

    stopped = train("resumed", 4)
    resumed = train("resumed", 8, f"{folder}/resumed/checkpoint-4")
    whole = train("whole", 8)
    return {"stopped": stopped, "resumed": resumed, "whole": whole, "logs": seen}


def accelerate(folder: str, door: str) -> dict[str, Any]:
    from accelerate import Accelerator

    from laconic.integrations.accelerate import accelerated

    def train(epochs: int, load: str = "", save: str = "") -> Tensor:
        torch.manual_seed(0)
        data = TensorDataset(torch.randn(64, 64), torch.randint(10, (64,)))
        accelerator = Accelerator(cpu=True)
        inner = nn.Sequential(nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 10))
        model, optimizer, loader = accelerator.prepare(
            inner, torch.optim.Adam(inner.parameters(), 0.01), DataLoader(data, 8)
        )
        given = optimizer if door == "distribute" else None
        with accelerated(accelerator, model, "topk(0.05)", optimizer=given, door=door) as job:  # type: ignore[arg-type]
            if load:
                accelerator.load_state(load)
            for _ in range(epochs):
                for x, y in loader:
                    optimizer.zero_grad()
                    accelerator.backward(nn.functional.cross_entropy(model(x), y))
                    optimizer.step()
            job.finish()
            if save:
                accelerator.save_state(save)
            assert job.metrics()["sent_nbytes"]
        return _weights(inner)

    stopped = train(1, save=f"{folder}/one")
    return {"stopped": stopped, "resumed": train(1, load=f"{folder}/one"), "whole": train(2)}


def _classifier(fails_at: int = -1) -> Any:
    import lightning as pl

    class Classifier(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 10))

        def training_step(self, batch: list[Tensor], number: int) -> Tensor:
            if number == fails_at:
                raise RuntimeError("broken on purpose")
            return nn.functional.cross_entropy(self.layers(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), 0.01)

    torch.manual_seed(0)
    return Classifier()


def _data() -> DataLoader[Any]:
    torch.manual_seed(1)
    return DataLoader(TensorDataset(torch.randn(64, 64), torch.randint(10, (64,))), 8)


def lightning(folder: str, door: Any, strategy: Any = None) -> dict[str, Any]:
    import lightning as pl
    from lightning.fabric.plugins.environments import TorchElasticEnvironment
    from lightning.pytorch.loggers import CSVLogger

    from laconic.integrations.lightning import LaconicCallback

    def trainer(epochs: int) -> tuple[Any, Any]:
        made = strategy("topk(0.05)", door=door) if strategy else "ddp"
        callback = LaconicCallback("topk(0.05)", door=door)
        keeper = made if strategy else callback
        return keeper, pl.Trainer(
            max_epochs=epochs, accelerator="cpu", devices=2, strategy=made, callbacks=[] if strategy else [callback],
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=2,
            logger=CSVLogger(folder, name=f"{door}-{strategy is not None}"),
            plugins=[TorchElasticEnvironment()], gradient_clip_val=1.0, precision="bf16-mixed",
        )  # fmt: skip

    def train(epochs: int, load: Path | None = None, save: Path | None = None) -> Tensor:
        model, (_, made) = _classifier(), trainer(epochs)
        made.fit(model, _data(), ckpt_path=load)
        if save is not None:
            made.save_checkpoint(save)
        return _weights(model)

    keeper, made = trainer(1)
    jobs = []
    with contextlib.suppress(RuntimeError):
        model = _classifier(fails_at=1)
        model.on_train_batch_end = lambda *_: jobs.append(keeper.job)
        made.fit(model, _data())
    assert jobs[0] is not None
    assert keeper.job is None, "a training that fails leaves its job open"
    kept = Path(folder) / "one.ckpt"
    stopped = train(1, save=kept)
    found = {"stopped": stopped, "resumed": train(2, load=kept), "whole": train(2)}
    if torch.distributed.get_rank() == 0:
        rows = [each.read_text() for each in Path(folder).glob(f"{door}-{strategy is not None}/*/metrics.csv")]
        assert any("laconic/sent_nbytes" in text for text in rows)
    return found


def lightning_strategy(folder: str, door: str) -> dict[str, Any]:
    from laconic.integrations.lightning import LaconicStrategy

    return lightning(folder, door, LaconicStrategy)


def fabric(folder: str, door: str) -> dict[str, Any]:
    import lightning as pl
    from lightning.fabric.plugins.environments import TorchElasticEnvironment

    from laconic.integrations.lightning import LaconicFabricStrategy

    def train(epochs: int, load: str = "", save: str = "") -> Tensor:
        strategy = LaconicFabricStrategy("topk(0.05)")
        made = pl.Fabric(
            accelerator="cpu", strategy=strategy, devices=2, plugins=[TorchElasticEnvironment()], precision="bf16-mixed"
        )
        made.launch()
        inner = _classifier()
        model, optimizer = made.setup(inner, torch.optim.Adam(inner.parameters(), 0.01))
        model.mark_forward_method("training_step")
        state = {"model": model, "optimizer": optimizer, "epoch": 0}
        if load:
            made.load(load, state)
        for _ in range(state["epoch"], epochs):
            for number, batch in enumerate(made.setup_dataloaders(_data(), use_distributed_sampler=False)):
                optimizer.zero_grad()
                made.backward(model.training_step(batch, number))
                made.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
            state["epoch"] += 1
        if save:
            made.save(save, state)
        (job,) = strategy.jobs
        assert job.metrics()["sent_nbytes"]
        job.close()
        return _weights(inner)

    kept = f"{folder}/one.ckpt"
    return {"stopped": train(1, save=kept), "resumed": train(2, load=kept), "whole": train(2)}


TRAININGS = {
    "trainer": trainer, "accelerate": accelerate, "lightning": lightning, "lightning strategy": lightning_strategy,
    "fabric": fabric,
}  # fmt: skip


def run(name: str, door: str, folder: str) -> dict[str, Any]:
    """One rank's part; tensors as lists, for they go through a pipe."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found = TRAININGS[name](folder, door)
    return {key: value.tolist() if isinstance(value, Tensor) else value for key, value in found.items()}
