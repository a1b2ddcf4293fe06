"""The simulated engine as a real HTTP process, `mesh-agent engine-sim`."""
