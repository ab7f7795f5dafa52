"""``python -m kvplan_nixl demo``."""

import sys

USAGE = "usage: python -m kvplan_nixl demo"


def main(arguments: list[str]) -> int:
    """Run the demo; exit status 2 for anything else, and where something that it needs is not installed."""
    if arguments != ["demo"]:
        print(USAGE, file=sys.stderr)
        return 2
    try:
        from kvplan_nixl import demo
    except ImportError as missing:
        print(f"{missing}; the demo needs: pip install 'kvplan[demo]'", file=sys.stderr)
        return 2
    return demo.main()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
