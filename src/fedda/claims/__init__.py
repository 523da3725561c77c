"""The paper's claims as data (`claims.toml`), and verdicts on them from run folders."""

from .groups import Group, dumps, judge_one_run, verdicts, write
from .judge import Verdict
from .statements import Claim, claims

__all__ = ["Claim", "Group", "Verdict", "claims", "dumps", "judge_one_run", "verdicts", "write"]
