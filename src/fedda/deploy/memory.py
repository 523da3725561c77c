"""The memory of a client between rounds: in the node's state, or in a folder of the node.

Flower gives a run that is submitted again a fresh state, so the memory would be lost with the server. With
`memory = "FOLDER"` in its node configuration a node keeps it on its own disk, in a file with the name of the run.
"""

from pathlib import Path

import torch
from flwr.app import Array, ArrayRecord, Context
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from ..files import PRIVATE, write_whole
from .wire import Refused

RECORD = "fedda.memory"  # in the node's state
RUN = r"[0-9a-f]{32}"  # the name of a run, which becomes the name of a file


class MemoryStore:
    """The memory of one client in one run, by exchange."""

    def __init__(self, context: Context, run: str):
        folder = context.node_config.get("memory")
        self.context, self.file = context, Path(folder) / f"{run}.safetensors" if isinstance(folder, str) else None

    def load(self, base: int, names: tuple[str, ...], d: int, dtype: torch.dtype) -> dict[str, Tensor]:
        """The memory after the last exchange that the server used. Replies that were rejected, or lost with the server,
        do not count."""
        if base == -1 or not names:
            return {name: torch.zeros(1, d, dtype=dtype) for name in names}
        stored = self._all()
        if any(f"{base}.{name}" not in stored for name in names):
            raise Refused(f"this client has no memory of exchange {base}")
        return {name: stored[f"{base}.{name}"].to(dtype) for name in names}

    def save(self, before: tuple[int, ...], stamp: int, memory: dict[str, Tensor]) -> None:
        """Keep the memory of the exchanges `before` (of this round, and of the server's checkpoint) and the new one.
        The server's next message says which of them counts."""
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
