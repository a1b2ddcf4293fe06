"""The LoRA adapters that a simulated engine has loaded, with vLLM's rules.

A name is loaded once until it is unloaded. vLLM itself takes any number of names and moves weights
in and out of memory; here a load beyond the maximum is an error, so that an agent which exceeds it
is seen. Source: vLLM's `OpenAIServingModels`, 0.12.
"""

from dataclasses import dataclass, field


class AdapterRefused(ValueError):
    """An adapter can't be loaded or unloaded; the message says why."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status  # HTTP


@dataclass(slots=True)
class LoadedAdapters:
    """`begin` a load, then `finish` it when its time has passed. `most`: 0 for an engine without
    adapters; what is being loaded counts."""

    most: int
    paths: dict[str, str] = field(default_factory=dict)  # of those loaded, by name
    _loading: set[str] = field(default_factory=set)

    def begin(self, name: str) -> None:
        """A load begins. Raises AdapterRefused."""
        if not self.most:
            raise AdapterRefused(404, "this engine takes no adapters: start it with --adapters-max")
        if name in self.paths or name in self._loading:
            raise AdapterRefused(400, f"The lora adapter '{name}' has already been loaded.")
        if len(self.paths) + len(self._loading) >= self.most:
            raise AdapterRefused(400, f"{self.most} adapters are loaded already: unload one first")
        self._loading.add(name)

    def finish(self, name: str, path: str | None) -> None:
        """The load is over. `path`: None where it failed."""
        self._loading.discard(name)
        if path is not None:
            self.paths[name] = path

    def unload(self, name: str) -> None:
        """Raises AdapterRefused."""
        if self.paths.pop(name, None) is None:
            raise AdapterRefused(404, f"The lora adapter '{name}' cannot be found.")
