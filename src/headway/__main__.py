"""`python -m headway`, the form in which torchrun and srun start a run."""

import sys

from headway.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
