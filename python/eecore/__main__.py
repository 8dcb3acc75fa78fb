"""``python -m eecore`` is ``eecore``."""

from eecore.cli import main

if __name__ == "__main__":
    main()
