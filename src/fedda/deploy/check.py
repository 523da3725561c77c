"""`fedda deploy check`: try the doors of a SuperLink from outside, as a stranger would, and compare the clocks.

In Flower 1.41 and 1.42 one port serves all calls, as HTTP requests: those of nodes (/v1/fleet/), those of `flwr`
(/v1/control/: submit code, register nodes) and those of the server's own processes (/v1/runtime/). Only the first are
for the network. The calls that are tried here only read, and carry no credentials.
"""

import http.client
import re
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path

# The calls of a node that has a key. A node without one would also register itself: a proxy refuses that.
NODE_CALLS = (
    "activate-node", "deactivate-node", "send-node-heartbeat", "pull-messages", "push-messages", "get-run", "get-fab",
    "push-object", "pull-object", "confirm-message-received",
)  # fmt: skip
NOWHERE = "/fedda-deploy-check"  # no such path exists: the answer to it is that to a refused one
TIMEOUT = 10.0  # seconds for an answer
MOST = 4096  # bytes of an answer that are read
AHEAD, BEHIND = 5, 305  # seconds by which the clock of a node may differ from the SuperLink's


@dataclass(frozen=True)
class Door:
    name: str
    method: str
    path: str
    purpose: str
    for_nodes: bool = False


DOORS = (
    Door("control", "POST", "/v1/control/list-runs", "anyone can submit code, and list and register nodes"),
    Door("runtime", "POST", "/v1/runtime/get-nodes", "anyone can pose as a process of the server"),
    Door("register", "POST", "/v1/fleet/register-node", "a node without a key can ask to be let in"),
    Door("docs", "GET", "/openapi.json", "anyone can read which calls there are"),
    Door("nodes", "POST", "/v1/fleet/pull-messages", "nodes can connect", for_nodes=True),
)


@dataclass(frozen=True)
class Finding:
    """The result of one try. `wrong`: it is not as it should be."""

    text: str
    wrong: bool


def try_doors(address: str, root_certificates: Path | None = None, clock: bool = False) -> Iterator[Finding]:
    """Try every door with and without TLS. With the CA's certificate, the server's certificate is checked too.

    With `clock` only the clocks are compared.
    """
    host, port = _split(address)
    trusted = None if root_certificates is None else _trusted(root_certificates)
    try:
        findings = list(_certificate(host, port, trusted))
        encrypted = True
        yield from [] if clock else findings
    except ssl.SSLError as why:
        encrypted = False
        if not clock:
            yield Finding(f"TLS: none ({why.reason or 'no answer'}): messages can be read on their way", True)
    except OSError as why:
        raise ValueError(f"{address}: cannot be reached: {why.strerror or why}") from None
    yield _clock(host, port, _unchecked() if encrypted else None)
    if clock:
        return
    if encrypted:
        yield from _doors("with TLS", host, port, _unchecked())
    yield from _doors("without TLS", host, port, None)


def _split(address: str) -> tuple[str, int]:
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([^:/\[\]\s]+)):(\d{1,5})", address)
    if match is None or not 1 <= int(match[3]) <= 65535:
        raise ValueError(f"deploy check: give the address as HOST:PORT, such as link.example.org:9443, got {address!r}")
    return match[1] or match[2], int(match[3])


def _trusted(file: Path) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=str(file))
    except ssl.SSLError:
        raise ValueError(f"{file}: is not a certificate in PEM format") from None
    except OSError as why:
        raise ValueError(f"{file}: {why.strerror}") from None


def _unchecked() -> ssl.SSLContext:
    """A stranger who looks for open doors does not check certificates."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def _certificate(host: str, port: int, trusted: ssl.SSLContext | None) -> Iterator[Finding]:
    """Shake hands. Without TLS an ssl.SSLError is raised."""
    try:
        version = _shake_hands(host, port, trusted or _unchecked())
        checked = (
            f"the certificate is valid for {host}" if trusted else "certificate not checked (give --root-certificates)"
        )
        yield Finding(f"TLS: {version}, {checked}", False)
    except ssl.SSLCertVerificationError as why:
        yield Finding(f"TLS: the certificate is WRONG: {why.verify_message}", True)


def _shake_hands(host: str, port: int, context: ssl.SSLContext) -> str:
    connection = http.client.HTTPSConnection(host, port, timeout=TIMEOUT, context=context)
    try:
        connection.connect()
        return str(connection.sock.version())
    finally:
        connection.close()


def _clock(host: str, port: int, context: ssl.SSLContext | None) -> Finding:
    """Compare this machine's clock with the time in the server's answer, which has whole seconds."""
    before = time.time()
    answer = _answer(host, port, context, "GET", NOWHERE)
    after = time.time()
    try:
        server = parsedate_to_datetime(answer.headers["date"] if answer else "").timestamp() + 0.5
    except (TypeError, ValueError):
        return Finding("clock: UNKNOWN: the server does not say its time", False)
    ahead = round((before + after) / 2 - server)
    if abs(ahead) <= 1:
        return Finding("clock: as the server's", False)
    by = f"{ahead} s ahead of" if ahead > 0 else f"{-ahead} s behind"
    allowed = f"Flower allows at most {AHEAD} s ahead and {BEHIND} s behind"
    if -BEHIND < ahead < AHEAD:
        return Finding(f"clock: {by} the server's; {allowed}", False)
    return Finding(
        f"clock: WRONG: {by} the server's; {allowed}, and refuses a node without a word: set the clock", True
    )


def _doors(how: str, host: str, port: int, context: ssl.SSLContext | None) -> Iterator[Finding]:
    refusals = {method: _status(host, port, context, method, NOWHERE) for method in ("GET", "POST")}
    if context is None and set(refusals.values()) <= {None, 400}:  # what a server says that expects TLS
        yield Finding(f"{how}: shut", False)
        return
    for door in DOORS:
        status = _status(host, port, context, door.method, door.path)
        said = "no answer" if status is None else f"HTTP {status}"
        if status is not None and status >= 500:
            yield Finding(f"{how}, {door.name}: UNKNOWN ({said}): is the SuperLink up?", True)
        elif status is None or status == refusals[door.method]:
            missing = door.for_nodes and context is not None
            yield Finding(
                f"{how}, {door.name}: {'SHUT: nodes cannot connect' if missing else 'shut'} ({said})", missing
            )
        else:
            wrong = not door.for_nodes or context is None
            yield Finding(f"{how}, {door.name}: {'OPEN' if wrong else 'open'}: {door.purpose} ({said})", wrong)


def _status(host: str, port: int, context: ssl.SSLContext | None, method: str, path: str) -> int | None:
    """The status of the answer, or None without one."""
    answer = _answer(host, port, context, method, path)
    return None if answer is None else answer.status


def _answer(
    host: str, port: int, context: ssl.SSLContext | None, method: str, path: str
) -> http.client.HTTPResponse | None:
    """The answer, or None without one. An empty body is an empty protobuf message."""
    if context is None:
        connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT)
    else:
        connection = http.client.HTTPSConnection(host, port, timeout=TIMEOUT, context=context)
    try:
        connection.request(method, path, b"" if method == "POST" else None, {"content-type": "application/protobuf"})
        answer = connection.getresponse()
        answer.read(MOST)
        return answer
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
