"""Program of PyTorch Lightning that does not know this package, for the tests of integrations.

`DeepSpeedStrategy` accepts no accelerator but `CUDAAccelerator`. `HostAccelerator` is a subclass with devices of the
CPU, so that the strategy itself runs unchanged.

python lightning_program.py OUTPUT DS_CONFIG [PACKAGE]
"""

import importlib
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import deepspeed
import torch

WIDTH = 16
BATCH = 4
EPOCH = 4
"""Optimizer steps of an epoch."""


def host_accelerator(package: str) -> Any:
    """Return an accelerator of Lightning's package `package` (`lightning.pytorch` or `pytorch_lightning`)."""
    base = importlib.import_module(f"{package}.accelerators").CUDAAccelerator

    class HostAccelerator(base):  # type: ignore[misc]
        """CUDA accelerator without CUDA: two devices on the CPU."""

        def setup_device(self, device: torch.device) -> None:
            pass

        def setup(self, trainer: Any) -> None:
            pass

        def teardown(self) -> None:
            pass

        @staticmethod
        def parse_devices(devices: Any) -> list[int]:
            return list(range(int(devices)))

        @staticmethod
        def get_parallel_devices(devices: list[int]) -> list[torch.device]:
            return [torch.device("cpu", index) for index in devices]

        @staticmethod
        def is_available() -> bool:
            return True

    return HostAccelerator()


@dataclass(frozen=True)
class Job:
    """One run of `Trainer.fit`.

    Attributes:
        directory: directory of the checkpoints.
        config: DeepSpeed configuration.
        trainer: further arguments of `Trainer`.
        resume: checkpoint to continue from.
        manual: use manual optimization.
        package: `lightning.pytorch` or `pytorch_lightning`.
        keep: number of checkpoints to keep; -1 keeps all. There is one for each epoch.
    """

    directory: str
    config: Mapping[str, Any]
    trainer: Mapping[str, Any] = field(default_factory=dict)
    resume: str | None = None
    manual: bool = False
    package: str = "lightning.pytorch"
    keep: int = -1


@dataclass(frozen=True)
class Outcome:
    """Results of one rank.

    Attributes:
        losses: the losses of all micro-steps.
        parameters: the parameters at the end, gathered if ZeRO 3 has partitioned them.
        master_weights: the fp32 master weights at the end, if the optimizer has any.
        module: the parameters of the module after `fit`; None under ZeRO 3.
        bytes_sent: bytes of gradients in each optimizer step, and those without compression; empty if not attached.
    """

    losses: list[float]
    parameters: dict[str, list[float]]
    master_weights: dict[str, list[float]]
    module: dict[str, list[float]] | None
    bytes_sent: list[tuple[int, int]]


def network(pl: Any, manual: bool) -> Any:
    """Return a LightningModule."""

    class Network(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = not manual
            self.layers: Any = None
            self.losses: list[float] = []
            self.parameters_at_end: dict[str, list[float]] = {}
            self.master_weights_at_end: dict[str, list[float]] = {}
            self.bytes_sent: list[tuple[int, int]] = []

        def configure_model(self) -> None:
            """Create the layers, within deepspeed.zero.Init under ZeRO 3. Lightning calls this more than once."""
            if self.layers is None:
                torch.manual_seed(0)
                sizes = (WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH)
                linear = [torch.nn.Linear(*size) for size in sizes]
                self.layers = torch.nn.Sequential(linear[0], torch.nn.Tanh(), linear[1])

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 12)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            loss = (self.layers(batch) - batch.roll(1, -1)).float().square().mean()
            self.losses.append(float(loss.detach()))
            self.log("epoch", float(self.current_epoch), on_step=False, on_epoch=True)
            if manual:
                self.manual_backward(loss)
                self.optimizers().step()
                self.lr_schedulers().step()
            return loss

        def on_train_start(self) -> None:
            session = vars(self.trainer.model).get("compression")
            if session is not None:
                session.subscribe(lambda step: self.bytes_sent.append((step.bytes_sent, step.bytes_uncompressed)))

        def on_train_end(self) -> None:
            for name, parameter in self.named_parameters():
                gathered = [parameter] if hasattr(parameter, "ds_id") else []
                with deepspeed.zero.GatheredParameters(gathered):
                    self.parameters_at_end[name] = parameter.detach().float().flatten().tolist()
                master = deepspeed.utils.safe_get_full_fp32_param(parameter)
                if master is not None:
                    self.master_weights_at_end[name] = master.detach().flatten().tolist()

    return Network()


def fit(job: Job) -> Outcome:
    """Train as the job says."""
    pl = importlib.import_module(job.package)
    strategies = importlib.import_module(f"{job.package}.strategies")
    callbacks = importlib.import_module(f"{job.package}.callbacks")
    newest = {"save_top_k": job.keep, "monitor": "epoch", "mode": "max"}
    settings = {
        "max_epochs": 3,
        "accumulate_grad_batches": 2,
        "gradient_clip_val": 0.5,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "callbacks": [callbacks.ModelCheckpoint(job.directory, "{epoch}", **newest)],
        **job.trainer,
    }
    strategy = strategies.DeepSpeedStrategy(config=dict(job.config))
    trainer = pl.Trainer(accelerator=host_accelerator(job.package), devices=2, strategy=strategy, **settings)
    module = network(pl, job.manual)
    rows: Any = torch.randn(EPOCH * 4 * BATCH, WIDTH, generator=torch.Generator().manual_seed(1))
    trainer.fit(module, torch.utils.data.DataLoader(rows, BATCH, shuffle=True), ckpt_path=job.resume)
    partitioned = job.config["zero_optimization"].get("stage") == 3
    state = {name: value.float().flatten().tolist() for name, value in module.state_dict().items()}
    return Outcome(
        module.losses,
        module.parameters_at_end,
        module.master_weights_at_end,
        None if partitioned else state,
        module.bytes_sent,
    )


if __name__ == "__main__":
    directory, ds_config, *package = sys.argv[1:]
    fit(Job(directory, json.loads(ds_config), package=package[0] if package else "lightning.pytorch"))
