"""The claims of the paper as data (`claims.toml`), and verdicts on them from run folders."""

from .groups import Group, alone, dumps, verdicts, write
from .judge import Verdict
from .statements import Claim, claims

__all__ = ["Claim", "Group", "Verdict", "alone", "claims", "dumps", "verdicts", "write"]
