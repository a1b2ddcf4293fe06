"""The command `mesh-agent`."""

import click

from infra.lazy_group import LazyGroup

main = click.version_option(package_name="inference-mesh")(
    LazyGroup(
        help="The process beside one inference engine.",
        modules={
            "run": ("agents.runtime.command", "Serve the work of one engine from the bus."),
            "probe": (
                "agents.runtime.probe_command",
                "Examine an engine: what an agent learns from it, and how to install the agent.",
            ),
            "profile": (
                "agents.profiler.command",
                "Find how much offline work an engine takes beside online requests.",
            ),
            "engine-sim": ("agents.simserver.command", "A simulated engine behind real HTTP."),
        },
    )
)

if __name__ == "__main__":
    main()
