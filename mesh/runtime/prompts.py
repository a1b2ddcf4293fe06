"""From a request's text to the prompt the core sees, with the token ratio learned per model."""

from mesh.core.prefixes.prompt import Prompt, TokenRatio, block_hashes
from schemas.ids import ModelId

MODELS_MAX = 256  # token ratios kept; a mesh serves far fewer models


class PromptReader:
    """Hashes prompts and estimates their tokens."""

    def __init__(self, hash_key: str) -> None:
        self._hash_key = hash_key
        self._ratios: dict[ModelId, TokenRatio] = {}

    def read(self, model: ModelId, text: bytes, salt: str = "", tenant: str = "") -> Prompt:
        """The prompt of that text; shared only with prompts of the same `salt` and `tenant`."""
        hashes = block_hashes(text, key=self._hash_key, model=model, salt=salt, tenant=tenant)
        ratio = self._ratio(model)
        return Prompt(ratio.tokens(len(text)), hashes, ratio.block_tokens)

    def learn(self, model: ModelId, text_bytes: int, prompt_tokens: int) -> None:
        """What an engine counted for a text of that size."""
        self._ratio(model).observe(text_bytes, prompt_tokens)

    def _ratio(self, model: ModelId) -> TokenRatio:
        ratio = self._ratios.get(model)
        if ratio is None:
            if len(self._ratios) >= MODELS_MAX:
                self._ratios.pop(next(iter(self._ratios)))
            ratio = self._ratios[model] = TokenRatio()
        return ratio
