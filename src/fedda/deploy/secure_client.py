"""Secure aggregation, the client's side: keys, masked uploads, and the shares that a site reveals."""

import json
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, Context, RecordDict
from torch import Tensor

from .identity import check_peers
from .masking import MOST_COUNT, Terms, Unfit, held, masked, new_private_key
from .masking import public_key as public_of
from .masking import revealed as shares_of
from .wire import Refused, packed, tensors_of

REVEAL = "reveal"  # the second message of an exchange
GREETED = "keys"  # in a greeting: asks for a new public key
RECORD = "fedda.secure"  # in the node's state


class Keyring:
    """A site's private key and what it was used for: in the node's memory, on no disk.

    A SuperNode answers one message at a time, so an exchange cannot be entered twice by messages that arrive together.
    """

    def __init__(self, context: Context):
        self.state = context.state

    def renew(self) -> str:
        """A new key pair. Returns the public key."""
        private = new_private_key()
        self._keep(private, -1, b"")
        return public_of(private)

    def open(self, terms: Terms) -> tuple[bytes, int]:
        """The private key, and which of the sites this is. An exchange is entered once: a mask hides one vector."""
        private, last, _ = self._kept()
        own = [name for name, key in terms.key_of.items() if key == public_of(private)]
        if not own:
            raise Refused("the terms do not have this site's key")
        if terms.number <= last:
            raise Refused(f"exchange {terms.number} is not new")
        self._keep(private, terms.number, terms.digest)
        return private, own[0]

    def close(self, terms: Terms) -> tuple[bytes, int]:
        """The same, for the shares of an exchange that was entered. They are revealed once."""
        private, last, digest = self._kept()
        if digest != terms.digest:
            raise Refused("the shares belong to no exchange of this site, or were revealed")
        self._keep(private, last, b"")
        return private, next(name for name, key in terms.key_of.items() if key == public_of(private))

    def _kept(self) -> tuple[bytes, int, bytes]:
        record: Any = self.state.config_records.get(RECORD)
        if record is None:
            raise Refused("this site has no key: it was restarted, or was not asked for one")
        return record["private"], record["number"], record["digest"]

    def _keep(self, private: bytes, number: int, digest: bytes) -> None:
        self.state[RECORD] = ConfigRecord({"private": private, "number": number, "digest": digest})


def terms_of(fields: dict[str, Any]) -> Terms:
    """The terms of a request, if they are those of its other fields."""
    try:
        terms = Terms.of(fields["secure"])
    except Unfit as why:
        raise Refused(str(why)) from None
    if (terms.run, terms.stamp, terms.task) != (fields["run"], fields["stamp"], fields["task"]):
        raise Refused("the terms are of another exchange")
    return terms


def uploaded(
    terms: Terms, context: Context, samples: int, values: tuple[Tensor, ...], counts: dict[str, int]
) -> RecordDict:
    """The reply of a site: its values with masks, and shares for other sites."""
    flat = torch.cat([v.detach().double().flatten() for v in values])
    if not bool(flat.isfinite().all()):
        raise Refused("a value is not finite")
    if float(flat.abs().max()) > terms.limit:  # the server sets the limit, so the message must not say the size
        raise Refused(f"a value is larger than the limit, {terms.limit:.3g}")
    gradients = [min(counts[name], MOST_COUNT) for name in ("gradients", "full_gradients")]
    private, own = Keyring(context).open(terms)
    check_peers(context, terms, own)
    try:
        vector, bundles = masked(terms, own, private, terms.encode(flat.numpy(), min(samples, terms.most), gradients))
    except Unfit as why:
        raise Refused(str(why)) from None
    tensors = (torch.from_numpy(vector.view(f"i{terms.bits // 8}"))[None], rows_of(bundles))
    return packed(tensors, {"stamp": terms.stamp, "draws": counts["draws"]})


def revealed(content: RecordDict, fields: dict[str, Any], context: Context) -> RecordDict:
    """The shares that a site reveals, after its own look at who has uploaded."""
    try:
        request = json.loads(fields["secure"])
        terms, names = Terms.of(request["terms"]), request["uploaded"]
        if terms.run != fields["run"] or type(names) is not list or any(type(name) is not int for name in names):
            raise ValueError
        private, own = Keyring(context).close(terms)
        here = held(terms, own, names)
        forms = [((1, terms.bundle_bytes(name)), torch.uint8) for name in here]
        bundles = [tensor.numpy().tobytes() for tensor in tensors_of(content, forms)]
        return packed((rows_of(shares_of(terms, own, private, names, bundles)),), {"stamp": terms.stamp})
    except Unfit as why:
        raise Refused(str(why)) from None
    except (KeyError, TypeError, ValueError) as why:
        raise why if isinstance(why, Refused) else Refused("the request for shares is malformed") from None


def rows_of(parts: list[bytes]) -> Tensor:
    return torch.from_numpy(np.frombuffer(b"".join(parts), np.uint8).reshape(len(parts), -1).copy())
