"""``python -m kvplan_nixl demo`` and ``python -m kvplan_nixl calibrate``."""

import argparse
import sys


def main(arguments: list[str]) -> int:
    """Run a command. Exit status 2: a usage error, or a missing package."""
    parser = argparse.ArgumentParser(
        "python -m kvplan_nixl", description="Move bytes through NIXL on this machine."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("demo", help="read requests between two processes and check every value")
    rates = commands.add_parser(
        "calibrate", help="measure transfers and copies, for kvplan.staging.choose"
    )
    rates.add_argument("--device", default="cpu", help="torch device of the memory: cpu, cuda:0")
    rates.add_argument(
        "--operation", default="READ", choices=("READ", "WRITE"), help="what moves bytes"
    )
    rates.add_argument(
        "--save", metavar="FILE", help="also write the rates to a JSON file, for Rates.load"
    )
    options = parser.parse_args(arguments)
    # loading them takes seconds
    print("loading torch and NIXL", flush=True)
    try:
        from kvplan_nixl import calibrate, demo
    except ImportError as missing:
        print(f"{missing}; install with: pip install 'nixl>=1.5.1,<2' torch", file=sys.stderr)
        return 2
    if options.command == "demo":
        return demo.main()
    return calibrate.main(options.device, options.operation, options.save)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
