"""The same work, faster or slower: how a recorded or made open loop is brought to a load.

Arrivals and pauses shrink alike, as if the recording's clock ran faster. Rejected: arrivals only.
A session's own requests would then stay as far apart as they were, and a trace of sessions
would not come to the load it was asked for.
"""

from dataclasses import replace

from mesh.sim.workload import Arrival, Node, Workload


def at_speed(workload: Workload, speed: float) -> Workload:
    """The workload with arrivals and pauses `speed` times as fast. Raises ValueError.

    A closed loop has no speed: its clients ask when they are answered.
    """
    if not speed > 0:
        raise ValueError(f"speed must be above 0, got {speed}")
    if workload.clients:
        raise ValueError(f"{workload.name} is a closed loop: change the number of clients")
    if speed == 1:
        return workload
    arrivals = tuple(
        Arrival(arrival.at_s / speed, arrival.region, _hurried(arrival.node, speed))
        for arrival in workload.arrivals
    )
    return replace(workload, arrivals=arrivals, facts=workload.facts | {"at_speed": speed})


def _hurried(root: Node, speed: float) -> Node:
    # From the leaves up and without recursion: chains of agents are hundreds of nodes long.
    order = [root]
    for node in order:
        order.extend(node.children)
    done: dict[int, Node] = {}
    for node in reversed(order):
        children = tuple(done[id(child)] for child in node.children)
        done[id(node)] = replace(node, pause_s=node.pause_s / speed, children=children)
    return done[id(root)]
