"""The command `mesh`."""

import click

from infra.lazy_group import LazyGroup

main = click.version_option(package_name="inference-mesh")(
    LazyGroup(
        help="A federated routing mesh for LLM inference.",
        modules={
            "up": ("mesh.cli.up", "Run every region on this machine, until Ctrl-C."),
            "router": ("mesh.cli.router", "Run one region's router."),
            "batch-runner": ("mesh.cli.batch_runner", "Run one of a region's batch runners."),
            "infra": ("mesh.cli.infra", "Write nats-server configurations; make the streams."),
            "config": ("mesh.cli.config", "Check mesh.toml: every mistake, with its line."),
            "doctor": (
                "mesh.cli.doctor",
                "Examine a running mesh: links, permissions, residency.",
            ),
            "top": ("mesh.cli.top", "Show regions, replicas and requests, live."),
            "explain": ("mesh.cli.explain", "Explain what happened to one request."),
            "batch": ("mesh.cli.batch", "Hand in batch jobs, follow them, fetch their output."),
            "drain": ("mesh.cli.drain:drain", "Let replicas take no new work; wait until idle."),
            "cordon": ("mesh.cli.drain:cordon", "The same without waiting."),
            "undrain": ("mesh.cli.drain:undrain", "Let replicas take work again."),
            "changes": ("mesh.cli.drain:changes", "List what operators changed, and why."),
            "keys": ("mesh.cli.keys", "Make, list, rotate and revoke API keys."),
            "usage": ("mesh.cli.usage", "Sum up tokens by key, tenant, model and region."),
            "routing": ("mesh.cli.routing", "Choose how running routers place requests."),
            "replay": ("mesh.cli.replay", "Play a recorded trace against running endpoints."),
            "sim": ("mesh.cli.sim", "Compare policies in a simulated mesh."),
            "plan": ("mesh.cli.plan", "Find the fewest replicas that meet a target."),
        },
    )
)

if __name__ == "__main__":
    main()
