"""``python -m eecore`` is ``eecore``."""

import sys

if __name__ == "__main__":
    try:
        from eecore.cli import main

        main()
    except KeyboardInterrupt:
        sys.exit(130)
