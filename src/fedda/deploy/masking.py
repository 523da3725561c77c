"""Sums of hidden vectors: what SecAgg+ (Bell et al. 2020) needs, without any network.

A site j turns its vector into whole numbers modulo 2^bits and adds masks:

    y_j = q_j + PRG(b_j) + sum over i of sign(i - j) PRG(m_ij)

b_j is drawn by the site. m_ij is a key that only sites i and j know, by X25519. In the sum over all sites the masks of
pairs cancel. Shares of b_j, and of every m_ij, go to the neighbours of j, encrypted. For a site that has uploaded they
reveal b_j, and the keys m_ij of those sites i that have not. So a sum can be unmasked although sites have died, and no
site reveals what would unmask a single vector.
"""

import hashlib
import json
import math
import os
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from ..aggregation.gaussian import uniform_integers
from .sharing import SECRET, combine, split

BITS = (32, 64)
NEIGHBOURS = 20  # of a site; with fewer other sites, all of them
NONCE, TAG = 12, 16  # bytes of ChaCha20-Poly1305
MOST_SITES = 10_000
MOST_SIGNATURE = 400  # hexadecimal digits
MOST_WEIGHT = 2**31
MOST_COUNT = 1_000_000  # of one site: gradients in one exchange


class Unfit(ValueError):
    """Terms, shares or vectors that a site or a server must not work with."""


@dataclass(frozen=True)
class Terms:
    """What server and sites agree on before an exchange. Every mask depends on all of it."""

    run: str
    number: int  # of the exchange; a site never takes part in two of the same number
    task: str
    stamp: int
    names: tuple[int, ...]  # the sites
    keys: tuple[str, ...]  # their public keys, in hexadecimal
    signatures: tuple[str, ...]  # of the keys, by the sites; empty if a site does not sign
    needed: int  # a sum over fewer sites is not unmasked; at least two thirds
    bits: int  # the modulus is 2^bits
    limit: float  # a site with a larger value does not take part
    most: int  # the largest weight; 1 if all sites weigh the same

    def __post_init__(self) -> None:
        sites = len(self.names)
        if not 2 <= sites <= MOST_SITES or len(set(self.names)) < sites:
            raise Unfit(f"secure aggregation needs 2 to {MOST_SITES} different sites, got {sites}")
        if len(set(self.keys)) < sites or len(self.keys) != sites or any(len(key) != 2 * SECRET for key in self.keys):
            raise Unfit("every site must have a public key of its own")
        if len(self.signatures) != sites or any(len(signed) > MOST_SIGNATURE for signed in self.signatures):
            raise Unfit("every site must have a signature, which may be empty")
        if not two_thirds(sites) <= self.needed <= sites:
            raise Unfit(f"a sum of {sites} sites must need at least {two_thirds(sites)} of them, got {self.needed}")
        if self.bits not in BITS or not 0 < self.limit <= 1e30 or not 1 <= self.most <= MOST_WEIGHT:
            raise Unfit("bits, limit or the largest weight is out of range")
        if sites * max(self.most, MOST_COUNT) >= 2 ** (self.bits - 1):
            raise Unfit(f"the sum of {sites} weights does not fit into {self.bits} bits")

    @classmethod
    def of(cls, text: str) -> "Terms":
        """From the JSON text of a message. Nothing in it is trusted."""
        try:
            table = json.loads(text)
            kinds: Any = {name: kind for name, kind in cls.__annotations__.items() if kind in (str, int, float)}
            if set(table) != set(cls.__annotations__) or any(type(table[k]) is not kind for k, kind in kinds.items()):
                raise ValueError
            lists = {"names": int, "keys": str, "signatures": str}
            for name, kind in lists.items():
                if type(table[name]) is not list or any(type(value) is not kind for value in table[name]):
                    raise ValueError
            return cls(**table | {name: tuple(table[name]) for name in lists})
        except Unfit:
            raise
        except (ValueError, TypeError):
            raise Unfit("the terms of a secure exchange are malformed") from None

    @cached_property
    def text(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @cached_property
    def digest(self) -> bytes:
        return hashlib.sha256(self.text.encode()).digest()

    @cached_property
    def key_of(self) -> dict[int, str]:
        return dict(zip(self.names, self.keys, strict=True))

    @cached_property
    def _ring(self) -> list[int]:
        """The sites in an order that nobody chooses: it depends on all public keys."""
        return sorted(self.names, key=lambda name: hashlib.sha256(self.digest + _number(name)).digest())

    @cached_property
    def _place(self) -> dict[int, int]:
        return {name: place for place, name in enumerate(self._ring)}

    def neighbours(self, name: int) -> list[int]:
        """The sites that share masks with a site and hold its shares: the nearest on a ring, the same in return."""
        around, place = len(self.names), self._place[name]
        reach = min(NEIGHBOURS // 2, around // 2)
        return sorted({self._ring[(place + step) % around] for step in range(-reach, reach + 1)} - {name})

    def holders(self, name: int) -> list[int]:
        """The sites that hold shares of a site's secrets; it holds one itself. Share number k is that of the k-th."""
        return sorted([name, *self.neighbours(name)])

    def threshold(self, name: int) -> int:
        """So many shares of a site's secrets reveal them.

        A server may lie and tell some sites that a site has uploaded, and others that it has not. With more than half
        of the holders it could not get both kinds of shares if all sites had the same holders. On a ring a neighbour
        has other holders, which makes it possible. With two thirds it is not (tests/test_secure.py).
        """
        return two_thirds(len(self.holders(name)))

    def bundle_bytes(self, name: int) -> int:
        """The bytes that a site sends to one holder: a share of b and of each key of a pair, encrypted."""
        return NONCE + SECRET * len(self.holders(name)) + TAG

    # -- numbers ------------------------------------------------------------------------------------------------------
    @property
    def step(self) -> float:
        """The width of the grid of values: a power of two, so small that the modulus is used, so large that no sum of
        weighted values leaves it."""
        return 2.0 ** math.ceil(math.log2(len(self.names) * self.most * self.limit) - (self.bits - 2))

    @property
    def error(self) -> float:
        """A mean of hidden values differs from the mean of the values by at most this, besides the rounding of float64:
        each value is rounded by at most half a step, and weights are at least 1."""
        return self.step / 2

    def encode(self, values: np.ndarray, weight: int, counts: Iterable[int]) -> np.ndarray:
        """Weighted values, the weight and counts as whole numbers modulo 2^bits."""
        scaled = np.rint(np.asarray(values, np.float64) * (weight / self.step)).astype(np.int64)
        whole = np.concatenate([scaled, np.array([weight, *counts], np.int64)])
        return whole.astype(self.unsigned)

    def decode(self, total: np.ndarray, counts: int) -> tuple[np.ndarray, int, list[int]]:
        """The mean of the values, the sum of the weights and the sums of the counts."""
        whole = total.view(np.dtype(f"<i{self.bits // 8}")).astype(np.int64)
        weight, *sums = (int(value) for value in whole[len(whole) - counts - 1 :])
        return whole[: len(whole) - counts - 1] * (self.step / max(weight, 1)), weight, sums

    @property
    def unsigned(self) -> np.dtype:
        return np.dtype(f"<u{self.bits // 8}")


def two_thirds(sites: int) -> int:
    """Two thirds of the sites, rounded up: so many must take part in a sum, and so many holders must reveal a key.

    >>> [two_thirds(n) for n in (2, 3, 4, 5, 6, 21)]
    [2, 2, 3, 4, 4, 14]
    """
    return -(-2 * sites // 3)


def new_private_key() -> bytes:
    return X25519PrivateKey.generate().private_bytes_raw()


def public_key(private: bytes) -> str:
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw().hex()


def shared_key(terms: Terms, private: bytes, other: int, purpose: bytes) -> bytes:
    """A key for one purpose in one exchange that only this site and the other one know."""
    try:
        public = X25519PublicKey.from_public_bytes(bytes.fromhex(terms.key_of[other]))
        secret = X25519PrivateKey.from_private_bytes(private).exchange(public)
    except ValueError:  # a point of small order, which gives everybody the same secret
        raise Unfit(f"the public key of site {other} is not valid") from None
    return HKDF(SHA256(), SECRET, salt=terms.digest, info=b"fedda " + purpose).derive(secret)


def masked(terms: Terms, own: int, private: bytes, vector: np.ndarray) -> tuple[np.ndarray, list[bytes]]:
    """The masked vector, and the encrypted shares for the holders, in their order."""
    secret, total = os.urandom(SECRET), vector.copy()
    total += uniform_integers(secret, len(vector), terms.bits)
    holders, parts, threshold = terms.holders(own), [], terms.threshold(own)
    parts.append(split(secret, threshold, len(holders)))
    for other in terms.neighbours(own):
        key = shared_key(terms, private, other, b"mask")
        _add_mask(total, key, terms.bits, own < other)
        parts.append(split(key, threshold, len(holders)))
    bundles = []
    for place, holder in enumerate(holders):
        nonce, route = os.urandom(NONCE), _number(own) + _number(holder)
        cipher = ChaCha20Poly1305(shared_key(terms, private, holder, b"shares" + route))
        bundles.append(nonce + cipher.encrypt(nonce, b"".join(shares[place] for shares in parts), terms.digest))
    return total, bundles


def check_uploads(terms: Terms, uploaded: Collection[int], held: Collection[int]) -> None:
    """Refuse sets of uploads whose sum would be over too few sites."""
    if not set(uploaded) <= set(terms.names) or len(set(uploaded)) < len(uploaded):
        raise Unfit("the uploads must be of sites in the terms")
    if len(uploaded) < terms.needed:
        raise Unfit(f"a sum needs {terms.needed} sites, got {len(uploaded)}")
    for name in held:
        around = len(set(terms.holders(name)) & set(uploaded))
        if around < terms.threshold(name):
            raise Unfit(f"a sum needs {terms.threshold(name)} of the sites around site {name}, got {around}")


def held(terms: Terms, holder: int, uploaded: Collection[int]) -> list[int]:
    """The uploads whose shares a site holds."""
    return sorted(set(terms.holders(holder)) & set(uploaded))


def revealed(terms: Terms, own: int, private: bytes, uploaded: Collection[int], bundles: list[bytes]) -> list[bytes]:
    """The shares that a site reveals: of every upload that it holds, that of b, and those of the keys that the upload
    shares with sites that have not uploaded. `bundles` are in the order of `held`."""
    if own not in uploaded:
        raise Unfit("this site is asked for shares, and its own upload is not in the sum")
    here = held(terms, own, uploaded)
    check_uploads(terms, uploaded, here)
    out = []
    for name, bundle in zip(here, bundles, strict=True):
        route = _number(name) + _number(own)
        cipher = ChaCha20Poly1305(shared_key(terms, private, name, b"shares" + route))
        try:
            plain = cipher.decrypt(bundle[:NONCE], bundle[NONCE:], terms.digest)
        except InvalidTag:
            raise Unfit(f"the shares of site {name} are not authentic") from None
        shares = [plain[i : i + SECRET] for i in range(0, len(plain), SECRET)]
        if len(shares) != len(terms.holders(name)):
            raise Unfit(f"the shares of site {name} are of the wrong number")
        out.append(shares[0])
        pairs = zip(terms.neighbours(name), shares[1:], strict=True)
        out += [share for other, share in pairs if other not in uploaded]
    return out


def secrets_needed(terms: Terms, uploaded: Collection[int], name: int) -> list[int | None]:
    """The secrets of an upload that the server needs: b (None), and the keys that it shares with missing sites."""
    return [None, *(other for other in terms.neighbours(name) if other not in uploaded)]


class Unmasking:
    """The server's side of an exchange: adds up uploads, collects shares, and takes the masks off the sum."""

    def __init__(self, terms: Terms, length: int):
        self.terms, self.total = terms, np.zeros(length, terms.unsigned)
        self.bundles: dict[int, list[bytes]] = {}  # of every upload, in the order of its holders
        self.shares: dict[tuple[int, int | None], dict[int, bytes]] = {}  # by upload and secret: number and share
        self.holders: set[int] = set()  # the sites that have revealed their shares

    def add(self, name: int, vector: np.ndarray, bundles: list[bytes]) -> None:
        self.total += vector
        self.bundles[name] = bundles

    @property
    def uploaded(self) -> list[int]:
        return sorted(self.bundles)

    def bundles_for(self, holder: int) -> list[bytes]:
        here = held(self.terms, holder, self.bundles)
        return [self.bundles[name][self.terms.holders(name).index(holder)] for name in here]

    def shares_from(self, holder: int) -> int:
        """How many shares a site reveals."""
        here = held(self.terms, holder, self.bundles)
        return sum(len(secrets_needed(self.terms, self.bundles, name)) for name in here)

    def reveal(self, holder: int, shares: list[bytes]) -> None:
        left = iter(shares)
        for name in held(self.terms, holder, self.bundles):
            number = self.terms.holders(name).index(holder) + 1
            for secret in secrets_needed(self.terms, self.bundles, name):
                self.shares.setdefault((name, secret), {})[number] = next(left)
        self.holders.add(holder)

    @property
    def complete(self) -> bool:
        """Whether the shares suffice."""
        return all(
            len(self.holders & set(self.terms.holders(name))) >= self.terms.threshold(name) for name in self.bundles
        )

    def sum(self) -> np.ndarray:
        """The sum of the vectors, modulo 2^bits."""
        total, bits = self.total.copy(), self.terms.bits
        for (name, secret), shares in self.shares.items():
            key = combine(dict(sorted(shares.items())[: self.terms.threshold(name)]))
            _add_mask(total, key, bits, plus=secret is not None and name > secret)
        return total


def _add_mask(total: np.ndarray, key: bytes, bits: int, plus: bool) -> None:
    mask = uniform_integers(key, len(total), bits)
    if plus:
        total += mask
    else:
        total -= mask


def _number(name: int) -> bytes:
    return name.to_bytes(16, "little", signed=True)
