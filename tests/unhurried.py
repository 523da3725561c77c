"""`fedda` that rests in every round: whoever waits for a round, to kill or to stop it there, is in time on a busy machine."""

import time

from fedda.cli import main
from fedda.run import Run

advance = Run.advance


def rested(run):
    time.sleep(0.02)
    advance(run)


if __name__ == "__main__":
    Run.advance = rested
    main()
