"""`python -m backend.engine.native` compiles the CPU kernels. Set-up runs it; what fails here costs speed only."""

from __future__ import annotations

import sys

from backend.engine.native.build import BuildError, build, path


def main() -> int:
    try:
        if path().exists():
            return 0
        print("Compiling the CPU kernels (a minute, once) …", file=sys.stderr, flush=True)
        build()
    except BuildError as error:
        print(
            f"note: no compiled CPU kernels: {error}. Everything works without them, decoding is slower. "
            "On Debian: apt-get install g++",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
