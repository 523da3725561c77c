"""What a client remembers between rounds: in the node's state, and in a folder of the node's where it has one.

Flower gives a run that is submitted again a fresh state, so that what a client remembers would be lost with the server.
With `memory = "FOLDER"` in its node configuration a node keeps it on its own disk, by the name of our run.
"""

from __future__ import annotations

from pathlib import Path

import torch
from flwr.app import Array, ArrayRecord, Context
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from ..files import PRIVATE, write_whole
from .wire import Refused

RECORD = "fedda.memory"  # of the node's state
RUN = r"[0-9a-f]{32}"  # the name of a run: it becomes that of a file


class MemoryStore:
    """The memory of one client in one run, by the exchange that it is of."""

    def __init__(self, context: Context, run: str):
        folder = context.node_config.get("memory")
        self.context, self.file = context, Path(folder) / f"{run}.safetensors" if isinstance(folder, str) else None

    def taken(self, base: int, names: tuple[str, ...], d: int, dtype: torch.dtype) -> dict[str, Tensor]:
        """What the client remembers as of the exchange that the server last took from it: a reply that was rejected, or
        that died with the server, has not happened."""
        if base == -1 or not names:
            return {name: torch.zeros(1, d, dtype=dtype) for name in names}
        found = self._all()
        if any(f"{base}.{name}" not in found for name in names):
            raise Refused(f"this client remembers nothing as of exchange {base}")
        return {name: found[f"{base}.{name}"].to(dtype) for name in names}

    def put(self, before: tuple[int, ...], stamp: int, memory: dict[str, Tensor]) -> None:
        """Keep what was before (in this round, and in the server's checkpoint) and what is now; the server says next
        time which of them it was."""
        if not memory:
            return
        kept = {key: value for key, value in self._all().items() if int(key.partition(".")[0]) in before}
        kept |= {f"{stamp}.{name}": value.clone().contiguous() for name, value in memory.items()}
        if self.file is None:
            self.context.state[RECORD] = ArrayRecord({key: Array(value.numpy()) for key, value in kept.items()})
            return
        self.file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_whole(self.file, save(kept), PRIVATE)  # it was made from this site's samples

    def _all(self) -> dict[str, Tensor]:
        if self.file is None:
            record = self.context.state.array_records.get(RECORD) or ArrayRecord()
            return {key: torch.from_numpy(array.numpy().copy()) for key, array in record.items()}
        try:
            return load_file(self.file)
        except (FileNotFoundError, SafetensorError):
            return {}
