"""Signed keys: a site proves with its node key that a public key of secure aggregation is its own.

In a node's configuration `identity` is the file of its private node key, and `peers` a folder with the other sites'
public keys, nodeNUMBER.pub. The site signs if it has the first, and checks all others' signatures if it has the second.
"""

from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ec import ECDSA
from cryptography.hazmat.primitives.hashes import SHA384
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key
from flwr.app import Context

from .masking import Terms
from .wire import Refused


def signature(context: Context, run: str, number: int, public: str) -> str:
    """The signature of this site under its public key, in hexadecimal; empty without `identity`."""
    file = context.node_config.get("identity")
    if not isinstance(file, str):
        return ""
    key: Any = load_ssh_private_key(Path(file).read_bytes(), None)
    signed: bytes = key.sign(_statement(run, number, public), ECDSA(SHA384()))
    return signed.hex()


def check_peers(context: Context, terms: Terms, own: int) -> None:
    """Refuse terms with a public key that its site has not signed; without `peers` nothing is checked."""
    folder = context.node_config.get("peers")
    if not isinstance(folder, str):
        return
    for name, public, signed in zip(terms.names, terms.keys, terms.signatures, strict=True):
        if name == own:
            continue
        try:
            key: Any = load_ssh_public_key((Path(folder) / f"node{name}.pub").read_bytes())
        except (OSError, ValueError):
            raise Refused(f"this site has no key of site {name} among its peers") from None
        try:
            key.verify(bytes.fromhex(signed), _statement(terms.run, name, public), ECDSA(SHA384()))
        except (InvalidSignature, ValueError):
            raise Refused(f"site {name} has not signed its public key") from None


def _statement(run: str, number: int, public: str) -> bytes:
    return f"fedda secure aggregation: run {run}, site {number}, key {public}".encode()
