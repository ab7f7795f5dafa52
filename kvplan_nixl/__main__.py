"""``python -m kvplan_nixl``: its commands calibrate and doctor."""

import argparse
import os
import sys


def main(arguments: list[str]) -> int:
    """Run a command. Exit status 2: a usage error, or a missing package."""
    parser = argparse.ArgumentParser(
        "python -m kvplan_nixl", description="See what NIXL does on this machine."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    rates = commands.add_parser(
        "calibrate", help="measure transfers and copies, for kvplan.staging.choose"
    )
    rates.add_argument("--device", default="cpu", help="torch device of the memory: cpu, cuda:0")
    rates.add_argument(
        "--save", metavar="FILE", help="also write the rates to a JSON file, for the setting rates"
    )
    doctor = commands.add_parser(
        "doctor",
        prog="kvplan doctor",
        help="check what serving needs on this machine",
        description="Check what serving needs on this machine. "
        "Exit status: 0 nothing is wrong, 1 something is, 2 a usage error.",
    )
    doctor.add_argument(
        "--host",
        default=os.environ.get("VLLM_NIXL_SIDE_CHANNEL_HOST", "localhost"),
        help="where peers reach an engine (default: VLLM_NIXL_SIDE_CHANNEL_HOST, or localhost)",
    )
    doctor.add_argument(
        "--port",
        type=int,
        default=os.environ.get("VLLM_NIXL_SIDE_CHANNEL_PORT", "5600"),
        help="its port (default: VLLM_NIXL_SIDE_CHANNEL_PORT, or 5600)",
    )
    doctor.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args(arguments)
    if options.command == "doctor":
        # it loads neither torch nor NIXL, which may be what is missing
        from kvplan_nixl.doctor import main as examine

        return examine(options.host, options.port, options.json)
    # loading them takes seconds
    print("loading torch and NIXL", flush=True)
    try:
        from kvplan_nixl import calibrate
    except ImportError as missing:
        print(f"{missing}; install with: pip install 'nixl>=1.5.1,<2' torch", file=sys.stderr)
        return 2
    return calibrate.main(options.device, options.save)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
