"""The program `effexport`, also as `python -m effexport`."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run the command line. A package that cannot be imported, even click, is one line and exit status 2."""
    open_standard_streams()
    ensure_utf8()
    try:
        from effexport.cli.main import main as run

        run()
    except (ImportError, OSError) as error:
        from effexport.base.environment import why_not_importable
        from effexport.base.files import json_text

        message = why_not_importable(error)
        if message is None or "--debug" in sys.argv:
            raise
        if "--json" in sys.argv:
            print(json_text({"error": message, "exit_code": 2}), end="")
        print(f"effexport: error: {message}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:  # before the command line could handle it
        print("effexport: error: interrupted", file=sys.stderr)
        sys.exit(130)


def ensure_utf8() -> None:
    """Start again in Python's UTF-8 mode if names of files have another encoding, such as that of the locale C.

    The libraries that read and write models take names as UTF-8, whatever the locale says.
    """
    # an option of Python itself may forbid that mode: then it is tried once
    if sys.getfilesystemencoding() == "utf-8" or os.environ.get("PYTHONUTF8") == "1" or not sys.executable:
        return
    os.environ["PYTHONUTF8"] = "1"  # also for processes that this one starts
    os.execv(sys.executable, [sys.executable, "-P", "-X", "utf8", *sys.orig_argv[1:]])


def open_standard_streams() -> None:
    """Put nothing in the place of standard streams that are closed: the next file that is opened would become stdout,
    and libraries in C++ would write their messages into a model."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free, which is this one


if __name__ == "__main__":
    # -m puts the current folder first, where a folder `triton` would pass for the package that PyTorch looks for
    if not sys.flags.safe_path:
        del sys.path[0]
    main()
