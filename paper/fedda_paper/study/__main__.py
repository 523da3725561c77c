"""`python -m fedda_paper.study TASK`."""

import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "2")

from .protocol import main

if __name__ == "__main__":
    main(sys.argv[1:])
