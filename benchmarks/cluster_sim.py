"""The coordinator's machines against a simulated cluster: what they cost, and nothing lost or doubled.

    python benchmarks/cluster_sim.py                          1 000 nodes, 10 000 jobs
    python benchmarks/cluster_sim.py --nodes 20 --jobs 150
    python benchmarks/cluster_sim.py --no-fencing …           negative control: must fail (doubled)
    python benchmarks/cluster_sim.py --no-outbox …            negative control: must fail (lost)

`coordinator/cluster.py` is the one that the service runs; simulated are nodes, network, time and the disk of
the coordinator (records and outbox as the store keeps them). Meanwhile agents crash and resume, nodes die for
good or come back empty, partitions heal before and after ten minutes, attempts fail by their node's fault,
the disk at home is full, and the coordinator itself is killed with everything that was under way.

In the end every job must have ended as it should, and every completed one must have been put into its output
directory once. Counted as events are those that the machine handled; its time is the time inside `handle`: of
the processor for the rate (one core, whatever else runs on it), of the wall clock for a placement.

Exit code 0 when every gate holds, 1 when one fails.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys

from cluster_sim_world import World
from gshare.agent.node.protocol import AttemptStatus
from gshare.coordinator.actions import ClusterAction, Place, Publish
from gshare.coordinator.cluster import Cluster
from gshare.coordinator.events import BroughtHome
from gshare.coordinator.facts import JobRecord

EVENTS_A_SECOND = 10_000
PLACEMENT_P99_MS = 50.0


class Unfenced(Cluster):
    """Negative control: whatever completes is fetched and put into place."""

    def still_wanted(self, action: ClusterAction) -> bool:
        return True

    def _not_current(self, job: JobRecord, node: str, status: AttemptStatus) -> None:
        if status.state == "completed":
            self._out.append(Publish(node=node, job=status.job, attempt=status.attempt))

    def _brought_home(self, event: BroughtHome) -> None:
        super()._brought_home(event)
        self._out.append(Place(job=event.job, attempt=event.attempt))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-fencing", action="store_true")
    parser.add_argument("--no-outbox", action="store_true")
    parser.add_argument("--no-speed", action="store_true", help="do not judge speed, for small runs")
    args = parser.parse_args()
    world = World(
        nodes=args.nodes,
        jobs=args.jobs,
        seed=args.seed,
        machine=Unfenced if args.no_fencing else Cluster,
        outbox=not args.no_outbox,
    )
    world.run()
    lost, doubled = world.checks.verdict(world.cluster)
    placements = sorted(world.placements)
    report = {
        "nodes": args.nodes,
        "jobs": args.jobs,
        "seed": args.seed,
        "simulated_s": round(world.clock),
        "events": world.events,
        "events_per_cpu_s": round(world.events / world.machine_cpu_s),
        "events_per_wall_s": round(world.events / world.machine_s),
        "placements": len(placements),
        "placement_p99_ms": round(1000 * placements[int(len(placements) * 0.99)], 3),
        "placement_max_ms": round(1000 * placements[-1], 3),
        "happened": world.happened,
        "lost": len(lost),
        "doubled": len(doubled),
        "broken_limits": len(world.checks.faults),
        "python": platform.python_version(),
    }
    print(json.dumps(report, indent=1))
    for line in (lost + doubled + world.checks.faults)[:20]:
        print(line, file=sys.stderr)
    gates = {
        "0 lost": not lost,
        "0 doubled": not doubled,
        "limits kept": not world.checks.faults,
    }
    if not args.no_speed:
        gates[f"{EVENTS_A_SECOND} events/s"] = report["events_per_cpu_s"] >= EVENTS_A_SECOND
        gates[f"placement p99 {PLACEMENT_P99_MS} ms"] = report["placement_p99_ms"] <= PLACEMENT_P99_MS
    for name, held in gates.items():
        print(f"{name}: {'ok' if held else 'FAILED'}")
    return 0 if all(gates.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
