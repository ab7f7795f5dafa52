"""A transport of weights from a trainer to vLLM's workers: the trainer writes a folder, and workers read it.

vLLM's own transports need GPUs. Loading is what theirs do with what has arrived.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from safetensors.torch import load_file
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload


@dataclass
class Init(WeightTransferInitInfo):  # type: ignore[misc]
    """Nothing to agree on."""


@dataclass
class Update(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Where the new weights are."""

    folder: str


class WeightsInFolder(WeightTransferEngine[Init, Update]):  # type: ignore[misc]
    """Loads weights out of a folder."""

    init_info_cls = Init
    update_info_cls = Update

    def init_transfer_engine(self, init_info: Init) -> None:
        pass

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))  # the base waits for an accelerator, too

    def receive_weights(self, update_info: Update) -> None:
        self.model.load_weights(load_file(f"{update_info.folder}/model.safetensors").items())

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        pass
