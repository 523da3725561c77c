"""A network for the processes of a test: loopback and nothing else."""

import os
import shutil
import signal
import subprocess
from contextlib import suppress


class Namespace:
    """A network with loopback alone; nothing where namespaces may not be made."""

    def __init__(self):
        self.name = f"fedda-flower-{os.getpid()}"
        made = (
            shutil.which("ip") and not subprocess.run(["ip", "netns", "add", self.name], capture_output=True).returncode
        )
        self.prefix = ["ip", "netns", "exec", self.name] if made else []
        if made:
            subprocess.run(["ip", "-n", self.name, "link", "set", "lo", "up"], check=True)

    def close(self):
        if self.prefix:
            pids = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True).stdout.split()
            for pid in map(int, pids):
                with suppress(ProcessLookupError):  # it ended by itself: those that it worked for are gone
                    os.kill(pid, signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", self.name], check=True)
