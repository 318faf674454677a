"""The program `your_ai`, also as `python -m your_ai`."""

from __future__ import annotations

import gc


def run() -> None:
    """Run the command line. Modules are no garbage, so none is looked for while and among them,
    which is a tenth of the time of a short command."""
    gc.disable()
    from your_ai.cli import main

    gc.freeze()
    gc.enable()
    main()


if __name__ == "__main__":
    run()
