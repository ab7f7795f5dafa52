"""Find the seed that shows each planted fault: ``python -m tests.simulation [seeds] [part of a name]``."""

from __future__ import annotations

import logging
import sys
import time
from contextlib import nullcontext

import attrs

from kvplan.testing.simulation.fleet import Simulation
from kvplan.testing.simulation.leases import LeaseConnector
from tests.simulation.faults import (
    CHOICE_FAULTS,
    DIGEST_FAULTS,
    FAULTS,
    FEATURE_FAULTS,
    FEATURE_ROOM_FAULTS,
    FEATURE_SGLANG_FAULTS,
    FEATURE_VLLM_FAULTS,
    HYBRID_FAULTS,
    HYBRID_SGLANG_FAULTS,
    HYBRID_VLLM_FAULTS,
    LIMIT_FAULTS,
    LIMIT_LEASE_FAULTS,
    RESEND_S,
    SENT_AGAIN_FAULTS,
    SENT_AGAIN_ROOM_FAULTS,
    SENT_AGAIN_SGLANG_FAULTS,
    SGLANG_FAULTS,
    STAGE_FAULTS,
    STAGING_FAULTS,
    STORE_FAULTS,
    VLLM_DIGEST_FAULTS,
    VLLM_FAULTS,
    VLLM_LATE_DIGEST_FAULTS,
    VLLM_ROOM_DIGEST_FAULTS,
    VLLM_ROOM_FAULTS,
)
from tests.simulation.limits import small_limits
from tests.simulation.sglang_connector import sglang_fleets
from tests.simulation.staged_connector import StagedConnector, choosing_fleets
from tests.simulation.store_connector import StoreFleets
from tests.simulation.verified_connector import VerifiedConnector, vllm_verified_fleets
from tests.simulation.vllm_connector import VllmConnector, make_params, vllm_room_fleets


def main(num_seeds: int = 100, part: str = "") -> None:
    logging.disable(logging.CRITICAL)
    planted = [(Simulation(LeaseConnector), fault) for fault in FAULTS]
    planted += [(Simulation(LeaseConnector), fault) for fault in HYBRID_FAULTS]
    planted += [(Simulation(StagedConnector), fault) for fault in STAGING_FAULTS]
    planted += [(Simulation(VerifiedConnector), fault) for fault in DIGEST_FAULTS]
    planted += [(choosing_fleets(), fault) for fault in CHOICE_FAULTS]
    planted += [(vllm_verified_fleets(), fault) for fault in VLLM_DIGEST_FAULTS]
    planted += [(vllm_verified_fleets(make_params), fault) for fault in VLLM_ROOM_DIGEST_FAULTS]
    late = vllm_verified_fleets(make_params, hears_late=True)
    planted += [(late, fault) for fault in VLLM_LATE_DIGEST_FAULTS]
    planted += [(Simulation(VllmConnector), fault) for fault in (*VLLM_FAULTS, *HYBRID_VLLM_FAULTS)]
    planted += [(vllm_room_fleets(), fault) for fault in VLLM_ROOM_FAULTS]
    planted += [(sglang_fleets(), fault) for fault in (*SGLANG_FAULTS, *HYBRID_SGLANG_FAULTS, *STAGE_FAULTS)]
    planted += [(Simulation(LeaseConnector, resend_s=RESEND_S), fault) for fault in SENT_AGAIN_FAULTS]
    planted += [(vllm_room_fleets(RESEND_S), fault) for fault in SENT_AGAIN_ROOM_FAULTS]
    planted += [(sglang_fleets(RESEND_S), fault) for fault in SENT_AGAIN_SGLANG_FAULTS]
    planted += [(Simulation(LeaseConnector), fault) for fault in FEATURE_FAULTS]
    planted += [(vllm_room_fleets(), fault) for fault in FEATURE_ROOM_FAULTS]
    planted += [(Simulation(VllmConnector), fault) for fault in FEATURE_VLLM_FAULTS]
    planted += [(sglang_fleets(), fault) for fault in FEATURE_SGLANG_FAULTS]
    planted += [(StoreFleets(), fault) for fault in STORE_FAULTS]
    planted += [(vllm_room_fleets(), fault) for fault in LIMIT_FAULTS]
    planted += [(Simulation(LeaseConnector), fault) for fault in LIMIT_LEASE_FAULTS]
    for simulation, fault in planted:
        if part not in fault.name:
            continue
        began = time.perf_counter()
        outcome = None
        with fault.planted(), small_limits() if fault in (*LIMIT_FAULTS, *LIMIT_LEASE_FAULTS) else nullcontext():
            for seed in range(num_seeds):
                outcome = simulation.run(attrs.evolve(fault, seed=seed).scenario)
                if outcome.error is not None:
                    break
        assert outcome is not None
        found = f"seed {outcome.scenario.seed} {outcome.error}" if outcome.error else "NOT FOUND"
        print(f"{fault.name}: {found} ({time.perf_counter() - began:.1f} s)", flush=True)


if __name__ == "__main__":
    main(int((sys.argv[1:2] or ["100"])[0]), *sys.argv[2:3])
