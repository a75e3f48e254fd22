"""`python -m effexport`."""

import sys


def run() -> None:
    # -m puts the current folder first, where a folder `triton` would pass for the package that PyTorch looks for
    if not sys.flags.safe_path:
        del sys.path[0]
    from effexport.cli import main

    main()


run()
