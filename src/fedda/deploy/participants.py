"""Who may take part, and under which number: the public keys of the sites, as files nodeNUMBER.pub in a folder.

Flower authenticates a node by its key and tells the server which key that was. The number that a node gives itself
(`partition-id`) counts only if the file of that number holds the node's key.
"""

import base64
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from .wire import Refused


@dataclass(frozen=True)
class Participants:
    """The sites whose keys are in a folder. Without a folder any node takes part under the number that it gives itself.

    The folder is read whenever a node arrives, so a new key counts at once.
    """

    folder: Path | None = None

    def __post_init__(self) -> None:
        if self.folder is not None and not self.numbers():
            raise ValueError(
                f"{self.folder}: holds no node*.pub: put the sites' public keys there, or set participants='' to let "
                "every node take part under the number that it gives itself"
            )

    @property
    def listed(self) -> bool:
        return self.folder is not None

    def numbers(self) -> dict[bytes, int]:
        """The site number of each key."""
        assert self.folder is not None
        files = {
            int(m[1]): file
            for file in self.folder.glob("node*.pub")
            if (m := re.fullmatch(r"node(\d+)\.pub", file.name))
        }
        keys: dict[bytes, int] = {}
        for number, file in sorted(files.items()):
            key = _ssh_key(file)
            if key in keys:
                raise ValueError(f"{file}: is the key of site {keys[key]} too: each site needs a key of its own")
            keys[key] = number
        return keys

    def check(self, key: bytes, claimed: int) -> str:
        """Refuse a node whose key is not that of the site it claims to be. Returns the key's fingerprint."""
        if not self.listed:
            return ""
        shown, numbers = fingerprint(key) if key else "none", self.numbers()
        if key not in numbers:
            raise Refused(f"its key ({shown}) is not one of {self.folder}/node*.pub; it claims to be site {claimed}")
        if numbers[key] != claimed:
            raise Refused(f"it has the key of site {numbers[key]} ({shown}) and claims to be site {claimed}")
        return shown


def _ssh_key(file: Path) -> bytes:
    """A public key in the form in which Flower keeps it."""
    from cryptography.hazmat.primitives import serialization

    try:
        key = serialization.load_ssh_public_key(file.read_bytes())
    except Exception:
        raise ValueError(f"{file}: is not a public key as `fedda deploy keys` writes it") from None
    return key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def fingerprint(key: bytes) -> str:
    """As `ssh-keygen -lf nodeNUMBER.pub` shows it."""
    from cryptography.hazmat.primitives import serialization

    try:
        ssh = serialization.load_pem_public_key(key).public_bytes(
            serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
        )
    except Exception:
        return "unreadable"
    digest = hashlib.sha256(base64.b64decode(ssh.split()[1])).digest()
    return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")
