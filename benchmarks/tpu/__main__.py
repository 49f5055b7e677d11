"""`python -m benchmarks.tpu`."""

import sys

from benchmarks.tpu.run import main

if __name__ == "__main__":
    sys.exit(main())
