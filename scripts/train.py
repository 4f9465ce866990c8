"""accelerate launch scripts/train.py RUN.yaml [key=value ...]: train with one process or several."""

import sys

from flowrl.run.cli import main

if __name__ == "__main__":
    main(["train", *sys.argv[1:]])
