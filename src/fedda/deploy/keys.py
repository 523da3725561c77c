"""Keys of a federation: a CA, the server's certificate, and a key for each node, in Flower's formats."""

import ipaddress
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

from ..extras import needed_for
from ..files import PRIVATE, write_whole

with needed_for("fedda deploy keys", "flower"):
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives import serialization as written
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

ALWAYS = ("127.0.0.1", "localhost")  # where the SuperLink's own processes reach it
CA_DAYS = 3650
LABEL = r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"


def make_keys(place: Path, hosts: list[str], nodes: list[int], days: int = 365, overwrite: bool = False) -> list[Path]:
    """Write the server's certificate for these hosts, if any, and a key pair for each node. Returns the files.

    An existing CA is used again, so the sites keep their ca.crt. Without one, a new CA is made.
    """
    names = [_name(host) for host in dict.fromkeys([*hosts, *ALWAYS])] if hosts else []
    if not 1 <= days <= CA_DAYS:
        raise ValueError(f"keys: days must be a whole number from 1 to {CA_DAYS}, got {days}")
    if any(node < 0 for node in nodes):
        raise ValueError(f"keys: nodes are numbered from 0, got {min(nodes)}")
    wanted = [place / name for name in ("server.key", "server.crt")] if names else []
    wanted += [place / f"node{node}{end}" for node in nodes for end in ("", ".pub")]
    if not wanted:
        raise ValueError("keys: give --hosts (such as link.example.org) or --nodes (such as 3)")
    for path in wanted:
        if path.exists() and not overwrite:
            raise ValueError(f"{path}: exists already; --overwrite replaces it, and the old one is lost")
    if place.exists() and not place.is_dir():
        raise ValueError(f"{place}: is not a folder")
    place.mkdir(parents=True, exist_ok=True, mode=0o700)
    made: list[Path] = []
    if names:
        ca_key, ca, made = _authority(place)
        key = ec.generate_private_key(ec.SECP384R1())
        _write(place / "server.key", _pem(key), private=True)
        _write(place / "server.crt", _signed(key, ca_key, ca, names, days).public_bytes(written.Encoding.PEM))
    for node in nodes:
        key = ec.generate_private_key(ec.SECP384R1())
        ssh = (written.Encoding.PEM, written.PrivateFormat.OpenSSH, written.NoEncryption())
        _write(place / f"node{node}", key.private_bytes(*ssh), private=True)
        public = key.public_key().public_bytes(written.Encoding.OpenSSH, written.PublicFormat.OpenSSH)
        _write(place / f"node{node}.pub", public + f" node{node}\n".encode())
    return made + wanted


def _name(host: str) -> x509.GeneralName:
    """A host in a certificate, by address or by name."""
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        if len(host) > 253 or not re.fullmatch(rf"{LABEL}(\.{LABEL})*", host) or re.fullmatch(r"[\d.]+", host):
            raise ValueError(f"keys: a host must be a name or an address, got {host[:60]!r}") from None
        return x509.DNSName(host)


def _authority(place: Path) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate, list[Path]]:
    """The CA of a folder, and the files that were made for it."""
    key_file, file = place / "ca.key", place / "ca.crt"
    if key_file.exists() != file.exists():
        missing = file if key_file.exists() else key_file
        raise ValueError(f"{missing}: is missing: put it back here to sign, and move ca.key away again afterwards")
    if key_file.exists():
        try:
            key = written.load_pem_private_key(key_file.read_bytes(), None)
            ca = x509.load_pem_x509_certificate(file.read_bytes())
        except (TypeError, ValueError):
            raise ValueError(f"{place}: ca.key or ca.crt cannot be read as PEM") from None
        if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != ca.public_key():
            raise ValueError(f"{place}: ca.key is not the key of ca.crt")
        return key, ca, []
    key = ec.generate_private_key(ec.SECP384R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fedda federation CA")])
    constraints = x509.BasicConstraints(ca=True, path_length=0)
    ca = _certificate(name, name, key, key, CA_DAYS, (constraints, True), (_usage(signs_certificates=True), True))
    _write(key_file, _pem(key), private=True)
    _write(file, ca.public_bytes(written.Encoding.PEM))
    return key, ca, [key_file, file]


def _signed(
    key: ec.EllipticCurvePrivateKey, ca_key: ec.EllipticCurvePrivateKey, ca: x509.Certificate,
    names: list[x509.GeneralName], days: int,
) -> x509.Certificate:  # fmt: skip
    return _certificate(
        x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fedda federation server")]), ca.subject, key, ca_key, days,
        (x509.BasicConstraints(ca=False, path_length=None), True),
        (_usage(signs_certificates=False), True),
        (x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False),
        (x509.SubjectAlternativeName(names), False),
        (x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), False),
    )  # fmt: skip


def _certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, signer: ec.EllipticCurvePrivateKey,
    days: int, *extensions: tuple[x509.ExtensionType, bool],
) -> x509.Certificate:  # fmt: skip
    """A certificate for a key, with extensions that are critical or not."""
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key.public_key())
    builder = builder.serial_number(x509.random_serial_number())
    # Clocks differ by up to an hour.
    builder = builder.not_valid_before(now - timedelta(hours=1)).not_valid_after(now + timedelta(days=days))
    for extension, critical in ((x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False), *extensions):
        builder = builder.add_extension(extension, critical)
    return builder.sign(signer, hashes.SHA384())


def _usage(signs_certificates: bool) -> x509.KeyUsage:
    no = dict.fromkeys(("content_commitment", "key_encipherment", "data_encipherment", "key_agreement"), False)
    return x509.KeyUsage(
        digital_signature=not signs_certificates, key_cert_sign=signs_certificates, crl_sign=signs_certificates,
        encipher_only=False, decipher_only=False, **no,
    )  # fmt: skip


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(written.Encoding.PEM, written.PrivateFormat.PKCS8, written.NoEncryption())


def _write(path: Path, content: bytes, private: bool = False) -> None:
    write_whole(path, content, PRIVATE if private else 0o644)
