"""`python -m tests.second_opinion`: compares kvplan with its peers and writes the page, in the peers' environment.

`--every N` takes one pair in N and writes no page. Exit status 1: a difference is not explained, or is kvplan's fault.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

from benchmarks.peers import environment


def main() -> int:
    """Run here, or with the interpreter of the environment."""
    parser = argparse.ArgumentParser(prog="python -m tests.second_opinion", description="kvplan and outside planners")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="take one pair in N, and write no page")
    every = parser.parse_args().every
    if not environment.is_there():
        print("no second opinion here: `python -m benchmarks.peers.environment` makes its environment")
        return 0
    if not environment.PYTHON.parent.parent.samefile(sys.prefix):
        command = [str(environment.PYTHON), "-m", "tests.second_opinion", *sys.argv[1:]]
        return subprocess.run(command, cwd=environment.ROOT).returncode
    return _run(every)


def _run(every: int) -> int:
    from benchmarks.peers import loading
    from tests.second_opinion import driver, page, sglang_send, vllm_nixl, vllm_offloading

    loading.load()
    peers = (vllm_offloading.PEER, vllm_nixl.PEER, sglang_send.MOONCAKE, sglang_send.NIXL)
    tallies = driver.compare(peers, every)
    text = page.text(tallies)
    if every == 1:
        page.PAGE.write_text(text)
    print(text)
    return 0 if all(tally.is_settled for tally in tallies) else 1


if __name__ == "__main__":
    sys.exit(main())
